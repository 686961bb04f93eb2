"""Keys of blocks: what they are made of, what changes them, and that nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness import shown
from support.siphash_twin import siphash_2_4_128, twin_keys

from ctxcache.errors import ContractError
from ctxcache.ids import Hash128
from ctxcache.keys.chain import KeyHasher, hash_exact_prefix, hash_full_blocks
from ctxcache.keys.identity import AdapterKey, BlockKeyExtras, MediaSpanKey, hash_opaque_identity
from ctxcache.keys.siphash import hash_blocks, hash_bytes, initial_state
from ctxcache.keys.tokens import as_media_array, as_token_array

KEY = bytes(range(16))
NONE = Hash128(0, 0)
PATIENT = settings(deadline=None)  # the first call of a kind of array may compile
M1, M2, M3 = (hash_opaque_identity(name) for name in ("picture 1", "picture 2", "picture 3"))


def run_of(length: int, first: int = 1) -> list[int]:
    """Tokens `first, first + 1, ...`."""
    return list(range(first, first + length))


def keys_of(tokens, tokens_per_page=128, extras=BlockKeyExtras(), media=None, key=KEY) -> list[Hash128]:  # noqa: B008
    """Keys of the full blocks as values that compare and hash."""
    rows = hash_full_blocks(tokens, tokens_per_page, extras, media, key=key)
    return [Hash128(int(hi), int(lo)) for hi, lo in rows]


def exact_key_of(tokens, tokens_per_page=128, extras=BlockKeyExtras(), media=None, key=KEY) -> Hash128:  # noqa: B008
    """Exact key of all tokens."""
    return hash_exact_prefix(tokens, tokens_per_page, extras, media, key=key)


# --- SipHash itself ---------------------------------------------------------------------------------------------------

# The reference implementation's vectors_sip128, key 00..0f over 00, 01, ...; the later ones from OpenSSL 3.0.
PUBLISHED = {
    0: "a3817f04ba25a8e66df67214c7550293",
    1: "da87c1d86b99af44347659119b22fc45",
    2: "8177228da4a45dc7fca38bdef60affe4",
    3: "9c70b60c5267a94e5f33b6b02985ed51",
    8: "3b62a9ba6258f5610f83e264f31497b4",
    15: "5493e99933b0a8117e08ec0f97cfc3d9",
    16: "6ee2a4ca67b054bbfd3315bf85230577",
    63: "5150d1772f50834a503e069a973fbd7c",
}


@pytest.mark.parametrize("length", PUBLISHED)
def test_the_twin_is_siphash_2_4_128(length):
    """The plain-Python hash that everything else is compared with gives the published digests."""
    assert siphash_2_4_128(KEY, bytes(range(length))).hex() == PUBLISHED[length]


@PATIENT
@given(key=st.binary(min_size=16, max_size=16), message=st.binary(max_size=300))
def test_the_compiled_hash_of_bytes_is_siphash(key, message):
    """Compiled SipHash equals the plain one for every key and every length, those beyond 255 bytes included."""
    digest = np.empty(2, dtype=np.uint64)
    hash_bytes(initial_state(key), np.frombuffer(message, dtype=np.uint8), digest)
    assert digest.astype("<u8").tobytes() == siphash_2_4_128(key, message)


# --- The keys are what the module says --------------------------------------------------------------------------------

TOKENS = st.integers(-(2**31), (2**31 - 1))
DIGESTS = st.builds(Hash128, st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
SPANS = st.builds(
    MediaSpanKey,
    DIGESTS,
    DIGESTS,
    st.integers(0, 200),
    st.integers(0, 9),
    st.one_of(st.integers(0, 9), st.text(max_size=5)),
)
EXTRAS = st.builds(
    BlockKeyExtras,
    st.lists(SPANS, max_size=2),
    st.none() | st.builds(AdapterKey, DIGESTS, st.integers(0, 5)),
    st.none() | DIGESTS,
    st.none() | DIGESTS,
    st.none() | DIGESTS,
)


@st.composite
def sequences(draw, min_size=0):
    """Tokens, page size, extras and per-position media (`None`, or sparse digests)."""
    tokens = draw(st.lists(TOKENS, min_size=min_size, max_size=70))
    spans = st.lists(st.just(NONE) | DIGESTS, min_size=len(tokens), max_size=len(tokens))
    sparse = st.lists(st.just(NONE), min_size=len(tokens), max_size=len(tokens))
    return tokens, draw(st.integers(1, 9)), draw(EXTRAS), draw(st.none() | sparse | spans)


@PATIENT
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
    tokens = rng.integers(-(2**31), (2**31 - 1), num_blocks * tokens_per_page + tokens_per_page // 2).tolist()
    media = [M1 if index % 97 == 5 else NONE for index in range(len(tokens))]
    for spans in (None, media):
        full, exact = twin_keys(tokens, tokens_per_page, BlockKeyExtras(), spans, KEY)
        assert keys_of(tokens, tokens_per_page, media=spans) == full
        assert exact_key_of(tokens, tokens_per_page, media=spans) == exact


GOLDEN_EXTRAS = BlockKeyExtras(
    media=(MediaSpanKey(M1, M2, 3, 0, "image"), MediaSpanKey(M2, M1, 7, 1, 4)),
    adapter=AdapterKey(hash_opaque_identity("adapter"), 7),
    position_digest=Hash128(1, 2),
    custom_embedding_digest=Hash128(0, 0),
    isolation_digest=hash_opaque_identity("tenant"),
)


def golden_keys() -> list[str]:
    """Keys of fixed inputs under a fixed key, as text."""
    media = [M1 if 3 <= index < 9 else NONE for index in range(40)]
    return [
        *map(str, keys_of(run_of(256))),
        str(exact_key_of(run_of(130))),
        *map(str, keys_of(run_of(40, first=-20), 16, GOLDEN_EXTRAS, media)),
        str(exact_key_of(run_of(40, first=-20), 16, GOLDEN_EXTRAS, media)),
        str(exact_key_of([], 16)),
    ]


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


@PATIENT
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


# --- What changes keys -------------------------------------------------------------------------------------------------


@PATIENT
@given(sequence=sequences(min_size=1), data=st.data())
def test_a_changed_position_changes_every_key_from_there_on(sequence, data):
    """A single token, or a single media digest, changes its block's key, all later ones, and none before."""
    tokens, tokens_per_page, extras, media = sequence
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed_tokens, changed_media = list(tokens), list(media or [NONE] * len(tokens))
    if data.draw(st.booleans()) or changed_media[position]:  # where there is media, the token does not count
        changed_media[position] = data.draw(DIGESTS.filter(lambda digest: digest != changed_media[position]))
    else:
        changed_tokens[position] = data.draw(TOKENS.filter(lambda token: token != tokens[position]))
    before = keys_of(tokens, tokens_per_page, extras, media)
    after = keys_of(changed_tokens, tokens_per_page, extras, changed_media)
    block = position // tokens_per_page
    assert after[:block] == before[:block]
    assert set(after[block:]).isdisjoint(before)
    assert exact_key_of(changed_tokens, tokens_per_page, extras, changed_media) != exact_key_of(
        tokens, tokens_per_page, extras, media
    )


