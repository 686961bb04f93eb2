"""Streams of any library are told apart by their handles alone."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from ctxcache.device.streams import is_per_thread, same_stream, stream_handle
from ctxcache.errors import ContractError


class Protocol:
    """A stream of the CUDA Python protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = "not this"
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def thing(**attributes: Any) -> Any:
    """An object with these attributes, like a stream of an older library."""
    return type("Stream", (), attributes)()


STREAMS: dict[str, tuple[Any, int]] = {
    "none": (None, 0),
    "integer": (0x7F00, 0x7F00),
    "protocol": (Protocol(0x7F00), 0x7F00),
    "protocol as a property": (thing(__cuda_stream__=(0, 5)), 5),
    "pytorch": (thing(cuda_stream=0x7F00), 0x7F00),
    "pytorch default": (thing(cuda_stream=0), 0),
    "cupy": (thing(ptr=0x7F00), 0x7F00),
    "numba by ctypes": (thing(handle=ctypes.c_void_p(0x7F00)), 0x7F00),
    "numba default": (thing(handle=ctypes.c_void_p(0)), 0),
    "cuda.core": (thing(handle=0x7F00), 0x7F00),
}


@pytest.mark.parametrize(("stream", "handle"), STREAMS.values(), ids=STREAMS)
def test_the_handle_is_found(stream: Any, handle: int) -> None:
    """Each library's spelling of the handle is read."""
    assert stream_handle(stream) == handle
    assert same_stream(stream, handle)
    assert not same_stream(stream, handle + 1)


def test_streams_of_the_simulator_differ_by_identity() -> None:
    """The simulator's streams have no handle; each equals itself alone."""
    from ctxcache.device.numba.context import SIMULATED, cuda

    one, other = cuda.stream(), cuda.stream()
    assert same_stream(one, one)
    assert not same_stream(one, other)
    assert SIMULATED or stream_handle(one) != 0


@pytest.mark.parametrize("stranger", ["stream", 1.5, True, object(), -1, thing(handle=-4)])
def test_strangers_are_refused(stranger: Any) -> None:
    """What is no stream is a `ContractError`; no handle is guessed."""
    with pytest.raises(ContractError, match="stream"):
        stream_handle(stranger)


def test_the_per_thread_default_stream_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its handle in any spelling; the default stream too where CUDA's Python bindings are told to mean that by it."""
    monkeypatch.delenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", raising=False)
    assert is_per_thread(2)
    assert is_per_thread(thing(cuda_stream=2))
    for stream in (None, 0, 1, 3, 0x7F00):
        assert not is_per_thread(stream)
    monkeypatch.setenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0")
    assert not is_per_thread(None)
    monkeypatch.setenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "1")
    assert is_per_thread(None)
    assert not is_per_thread(1)
    with pytest.raises(ContractError, match="is no stream"):
        is_per_thread("default")
