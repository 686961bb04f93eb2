"""In-place compaction is right for every order-keeping map (H21): all 510 of batches 1 to 8."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.device import R, build_rig, equal_images, ints

from ctxcache.arguments import check_mapping
from ctxcache.config import EngineConfig, RecurrentStateConfig
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.errors import ContractError

Map = tuple[int, ...]


def order_keeping_maps(batch: int) -> Iterator[Map]:
    """Every map of a batch: each slot survives or retires, survivors are numbered in order."""
    for survives in product((False, True), repeat=batch):
        numbers = iter(range(batch))
        yield tuple(next(numbers) if alive else -1 for alive in survives)


ALL_MAPS = [mapping for batch in range(1, 9) for mapping in order_keeping_maps(batch)]
# For more sizes of slots: every map of small batches, and of large ones what moves far, in a chain, or overlapping.
CHOSEN_MAPS = [mapping for mapping in ALL_MAPS if len(mapping) <= 4] + [
    (-1, 0, 1, 2, 3, 4, 5, 6),
    (0, -1, 1, -1, 2, -1, 3, -1),
    (-1, 0, -1, 1, -1, 2, -1, 3),
    (-1, -1, -1, -1, -1, -1, -1, 0),
    (0, 1, 2, -1, 3, 4, -1, 5),
    (-1, 0, 1, -1, 2),
]


def engine(state_elements: int, conv_elements: int, dtype: str, batch: int) -> EngineConfig:
    """Two recurrent layers with as many elements a slot."""
    state = RecurrentStateConfig(1, 1, state_elements, conv_elements, 1, dtype=dtype, conv_dtype="float16")
    return EngineConfig(layers=(R, R), attention=(), recurrent=state, max_batch_size=batch)


def check(ops: Any, config: EngineConfig, maps: list[Map], *, skew: int = 0, num_bytes: int = 1 << 16) -> None:
    """Compact by every map and require the survivors in the new slots, and the bytes around all slots untouched."""
    rig = build_rig(ops, config, skew=skew, num_bytes=num_bytes, num_snapshots=1)
    device_mapping = ops.allocate((config.max_batch_size,), "int32")
    arrays = (rig.base.kv_lengths, *rig.base.slot_arrays)
    for seed, mapping in enumerate(maps):
        old_batch, new_batch = len(mapping), sum(new >= 0 for new in mapping)
        survivors = [old for old, new in enumerate(mapping) if new >= 0]
        expected = rig.ops.fill(seed)
        for array in arrays:
            part = rig.ops.of(expected, array)
            part[:new_batch] = part[survivors].copy()
        ops.upload_mapping(ints(*mapping), device_mapping, rig.stream)
        launches = rig.launches or 0
        rig.ops.compact_slot_state(rig.base, device_mapping, old_batch, new_batch, rig.stream)
        rig.synchronize()
        assert (rig.launches or 0) - launches <= 1
        actual = rig.ops.image()
        for array in arrays:
            # Slots from the new batch up to the old one are undefined afterwards; all others are checked.
            for image in (actual, expected):
                rig.ops.of(image, array)[new_batch:old_batch] = 0
        equal_images(actual, expected, f"map {mapping}")


def test_the_maps_are_all_there_and_never_point_upwards() -> None:
    """There are sum(2**b) = 510 maps, and in each a slot moves down or stays: what the kernel's proof rests on."""
    assert len(set(ALL_MAPS)) == 510
    assert all(new <= old for mapping in ALL_MAPS for old, new in enumerate(mapping))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("state_elements", "conv_elements", "num_bytes"), [(1, 31, 1 << 13), (4096, 5, 1 << 19)])
def test_every_map_on_numpy(state_elements: int, conv_elements: int, num_bytes: int, dtype: str) -> None:
    """All 510 maps, on the oracle."""
    check(NumpyDeviceOps(), engine(state_elements, conv_elements, dtype, 8), ALL_MAPS, num_bytes=num_bytes)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_large_slots_on_numpy(dtype: str) -> None:
    """Slots of 1,000,003 elements, of which none lies at an aligned address, on the oracle."""
    check(NumpyDeviceOps(), engine(1_000_003, 1, dtype, 5), [(-1, 0, 1, -1, 2)], num_bytes=1 << 26)