@PATIENT
@given(sequence=sequences(min_size=1), data=st.data())
def test_a_changed_identity_changes_every_key(sequence, data):
    """Any one field of the extras, the page size, or the secret changes all keys, the exact one included."""
    tokens, tokens_per_page, extras, media = sequence
    other = data.draw(EXTRAS)
    name = data.draw(st.sampled_from(["media", "adapter", "position_digest", "custom_embedding_digest", "key", "page"]))
    changed_page, changed_key, changed = tokens_per_page, KEY, extras
    if name == "page":
        changed_page += 1
    elif name == "key":
        changed_key = KEY[:15] + b"\xff"
    else:
        changed = replace(extras, **{name: getattr(other, name)})
        if changed == extras:
            return
    before = {*keys_of(tokens, tokens_per_page, extras, media), exact_key_of(tokens, tokens_per_page, extras, media)}
    after = {
        *keys_of(tokens, changed_page, changed, media, changed_key),
        exact_key_of(tokens, changed_page, changed, media, changed_key),
    }
    assert before.isdisjoint(after)


@pytest.mark.parametrize(
    "extras",
    [
        BlockKeyExtras(position_digest=NONE),
        BlockKeyExtras(custom_embedding_digest=NONE),
        BlockKeyExtras(isolation_digest=NONE),
        BlockKeyExtras(adapter=AdapterKey(NONE)),
        BlockKeyExtras(adapter=AdapterKey(NONE, 1)),
        BlockKeyExtras(media=(MediaSpanKey(NONE, NONE, 0, 0, 0),)),
        BlockKeyExtras(media=(MediaSpanKey(NONE, NONE, 0, 0, "0"),)),
        BlockKeyExtras(media=(MediaSpanKey(NONE, NONE, 0, 0, ""),)),
        BlockKeyExtras(media=(MediaSpanKey(NONE, NONE, 0, 1, 0), MediaSpanKey(NONE, NONE, 0, 0, 0))),
        BlockKeyExtras(media=(MediaSpanKey(NONE, NONE, 0, 0, 0), MediaSpanKey(NONE, NONE, 0, 1, 0))),
    ],
)
def test_an_absent_field_never_equals_a_zero_one(extras):
    """Fields are tagged and sized: zeros differ from nothing, and the same zeros in two fields from each other."""
    others = [BlockKeyExtras(), BlockKeyExtras(position_digest=NONE), BlockKeyExtras(isolation_digest=NONE)]
    for other in others:
        assert (keys_of([1, 2], 2, extras) == keys_of([1, 2], 2, other)) == (extras == other)


