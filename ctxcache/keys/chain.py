"""Keys of blocks: what two sequences must share to share a page.

With `SipHash(key, message)` the standard SipHash-2-4 with 128-bit output, `‖` concatenation, `le32` and `le64`
little-endian integers, and a subkey for each domain, `SipHash(key, b"ctxcache.key.v1." + domain)`:

    root      = SipHash(root subkey,  serialised(tokens_per_page, extras))
    D of text = SipHash(text subkey,  le32(token) for each token)
    D of media= SipHash(media subkey, for each position: le64(0) ‖ le64(token) ‖ le64(0), the token taken modulo 2**32,
                                      or, where there is media: le64(1) ‖ le64(hi) ‖ le64(lo))
    key of block i               = SipHash(chain subkey, root ‖ D_0 ‖ ... ‖ D_i)
    exact key, length L = i*P    = key of block i - 1 (of no block: the root)
    exact key, another length L  = SipHash(tail subkey, exact key of the last full block ‖ D_tail ‖ le64(L))

A block of which any position has media takes the media form. A digest's words are those of SipHash's 16 bytes, each
little-endian: first `hi`, then `lo`. So a block's own digest depends on nothing before it and several are computed at
once, and extending a sequence hashes only what is new.

The key is secret: a tenant who chooses tokens can build a collision for an unkeyed hash, and be served state that
another prompt computed. By default it is random for each process; processes that must agree set it.
"""

from __future__ import annotations

import secrets
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Words, as_integer, describe
from ctxcache.config import HASH_KEY_BYTES
from ctxcache.errors import ContractError
from ctxcache.ids import Hash128
from ctxcache.keys.identity import BlockKeyExtras, MediaSpanKey
from ctxcache.keys.siphash import absorb_digest, hash_blocks, hash_bytes, hash_tail, hash_tails, initial_state
from ctxcache.keys.tokens import MediaHashes, TokenIds, as_media_array, as_token_array

_DOMAIN_PREFIX = b"ctxcache.key.v1."
_NO_EXTRAS = BlockKeyExtras()
_NO_MEDIA: Words = np.empty((0, 2), dtype=np.uint64)
_PROCESS_KEY = secrets.token_bytes(HASH_KEY_BYTES)

# Tags of the serialised root. A field that is absent is not written; a new field takes a new tag.
_TOKENS_PER_PAGE, _ADAPTER, _POSITIONS, _EMBEDDINGS, _ISOLATION, _MEDIA_SPAN = range(1, 7)
_NUMBERED_MODALITY, _NAMED_MODALITY = b"\0", b"\1"


def hash_full_blocks(
    tokens: TokenIds,
    tokens_per_page: int,
    extras: BlockKeyExtras = _NO_EXTRAS,
    per_position_media_hash: MediaHashes | None = None,
    *,
    key: bytes | None = None,
) -> NDArray[np.uint64]:
    """Return the keys of all full blocks of a sequence, `uint64[len(tokens) // tokens_per_page, 2]`, as (hi, lo).

    Args:
        tokens: a one-dimensional run of integers in int32 range.
        tokens_per_page: tokens of one block, at least 1.
        extras: identity that all blocks of the sequence share.
        per_position_media_hash: one digest per token; a non-zero one takes the token's place.
        key: 16 secret bytes; `None` is the process's own random key.

    Returns:
        A new array. Two sequences have equal rows exactly as far as their blocks, and all before them, are equal.

    Raises:
        ContractError: an argument is not what is said above.
    """
    sequence = _hasher(tokens_per_page, key).start(extras)
    token_array = as_token_array(tokens)
    sequence.extend(token_array, as_media_array(per_position_media_hash, len(token_array)))
    return sequence.full_block_keys


def hash_exact_prefix(
    tokens: TokenIds,
    tokens_per_page: int,
    extras: BlockKeyExtras = _NO_EXTRAS,
    per_position_media_hash: MediaHashes | None = None,
    *,
    key: bytes | None = None,
) -> Hash128:
    """Return the key of exactly these tokens, the incomplete last block included.

    For a whole number of blocks it is the last block's key. Arguments and errors are those of `hash_full_blocks`.
    """
    sequence = _hasher(tokens_per_page, key).start(extras)
    token_array = as_token_array(tokens)
    media = as_media_array(per_position_media_hash, len(token_array))
    sequence.extend(token_array, media)
    return sequence.exact_key(token_array, media, len(token_array))


