"""Page sums: kernels and NumPy agree to the bit, and any changed byte of a page changes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctxcache import AttentionLayerConfig, ContractError, EngineConfig, HybridCacheManager, LayerType
from ctxcache.device.arrays import view_array
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.page_sums import FIRST_FACTOR, SECOND_FACTOR, SUM_LANES, allocate_sums, fold

A = LayerType.ATTENTION


def engine(dtype: str, head_dim: int, page: int = 3) -> EngineConfig:
    """Two layers of different shapes; small pages whose bytes are no multiple of four."""
    layers = (AttentionLayerConfig(1, head_dim), AttentionLayerConfig(2, head_dim))
    return EngineConfig((A, A), layers, kv_dtype=dtype, max_sequence_length=4 * page, tokens_per_page=page, num_pages=5)


def filled(ops: Any, config: EngineConfig, seed: int = 0) -> HybridCacheManager:
    """A cache full of random bytes."""
    cache = HybridCacheManager(config, None, device_ops=ops)
    rng = np.random.default_rng(seed)
    for pool in cache.kv_pools:
        host = ops.to_host(pool)
        raw = rng.integers(0, 256, host.nbytes, np.uint8)
        ops.to_device(pool, raw.view(host.dtype).reshape(host.shape))
    return cache


def sums_of(ops: Any, cache: HybridCacheManager, pages: list[int]) -> np.ndarray:
    """The sums of pages, lanes and all."""
    sums = allocate_sums(ops, cache, len(pages))
    ops.sum_pages(cache, np.array(pages, np.int32), sums, None)
    ops.synchronize(None, None)
    return ops.to_host(sums)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page"),
    [
        ("float16", 4, 3),
        ("float8_e4m3fn", 1, 3),
        ("float8_e4m3fn", 5, 3),
        ("float16", 1024, 8),  # 16 KiB: four units a lane, which are loaded together
        ("float8_e4m3fn", 2053, 8),  # the same and a remainder; behind the first page nothing is aligned
    ],
)
def test_kernels_and_numpy_agree(dtype: str, head_dim: int, page: int) -> None:
    """Every lane of every page and layer, for whole words and for left-over bytes, in one launch."""
    host, device = NumpyDeviceOps(), NumbaDeviceOps()
    config = engine(dtype, head_dim, page)
    expected = sums_of(host, filled(host, config), [4, 0, 2])
    cache = filled(device, config)
    sums_of(device, cache, [1])
    before = device.num_launches
    np.testing.assert_array_equal(sums_of(device, cache, [4, 0, 2]), expected)
    assert device.num_launches == before + 1
    assert len({tuple(page) for page in fold(expected).reshape(-1, 2).tolist()}) == 6


def test_every_byte_counts_and_no_other_page_does() -> None:
    """Flipping any bit of any byte of a page changes both words of its sum in that layer, and nothing else."""
    ops = NumpyDeviceOps()
    cache = filled(ops, engine("float8_e4m3fn", 1))
    before = fold(sums_of(ops, cache, list(range(5))))
    for layer, pool in enumerate(cache.kv_pools):
        flat = np.asarray(pool).reshape(2, 5, -1)
        for half in range(2):
            for page in range(5):
                for byte in range(flat.shape[2]):
                    flat[half, page, byte] ^= 1 << (byte % 8)
                    changed = fold(sums_of(ops, cache, list(range(5)))) != before
                    assert changed[page, layer].all()
                    assert changed.sum() == 2
                    flat[half, page, byte] ^= 1 << (byte % 8)


def test_swapped_tokens_and_halves_are_seen() -> None:
    """The same bytes in other places have another sum."""
    ops = NumpyDeviceOps()
    cache = filled(ops, engine("float16", 4))
    before = fold(sums_of(ops, cache, [0]))
    pool = np.asarray(cache.kv_pools[0])
    pool[:, 0] = pool[::-1, 0].copy()
    assert (fold(sums_of(ops, cache, [0]))[0, 0] != before[0, 0]).all()
    pool[:, 0] = pool[::-1, 0].copy()
    pool[0, 0, [0, 1]] = pool[0, 0, [1, 0]].copy()
    assert (fold(sums_of(ops, cache, [0]))[0, 0] != before[0, 0]).all()


@pytest.mark.parametrize("ops", [NumpyDeviceOps(), NumbaDeviceOps()], ids=["numpy", "numba"])
def test_wrong_pages_and_small_arrays_are_refused(ops: Any) -> None:
    """Pages out of range, too many of them, and arrays of another shape; an empty run sums nothing."""
    cache = filled(ops, engine("float16", 4))
    sums = allocate_sums(ops, cache, 2)
    for pages, target in (([5], sums), ([-1], sums), ([0, 1, 2], sums), ([0], ops.allocate((2, 2), "int64"))):
        with pytest.raises(ContractError, match=r"page_ids|sums"):
            ops.sum_pages(cache, np.array(pages, np.int32), target, None)
    gaps = np.zeros((2, 2, SUM_LANES, 4), np.int64)[..., ::2]
    if isinstance(ops, NumpyDeviceOps):
        with pytest.raises(ContractError, match="pass a C-contiguous array"):
            ops.sum_pages(cache, np.array([0], np.int32), gaps, None)
    ops.sum_pages(cache, np.empty(0, np.int32), sums, None)
    ops.synchronize(None, None)
    assert not ops.to_host(sums).any()


_BOTH = (NumpyDeviceOps(), NumbaDeviceOps())


def by_definition(halves: tuple[bytes, ...]) -> np.ndarray:
    """The sum as it is defined, in whole numbers: `int64[SUM_LANES, 2]`."""
    sums = np.zeros((SUM_LANES, 2), np.uint64)
    padded = [half + bytes(-len(half) % 16) for half in halves]
    for column, factor in enumerate((FIRST_FACTOR, SECOND_FACTOR)):
        for lane in range(min(SUM_LANES, len(padded[0]) // 16)):
            total = 0
            for half in padded:
                for at in range(16 * lane, len(half), 16 * SUM_LANES):
                    for word in (half[at : at + 8], half[at + 8 : at + 16]):
                        total = (total * factor + int.from_bytes(word, "little")) % 2**64
            sums[lane, column] = total
    return sums.view(np.int64)


@given(st.integers(1, 5000), st.integers(0, 17), st.integers(1, 3), st.integers(0, 2**32 - 1))
@example(num_bytes=16 * 4 * SUM_LANES, offset=0, pages=2, seed=1)
@example(num_bytes=16 * 4 * SUM_LANES + 1, offset=0, pages=1, seed=1)
@example(num_bytes=16 * 4 * SUM_LANES - 1, offset=16, pages=1, seed=1)
@example(num_bytes=16 * 3 * SUM_LANES + 8, offset=1, pages=1, seed=1)
@settings(max_examples=30, deadline=None)
def test_sums_of_pages_of_any_size_at_any_address(num_bytes: int, offset: int, pages: int, seed: int) -> None:
    """Kernel, NumPy and definition agree on borrowed pools: odd sizes, single bytes, addresses of no alignment."""
    layer = AttentionLayerConfig(1, num_bytes)
    engine = EngineConfig(
        (LayerType.ATTENTION,), (layer,), kv_dtype="int8", max_sequence_length=pages, tokens_per_page=1, num_pages=pages
    )
    rng = np.random.default_rng(seed)
    content = rng.integers(-128, 128, (2, pages, 1, 1, num_bytes), np.int8)
    order = rng.permutation(pages).astype(np.int32)
    found = []
    for ops in _BOTH:
        cache = HybridCacheManager.from_arrays(
            engine, kv_pools=(lent(ops, content, offset),), stream=None, device_ops=ops
        )
        sums = allocate_sums(ops, cache, pages)
        ops.sum_pages(cache, order, sums, None)
        ops.synchronize(None, None)
        found.append(ops.to_host(sums))
    np.testing.assert_array_equal(*found)
    for place, page in enumerate(order.tolist()):
        expected = by_definition((content[0, page].tobytes(), content[1, page].tobytes()))
        np.testing.assert_array_equal(found[0][place, 0], expected)


def lent(ops: Any, content: np.ndarray, offset: int) -> Any:
    """An array of the ops' own memory that lies `offset` bytes behind a multiple of 16."""
    memory = ops.allocate((content.size + 64,), "int8")
    first = -view_array(memory).address % 16 + offset
    bytes_there = np.zeros(content.size + 64, np.int8)
    bytes_there[first : first + content.size] = content.ravel()
    ops.to_device(memory, bytes_there)
    return memory[first : first + content.size].reshape(content.shape)