def test_a_media_digest_never_equals_tokens():
    """Digest words that look like token ids, and all-zero digests, are not mistaken for tokens."""
    as_text = keys_of([5, 0, 7, 0], 4)
    assert keys_of([0, 0, 0, 0], 4, media=[Hash128(5, 0), NONE, Hash128(7, 0), NONE]) != as_text
    assert keys_of([9, 0, 7, 0], 4, media=[Hash128(0, 5), NONE, NONE, NONE]) != as_text
    assert keys_of([5, 0, 7, 0], 4, media=[NONE] * 4) == as_text
    assert keys_of([1, 0, 7, 0], 4, media=[M1, NONE, NONE, NONE]) == keys_of(
        [2, 0, 7, 0], 4, media=[M1, NONE, NONE, NONE]
    )


def test_h03_an_adapter_reloaded_under_its_name_shares_nothing():
    """H03: the adapter's digest and generation are part of every key; the same ones give the same keys."""
    first, second = (
        BlockKeyExtras(adapter=AdapterKey(hash_opaque_identity(weights))) for weights in ("weights 1", "weights 2")
    )
    reloaded = BlockKeyExtras(adapter=AdapterKey(hash_opaque_identity("weights 1"), generation=1))
    cached = keys_of(run_of(257), extras=first)
    assert keys_of(run_of(258), extras=first) == cached
    for extras in (second, reloaded, BlockKeyExtras()):
        assert set(keys_of(run_of(258), extras=extras)).isdisjoint(cached)


def test_h04_a_blocks_key_holds_its_ancestors_media():
    """H04: with the same tokens and the same second picture, another first picture changes both blocks' keys."""
    tokens = [7] * 256

    def media(first: Hash128) -> list[Hash128]:
        return [first if index < 64 else M3 if 130 <= index <= 200 else NONE for index in range(256)]

    one, two = keys_of(tokens, media=media(M1)), keys_of(tokens, media=media(M2))
    assert one[0] != two[0]
    assert one[1] != two[1]


def test_h05a_compensating_changes_do_not_collide():
    """H05 (a): adding 31 to one token and taking 1 from the next collides under a polynomial hash, not here."""
    tokens = run_of(128)
    variants = [
        [*tokens[:index], tokens[index] + 31, tokens[index + 1] - 1, *tokens[index + 2 :]] for index in range(127)
    ]
    assert len({keys_of(variant)[0] for variant in (tokens, *variants)}) == 128


