"""Who a block belongs to, apart from its tokens: adapter, tenant, positions, embeddings, media."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ctxcache.arguments import NOT_ITERABLE, as_integer
from ctxcache.errors import ContractError
from ctxcache.ids import Hash128


def hash_opaque_identity(data: bytes | str) -> Hash128:
    """Digest a name that only the caller understands (an adapter file, a tenant, an image) to 128 bits.

    Text is encoded as UTF-8. The digest is BLAKE2b's, unkeyed, so that processes agree about it.

    Raises:
        ContractError: neither bytes nor text. (`bytes(8)` of a number would be eight zeros: every such tenant the same.)
    """
    if not isinstance(data, (bytes, bytearray, memoryview, str)):
        raise ContractError(
            f"an identity is a {type(data).__name__}; pass bytes or text, str() of a number for example"
        )
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
    return Hash128.from_bytes(hashlib.blake2b(raw, digest_size=16, person=b"ctxcache.id").digest())


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """A LoRA adapter: the digest of its identity, and how often it was replaced under that name.

    Attributes:
        id: digest of the adapter's identity.
        generation: a non-negative count below 2**64; a reload under the same name takes the next one.
    """

    id: Hash128
    generation: int = 0

    def __post_init__(self) -> None:
        _check_field(self, "id", Hash128)
        _set_unsigned(self, "generation")


@dataclass(frozen=True, slots=True)
class MediaSpanKey:
    """One media item as a sequence sees it.

    Attributes:
        content_digest: digest of the item's bytes after preprocessing.
        placement_digest: digest of where and how it was placed (grid, crops, timestamps).
        offset_within_block: tokens from the start of the block to the start of the item.
        item_order: position of the item among the sequence's items.
        modality: the runtime's number or name for image, audio, video ...
    """

    content_digest: Hash128
    placement_digest: Hash128
    offset_within_block: int
    item_order: int
    modality: int | str

    def __post_init__(self) -> None:
        _check_field(self, "content_digest", Hash128)
        _check_field(self, "placement_digest", Hash128)
        _set_unsigned(self, "offset_within_block")
        _set_unsigned(self, "item_order")
        if not isinstance(self.modality, str):
            _set_unsigned(self, "modality")


@dataclass(frozen=True, slots=True)
class BlockKeyExtras:
    """Identity that all blocks of a sequence share. Whatever differs here never shares a page.

    Attributes:
        media: the media items of the sequence, in order.
        adapter: the adapter that computed the state, or `None` for the bare model.
        position_digest: digest of a position scheme other than the default.
        custom_embedding_digest: digest of embeddings that replace the model's own.
        isolation_digest: digest of the tenant that may see the state.
    """

    media: tuple[MediaSpanKey, ...] = ()
    adapter: AdapterKey | None = None
    position_digest: Hash128 | None = None
    custom_embedding_digest: Hash128 | None = None
    isolation_digest: Hash128 | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "media", tuple(self.media))
        except NOT_ITERABLE:
            raise ContractError(f"BlockKeyExtras.media is {self.media!r}; pass a tuple of MediaSpanKey") from None
        for span in self.media:
            if not isinstance(span, MediaSpanKey):
                raise ContractError(f"BlockKeyExtras.media holds {span!r}; pass MediaSpanKey values")
        _check_field(self, "adapter", AdapterKey, optional=True)
        for name in ("position_digest", "custom_embedding_digest", "isolation_digest"):
            _check_field(self, name, Hash128, optional=True)


def _check_field(key: object, field: str, kind: type, *, optional: bool = False) -> None:
    value = getattr(key, field)
    if not (isinstance(value, kind) or (optional and value is None)):
        wanted = kind.__name__ + (" or None" if optional else "")
        hint = ", hash_opaque_identity(...) of a name for example" if kind is Hash128 else ""
        raise ContractError(f"{type(key).__name__}.{field} is {value!r}; pass {wanted}{hint}")


def _set_unsigned(key: object, field: str) -> None:
    """Check a number of an identity under construction, and keep it as an `int`."""
    name = f"{type(key).__name__}.{field}"
    object.__setattr__(key, field, as_integer(name, getattr(key, field), 0, 1 << 64))
