"""What a caller of the hashing functions may pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from support.keys import KEY, M1, M2, M3, NONE, exact_key_of, keys_of, sequences
from support.values import shown

from ctxcache.errors import ContractError
from ctxcache.ids import Hash128
from ctxcache.keys.chain import KeyHasher, hash_exact_prefix, hash_full_blocks
from ctxcache.keys.identity import AdapterKey, BlockKeyExtras, MediaSpanKey
from ctxcache.keys.tokens import as_token_array


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
    "build",
    [
        lambda: None,
        lambda: (),
        lambda: BlockKeyExtras(adapter="adapter"),
        lambda: BlockKeyExtras(adapter=AdapterKey("digest")),
        lambda: BlockKeyExtras(isolation_digest=b"0123456789abcdef"),
        lambda: BlockKeyExtras(media=(M1,)),
        lambda: BlockKeyExtras(media=(MediaSpanKey("content", M1, 0, 0, 0),)),
    ],
    ids=["nothing", "a tuple", "adapter", "adapter id", "tenant", "media", "content"],
)
def test_n03_extras_of_another_type_are_refused(build):
    """N3: a field that is not of its declared type is refused where it is built, and what is no extras where it is used."""
    with pytest.raises(ContractError, match="pass"):
        hash_full_blocks([1, 2], 2, build(), key=KEY)


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


@settings(max_examples=50)
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