def test_h05b_order_counts():
    """H05 (b): swapping two neighbours anywhere changes the key."""
    tokens = run_of(128)
    variants = [[*tokens[:index], tokens[index + 1], tokens[index], *tokens[index + 2 :]] for index in range(127)]
    assert len({keys_of(variant)[0] for variant in (tokens, *variants)}) == 128


def test_h05c_a_zero_token_differs_from_no_token():
    """H05 (c): exact keys know their length; zeros at the end do not vanish."""
    tails = [exact_key_of([*run_of(130), *[0] * zeros]) for zeros in range(126)]
    assert len(set(tails)) == 126
    assert len({exact_key_of([0] * length, 4) for length in range(20)}) == 20


def test_h05d_extreme_ids():
    """H05 (d): ids at the edges of int32 keep all their bits."""
    ids = [(1 << 31) - 1, -1, 1 << 16, 0, 1, -(1 << 31), (1 << 16) - 1, -(1 << 16)]
    assert len({keys_of([token] * 4, 4)[0] for token in ids}) == len(ids)
    assert len({keys_of([token] * 4, 4, media=[M1, NONE, NONE, NONE])[0] for token in ids}) == len(ids)


def test_h05e_ids_do_not_run_together():
    """H05 (e): [1, 23] is not [12, 3]."""
    assert keys_of([1, 23], 2) != keys_of([12, 3], 2)
    assert exact_key_of([1, 23]) != exact_key_of([12, 3])


def test_h05f_a_block_is_keyed_by_its_place():
    """H05 (f): the same block under another parent, or under none, has another key."""
    block, other = run_of(128), run_of(128, first=1000)
    under_other, alone, under_itself = keys_of([*other, *block])[1], keys_of(block)[0], keys_of([*block, *block])[1]
    assert len({under_other, alone, under_itself}) == 3


@numba.njit
def first_block_keys(tokens, initials, running, keys):
    """Hash every row of `tokens` as the only block of a sequence of its own."""
    no_media = np.empty((0, 2), dtype=np.uint64)
    for row in range(tokens.shape[0]):
        hash_blocks(
            tokens[row], no_media, 0, 1, tokens.shape[1], initials[0], initials[1], running.copy(), keys[row : row + 1]
        )


def test_h05g_a_million_random_blocks():
    """H05 (g): 10**6 random blocks have 10**6 keys, and each half of the key alone tells them apart too."""
    tokens = np.random.default_rng(5).integers(-(2**31), (2**31 - 1), (1_000_000, 4), dtype=np.int32)
    assert len(np.unique(tokens, axis=0)) == len(tokens)
    keys = np.empty((len(tokens), 2), dtype=np.uint64)
    first_block_keys(tokens, np.stack([initial_state(KEY), initial_state(KEY[::-1])]), initial_state(KEY), keys)
    for half in range(2):
        assert len(np.unique(keys[:, half])) == len(keys)


def test_h05h_processes_with_one_key_agree():
    """H05 (h): keys under a set key do not depend on Python's hash seed; the default key is another in each process."""
    script = (
        "from test_chain import golden_keys; from ctxcache.keys.chain import hash_full_blocks\n"
        "print(*golden_keys(), hash_full_blocks([1, 2], 2).tobytes().hex())"
    )
    outputs = []
    for seed in ("0", "1"):
        folders = [str(Path(__file__).parent), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(folders)}
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(run.stdout.split())
    own = hash_full_blocks([1, 2], 2).tobytes().hex()
    assert outputs[0][:-1] == outputs[1][:-1] == golden_keys()
    assert len({own, outputs[0][-1], outputs[1][-1]}) == 3


