"""Streams of any library, reduced to their handle."""

from __future__ import annotations

import os
from typing import Any

from ctxcache.errors import ContractError

DEFAULT_STREAM = 0
"""The handle of the default stream, and of `None`."""

PER_THREAD_DEFAULT_STREAM = 2
"""The handle of the per-thread default stream, in whichever thread."""


def stream_handle(stream: Any) -> int:
    """Return the integer handle (`cudaStream_t`) of a stream. The stream stays the caller's.

    Args:
        stream: anything with `__cuda_stream__` (the CUDA Python protocol), a PyTorch (`cuda_stream`), CuPy (`ptr`),
            Numba or cuda.core (`handle`) stream, an integer handle, or `None` for the default stream. A stream of
            Numba's simulator has no handle; its identity stands in.

    Raises:
        ContractError: anything else.
    """
    if stream is None:
        return DEFAULT_STREAM
    if isinstance(stream, int) and not isinstance(stream, bool):
        return _checked(stream, stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _version, handle = protocol() if callable(protocol) else protocol
        return _checked(stream, int(handle))
    for name in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, name, None)
        if handle is not None:
            # ctypes handles say None for the null pointer, which is the default stream.
            value = getattr(handle, "value", handle)
            return _checked(stream, int(value or DEFAULT_STREAM))
    if "simulator" in type(stream).__module__:
        return id(stream)
    raise ContractError(
        f"{stream!r} is no stream; pass an object with __cuda_stream__, a PyTorch, CuPy, Numba or cuda.core stream, "
        "an integer handle, or None"
    )


def is_per_thread(stream: Any) -> bool:
    """Say whether a stream is the per-thread default stream: one handle, and another stream in every thread.

    Raises:
        ContractError: it is no stream.
    """
    handle = stream_handle(stream)
    return handle == PER_THREAD_DEFAULT_STREAM or (handle == DEFAULT_STREAM and _default_is_per_thread())


def _default_is_per_thread() -> bool:
    """Whether CUDA's Python bindings were told so; they read the variable as a number."""
    return os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0").strip() not in {"", "0"}


def same_stream(one: Any, other: Any) -> bool:
    """Say whether two stream objects name the same stream: whether their handles are equal.

    Raises:
        ContractError: one of them is no stream.
    """
    return one is other or stream_handle(one) == stream_handle(other)


def _checked(stream: Any, handle: int) -> int:
    if handle < 0:
        raise ContractError(f"stream {stream!r} has the handle {handle}; a handle is an address, or 0, 1 or 2")
    return handle
