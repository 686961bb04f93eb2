"""Token ids and media digests in any form that callers have, as the arrays that are hashed."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import as_plain
from ctxcache.errors import ContractError
from ctxcache.ids import Hash128
from ctxcache.keys.siphash import Words

if TYPE_CHECKING:
    from ctxcache.request.admission import MediaHashes, TokenIds

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1


def as_token_array(token_ids: TokenIds) -> NDArray[np.int32]:
    """Return token ids as a contiguous `int32[n]`. A contiguous int32 array is returned itself, without a copy.

    Raises:
        ContractError: not a one-dimensional run of integers in int32 range. Floats and bools are refused, also one
            among integers.
    """
    if isinstance(token_ids, np.ndarray):
        return _checked_token_array(token_ids)
    return _token_array_from_values(token_ids)


def _token_array_from_values(token_ids: Any) -> NDArray[np.int32]:
    if hasattr(token_ids, "__array__"):  # a tensor of another library
        return _checked_token_array(_as_array(token_ids))
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
        raise ContractError(f"token ids are a {type(token_ids).__name__}; pass a sequence of integers, or an array")
    # Read once: array.array() takes bytes for raw memory, and a sequence of the caller's may answer otherwise next time.
    tokens = token_ids if type(token_ids) in (list, tuple) else list(token_ids)
    strangers = {kind for kind in set(map(type, tokens)) if kind is bool or not issubclass(kind, (int, np.integer))}
    if strangers:
        index = next(index for index, token in enumerate(tokens) if type(token) in strangers)
        raise ContractError(f"token id {index} is {tokens[index]!r}; token ids are integers")
    try:
        return np.frombuffer(array.array("i", tokens), dtype=np.int32)
    except OverflowError:
        index = next(index for index, token in enumerate(tokens) if not INT32_MIN <= token <= INT32_MAX)
        raise ContractError(_out_of_range(index, tokens[index])) from None


def as_media_array(media: MediaHashes | None, num_tokens: int) -> Words | None:
    """Return per-position media digests as a contiguous `uint64[num_tokens, 2]` of (hi, lo), or `None` for none.

    Raises:
        ContractError: not one digest a token, or neither a `uint64[n, 2]` array nor a sequence of `Hash128`.
    """
    if media is None:
        return None
    if isinstance(media, np.ndarray):
        if media.dtype != np.uint64 or media.ndim != 2 or media.shape[1] != 2:
            raise ContractError(
                f"media digests are {media.dtype}{list(media.shape)}; pass uint64[n, 2], one (hi, lo) a token"
            )
        digests = as_plain(np.asarray(media))
    else:
        digests = _media_from_values(media)
    if len(digests) != num_tokens:
        raise ContractError(
            f"{len(digests)} media digests for {num_tokens} token ids; pass one for each, zero where there is no media"
        )
    return digests


def _as_array(values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # an array of a device, for one
        raise ContractError(f"token ids are a {type(values).__name__} that NumPy cannot read: {error}") from error


def _checked_token_array(tokens: NDArray[Any]) -> NDArray[np.int32]:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ContractError(
            f"token ids are {tokens.dtype}{list(tokens.shape)}; pass a one-dimensional array of integers"
        )
    if tokens.dtype == np.int32:  # of this machine's byte order
        tokens = np.asarray(tokens)
        return tokens if tokens.flags.c_contiguous and tokens.flags.aligned else tokens.copy(order="C")
    outside = (tokens < INT32_MIN) | (tokens > INT32_MAX)
    if outside.any():
        index = int(outside.argmax())
        raise ContractError(_out_of_range(index, int(tokens[index])))
    return tokens.astype(np.int32)


def _out_of_range(index: int, token: int) -> str:
    return f"token id {index} is {token}; token ids lie in int32 range, [{INT32_MIN}, {INT32_MAX}]"


def _media_from_values(media: Sequence[Hash128]) -> Words:
    if not isinstance(media, Sequence) or not all(isinstance(digest, Hash128) for digest in media):
        raise ContractError(
            f"media digests are a {type(media).__name__}; pass a sequence of Hash128, or an array uint64[n, 2]"
        )
    return np.array([(digest.hi, digest.lo) for digest in media], dtype=np.uint64).reshape(-1, 2)