@pytest.mark.parametrize(
    ("state_elements", "conv_elements", "dtype", "skew"),
    [(6, 12, "float32", 0), (31, 8, "float32", 1), (64, 24, "float32", 3), (33, 1, "float8_e4m3fn", 7)],
)
def test_chosen_maps_on_kernels(state_elements: int, conv_elements: int, dtype: str, skew: int) -> None:
    """All maps of batches 1 to 4 and the hard ones of larger batches, for columns of 1, 4 and 16 bytes, in one launch."""
    check(NumbaDeviceOps(), engine(state_elements, conv_elements, dtype, 8), CHOSEN_MAPS, skew=skew)


def test_every_map_on_kernels() -> None:
    """All 510 maps, for slots of one and of 31 elements."""
    check(NumbaDeviceOps(), engine(1, 31, "float16", 8), ALL_MAPS, num_bytes=1 << 13)


def test_a_large_slot_on_kernels() -> None:
    """A slot of 4096 elements, beyond one round of the grid."""
    check(NumbaDeviceOps(), engine(4096, 5, "float16", 5), [(-1, 0, 1, -1, 2)], num_bytes=1 << 18)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("state_elements", "maps", "repeats", "num_bytes"),
    [
        (1, ALL_MAPS, 20, 1 << 14),
        (31, ALL_MAPS, 20, 1 << 14),
        (4096, ALL_MAPS, 20, 1 << 19),
        (1_000_003, ALL_MAPS[-256::16], 1, 1 << 27),
    ],
)
def test_every_map_on_a_gpu(state_elements: int, dtype: str, maps: list[Map], repeats: int, num_bytes: int) -> None:
    """All 510 maps 20 times each where threads really run side by side; for huge slots a sixteenth of batch 8, once."""
    config = engine(state_elements, 31, dtype, 8)
    for _ in range(repeats):
        check(NumbaDeviceOps(), config, maps, num_bytes=num_bytes)


@pytest.mark.parametrize(
    ("mapping", "old_batch", "new_batch"),
    [
        ([1, 0, -1], 3, 2),
        ([0, 0, -1], 3, 1),
        ([-1, 1, 0], 3, 2),
        ([0, 2, -1], 3, 2),
        ([0, 1], 3, 2),
        ([0, 1, 2], 3, 2),
        ([0, -1, 1], 3, 3),
        ([-2, 0, 1], 3, 2),
    ],
)
def test_maps_that_do_not_keep_order_are_refused(mapping: list[int], old_batch: int, new_batch: int) -> None:
    """The convenience of a cache checks a host mapping before anything is enqueued (H22)."""
    rig = build_rig(NumbaDeviceOps(), engine(4, 4, "float32", 3))
    image = rig.ops.fill()
    for attempt in (mapping, np.array(mapping)):
        with pytest.raises(ContractError):
            rig.base.compact_batch_slot_state(attempt, old_batch, new_batch, rig.stream)
            # A NumPy mapping may be longer than the batch: only its head counts, and here the head is wrong too.
    np.testing.assert_array_equal(rig.ops.image(), image)


def test_host_mappings_are_checked_and_uploaded() -> None:
    """A list, or the head of a NumPy array, serves as the mapping of the convenience; it is copied at once."""
    for ops in (NumpyDeviceOps(), NumbaDeviceOps()):
        rig = build_rig(ops, engine(4, 4, "float32", 3))
        for mapping in ([0, -1, 1], np.array([0, -1, 1, 9, 9])):
            rig.base.reset_for_new_sequences([5, 6, 7], rig.stream)
            rig.base.compact_batch_slot_state(mapping, 3, 2, rig.stream)
            rig.synchronize()
            assert rig.ops.to_host(rig.base.kv_lengths)[:2].tolist() == [5, 7]
            assert rig.base.active_batch_size == 2
    np.testing.assert_array_equal(check_mapping("mapping", [-1, 0, 1], 3, 2), [-1, 0, 1])
