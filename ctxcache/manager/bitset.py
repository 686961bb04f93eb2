"""A set of small integers that knows its least member: a tree of 64-bit words, each bit of which stands for a word below.

The root is word 0, the words below word `i` are `64 * i + 1 .. 64 * i + 64`, and the bits of the last level are the
members. So every question and every change looks at one word a level, three for a quarter of a million integers, and
words of neighbouring members are neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ctxcache.arguments import Words
from ctxcache.jit import njit_part

_BITS = 64
_SHIFT = 6
_LOW = 63
_ONE = np.uint64(1)
_NONE = np.uint64(0)


def first_leaf_for(size: int) -> int:
    """Return the first word of the last level of a tree for `0 .. size - 1`."""
    leaf, reach = 0, _BITS
    while reach < size:
        leaf, reach = _BITS * leaf + 1, _BITS * reach
    return leaf


def allocate_bits(num_sets: int, size: int) -> Words:
    """Return `num_sets` empty sets of integers in `0 .. size - 1`, `uint64[num_sets, words]`."""
    return np.zeros((num_sets, first_leaf_for(size) + -(-max(size, 1) // _BITS)), np.uint64)


@intrinsic  # type: ignore[untyped-decorator]
def _trailing_zeros(_context: Any, word: Any) -> Any:
    """Count the zero bits below the lowest one of a word that is not 0."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(word), generate


@njit_part
def holds(words: Words, leaf: int, member: int) -> bool:
    """Whether the set holds this integer."""
    return bool((words[leaf + (member >> _SHIFT)] >> np.uint64(member & _LOW)) & _ONE)


@njit_part
def add(words: Words, leaf: int, member: int) -> None:
    """Take an integer in."""
    at, bit = leaf + (member >> _SHIFT), member & _LOW
    while True:
        before = words[at]
        words[at] = before | (_ONE << np.uint64(bit))
        if before != _NONE or at == 0:
            return
        at, bit = (at - 1) >> _SHIFT, (at - 1) & _LOW


@njit_part
def discard(words: Words, leaf: int, member: int) -> None:
    """Take an integer out that is in."""
    at, bit = leaf + (member >> _SHIFT), member & _LOW
    while True:
        words[at] &= ~(_ONE << np.uint64(bit))
        if words[at] != _NONE or at == 0:
            return
        at, bit = (at - 1) >> _SHIFT, (at - 1) & _LOW


@njit_part
def least(words: Words, leaf: int) -> int:
    """Return the least member, or -1."""
    if words[0] == _NONE:
        return -1
    at = 0
    while at < leaf:
        at = _BITS * at + 1 + _trailing_zeros(words[at])
    return int(_BITS * (at - leaf) + _trailing_zeros(words[at]))


def members(words: Words, leaf: int) -> list[int]:
    """Return all members, for checks."""
    bits = np.unpackbits(words[leaf:].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()
