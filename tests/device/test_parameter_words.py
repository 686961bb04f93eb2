"""Runs of values that travel with a launch, and longer ones through a buffer: the same effect, whatever their number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.device import build_rig, even_engine, jobs, mtp_deployment

from ctxcache.config import AttentionLayerConfig, EngineConfig
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numba.parameter_words import INLINE_INTS, INLINE_WORDS, as_words
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.page_sums import allocate_sums
from ctxcache.ids import LayerType

AROUND_THE_LIMIT = (0, 1, 2, 3, INLINE_INTS - 1, INLINE_INTS, INLINE_INTS + 1, 2 * INLINE_INTS + 5)
MOST = AROUND_THE_LIMIT[-1]
EXTREMES = (-1, 0, 2**31 - 1, -(2**31), 1 << 16, -(1 << 16))


@pytest.mark.parametrize("count", AROUND_THE_LIMIT)
def test_a_word_holds_two_values(count: int) -> None:
    """Low half first; a run of odd length is filled up; signs stay with their value."""
    values = np.resize(np.array(EXTREMES, np.int32), count)
    words = as_words(values)
    assert len(words) == -(-count // 2)
    assert (len(words) <= INLINE_WORDS) == (count <= INLINE_INTS)
    unpacked = [half for word in words.tolist() for half in (word & 0xFFFFFFFF, word >> 32 & 0xFFFFFFFF)]
    assert unpacked[:count] == [int(value) & 0xFFFFFFFF for value in values]
    assert not any(unpacked[count:])


@pytest.mark.parametrize("count", AROUND_THE_LIMIT)
@pytest.mark.parametrize("prepared", [True, False])
def test_any_number_of_values_arrives(count: int, prepared: bool) -> None:
    """A mapping of any length and any int32 values is on the device as it was on the host, and nothing behind it changes."""
    ops = NumbaDeviceOps(prepared_launches=prepared)
    values = np.resize(np.array(EXTREMES, np.int32), count)
    target = ops.allocate((MOST + 1,), "int32")
    ops.to_device(target, np.full(MOST + 1, 77, np.int32))
    ops.upload_mapping(values, target, None)
    values[:] = 5  # read before the op returned
    ops.synchronize(None, None)
    expected = np.full(MOST + 1, 77, np.int32)
    expected[:count] = np.resize(np.array(EXTREMES, np.int32), count)
    np.testing.assert_array_equal(ops.to_host(target), expected)


@pytest.mark.parametrize("count", AROUND_THE_LIMIT)
def test_any_number_of_slots_is_reset_and_zeroed(count: int) -> None:
    """Lengths and zeroed slots agree with NumPy's ops to the byte."""
    images = []
    for ops in (NumbaDeviceOps(), NumpyDeviceOps()):
        rig = build_rig(ops, even_engine(max_batch_size=MOST), num_bytes=1 << 21, num_snapshots=2)
        rig.ops.fill(3)
        slots = np.random.default_rng(count).permutation(MOST)[:count].astype(np.int32)
        rig.ops.reset_lengths(rig.base, slots, rig.stream)
        rig.ops.zero_recurrent(rig.base, slots, rig.stream)
        rig.synchronize()
        images.append(rig.ops.image())
    np.testing.assert_array_equal(*images)


@pytest.mark.parametrize("count", [0, 1, 2, INLINE_INTS // 6, INLINE_INTS // 6 + 1, 40])
@pytest.mark.parametrize("restoring", [False, True])
def test_any_number_of_jobs_is_moved(count: int, restoring: bool) -> None:
    """Captures and restores of one job to many agree with NumPy's ops to the byte."""
    base = even_engine(max_batch_size=40, num_pages=45)
    images = []
    for ops in (NumbaDeviceOps(), NumpyDeviceOps()):
        rig = build_rig(ops, mtp_deployment(base), num_bytes=1 << 20, num_snapshots=42)
        rig.ops.fill(4)
        rng = np.random.default_rng(count)
        columns = [rng.permutation(limit)[:count] for limit in (40, 42, 41, 45, 47)]
        rows = jobs(*zip(*columns, rng.integers(0, 8, count), strict=True))
        (rig.ops.restore if restoring else rig.ops.capture)(rig.storage, rows, rig.stream)
        rig.synchronize()
        images.append(rig.ops.image())
    np.testing.assert_array_equal(*images)


@pytest.mark.parametrize("count", AROUND_THE_LIMIT)
def test_any_number_of_pages_is_summed(count: int) -> None:
    """Sums of many pages agree with NumPy's."""
    layer = AttentionLayerConfig(1, 5)
    engine = EngineConfig((LayerType.ATTENTION,), (layer,), max_sequence_length=3, tokens_per_page=3, num_pages=MOST)
    pages = np.random.default_rng(1).permutation(MOST)[:count].astype(np.int32)
    found: list[Any] = []
    for ops in (NumbaDeviceOps(), NumpyDeviceOps()):
        cache = HybridCacheManager(engine, None, device_ops=ops)
        noise = np.random.default_rng(2).integers(0, 100, ops.to_host(cache.kv_pools[0]).shape).astype(np.float16)
        ops.to_device(cache.kv_pools[0], noise)
        sums = allocate_sums(ops, cache, MOST)
        ops.sum_pages(cache, pages, sums, None)
        ops.synchronize(None, None)
        found.append(ops.to_host(sums))
    np.testing.assert_array_equal(*found)
    assert len({row.tobytes() for row in found[0][:count]}) == count
