"""Keys of blocks are what the module says, and extending them is hashing at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.keys import INT32_MAX, INT32_MIN, KEY, M1, NONE, exact_key_of, golden_keys, keys_of, run_of, sequences
from support.siphash_twin import twin_keys

from ctxcache.errors import ContractError
from ctxcache.keys.chain import KeyHasher, hash_full_blocks
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.keys.tokens import as_media_array, as_token_array

# --- The keys are what the module says --------------------------------------------------------------------------------


@given(sequence=sequences(), key=st.binary(min_size=16, max_size=16))
def test_keys_equal_their_definition(sequence, key):
    """Full and exact keys equal the plain-Python twin's, for odd page sizes, any identity, and media anywhere."""
    tokens, tokens_per_page, extras, media = sequence
    full, exact = twin_keys(tokens, tokens_per_page, extras, media, key)
    assert keys_of(tokens, tokens_per_page, extras, media, key) == full
    assert exact_key_of(tokens, tokens_per_page, extras, media, key) == exact


@pytest.mark.parametrize("tokens_per_page", [1, 2, 15, 16, 128])
@pytest.mark.parametrize("num_blocks", [1, 7, 8, 9, 33])
def test_keys_equal_their_definition_for_every_number_of_lanes(tokens_per_page, num_blocks):
    """Long prompts too: groups of blocks that fill the lanes, that do not, and that hold a little media."""
    rng = np.random.default_rng(num_blocks)
    tokens = rng.integers(INT32_MIN, INT32_MAX, num_blocks * tokens_per_page + tokens_per_page // 2).tolist()
    media = [M1 if index % 97 == 5 else NONE for index in range(len(tokens))]
    for spans in (None, media):
        full, exact = twin_keys(tokens, tokens_per_page, BlockKeyExtras(), spans, KEY)
        assert keys_of(tokens, tokens_per_page, media=spans) == full
        assert exact_key_of(tokens, tokens_per_page, media=spans) == exact


GOLDEN = [
    "703e7db971e9a4f82a32cc6a1d530183",
    "ae1e7974b993ac7e54a271436afbfb0e",
    "5c919b8ca70e003f9a9253e4d615fa15",
    "1aa51fa085cd6b991bec76f24a850613",
    "c93fd58fa0b8969e805b5f2c51fbf686",
    "4667e3060ea448ef47cce5d35c845695",
    "aaae4849f346f146ce3f1efc14eaa438",
]


def test_golden_vectors():
    """The format of keys is fixed: a change would part every process from its neighbours and its saved state."""
    assert golden_keys() == GOLDEN


# --- Extending ---------------------------------------------------------------------------------------------------------


@given(sequence=sequences(min_size=1), cuts=st.lists(st.integers(0, 70), max_size=5))
def test_extending_equals_hashing_at_once(sequence, cuts):
    """However a sequence is cut into turns, its keys are those of one call, and all exact lengths stay answerable."""
    tokens, tokens_per_page, extras, media = sequence
    token_array = as_token_array(tokens)
    media_array = as_media_array(media, len(tokens))
    keys = KeyHasher(tokens_per_page, KEY).start(extras)
    for length in (*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)):
        keys.extend(token_array[:length], None if media_array is None else media_array[:length])
        assert keys.num_hashed_blocks == length // tokens_per_page
    expected = hash_full_blocks(tokens, tokens_per_page, extras, media, key=KEY)
    np.testing.assert_array_equal(keys.full_block_keys, expected)
    for length in range(len(tokens) + 1):
        part = None if media is None else media[:length]
        assert keys.exact_key(token_array, media_array, length) == exact_key_of(
            tokens[:length], tokens_per_page, extras, part
        )


def test_extending_reads_only_what_is_new():
    """Tokens that are hashed already are not read again: overwriting them changes nothing."""
    tokens = np.arange(1, 1025, dtype=np.int32)
    keys = KeyHasher(128, KEY).start()
    keys.extend(tokens[:512], None)
    held = keys.full_block_keys
    before = held.copy()
    expected = hash_full_blocks(tokens, 128, key=KEY)
    tokens[:512] = -1
    keys.extend(tokens, None)
    np.testing.assert_array_equal(keys.full_block_keys, expected)
    np.testing.assert_array_equal(held, before)


def test_exact_key_of_whole_blocks_is_the_last_blocks_key():
    """At a page boundary the exact key is the block's key, and no shorter tail can be mistaken for a block."""
    tokens = run_of(256)
    assert exact_key_of(tokens) == keys_of(tokens)[-1]
    every_exact_key = {exact_key_of(tokens[:length]) for length in range(257)}
    assert len(every_exact_key) == 257
    assert {exact_key_of([9] * length, 1 << 20) for length in range(1, 300)}.isdisjoint(
        {keys_of([9] * length, length)[0] for length in range(1, 300)}
    )


def test_exact_key_needs_the_blocks_before_it():
    """A length beyond the tokens, or blocks that are not hashed yet, are refused; after extending it works."""
    tokens = as_token_array(run_of(300))
    keys = KeyHasher(128, KEY).start()
    for length in (128, 300, 301, -1):
        with pytest.raises(ContractError, match="exact key"):
            keys.exact_key(tokens, None, length)
    keys.extend(tokens, None)
    assert keys.exact_key(tokens, None, 300) == exact_key_of(tokens)
