"""Faults that were met once, each as the whole kind that it belonged to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ctxcache import ContractError, hash_exact_prefix, hash_full_blocks


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
        with pytest.raises(ContractError, match="below 2\\*\\*31"):
            function([1, 2], size)