# --- What a caller may pass --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        range(1, 9),
        tuple(range(1, 9)),
        [np.int64(token) for token in range(1, 9)],
        np.arange(1, 9, dtype=np.uint64),
        np.arange(1, 9, dtype=np.int8),
        np.arange(1, 9, dtype=">i4"),
        np.arange(1, 17, dtype=np.int32).repeat(2)[::4] // 2 + 1,
        memoryview(np.arange(1, 9, dtype=np.int32)),
    ],
    ids=["range", "tuple", "numpy ints", "uint64", "int8", "big endian", "strided", "memoryview"],
)
def test_any_run_of_integers_is_taken(tokens):
    """Sequences and integer arrays of any width, order and stride give the keys of the same numbers in a list."""
    assert keys_of(tokens, 4) == keys_of(list(range(1, 9)), 4)


def test_an_int32_array_is_taken_as_it_is():
    """A contiguous int32 array is not copied, read-only or not; another layout is."""
    tokens = np.arange(100, dtype=np.int32)
    assert as_token_array(tokens) is tokens
    tokens.flags.writeable = False
    assert as_token_array(tokens) is tokens
    assert keys_of(tokens, 4) == keys_of(tokens.tolist(), 4)
    assert as_token_array(tokens[::2]).flags.c_contiguous
    raw = np.zeros(41, dtype=np.uint8)
    unaligned = raw[1:].view(np.int32)
    assert as_token_array(unaligned).flags.aligned


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2.0],
        [1, True],
        [1, np.bool_(True)],
        [1, None],
        [1, "2"],
        [1, 1 << 31],
        [1, -(1 << 31) - 1],
        [1, 1 << 70],
        [[1, 2], [3, 4]],
        "12",
        5,
        np.int32(5),
        {1: 2},
        {1, 2},
        iter([1, 2]),
        None,
        np.array([1.0, 2.0]),
        np.array([True, False]),
        np.array([1, 1 << 31]),
        np.array([1 << 63], dtype=np.uint64),
        np.array([1, -(1 << 31) - 1]),
        np.zeros((2, 2), dtype=np.int32),
        np.array([1, 2], dtype=object),
        np.array([]),
        np.array(["1"]),
        np.array([1], dtype="m8[s]"),
    ],
    ids=shown,
)
def test_other_token_ids_are_refused(tokens):
    """What is no one-dimensional run of integers in int32 range is a `ContractError`, whichever function it meets."""
    for function in (hash_full_blocks, hash_exact_prefix):
        with pytest.raises(ContractError, match="token id"):
            function(tokens, 4, key=KEY)


def test_a_refusal_names_position_value_and_limit():
    """The message of a bad token says which one it is and what is allowed."""
    with pytest.raises(ContractError, match=r"token id 2 is 2147483648; .* \[-2147483648, 2147483647\]"):
        as_token_array([1, 2, 1 << 31])
    with pytest.raises(ContractError, match="token id 1 is True"):
        as_token_array([1, True])


@pytest.mark.parametrize(
    "media",
    [
        [],
        [NONE] * 3,
        [NONE] * 5,
        [0] * 4,
        [(1, 2)] * 4,
        5,
        "four",
        np.zeros((3, 2), dtype=np.uint64),
        np.zeros((4, 3), dtype=np.uint64),
        np.zeros(4, dtype=np.uint64),
        np.zeros((4, 2), dtype=np.int64),
        np.zeros((4, 2), dtype=np.float64),
    ],
    ids=shown,
)
def test_other_media_is_refused(media):
    """Media is one 128-bit digest a token, as `uint64[n, 2]` or `Hash128` values; all else is a `ContractError`."""
    with pytest.raises(ContractError, match="media digests"):
        hash_full_blocks([1, 2, 3, 4], 2, per_position_media_hash=media, key=KEY)


def test_media_arrays_and_values_agree():
    """`Hash128` values and a `uint64[n, 2]` array of (hi, lo), of any layout, are the same media."""
    values = [M1, NONE, M2, M3]
    array = np.array([(digest.hi, digest.lo) for digest in values], dtype=np.uint64)
    expected = keys_of([1, 2, 3, 4], 2, media=values)
    for layout in (array, np.asfortranarray(array), array.repeat(2, axis=0)[::2]):
        assert keys_of([1, 2, 3, 4], 2, media=layout) == expected


