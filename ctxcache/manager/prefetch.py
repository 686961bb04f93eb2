"""Asking for memory ahead of its use: evicting one record after the other meets every cache line of each for the first time."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ctxcache.arguments import Int32s
from ctxcache.jit import njit_inlined
from ctxcache.manager.block_index import first_slot_of
from ctxcache.manager.layout import ENDPOINT, RECENCY_END, CacheArrays

_INT = ir.IntType(32)
_READ, _KEEP, _DATA = _INT(0), _INT(3), _INT(1)

_RECORD_AHEAD, _BLOCK_AHEAD, _SLOT_AHEAD = 12, 8, 4
"""Places of the LRU order. Each step reads what the one before it has asked for four evictions earlier."""


@intrinsic  # type: ignore[untyped-decorator]
def _fetch(_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line at the beginning of `array[..., index]` (`index` of the axis that is not contiguous)."""
    axis = 1 if array.layout == "F" else 0

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        parts = target.make_array(array)(target, builder, arguments[0])
        stride = builder.extract_value(parts.strides, axis)
        offset = builder.mul(target.cast(builder, arguments[1], index, types.intp), stride)
        address = builder.add(builder.ptrtoint(parts.data, offset.type), offset)
        pointer = builder.inttoptr(address, cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), (cgutils.voidptr_t, _INT, _INT, _INT))
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, (pointer, _READ, _KEEP, _DATA))
        return target.get_dummy_value()

    return types.none(array, index), generate


@njit_inlined
def fetch_slot(slot: Int32s, low: np.uint64) -> None:
    """Ask for where a key with this low word is, or will be, in the index."""
    _fetch(slot, first_slot_of(low, slot.size - 1))


@njit_inlined
def fetch_behind(cache: CacheArrays, place: int) -> None:
    """Ask for what eviction will meet of the records that follow a place of the LRU order."""
    record = _record_at(cache, place + _RECORD_AHEAD)
    if record >= 0:
        _fetch(cache.record, record)
        _fetch(cache.serial, record)
    block = _endpoint_at(cache, place + _BLOCK_AHEAD)
    if block >= 0:
        _fetch(cache.key, block)
        _fetch(cache.node, block)
        _fetch(cache.resource, block)
    block = _endpoint_at(cache, place + _SLOT_AHEAD)
    if block >= 0:
        fetch_slot(cache.slot, cache.key[block, 1])


@njit_inlined
def _record_at(cache: CacheArrays, place: int) -> int:
    return int(cache.recency[place]) if place < cache.state[RECENCY_END] else -1


@njit_inlined
def _endpoint_at(cache: CacheArrays, place: int) -> int:
    record = _record_at(cache, place)
    return int(cache.record[ENDPOINT, record]) if record >= 0 else -1
