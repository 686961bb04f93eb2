"""Keys and values in pages. The runtime owns the pools; a page table says which page holds which tokens.

    logical positions of slot 1     0 ......... 31 | 32 ........ 63 | 64 ...
    row of the page table           page 7         | page 2         | page 9 ...
    pool of one layer               [2, num_pages, tokens_per_page, num_kv_heads, head_dim], K half, then V half

Nothing here imports `ctxcache`: a kernel of a real runtime sees the same three things, pools, table and lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from demo_runtime.attention import AttentionShape
from demo_runtime.tiles import Floats


def allocate_pools(num_layers: int, num_pages: int, tokens_per_page: int, attention: AttentionShape) -> list[Floats]:
    """Return one pool per layer, float32 `[2, num_pages, tokens_per_page, num_kv_heads, head_dim]`.

    They are filled with NaN: whoever reads a position that nobody has written gets a NaN answer, not a plausible one.
    """
    shape = (2, num_pages, tokens_per_page, attention.num_kv_heads, attention.head_dim)
    return [np.full(shape, np.nan, dtype=np.float32) for _ in range(num_layers)]


def identity_table(num_pages: int) -> NDArray[np.int32]:
    """Return the table of a runtime without a cache: one sequence, logical page i in page i. `int32[1, 2, num_pages]`."""
    pages = np.arange(num_pages, dtype=np.int32)
    return np.stack([pages, pages + num_pages])[None]


def own_pages(num_layers: int, max_sequence_length: int, tokens_per_page: int, attention: AttentionShape) -> PagedKv:
    """Return the memory of a runtime without a cache: one sequence of at most so many tokens, in pages of its own."""
    row = max_sequence_length // tokens_per_page
    return PagedKv(allocate_pools(num_layers, row, tokens_per_page, attention), identity_table(row))


class PagedKv:
    """Pools and the table that leads through them.

    Args:
        pools: one per layer, as `allocate_pools` returns them. Borrowed.
        table: int32 `[max_batch, 2, max_pages_per_sequence]`: ids of K pages, then of V pages, `v = k + num_pages`; -1
            where there is no page. Borrowed: whatever is uploaded to it is seen at the next access.
    """

    def __init__(self, pools: Sequence[Floats], table: NDArray[np.int32]) -> None:
        _, num_pages, self._tokens_per_page, num_kv_heads, head_dim = pools[0].shape
        # K and V pages in one line, so that the ids of both halves of the table are plain indices.
        self._pages = [pool.reshape(2 * num_pages, self._tokens_per_page, num_kv_heads, head_dim) for pool in pools]
        self._table = table

    def write(self, layer: int, slot: int, start: int, keys: Floats, values: Floats) -> None:
        """Store the rows `[n, num_kv_heads, head_dim]` of the positions from `start` on in the pages of `slot`."""
        positions = np.arange(start, start + len(keys))
        logical, offsets = np.divmod(positions, self._tokens_per_page)
        pages = self._page_ids(slot, start + len(keys))[:, logical]
        self._pages[layer][pages[0], offsets] = keys
        self._pages[layer][pages[1], offsets] = values

    def read(self, layer: int, slot: int, length: int) -> tuple[Floats, Floats]:
        """Gather keys and values of the positions below `length`, with zero rows behind them up to a whole page."""
        key_pages, value_pages = self._page_ids(slot, length)
        return self._gather(layer, key_pages, length), self._gather(layer, value_pages, length)

    def _page_ids(self, slot: int, length: int) -> NDArray[np.int32]:
        """Return `int32[2, pages]`, the K and V pages of the first `length` positions."""
        num_pages = -(-length // self._tokens_per_page)
        ids = self._table[slot, :, :num_pages]
        if ids.shape[1] < num_pages or ids.min() < 0:
            raise IndexError(f"slot {slot} has no page for position {length - 1}; its row is {self._table[slot, 0]}")
        return ids

    def _gather(self, layer: int, page_ids: NDArray[np.int32], length: int) -> Floats:
        gathered: Floats = self._pages[layer][page_ids]
        rows = gathered.reshape(-1, *gathered.shape[2:])
        rows[length:] = 0  # the rest of the last page is not this sequence's, or not written yet
        return rows
