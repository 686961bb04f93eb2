"""Token ids and media digests in any form that callers have, as the arrays that are hashed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Int32s, Words, as_int32s, as_list, as_numpy, as_plain
from ctxcache.errors import ContractError
from ctxcache.ids import Hash128

TokenIds: TypeAlias = "Sequence[int] | NDArray[Any]"
"""A one-dimensional run of integers in int32 range. An int32 array is taken without a Python loop."""

MediaHashes: TypeAlias = "NDArray[np.uint64] | Sequence[Hash128]"
"""One 128-bit digest per token, `uint64[n, 2]` (hi, lo) or `Hash128` values; zero where there is no media."""


def as_token_array(token_ids: TokenIds) -> Int32s:
    """Return token ids as a contiguous `int32[n]`; such an array is returned itself. Errors as of `as_int32s`."""
    return as_int32s("token ids", token_ids, "token id")


def as_media_array(media: MediaHashes | None, num_tokens: int) -> Words | None:
    """Return per-position media digests as a contiguous `uint64[num_tokens, 2]` of (hi, lo), or `None` for none.

    Raises:
        ContractError: not one digest a token, or neither a `uint64[n, 2]` array nor a sequence of `Hash128`.
    """
    if media is None:
        return None
    if hasattr(media, "__array__"):
        media = as_numpy("media digests", media)
        if media.dtype != np.uint64 or media.ndim != 2 or media.shape[1] != 2:
            raise ContractError(
                f"media digests are {media.dtype}{list(media.shape)}; pass uint64[n, 2], one (hi, lo) a token"
            )
        digests = as_plain(media)
    else:
        digests = _media_from_values(media)
    if len(digests) != num_tokens:
        raise ContractError(
            f"{len(digests)} media digests for {num_tokens} token ids; pass one for each, zero where there is no media"
        )
    return digests


def _media_from_values(media: Sequence[Hash128]) -> Words:
    wanted = "a sequence of Hash128, or an array uint64[n, 2]"
    digests = as_list("media digests", media, wanted)
    stranger = next((digest for digest in digests if not isinstance(digest, Hash128)), None)
    if stranger is not None:
        raise ContractError(f"media digests hold a {type(stranger).__name__}; pass {wanted}")
    return np.array([(digest.hi, digest.lo) for digest in digests], dtype=np.uint64).reshape(-1, 2)
