"""What changes the keys of blocks, and that nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.keys import (
    DIGESTS,
    EXTRAS,
    INT32_MAX,
    INT32_MIN,
    KEY,
    M1,
    M2,
    M3,
    NONE,
    TOKENS,
    exact_key_of,
    golden_keys,
    keys_of,
    run_of,
    sequences,
)

from ctxcache.ids import Hash128
from ctxcache.keys.chain import hash_full_blocks
from ctxcache.keys.identity import AdapterKey, BlockKeyExtras, MediaSpanKey, hash_opaque_identity
from ctxcache.keys.siphash import hash_blocks, initial_state


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


@pytest.mark.sampled(keep=1)
def test_h05g_a_million_random_blocks():
    """H05 (g): 10**6 random blocks have 10**6 keys, and each half of the key alone tells them apart too."""
    tokens = np.random.default_rng(5).integers(INT32_MIN, INT32_MAX, (1_000_000, 4), dtype=np.int32)
    assert len(np.unique(tokens, axis=0)) == len(tokens)
    keys = np.empty((len(tokens), 2), dtype=np.uint64)
    first_block_keys(tokens, np.stack([initial_state(KEY), initial_state(KEY[::-1])]), initial_state(KEY), keys)
    for half in range(2):
        assert len(np.unique(keys[:, half])) == len(keys)


def test_h05h_processes_with_one_key_agree():
    """H05 (h): keys under a set key do not depend on Python's hash seed; the default key is another in each process."""
    script = (
        "from support.keys import golden_keys; from ctxcache.keys.chain import hash_full_blocks\n"
        "print(*golden_keys(), hash_full_blocks([1, 2], 2).tobytes().hex())"
    )
    outputs = []
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(run.stdout.split())
    own = hash_full_blocks([1, 2], 2).tobytes().hex()
    assert outputs[0][:-1] == outputs[1][:-1] == golden_keys()
    assert len({own, outputs[0][-1], outputs[1][-1]}) == 3
