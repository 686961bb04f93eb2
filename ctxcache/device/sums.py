"""128-bit sums of pages: what the page sanitizer compares. Two implementations, one definition.

The bytes of a page in one layer are its keys, then its values. Each half is cut into little-endian 4-byte words, and the
bytes that are left over stand as words of their own. Word `i` of a page counts into lane `i % SUM_LANES`, and there adds
`word * weight(i)` to each of two sums modulo 2**62, with two odd weights of at most 30 bits: no product and no sum leaves
int64, which kernels and the simulator both have. A page's sum is that of its lanes.

Sums find accidents, a stray write, not an adversary: any change of one word changes both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.device.arrays import view_array
from ctxcache.device.ops import Int32s, as_int32s
from ctxcache.errors import ContractError

if TYPE_CHECKING:
    from ctxcache.device.caches import HybridCacheManager
    from ctxcache.device.ops import DeviceOps

SUM_LANES = 32
"""Partial sums of a page and layer; threads share them out."""

SUM_MASK = (1 << 62) - 1
WEIGHT_MASK = (1 << 29) - 1
FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B1, 0x85EBCA77

PAGE_ADDRESS, PAGE_HALF_BYTES, PAGE_BYTES, PAGE_FIELDS = range(4)
"""Fields of a page table of sums, one row a layer: where the pool lies, bytes of its K half, bytes of K of one page."""


def allocate_sums(ops: DeviceOps, cache: HybridCacheManager, num_pages: int) -> Any:
    """Allocate what `sum_pages` fills for so many pages: `int64[num_pages, layers, SUM_LANES, 2]`."""
    return ops.allocate((num_pages, len(cache.kv_pools), SUM_LANES, 2), "int64")


def fold(sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """Add up the lanes of host sums: `int64[n, layers, 2]`, each modulo 2**62."""
    folded = np.zeros((*sums.shape[:2], 2), np.int64)
    for lane in range(SUM_LANES):
        folded = (folded + sums[:, :, lane]) & SUM_MASK
    return folded


def check_pages(cache: HybridCacheManager, page_ids: Any, sums: Any) -> Int32s:
    """Check the arguments of `sum_pages` and return the ids as `int32[n]`; `ContractError` for wrong ones."""
    pages = as_int32s("page_ids", page_ids)
    if pages.size and (pages.min() < 0 or pages.max() >= cache.num_pages):
        raise ContractError(
            f"page_ids hold {pages.min()} .. {pages.max()}; the pool has pages 0 .. {cache.num_pages - 1}"
        )
    shape = view_array(sums).shape
    wanted = (len(cache.kv_pools), SUM_LANES, 2)
    if len(shape) != 4 or tuple(shape[1:]) != wanted or shape[0] < len(pages) or view_array(sums).itemsize != 8:
        raise ContractError(f"sums have shape {shape}; {len(pages)} pages need int64 [{len(pages)} or more, *{wanted}]")
    return pages


def sum_table(cache: HybridCacheManager) -> NDArray[np.int64]:
    """Return the table of a cache's pools, `int64[layers, PAGE_FIELDS]`."""
    views = [view_array(pool) for pool in cache.kv_pools]
    rows = [(view.address, view.nbytes // 2, view.nbytes // 2 // cache.num_pages) for view in views]
    return np.array(rows, np.int64).reshape(-1, PAGE_FIELDS)


def sum_on_host(halves: list[NDArray[np.uint8]]) -> NDArray[np.int64]:
    """Sum one page of one layer from the bytes of its halves: `int64[SUM_LANES, 2]`."""
    words = np.concatenate([_words(half) for half in halves])
    index = np.arange(words.size, dtype=np.int64)
    lanes = np.zeros((SUM_LANES, 2), np.int64)
    for which, factor in enumerate((FIRST_FACTOR, SECOND_FACTOR)):
        terms = words * ((((index + 1) * factor) & WEIGHT_MASK) * 2 + 1)
        for start in range(0, words.size, SUM_LANES):
            row = terms[start : start + SUM_LANES]
            lanes[: row.size, which] = (lanes[: row.size, which] + row) & SUM_MASK
    return lanes


def _words(half: NDArray[np.uint8]) -> NDArray[np.int64]:
    whole = half.size // 4 * 4
    words = np.frombuffer(half[:whole].tobytes(), "<u4").astype(np.int64)
    return np.concatenate((words, half[whole:].astype(np.int64)))
