"""Loads and stores at integer addresses, for kernels.

On a GPU each is one instruction in the global address space; under the simulator a `ctypes` twin does the same to host
memory. Scalars are int64 on the kernel's side, whatever their width in memory. The 16-byte forms, two words at an
address that is a multiple of 16, are what makes a copy run at the memory's rate: Numba does not merge adjacent accesses.
"""

# ruff: noqa: S101 - an assert is the simulator's twin of the fault that hardware raises for an unaligned access
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import ctypes
from typing import Any

from ctxcache.device.numba.context import SIMULATED

if SIMULATED:

    def load1(address: int) -> int:
        """Load an unsigned byte."""
        return ctypes.c_uint8.from_address(address).value

    def load4(address: int) -> int:
        """Load a signed 32-bit integer."""
        assert address % 4 == 0, "unaligned 4-byte load"
        return ctypes.c_int32.from_address(address).value

    def load8(address: int) -> int:
        """Load a signed 64-bit integer."""
        assert address % 8 == 0, "unaligned 8-byte load"
        return ctypes.c_int64.from_address(address).value

    def load16(address: int) -> tuple[int, int]:
        """Load 16 bytes as two signed 64-bit integers."""
        assert address % 16 == 0, "unaligned 16-byte load"
        low, high = (ctypes.c_int64 * 2).from_address(address)
        return low, high

    def store1(address: int, value: int) -> None:
        """Store the low byte of a value."""
        ctypes.c_uint8.from_address(address).value = value

    def store4(address: int, value: int) -> None:
        """Store the low 32 bits of a value."""
        assert address % 4 == 0, "unaligned 4-byte store"
        ctypes.c_int32.from_address(address).value = value

    def store16(address: int, words: tuple[int, int]) -> None:
        """Store two 64-bit integers as 16 bytes."""
        assert address % 16 == 0, "unaligned 16-byte store"
        (ctypes.c_int64 * 2).from_address(address)[:] = list(words)

    def wrapped(value: int) -> int:
        """Reduce a value to a signed 64-bit integer, as arithmetic on a GPU does by itself."""
        return ctypes.c_int64(value).value

else:  # pragma: gpu
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    _GLOBAL = 1  # NVVM's number of the global address space, which mapped host memory belongs to as well
    _INDEX = ir.IntType(32)
    _INT64 = ir.IntType(64)
    _WORDS = ir.VectorType(_INT64, 2)
    _PAIR = types.UniTuple(types.int64, 2)

    def _pointer(builder: Any, address: Any, element: Any) -> Any:
        return builder.inttoptr(address, ir.PointerType(element, _GLOBAL))

    def _scalar_load(num_bytes: int, *, signed: bool) -> Any:
        element = ir.IntType(8 * num_bytes)

        def load(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 - Numba's signature of an intrinsic
            def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001 - likewise
                value = builder.load(_pointer(builder, arguments[0], element), align=num_bytes)
                if num_bytes == 8:
                    return value
                return builder.sext(value, _INT64) if signed else builder.zext(value, _INT64)

            return types.int64(types.int64), emit

        return intrinsic(load)

    def _scalar_store(num_bytes: int) -> Any:
        element = ir.IntType(8 * num_bytes)

        def store(typing_context: Any, address: Any, value: Any) -> Any:  # noqa: ARG001 - Numba's signature
            def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001 - likewise
                value = builder.trunc(arguments[1], element)
                builder.store(value, _pointer(builder, arguments[0], element), align=num_bytes)
                return context.get_dummy_value()

            return types.void(types.int64, types.int64), emit

        return intrinsic(store)

    load1 = _scalar_load(1, signed=False)
    load4 = _scalar_load(4, signed=True)
    load8 = _scalar_load(8, signed=True)
    store1 = _scalar_store(1)
    store4 = _scalar_store(4)

    @intrinsic
    def load16(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 - Numba's signature of an intrinsic
        """Load 16 bytes as two signed 64-bit integers, in one access."""

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words = builder.load(_pointer(builder, arguments[0], _WORDS), align=16)
            halves = [builder.extract_element(words, ir.Constant(_INDEX, i)) for i in (0, 1)]
            return context.make_tuple(builder, signature.return_type, halves)

        return _PAIR(types.int64), emit

    @intrinsic
    def store16(typing_context: Any, address: Any, words: Any) -> Any:  # noqa: ARG001 - Numba's signature
        """Store two 64-bit integers as 16 bytes, in one access."""

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001 - likewise
            vector = ir.Constant(_WORDS, ir.Undefined)
            for i in (0, 1):
                half = builder.extract_value(arguments[1], i)
                vector = builder.insert_element(vector, half, ir.Constant(_INDEX, i))
            builder.store(vector, _pointer(builder, arguments[0], _WORDS), align=16)
            return context.get_dummy_value()

        return types.void(types.int64, _PAIR), emit

    @intrinsic
    def wrapped(typing_context: Any, value: Any) -> Any:  # noqa: ARG001 - Numba's signature of an intrinsic
        """Reduce a value to a signed 64-bit integer: it is one."""

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001 - likewise
            return arguments[0]

        return types.int64(types.int64), emit
