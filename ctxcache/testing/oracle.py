"""What every byte of the cache must be: each word derives from all tokens up to its position, and from nothing else.

A page that is stale, foreign, early or misplaced holds a word that no transcript has at that position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import IntEnum
from operator import index

import numpy as np

from ctxcache.arguments import Words

GARBAGE = 0xDEAD_BEEF_0000_0000
"""What a rejected draft token leaves behind; no transcript's word but by an accident of 2**-64."""


class Part(IntEnum):
    """What a word belongs to; each part has words of its own."""

    KEY = 1
    VALUE = 2
    STATE = 3
    CONVOLUTION = 4
    DRAFT_KEY = 5
    DRAFT_VALUE = 6
    HIDDEN = 7


def _salt(part: Part, layer: int) -> np.uint64:
    digest = hashlib.blake2b(bytes((part, layer)), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


_SALTS = {(part, layer): _salt(part, layer) for part in Part for layer in range(64)}


class Transcript:
    """The tokens of one sequence, and the words that its cache must hold.

    Attributes:
        tokens: all of them so far, the lookahead included.
        identity: whose tokens they are: adapter, tenant, media.
    """

    def __init__(self, tokens: Iterable[int], identity: int = 0) -> None:
        self.tokens: list[int] = []
        self.identity = identity
        self._digest = hashlib.blake2b(identity.to_bytes(8, "little"), digest_size=8)
        self._words = np.empty(0, np.uint64)
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        new = [index(token) for token in tokens]
        words = np.empty(len(new), np.uint64)
        for position, token in enumerate(new):
            self._digest.update(token.to_bytes(4, "little", signed=True))
            words[position] = int.from_bytes(self._digest.digest(), "little")
        self.tokens += new
        self._words = np.concatenate((self._words, words))

    def words(self, part: Part, layer: int, start: int, stop: int) -> Words:
        """Return the words of positions `[start, stop)`, `uint64[stop - start]`.

        A draft's word at a position depends on the token that follows, as its keys and values do; that token must be there.
        """
        shift = 1 if part in (Part.DRAFT_KEY, Part.DRAFT_VALUE) else 0
        if stop + shift > len(self.tokens):
            raise ValueError(f"position {stop - 1} of {part.name} needs {stop + shift} tokens; there are {len(self)}")
        return self._words[start + shift : stop + shift] ^ _SALTS[part, layer]

    def state(self, part: Part, layer: int, length: int) -> np.uint64:
        """Return the word that fills recurrent state which has seen `length` tokens; 0 after none."""
        return np.uint64(0) if length == 0 else np.uint64(self._words[length - 1] ^ _SALTS[part, layer])


def first_mismatch(found: Words, expected: Words) -> int | None:
    """Return the first position at which two runs of words differ, or `None`."""
    differs = found != expected
    return int(differs.argmax()) if differs.any() else None
