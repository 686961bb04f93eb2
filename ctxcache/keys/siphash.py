"""SipHash-2-4 with 128-bit output (Aumasson and Bernstein 2012; the 128-bit variant of their reference code), compiled.

What is hashed is fixed by `hashing`; here is how it is hashed fast. The digests of eight blocks do not depend on each
other, so they run side by side in the lanes of `lanes`. The chain over digests is serial, but only its two absorbed
words a block are: each prefix's finalisation starts from a copy of the running state, and eight of them run side by
side again. While eight blocks are digested, the eight before them are chained. Every result is the standard SipHash of a
plain message, as the tests' plain-Python twin recomputes.

Words are little-endian, as on every machine that Numba compiles for.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Words
from ctxcache.jit import njit, njit_part
from ctxcache.keys.simd import NUM_LANES, broadcast, load, load_strided, rotate_left, store

Word: TypeAlias = Any
"""Compiled code only: one `uint64`, or one in each lane."""
State: TypeAlias = tuple[Word, Word, Word, Word]

_WORD_BYTES = 8
_DIGEST_BYTES = 16
_TOKEN_BYTES = 4
_POSITION_BYTES = 24  # of a media block's message: tag, then token and zero, or the two words of a digest
_TAIL_MESSAGE_BYTES = 40

_DIGEST_ROWS, _PREFIX_ROWS = 2, 5

_LENGTH_SHIFT = np.uint64(56)  # SipHash keeps the message's length, modulo 256, in the last byte of its last word
_LENGTH_MASK = np.uint64(0xFF)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_WIDE_OUTPUT = np.uint64(0xEE)  # the reference code's mark of the 128-bit variant
_SECOND_HALF = np.uint64(0xDD)

_MEDIA_TAG = np.uint64(1)
_TOKEN_TAG = np.uint64(0)


def initial_state(key: bytes) -> Words:
    """Return `uint64[4]`, the state of SipHash-2-4-128 under a 16-byte key before its first word."""
    low, high = (int.from_bytes(key[half : half + _WORD_BYTES], "little") for half in (0, _WORD_BYTES))
    words = (
        low ^ 0x736F6D6570736575,
        high ^ 0x646F72616E646F6D ^ 0xEE,
        low ^ 0x6C7967656E657261,
        high ^ 0x7465646279746573,
    )
    return np.array(words, dtype=np.uint64)


@njit
def hash_bytes(initial: Words, message: NDArray[np.uint8], digest: Words) -> None:
    """Write the SipHash of `uint8[n]` under the key of `initial` to `digest`, `uint64[2]`."""
    v0, v1, v2, v3 = _words(initial)
    num_bytes = message.size
    num_whole_bytes = num_bytes - num_bytes % _WORD_BYTES
    for start in range(0, num_whole_bytes, _WORD_BYTES):
        word = _little_endian_word(message[start : start + _WORD_BYTES])
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, word)
    last = _little_endian_word(message[num_whole_bytes:]) | _length_word(num_bytes)
    digest[0], digest[1] = _finish(v0, v1, v2, v3, last)


@njit
def absorb_digest(running: Words, digest: Words) -> None:
    """Append the 16 bytes of `digest`, `uint64[2]`, to the message of `running`, `uint64[4]`."""
    v0, v1, v2, v3 = _words(running)
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, digest[0])
    running[0], running[1], running[2], running[3] = _absorb(v0, v1, v2, v3, digest[1])


@njit
def hash_blocks(
    tokens: NDArray[np.int32],
    media: Words,
    first_block: int,
    end_block: int,
    tokens_per_page: int,
    text_initial: Words,
    media_initial: Words,
    running: Words,
    keys: Words,
) -> None:
    """Hash blocks `[first_block, end_block)` of a sequence onto its chain.

    Args:
        tokens: `int32[n]`, all tokens of the sequence, contiguous; `n >= end_block * tokens_per_page`.
        media: `uint64[n, 2]`, or `uint64[0, 2]` for a sequence without media.
        first_block: how many blocks `running` has absorbed.
        end_block: one past the last block to hash.
        tokens_per_page: tokens of a block.
        text_initial: initial state of digests of blocks without media.
        media_initial: initial state of digests of blocks with media.
        running: `uint64[4]`, state of the chain; moves on to `end_block`.
        keys: `uint64[>= end_block, 2]`; rows `[first_block, end_block)` are written.
    """
    digests = np.empty((2 * _DIGEST_ROWS, NUM_LANES), dtype=np.uint64)
    prefixes = np.empty((2 * _PREFIX_ROWS, NUM_LANES), dtype=np.uint64)
    num_groups = (end_block - first_block + NUM_LANES - 1) // NUM_LANES
    # Group by group, three at a time at different stages: while one is digested the one before is chained (two streams of
    # instructions that do not wait for each other), and the one before that is finished.
    for group in range(num_groups + 2):
        block = first_block + group * NUM_LANES
        num_chained = 0
        if 0 < group <= num_groups:
            num_chained = min(NUM_LANES, end_block - (block - NUM_LANES))
        num_digested = 0
        if group < num_groups:
            num_digested = min(NUM_LANES, end_block - block)
        _digest_and_chain(
            tokens,
            block * tokens_per_page,
            tokens_per_page,
            num_digested,
            text_initial,
            digests,
            group % 2,
            running,
            block - NUM_LANES,
            num_chained,
            prefixes,
        )
        if media.size > 0:
            row = (group % 2) * _DIGEST_ROWS
            _digest_media_blocks(
                tokens, media, block * tokens_per_page, tokens_per_page, num_digested, media_initial, digests, row
            )
        if group >= 2:
            row = (group % 2) * _PREFIX_ROWS
            done = block - 2 * NUM_LANES
            _finish_prefixes(prefixes, row)
            for lane in range(min(NUM_LANES, end_block - done)):
                keys[done + lane, 0] = prefixes[row, lane]
                keys[done + lane, 1] = prefixes[row + 1, lane]


@njit
def hash_tail(
    tokens: NDArray[np.int32],
    media: Words,
    start: int,
    length: int,
    text_initial: Words,
    media_initial: Words,
    tail_initial: Words,
    parent: Words,
    key: Words,
) -> None:
    """Write to `key`, `uint64[2]`, the exact key of `tokens[0:length]`, whose last full block ends at `start < length`.

    `parent`, `uint64[2]`, is that block's key (the root where there is none); the other arguments are `hash_blocks`'.
    """
    digests = np.empty((_DIGEST_ROWS, NUM_LANES), dtype=np.uint64)
    _digest_and_chain(tokens, start, length - start, 1, text_initial, digests, 0, tail_initial, 0, 0, digests)
    if media.size > 0:
        _digest_media_blocks(tokens, media, start, length - start, 1, media_initial, digests, 0)
    v0, v1, v2, v3 = _words(tail_initial)
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, parent[0])
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, parent[1])
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, digests[0, 0])
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, digests[1, 0])
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, np.uint64(length))
    key[0], key[1] = _finish(v0, v1, v2, v3, _length_word(_TAIL_MESSAGE_BYTES))


@njit
def hash_tails(
    tokens: NDArray[np.int32],
    media: Words,
    start: int,
    text_initial: Words,
    media_initial: Words,
    tail_initial: Words,
    parent: Words,
    keys: Words,
) -> None:
    """Write to row i of `keys`, `uint64[n, 2]`, the exact key of `tokens[0 : start + 1 + i]`: all in one pass over the tail.

    The other arguments are `hash_tail`'s.
    """
    t0, t1, t2, t3 = _words(text_initial)
    m0, m1, m2, m3 = _words(media_initial)
    p0, p1, p2, p3 = _words(tail_initial)
    p0, p1, p2, p3 = _absorb(p0, p1, p2, p3, parent[0])
    p0, p1, p2, p3 = _absorb(p0, p1, p2, p3, parent[1])
    has_media, half = False, np.uint64(0)
    for i in range(keys.shape[0]):
        token, num_tokens = np.uint64(tokens[start + i]) & _LOW_HALF, i + 1
        if media.size > 0:
            tag, first, second = _MEDIA_TAG, media[start + i, 0], media[start + i, 1]
            if first | second == np.uint64(0):
                tag, first = _TOKEN_TAG, token
            has_media |= tag == _MEDIA_TAG
            m0, m1, m2, m3 = _absorb(m0, m1, m2, m3, tag)
            m0, m1, m2, m3 = _absorb(m0, m1, m2, m3, first)
            m0, m1, m2, m3 = _absorb(m0, m1, m2, m3, second)
        # Two tokens are a word of the text; of an odd number the last one stands in the last word, beside the length.
        if i % 2 == 0:
            half = token
        else:
            t0, t1, t2, t3 = _absorb(t0, t1, t2, t3, half | (token << np.uint64(32)))
            half = np.uint64(0)
        if has_media:
            d0, d1 = _finish(m0, m1, m2, m3, _length_word(num_tokens * _POSITION_BYTES))
        else:
            d0, d1 = _finish(t0, t1, t2, t3, half | _length_word(num_tokens * _TOKEN_BYTES))
        v0, v1, v2, v3 = _absorb(p0, p1, p2, p3, d0)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, d1)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, np.uint64(start + num_tokens))
        keys[i, 0], keys[i, 1] = _finish(v0, v1, v2, v3, _length_word(_TAIL_MESSAGE_BYTES))


@njit_part
def _digest_and_chain(
    tokens: NDArray[np.int32],
    start: int,
    tokens_per_block: int,
    num_blocks: int,
    initial: Words,
    digests: Words,
    half: int,
    running: Words,
    first_chained: int,
    num_chained: int,
    prefixes: Words,
) -> None:
    """Digest up to `NUM_LANES` adjacent blocks, the first at token `start`, while the digests of those before are chained.

    Args:
        tokens: as for `hash_blocks`.
        start: first token of the first block.
        tokens_per_block: tokens of each.
        num_blocks: how many; 0 for none.
        initial: state of digests of text.
        digests: two halves of two rows; the digests go into half `half`, those to be chained are in the other.
        half: 0 or 1.
        running: state of the chain; moves on by what is chained.
        first_chained: number of the first block that is chained.
        num_chained: how many; 0 for none.
        prefixes: two halves of five rows; the chain's state behind each block, and its prefix's last word, go into the other.
    """
    num_words = tokens_per_block // 2 if num_blocks > 0 else 0
    row, before, kept = half * _DIGEST_ROWS, (1 - half) * _DIGEST_ROWS, (1 - half) * _PREFIX_ROWS
    for lane in range(num_blocks):
        word = _length_word(tokens_per_block * _TOKEN_BYTES)
        if tokens_per_block % 2:
            word |= np.uint64(tokens[start + (lane + 1) * tokens_per_block - 1]) & _LOW_HALF
        digests[row, lane] = word  # the last one; until the digests themselves are written there

    v0, v1, v2, v3 = broadcast(initial[0]), broadcast(initial[1]), broadcast(initial[2]), broadcast(initial[3])
    c0, c1, c2, c3 = _words(running)
    address = np.uint64(tokens.ctypes.data) + np.uint64(start * _TOKEN_BYTES)
    stride = np.uint64(tokens_per_block * _TOKEN_BYTES)
    limit = np.uint64((num_blocks - 1) * tokens_per_block * _TOKEN_BYTES)  # lanes past the end repeat the last block
    for index in range(max(num_words, num_chained)):
        if index < num_words:
            words = load_strided(address + np.uint64(index * _WORD_BYTES), stride, limit)
            v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, words)
        if index < num_chained:
            c0, c1, c2, c3 = _absorb(c0, c1, c2, c3, digests[before, index])
            c0, c1, c2, c3 = _absorb(c0, c1, c2, c3, digests[before + 1, index])
            prefixes[kept, index], prefixes[kept + 1, index] = c0, c1
            prefixes[kept + 2, index], prefixes[kept + 3, index] = c2, c3
            num_digests = first_chained + index + 2  # the root is in it too
            prefixes[kept + 4, index] = _length_word(num_digests * _DIGEST_BYTES)
    if num_chained > 0:
        running[0], running[1], running[2], running[3] = c0, c1, c2, c3
    if num_blocks > 0:
        digest = np.uint64(digests.ctypes.data) + np.uint64(row * NUM_LANES * _WORD_BYTES)
        low, high = _finish(v0, v1, v2, v3, load(digest))
        store(digest, low)
        store(digest + np.uint64(NUM_LANES * _WORD_BYTES), high)


@njit_part
def _digest_media_blocks(
    tokens: NDArray[np.int32],
    media: Words,
    start: int,
    tokens_per_block: int,
    num_blocks: int,
    initial: Words,
    digests: Words,
    row: int,
) -> None:
    """Digest anew those of the blocks of `_digest_and_chain` that have media."""
    for lane in range(num_blocks):
        first = start + lane * tokens_per_block
        if media[first : first + tokens_per_block].any():
            _digest_media_block(tokens, media, first, tokens_per_block, initial, digests[row : row + 2, lane])


@njit_part
def _digest_media_block(
    tokens: NDArray[np.int32],
    media: Words,
    start: int,
    num_tokens: int,
    initial: Words,
    digest: Words,
) -> None:
    v0, v1, v2, v3 = _words(initial)
    for position in range(start, start + num_tokens):
        tag, first, second = _MEDIA_TAG, media[position, 0], media[position, 1]
        if first | second == np.uint64(0):
            tag, first = _TOKEN_TAG, np.uint64(tokens[position]) & _LOW_HALF
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, tag)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, first)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, second)
    digest[0], digest[1] = _finish(v0, v1, v2, v3, _length_word(num_tokens * _POSITION_BYTES))


@njit_part
def _finish_prefixes(prefixes: Words, first_row: int) -> None:
    """Turn the states of `NUM_LANES` prefixes, five rows, into their digests: the first two rows."""
    row = np.uint64(NUM_LANES * _WORD_BYTES)
    address = np.uint64(prefixes.ctypes.data) + np.uint64(first_row) * row
    low, high = _finish(
        load(address),
        load(address + row),
        load(address + np.uint64(2) * row),
        load(address + np.uint64(3) * row),
        load(address + np.uint64(4) * row),
    )
    store(address, low)
    store(address + row, high)


@njit_part
def _round(v0: Word, v1: Word, v2: Word, v3: Word) -> State:
    v0 = v0 + v1
    v2 = v2 + v3
    v1 = rotate_left(v1, 13) ^ v0
    v3 = rotate_left(v3, 16) ^ v2
    v0 = rotate_left(v0, 32)
    v2 = v2 + v1
    v0 = v0 + v3
    v1 = rotate_left(v1, 17) ^ v2
    v3 = rotate_left(v3, 21) ^ v0
    v2 = rotate_left(v2, 32)
    return v0, v1, v2, v3


@njit_part
def _absorb(v0: Word, v1: Word, v2: Word, v3: Word, word: Word) -> State:
    v3 = v3 ^ word
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@njit_part
def _finish(v0: Word, v1: Word, v2: Word, v3: Word, last_word: Word) -> tuple[Word, Word]:
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, last_word)
    v2 = v2 ^ _WIDE_OUTPUT
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    low = v0 ^ v1 ^ v2 ^ v3
    v1 = v1 ^ _SECOND_HALF
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return low, v0 ^ v1 ^ v2 ^ v3


@njit
def _words(state: Words) -> State:
    return state[0], state[1], state[2], state[3]


@njit_part
def _length_word(num_bytes: int) -> Word:
    return (np.uint64(num_bytes) & _LENGTH_MASK) << _LENGTH_SHIFT


@njit_part
def _little_endian_word(data: NDArray[np.uint8]) -> Word:
    word = np.uint64(0)
    for index in range(data.size):
        word |= np.uint64(data[index]) << np.uint64(8 * index)
    return word
