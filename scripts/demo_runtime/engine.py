"""One engine's pages, table and device lengths: the runtime's own memory, as it lends it to a coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from ctxcache import (
    AttentionLayerConfig,
    EngineConfig,
    HybridCacheManager,
    KVPageTable,
    LayerType,
    NumpyDeviceOps,
)
from demo_runtime.attention import AttentionShape
from demo_runtime.paged import PagedKv, allocate_pools


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """What one model computes on.

    Attributes:
        cache: lengths and pools, as a coordinator knows them.
        table: which pages each slot has; the coordinator writes it.
        memory: the same pools through the same table, as the model's attention sees them.
    """

    cache: HybridCacheManager
    table: KVPageTable
    memory: PagedKv

    @property
    def length(self) -> int:
        """Positions of slot 0 whose state counts, read as a kernel would: from the device array."""
        return int(self.cache.kv_lengths[0])

    def commit(self, num_tokens: int) -> None:
        """Count `num_tokens` positions more of slot 0. What lies behind the length may be overwritten at any time."""
        self.cache.commit_sequence_length(num_tokens, self.cache.stream)


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """How much of everything.

    Attributes:
        max_batch_size: slots.
        max_sequence_length: tokens of the longest sequence.
        tokens_per_page: a multiple of `TILE_TOKENS`.
        num_pages: pages in the pool of each layer; what running sequences leave free keeps the past.
    """

    max_batch_size: int
    max_sequence_length: int
    tokens_per_page: int
    num_pages: int


def lend_pages(num_layers: int, attention: AttentionShape, sizes: EngineSizes) -> Engine:
    """Give `num_layers` attention layers their pages, on the host and without a stream."""
    config = EngineConfig(
        layers=(LayerType.ATTENTION,) * num_layers,
        attention=(AttentionLayerConfig(attention.num_kv_heads, attention.head_dim),) * num_layers,
        kv_dtype="float32",
        max_batch_size=sizes.max_batch_size,
        max_sequence_length=sizes.max_sequence_length,
        num_pages=sizes.num_pages,
        tokens_per_page=sizes.tokens_per_page,
    )
    ops = NumpyDeviceOps()
    # The pools are the runtime's own arrays. The cache manager borrows them: it never copies and never frees them.
    pools = allocate_pools(num_layers, sizes.num_pages, sizes.tokens_per_page, attention)
    cache = HybridCacheManager.from_arrays(config, kv_pools=pools, stream=None, device_ops=ops)
    table = KVPageTable(sizes.max_batch_size, config.pages_per_sequence, sizes.num_pages, device_ops=ops)
    # Attention follows the device view of the table. The coordinator uploads to it before each step that needs it.
    return Engine(cache, table, PagedKv(pools, table.kernel_view))
