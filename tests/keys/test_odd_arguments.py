"""Arguments of the hashing functions that were once misread, each as the whole kind that it belonged to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.values import shown

from ctxcache import (
    BlockKeyExtras,
    ContractError,
    Hash128,
    hash_exact_prefix,
    hash_full_blocks,
    hash_opaque_identity,
)


class Fickle(Sequence):
    """A sequence that counts how often it is read, and hands out something else the second time."""

    def __init__(self, first: list[Any], second: list[Any]) -> None:
        self.runs = [first, second]
        self.length = len(first)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        run = self.runs[0]
        if index == self.length:
            self.runs.reverse()
        return run[index]


class Unreadable:
    """An array of another library whose conversion fails."""

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise ValueError("this tensor has no host copy")


@pytest.mark.parametrize(
    "kind", [bytes, bytearray, lambda ids: memoryview(bytes(ids)), lambda ids: np.array(ids, "u1")]
)
@pytest.mark.parametrize("length", [3, 4, 5])
def test_bytes_are_a_run_of_small_token_ids(kind, length):
    """A byte-level tokenizer's ids are read one a byte, whatever the length; four of them are not one int32."""
    tokens = list(range(250, 250 + length)) if length < 5 else [1, 2, 3, 4, 5]
    tokens = [token % 256 for token in tokens]
    expected = hash_full_blocks(tokens, 2)
    assert expected.shape == (length // 2, 2)
    assert (hash_full_blocks(kind(tokens), 2) == expected).all()
    assert hash_exact_prefix(kind(tokens), 2) == hash_exact_prefix(tokens, 2)


def test_a_sequence_is_read_once():
    """What was checked is what is hashed: a sequence that answers otherwise the second time is not read a second time."""
    expected = hash_full_blocks([1, 2, 3, 4], 2)
    assert (hash_full_blocks(Fickle([1, 2, 3, 4], [1.5, "x", None, 2**40]), 2) == expected).all()


def test_an_array_whose_conversion_fails_is_refused():
    """An exception of another library's conversion is the caller's mistake in words, with the cause kept."""
    with pytest.raises(ContractError, match="Unreadable that NumPy cannot read") as caught:
        hash_full_blocks(Unreadable(), 2)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("size", [2**31, 2**64, 2**70])
def test_a_page_size_beyond_any_page_is_refused(size):
    """A page holds fewer than 2**31 tokens; more is refused in words instead of overflowing somewhere below."""
    for function in (hash_full_blocks, hash_exact_prefix):
        with pytest.raises(ContractError, match=r"in 1 \.\. 2147483647"):
            function([1, 2], size)


def test_a_row_of_keys_is_a_digest():
    """`Hash128(*row)` of a key array is the digest that `hash_exact_prefix` returns: equal, same hash, same bytes."""
    row = hash_full_blocks([1, 2], 2)[0]
    digest = Hash128(*row)
    exact = hash_exact_prefix([1, 2], 2)
    assert (digest, hash(digest), digest.to_bytes(), str(digest)) == (exact, hash(exact), exact.to_bytes(), str(exact))
    assert type(digest.hi) is int
    assert hash_full_blocks([1, 2], 2, BlockKeyExtras(isolation_digest=digest)).shape == (1, 2)


@pytest.mark.parametrize("word", [None, "x", b"x", 1.0, True, np.float64(1), np.bool_(1), np.int64(-1), [1], -1, 2**64])
def test_a_digest_is_made_of_integers(word):
    """Anything but an integer of 64 bits is refused where the digest is made, not where it is used."""
    for arguments in ((word, 0), (0, word)):
        with pytest.raises(ContractError, match="Hash128"):
            Hash128(*arguments)


@pytest.mark.parametrize("data", [None, 7, 0, 1.5, True, [1, 2], {}, np.zeros(2), object()], ids=shown)
def test_an_identity_is_bytes_or_text(data):
    """A number is no identity: as bytes it would be that many zeros, and tenants 0 and [] would share their state."""
    with pytest.raises(ContractError, match="pass bytes or text"):
        hash_opaque_identity(data)
    with pytest.raises(ContractError, match="16"):
        Hash128.from_bytes(data)


def test_media_that_is_no_run_of_spans_is_refused():
    """`None` in place of no media is the caller's mistake, in words."""
    with pytest.raises(ContractError, match="pass a tuple of MediaSpanKey"):
        BlockKeyExtras(media=None)
