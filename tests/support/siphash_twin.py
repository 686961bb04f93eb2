"""Keys of blocks in plain Python, from their definition alone: the oracle of the compiled ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ctxcache.ids import Hash128
from ctxcache.keys.identity import BlockKeyExtras

_MASK = (1 << 64) - 1


def siphash_2_4_128(key: bytes, message: bytes) -> bytes:
    """SipHash-2-4 with 128-bit output, after the pseudocode of the paper and the reference code's 128-bit variant."""
    k0, k1 = struct.unpack("<QQ", key)
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    padded = message + bytes(-(len(message) + 1) % 8) + bytes([len(message) % 256])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        _rounds(v, 2)
        v[0] ^= word
    v[2] ^= 0xEE
    _rounds(v, 4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    _rounds(v, 4)
    return struct.pack("<QQ", first, v[0] ^ v[1] ^ v[2] ^ v[3])


def _rounds(v: list[int], count: int) -> None:
    def rotated(word: int, bits: int) -> int:
        return (word << bits | word >> (64 - bits)) & _MASK

    for _ in range(count):
        v[0] = (v[0] + v[1]) & _MASK
        v[1] = rotated(v[1], 13) ^ v[0]
        v[0] = rotated(v[0], 32)
        v[2] = (v[2] + v[3]) & _MASK
        v[3] = rotated(v[3], 16) ^ v[2]
        v[0] = (v[0] + v[3]) & _MASK
        v[3] = rotated(v[3], 21) ^ v[0]
        v[2] = (v[2] + v[1]) & _MASK
        v[1] = rotated(v[1], 17) ^ v[2]
        v[2] = rotated(v[2], 32)


def twin_keys(
    tokens: Sequence[int],
    tokens_per_page: int,
    extras: BlockKeyExtras,
    media: Sequence[Hash128] | None,
    key: bytes,
) -> tuple[list[Hash128], Hash128]:
    """The keys of all full blocks, and the exact key of all tokens."""
    sub = {
        name: siphash_2_4_128(key, b"ctxcache.key.v1." + name)
        for name in (b"root", b"chain", b"tail", b"text", b"media")
    }
    media = [Hash128(0, 0)] * len(tokens) if media is None else media

    def digest(start: int, end: int) -> bytes:
        if not any(media[start:end]):
            return siphash_2_4_128(sub[b"text"], struct.pack(f"<{end - start}i", *tokens[start:end]))
        message = b""
        for token, span in zip(tokens[start:end], media[start:end], strict=True):
            message += (
                struct.pack("<QQQ", 1, span.hi, span.lo) if span else struct.pack("<QQQ", 0, token % (1 << 32), 0)
            )
        return siphash_2_4_128(sub[b"media"], message)

    root = siphash_2_4_128(sub[b"root"], _root_message(tokens_per_page, extras))
    chain, keys, last = root, [], root
    num_blocks, rest = divmod(len(tokens), tokens_per_page)
    for block in range(num_blocks):
        chain += digest(block * tokens_per_page, (block + 1) * tokens_per_page)
        last = siphash_2_4_128(sub[b"chain"], chain)
        keys.append(last)
    if rest:
        tail = digest(len(tokens) - rest, len(tokens))
        last = siphash_2_4_128(
            sub[b"tail"],
            keys[-1] + tail + struct.pack("<Q", len(tokens)) if keys else root + tail + struct.pack("<Q", len(tokens)),
        )
    return [_hash128(word) for word in keys], _hash128(last)


def _hash128(digest: bytes) -> Hash128:
    return Hash128(*struct.unpack("<QQ", digest))


def _root_message(tokens_per_page: int, extras: BlockKeyExtras) -> bytes:
    fields: list[tuple[int, bytes]] = [(1, struct.pack("<Q", tokens_per_page))]
    if extras.adapter is not None:
        fields.append((2, extras.adapter.id.to_bytes() + struct.pack("<Q", extras.adapter.generation)))
    for tag, value in enumerate(
        (extras.position_digest, extras.custom_embedding_digest, extras.isolation_digest), start=3
    ):
        if value is not None:
            fields.append((tag, value.to_bytes()))
    for span in extras.media:
        modality = (
            b"\1" + span.modality.encode()
            if isinstance(span.modality, str)
            else b"\0" + struct.pack("<Q", span.modality)
        )
        digests = span.content_digest.to_bytes() + span.placement_digest.to_bytes()
        fields.append((6, digests + struct.pack("<QQ", span.offset_within_block, span.item_order) + modality))
    return b"".join(struct.pack("<BQ", tag, len(payload)) + payload for tag, payload in fields)
