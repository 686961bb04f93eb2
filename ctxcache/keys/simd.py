"""Several 64-bit words side by side as one value of compiled code: `+`, `^` and `rotate_left` act on each lane.

Numba has no vector value, and an array of eight words is not kept in registers. This one is LLVM's `<8 x i64>`, which
LLVM splits or widens into whatever registers the machine has. Code written for one `uint64` runs on eight unchanged.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

NUM_LANES = 8

_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, NUM_LANES)
_TOKEN_BYTES = 4  # the alignment of a block of int32 tokens, and so of its words
_WORD_BYTES = 8


class LanesType(types.Type):  # type: ignore[misc]  # numba is untyped
    """Numba's name for `NUM_LANES` unsigned 64-bit words. Has no Python value: it lives inside compiled code only."""

    def __init__(self) -> None:
        super().__init__(name=f"uint64x{NUM_LANES}")


lanes_type = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _VECTOR)


def _is_word(numba_type: Any) -> bool:  # pragma: while compiling
    return numba_type in (types.uint64, lanes_type)


def _broadcast(builder: Any, word: Any) -> Any:  # pragma: while compiling
    vector = ir.Constant(_VECTOR, ir.Undefined)
    for lane in range(NUM_LANES):
        vector = builder.insert_element(vector, word, ir.IntType(32)(lane))
    return vector


def _declare_operator(function: Any, instruction: str) -> None:
    """Let `lanes function lanes`, and `lanes function uint64`, be one LLVM instruction on every lane."""

    @infer_global(function)
    class _LanewiseOperator(ConcreteTemplate):  # type: ignore[misc]
        cases = (
            signature(lanes_type, lanes_type, lanes_type),
            signature(lanes_type, lanes_type, types.uint64),
        )

    @lower_builtin(function, lanes_type, lanes_type)  # type: ignore[untyped-decorator]
    def _emit(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(*arguments)

    @lower_builtin(function, lanes_type, types.uint64)  # type: ignore[untyped-decorator]
    def _emit_broadcast(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(arguments[0], _broadcast(builder, arguments[1]))


_declare_operator(operator.add, "add")
_declare_operator(operator.xor, "xor")


@intrinsic  # type: ignore[untyped-decorator]
def rotate_left(_context: Any, word: Any, bits: Any) -> Any:
    """Rotate one `uint64`, or every lane, by a constant number of bits in (0, 64)."""
    if not _is_word(word) or not isinstance(bits, types.IntegerLiteral):
        return None
    left, right = bits.literal_value, 64 - bits.literal_value

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        llvm_type = target.get_value_type(signature.args[0])
        shifts = [_constant(llvm_type, count) for count in (left, right)]
        return builder.or_(builder.shl(arguments[0], shifts[0]), builder.lshr(arguments[0], shifts[1]))

    return word(word, bits), generate


@intrinsic  # type: ignore[untyped-decorator]
def broadcast(_context: Any, word: Any) -> Any:
    """Put one `uint64` into every lane."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _broadcast(builder, arguments[0])

    return lanes_type(word), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_strided(_context: Any, address: Any, stride: Any, limit: Any) -> Any:
    """Fill lane `i` with the little-endian word at `address + min(i * stride, limit)` (bytes, 4-byte aligned)."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        start, step, last = arguments
        vector = ir.Constant(_VECTOR, ir.Undefined)
        for lane in range(NUM_LANES):
            offset = builder.mul(step, _WORD(lane))
            offset = builder.select(builder.icmp_unsigned("<", offset, last), offset, last)
            pointer = builder.inttoptr(builder.add(start, offset), _WORD.as_pointer())
            vector = builder.insert_element(vector, builder.load(pointer, align=_TOKEN_BYTES), ir.IntType(32)(lane))
        return vector

    return lanes_type(address, stride, limit), generate


@intrinsic  # type: ignore[untyped-decorator]
def load(_context: Any, address: Any) -> Any:
    """Read `NUM_LANES` adjacent words at `address` (8-byte aligned)."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _VECTOR.as_pointer()), align=_WORD_BYTES)

    return lanes_type(address), generate


@intrinsic  # type: ignore[untyped-decorator]
def store(_context: Any, address: Any, lanes: Any) -> Any:
    """Write the lanes as `NUM_LANES` adjacent words to `address` (8-byte aligned)."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _VECTOR.as_pointer())
        builder.store(arguments[1], pointer, align=_WORD_BYTES)
        return target.get_dummy_value()

    return types.none(address, lanes), generate


def _constant(llvm_type: Any, value: int) -> Any:  # pragma: while compiling
    if isinstance(llvm_type, ir.VectorType):
        return ir.Constant(llvm_type, [ir.Constant(_WORD, value)] * llvm_type.count)
    return ir.Constant(llvm_type, value)