@pytest.mark.parametrize("key", [b"", b"short", bytes(17), "0123456789abcdef", 16, bytes(32)], ids=shown)
def test_a_key_of_another_size_is_refused(key):
    """The secret is 16 bytes."""
    with pytest.raises(ContractError, match="16 bytes"):
        hash_full_blocks([1, 2], 2, key=key)
    with pytest.raises(ContractError, match="16 bytes"):
        KeyHasher(2, key)


@pytest.mark.parametrize("tokens_per_page", [0, -1, True, 2.0, "2", None], ids=shown)
def test_a_page_size_that_is_no_positive_integer_is_refused(tokens_per_page):
    """`True` does not pass for one token a page, not even after 1 was used."""
    hash_full_blocks([1, 2], 1, key=KEY)
    with pytest.raises(ContractError, match="tokens_per_page"):
        hash_full_blocks([1, 2], tokens_per_page, key=KEY)


@pytest.mark.parametrize(
    "extras",
    [
        None,
        (),
        BlockKeyExtras(adapter="adapter"),
        BlockKeyExtras(adapter=AdapterKey("digest")),
        BlockKeyExtras(isolation_digest=b"0123456789abcdef"),
        BlockKeyExtras(media=(M1,)),
        BlockKeyExtras(media=(MediaSpanKey("content", M1, 0, 0, 0),)),
    ],
    ids=shown,
)
def test_extras_of_another_type_are_refused(extras):
    """A field that is not of its declared type is a `ContractError`, not another serialisation."""
    with pytest.raises(ContractError, match="pass"):
        hash_full_blocks([1, 2], 2, extras, key=KEY)


def test_arrays_that_were_not_prepared_are_refused():
    """Compiled code reads by address, so `SequenceKeys` takes prepared arrays only, and is unchanged otherwise."""
    keys = KeyHasher(2, KEY).start()
    tokens = np.arange(1, 5, dtype=np.int32)
    for bad_tokens, bad_media in (
        (tokens.astype(np.int64), None),
        (tokens.repeat(2)[::2], None),
        (tokens, np.zeros((3, 2), dtype=np.uint64)),
        (tokens, np.zeros((4, 2), dtype=np.int64)),
    ):
        with pytest.raises(ContractError, match="pass what"):
            keys.extend(bad_tokens, bad_media)
        assert keys.num_hashed_blocks == 0
    keys.extend(tokens, None)
    np.testing.assert_array_equal(keys.full_block_keys, hash_full_blocks(tokens, 2, key=KEY))


@settings(max_examples=50, deadline=None)
@given(sequence=sequences())
def test_the_same_input_gives_the_same_keys(sequence):
    """Hashing has no hidden state: a second call, and a copy of the arguments, give the same keys."""
    tokens, tokens_per_page, extras, media = sequence
    again = (list(tokens), tokens_per_page, replace(extras), None if media is None else list(media))
    assert keys_of(*sequence) == keys_of(*again)
    assert exact_key_of(*sequence, key=KEY) == exact_key_of(*again, key=KEY)


@pytest.mark.parametrize("data", ["0123456789abcdef", 16, None, bytes(15), bytes(17), [0] * 16], ids=repr)
def test_a_digest_is_read_from_16_bytes(data):
    """Nothing else is taken for a digest; any kind of bytes is."""
    with pytest.raises(ContractError, match=r"from_bytes got .*16"):
        Hash128.from_bytes(data)
    for kind in (bytes, bytearray, memoryview):
        assert Hash128.from_bytes(kind(bytes(range(16)))).to_bytes() == bytes(range(16))


@pytest.mark.parametrize("value", [-1, 2**64, True, 1.5, None], ids=repr)
@pytest.mark.parametrize("field", ["offset_within_block", "item_order", "modality"])
def test_numbers_of_a_media_span_are_64_bit_words(field, value):
    """Offsets, orders and modalities enter keys as words; a modality may also be a name."""
    fields = {"offset_within_block": 0, "item_order": 0, "modality": "image"}
    with pytest.raises(ContractError, match=rf"MediaSpanKey.{field} is {value!r}; .*in 0 \.\. 18446744073709551615"):
        MediaSpanKey(NONE, NONE, **{**fields, field: value})