class KeyHasher:
    """Makes the keys of sequences, all with one page size and one secret.

    Args:
        tokens_per_page: tokens of one block, at least 1.
        hash_key: 16 secret bytes; `None` is the process's own random key.

    Raises:
        ContractError: the page size is no positive integer, or the key is not 16 bytes.
    """

    __slots__ = ("_chain", "_media", "_root", "_tail", "_text", "_unlabelled", "tokens_per_page")

    def __init__(self, tokens_per_page: int, hash_key: bytes | None = None) -> None:
        tokens_per_page = as_integer("tokens_per_page", tokens_per_page, 1)
        key = _checked_key(hash_key)
        self.tokens_per_page = tokens_per_page
        self._root, self._chain, self._text, self._media, self._tail = (
            _subkey_state(key, domain) for domain in (b"root", b"chain", b"text", b"media", b"tail")
        )
        self._unlabelled = self._root_digest(_NO_EXTRAS)

    def start(self, extras: BlockKeyExtras = _NO_EXTRAS) -> SequenceKeys:
        """Begin a sequence with this identity."""
        if not isinstance(extras, BlockKeyExtras):
            raise ContractError(f"key extras are {describe(extras)}; pass a BlockKeyExtras")
        root = self._unlabelled if extras is _NO_EXTRAS or extras == _NO_EXTRAS else self._root_digest(extras)
        return SequenceKeys(self, root)

    def _root_digest(self, extras: BlockKeyExtras) -> Words:
        message = np.frombuffer(_serialise(self.tokens_per_page, extras), dtype=np.uint8)
        digest = np.empty(2, dtype=np.uint64)
        hash_bytes(self._root, message, digest)
        return digest


class SequenceKeys:
    """The keys of one growing sequence. Holds 16 bytes a block; the tokens stay with the caller.

    Made by `KeyHasher.start`. Arrays passed in are `as_token_array`'s and `as_media_array`'s, and always the whole
    sequence from its first token: what is hashed already is neither read nor hashed again.
    """

    __slots__ = ("_hasher", "_keys", "_root", "_running", "num_hashed_blocks")

    def __init__(self, hasher: KeyHasher, root: Words) -> None:
        self._hasher = hasher
        self._root = root
        self._running = hasher._chain.copy()  # noqa: SLF001 - the two classes are one thing
        absorb_digest(self._running, root)
        self._keys: Words = np.empty((0, 2), dtype=np.uint64)
        self.num_hashed_blocks = 0

    @property
    def full_block_keys(self) -> Words:
        """`uint64[num_hashed_blocks, 2]`, a view to read only; it stays as it is when the sequence is extended."""
        return self._keys[: self.num_hashed_blocks]

    @property
    def unlabelled(self) -> bool:
        """Whether the sequence has no extras, so that its keys say its content alone."""
        return self._root is self._hasher._unlabelled  # noqa: SLF001 - the two classes are one thing

    def extend(self, tokens: NDArray[np.int32], media: Words | None) -> None:
        """Hash the full blocks of `tokens`, `int32[n]`, that are not hashed yet. `media` is `uint64[n, 2]` or `None`."""
        hasher, first_block = self._hasher, self.num_hashed_blocks
        end_block = len(tokens) // hasher.tokens_per_page
        if end_block <= first_block:
            return
        _check_prepared(tokens, media)
        self._reserve(end_block)
        hash_blocks(
            tokens,
            _NO_MEDIA if media is None else media,
            first_block,
            end_block,
            hasher.tokens_per_page,
            hasher._text,  # noqa: SLF001
            hasher._media,  # noqa: SLF001
            self._running,
            self._keys,
        )
        self.num_hashed_blocks = end_block

    def exact_key(self, tokens: NDArray[np.int32], media: Words | None, length: int) -> Hash128:
        """Return the key of exactly `tokens[0:length]`; costs one block's hash, whatever the length.

        The full blocks up to `length` have to be hashed (`extend`). `ContractError` where they are not, and where
        `length` is negative or beyond the tokens.
        """
        num_blocks, tail_length = divmod(length, self._hasher.tokens_per_page)
        if not 0 <= length <= len(tokens) or num_blocks > self.num_hashed_blocks:
            raise ContractError(
                f"an exact key of {length} tokens was asked for, with {len(tokens)} given and {self.num_hashed_blocks} "
                f"blocks hashed; extend() to at least {num_blocks} blocks first"
            )
        key = self._keys[num_blocks - 1] if num_blocks else self._root
        if tail_length:
            _check_prepared(tokens, media)
            key = self._tail_key(tokens, media, length - tail_length, length, key)
        return Hash128(int(key[0]), int(key[1]))

    def exact_keys_behind(self, tokens: NDArray[np.int32], media: Words | None, num_blocks: int) -> Words:
        """Return the exact keys of all lengths that end in the block behind so many, `uint64[k, 2]`, in one pass over it.

        Row i is that of length `num_blocks * tokens_per_page + i`; the first row is the last full block's key, the last one
        that of the next, or of all tokens. As many blocks have to be hashed (`extend`); `ContractError` where they are not.
        """
        hasher = self._hasher
        page = hasher.tokens_per_page
        start = num_blocks * page
        if not 0 <= num_blocks <= self.num_hashed_blocks or start > len(tokens):
            raise ContractError(
                f"exact keys behind {num_blocks} blocks were asked for, with {self.num_hashed_blocks} hashed of {len(tokens)} "
                "tokens; extend() first"
            )
        _check_prepared(tokens, media)
        whole = num_blocks < self.num_hashed_blocks
        tail_length = page - 1 if whole else min(page - 1, len(tokens) - start)
        parent = self._keys[num_blocks - 1] if num_blocks else self._root
        keys = np.empty((1 + tail_length + whole, 2), dtype=np.uint64)
        keys[0] = parent
        hash_tails(
            tokens,
            _NO_MEDIA if media is None else media,
            start,
            hasher._text,  # noqa: SLF001
            hasher._media,  # noqa: SLF001
            hasher._tail,  # noqa: SLF001
            parent,
            keys[1 : 1 + tail_length],
        )
        if whole:
            keys[-1] = self._keys[num_blocks]
        return keys

    def _tail_key(
        self, tokens: NDArray[np.int32], media: Words | None, start: int, length: int, parent: Words
    ) -> Words:
        hasher, key = self._hasher, np.empty(2, dtype=np.uint64)
        hash_tail(
            tokens,
            _NO_MEDIA if media is None else media,
            start,
            length,
            hasher._text,  # noqa: SLF001
            hasher._media,  # noqa: SLF001
            hasher._tail,  # noqa: SLF001
            parent,
            key,
        )
        return key

    def _reserve(self, num_blocks: int) -> None:
        """Make room by doubling, so that a sequence that grows block by block copies each key O(1) times."""
        capacity = len(self._keys)
        if num_blocks <= capacity:
            return
        keys = np.empty((max(num_blocks, 2 * capacity), 2), dtype=np.uint64)
        keys[: self.num_hashed_blocks] = self.full_block_keys
        self._keys = keys


