"""128-bit sums of pages: what the page sanitizer compares. Two implementations, one definition.

The bytes of a page in one layer are its keys, then its values. Each half is cut into units of 16 bytes, two little-endian
words of 64 bits; the last unit of a half is filled up with zeros. Unit `i` of either half belongs to lane `i % SUM_LANES`. A
lane takes its words in turn, those of the keys first, `sum = sum * factor + word` modulo 2**64, with each of two odd
factors, and the lanes of a page are put together in the same way: any change of one word changes both sums.

Sums find accidents, a stray write, not an adversary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Int32s, as_int32s
from ctxcache.device.arrays import ArrayView, view_array
from ctxcache.device.compiled_checks import are_within
from ctxcache.device.numba.tables import Descriptors
from ctxcache.errors import ContractError

if TYPE_CHECKING:
    from ctxcache.device.kv_pools import HybridCacheManager
    from ctxcache.device.ops import DeviceOps

SUM_LANES = 256
"""Partial sums of a page and layer: threads, each with four loads under way. Two blocks a page and layer share the work
more evenly than one: 117 us for 436 MB on an H200 against 130, where a read at the rate of a copy takes 103."""

FIRST_FACTOR, SECOND_FACTOR = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D
"""Odd, so that multiplying loses nothing, and less than 2**63."""

_FACTORS = np.array([FIRST_FACTOR, SECOND_FACTOR], np.int64)

_LANE_WEIGHTS = np.array(
    [
        [pow(factor, SUM_LANES - 1 - lane, 1 << 64) for factor in (FIRST_FACTOR, SECOND_FACTOR)]
        for lane in range(SUM_LANES)
    ],
    np.uint64,
).view(np.int64)
"""What each lane has been multiplied with once all lanes are put together."""

PAGE_ADDRESS, PAGE_HALF_BYTES, PAGE_BYTES, PAGE_FIELDS = range(4)
"""Fields of a page table of sums, one row a layer: where the pool lies, bytes of its K half, bytes of K of one page."""


def allocate_sums(ops: DeviceOps, cache: HybridCacheManager, num_pages: int) -> Any:
    """Allocate what `sum_pages` fills for so many pages: `int64[num_pages, layers, SUM_LANES, 2]`."""
    return ops.allocate((num_pages, len(cache.kv_pools), SUM_LANES, 2), "int64")


def fold(sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """Put the lanes of host sums together: `int64[n, layers, 2]`."""
    folded: NDArray[np.int64] = np.einsum("pnlf,lf->pnf", sums, _LANE_WEIGHTS)
    return folded


def check_pages(cache: HybridCacheManager, page_ids: Any, sums: Any) -> tuple[Int32s, ArrayView]:
    """Check the arguments of `sum_pages`; return the ids as `int32[n]` and where the sums lie. `ContractError` for wrong ones."""
    pages = as_int32s("page_ids", page_ids)
    if not are_within(pages, cache.num_pages):
        raise ContractError(
            f"page_ids hold {pages.min()} .. {pages.max()}; the pool has pages 0 .. {cache.num_pages - 1}"
        )
    view = view_array(sums)
    shape = view.shape
    wanted = (len(cache.kv_pools), SUM_LANES, 2)
    if len(shape) != 4 or tuple(shape[1:]) != wanted or shape[0] < len(pages) or view.itemsize != 8:
        raise ContractError(f"sums have shape {shape}; {len(pages)} pages need int64 [{len(pages)} or more, *{wanted}]")
    if not view.is_contiguous:
        raise ContractError(f"sums have strides {view.strides}; pass a C-contiguous array, as allocate_sums makes it")
    return pages, view


def describe_pages(cache: HybridCacheManager) -> Descriptors:
    """Return the table of a cache's pools, `int64[layers, PAGE_FIELDS]`."""
    views = [view_array(pool) for pool in cache.kv_pools]
    rows = [(view.address, view.nbytes // 2, view.nbytes // 2 // cache.num_pages) for view in views]
    return Descriptors(np.array(rows, np.int64).reshape(-1, PAGE_FIELDS))


def sum_on_host(halves: list[NDArray[np.uint8]]) -> NDArray[np.int64]:
    """Sum one page of one layer from the bytes of its halves: `int64[SUM_LANES, 2]`."""
    lanes = np.zeros((SUM_LANES, 2), np.int64)
    for half in halves:
        units = _units(half)
        for start in range(0, len(units), SUM_LANES):
            row = units[start : start + SUM_LANES]
            for word in row.T:
                lanes[: len(row)] = lanes[: len(row)] * _FACTORS + word[:, None]
    return lanes


def _units(half: NDArray[np.uint8]) -> NDArray[np.int64]:
    padded = np.zeros(-(-half.size // 16) * 16, np.uint8)
    padded[: half.size] = half
    return padded.view("<i8").astype(np.int64).reshape(-1, 2)