def _check_prepared(tokens: NDArray[np.int32], media: Words | None) -> None:
    """Compiled code reads these by address: another dtype or layout would give wrong keys, silently."""
    if tokens.dtype != np.int32 or not tokens.flags.c_contiguous:
        raise ContractError(f"tokens are {tokens.dtype}{list(tokens.shape)}; pass what as_token_array() returns")
    if media is not None and (media.dtype != np.uint64 or media.shape != (len(tokens), 2)):
        raise ContractError(
            f"media is {media.dtype}{list(media.shape)} for {len(tokens)} tokens; pass what as_media_array() returns"
        )


def _checked_key(key: bytes | None) -> bytes:
    if key is None:
        return _PROCESS_KEY
    if not isinstance(key, (bytes, bytearray)) or len(key) != HASH_KEY_BYTES:
        size = f"{len(key)} bytes" if isinstance(key, (bytes, bytearray)) else f"a {type(key).__name__}"
        raise ContractError(f"the hash key is {size}; pass {HASH_KEY_BYTES} bytes, or None for the process's own")
    return bytes(key)


def _hasher(tokens_per_page: int, key: bytes | None) -> KeyHasher:
    tokens_per_page = as_integer("tokens_per_page", tokens_per_page, 1)  # before the cache, to which True is 1
    return _cached_hasher(int(tokens_per_page), _checked_key(key))


@lru_cache(maxsize=8)
def _cached_hasher(tokens_per_page: int, key: bytes) -> KeyHasher:
    return KeyHasher(tokens_per_page, key)


def _subkey_state(key: bytes, domain: bytes) -> Words:
    """Return the initial state of the hash of one domain."""
    subkey = np.empty(2, dtype=np.uint64)
    hash_bytes(initial_state(key), np.frombuffer(_DOMAIN_PREFIX + domain, dtype=np.uint8), subkey)
    return initial_state(int(subkey[0]).to_bytes(8, "little") + int(subkey[1]).to_bytes(8, "little"))


def _serialise(tokens_per_page: int, extras: BlockKeyExtras) -> bytes:
    """Write the root's message: for each field that is there its tag (1 byte), length (8 bytes) and bytes."""
    fields = [_field(_TOKENS_PER_PAGE, _number(tokens_per_page))]
    if extras.adapter is not None:
        fields.append(_field(_ADAPTER, extras.adapter.id.to_bytes() + _number(extras.adapter.generation)))
    for tag, digest in (
        (_POSITIONS, extras.position_digest),
        (_EMBEDDINGS, extras.custom_embedding_digest),
        (_ISOLATION, extras.isolation_digest),
    ):
        if digest is not None:
            fields.append(_field(tag, digest.to_bytes()))
    fields.extend(_field(_MEDIA_SPAN, _media_span(span)) for span in extras.media)
    return b"".join(fields)


def _media_span(span: MediaSpanKey) -> bytes:
    if isinstance(span.modality, str):
        modality = _NAMED_MODALITY + span.modality.encode("utf-8", "surrogatepass")
    else:
        modality = _NUMBERED_MODALITY + _number(span.modality)
    return (
        span.content_digest.to_bytes()
        + span.placement_digest.to_bytes()
        + _number(span.offset_within_block)
        + _number(span.item_order)
        + modality
    )


def _field(tag: int, payload: bytes) -> bytes:
    return bytes([tag]) + _number(len(payload)) + payload


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
