"""Device arrays that a caller lends for one operation: what the ops would refuse is refused before anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.device import build_rig, hybrid_engine, ints, mtp_deployment
from support.harness import OK, EagleHarness, Harness, MtpHarness, SharedKvHarness, T, U
from support.lent_arrays import CudaArray, OpsOfDevice

from ctxcache import HybridCacheManager, NumpyDeviceOps
from ctxcache.device.arrays import CUDA, Location
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.ops import HiddenRow, location_of
from ctxcache.errors import ContractError
from ctxcache.testing import FaultInjector


def unaligned(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """An int32 array one byte behind where it should lie."""
    return np.zeros(4 * count + 4, np.uint8)[1 : 4 * count + 1].view(np.int32)


def readonly(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """An int32 array that must not be written."""
    array = np.zeros(count, np.int32)
    array.flags.writeable = False
    return array


WRONG: dict[str, tuple[str, Callable[[], Any]]] = {
    "strided": ("strides", lambda: np.zeros(8, np.int32)[::2]),
    "backwards": ("strides", lambda: np.zeros(4, np.int32)[::-1]),
    "unaligned": ("multiple of 4", lambda: unaligned(4)),
    "floats": ("float32", lambda: np.zeros(4, np.float32)),
    "unsigned": ("uint32", lambda: np.zeros(4, np.uint32)),
    "other byte order": (">i4", lambda: np.zeros(4, ">i4")),
    "two axes": ("one-dimensional", lambda: np.zeros((2, 2), np.int32)),
    "short": ("longer", lambda: np.zeros(1, np.int32)),
    "no array": ("is no array", lambda: [0, 0, 0, 0]),
}
"""Arrays that no ops use as int32, each with the words of the refusal."""

OUT_OF_REACH: dict[str, tuple[str, Callable[[], Any]]] = {
    "on a GPU": ("lies on cuda 0 and the device ops work on host", lambda: CudaArray(np.zeros(4, np.int32))),
    "read-only": ("read-only", lambda: readonly(4)),
}
"""Arrays that ops on the host do not write."""


def hide_in_gpu(cache: HybridCacheManager) -> None:
    """Let a cache on the host say that its ops work on a GPU."""
    cache.__dict__["lengths_view"] = cache.lengths_view._replace(place=CUDA, device=-1)


@pytest.mark.parametrize("harness", [Harness, EagleHarness, SharedKvHarness], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("case", [*WRONG.values(), *OUT_OF_REACH.values()], ids=[*WRONG, *OUT_OF_REACH])
def test_a_mapping_that_the_ops_would_refuse_changes_nothing(
    harness: type[Harness], case: tuple[str, Callable[[], Any]]
) -> None:
    """No drain, nothing published, no state left: the request goes on with an array that serves."""
    h = harness(max_batch=2, page=16, max_tokens=64, ops=FaultInjector(NumpyDeviceOps()))
    request, _ = h.admit(T(20), U(20))
    h.prefill()
    seen, touches = h.observe(request), list(h.ops.log)
    pattern, mapping = case
    with pytest.raises(ContractError, match=f"device_batch_mapping.*{pattern}"):
        h.coordinator.begin_batch_compaction(request, [0, -1], 1, mapping())
    assert h.observe(request) == seen
    assert h.ops.log == touches
    h.keep(0)
    assert h.coordinator.finish(request) is OK


@pytest.mark.parametrize(
    ("mapping", "pattern"),
    [
        (np.zeros(4, np.int32), "lies on host 0 and the device ops work on cuda"),
        (CudaArray(np.zeros(4, np.int32), device=1), "lies on cuda 1 and the device ops work on cuda 0"),
    ],
    ids=["host", "another GPU"],
)
def test_a_mapping_of_another_place_changes_nothing(mapping: Any, pattern: str) -> None:
    """Kernels of a GPU reach no host memory and no other GPU's: said before a draft is settled, where it is known."""
    h = EagleHarness(max_batch=2, page=16, max_tokens=64, ops=FaultInjector(OpsOfDevice(0)))
    request, _ = h.admit(T(20), U(20))
    h.prefill()
    hide_in_gpu(h.resources.base_cache)
    seen, touches = h.observe(request), list(h.ops.log)
    with pytest.raises(ContractError, match=pattern):
        h.coordinator.begin_batch_compaction(request, [0, -1], 1, mapping)
    assert h.observe(request) == seen
    assert h.ops.log == touches
    assert h.coordinator.abandon(request) is OK


@pytest.mark.parametrize("device", [None, 0], ids=["does not say", "says the same"])
def test_an_array_of_the_same_gpu_is_in_reach(device: int | None) -> None:
    """An array that does not say its device is believed."""
    ops = OpsOfDevice(0)
    cache = HybridCacheManager(hybrid_engine(), None, device_ops=ops)
    hide_in_gpu(cache)
    assert location_of(ops, cache) == Location(CUDA, 0)
    gpu = NumbaDeviceOps()
    gpu._location = location_of(ops, cache)
    mapping = np.zeros(3, np.int32)
    gpu.upload_mapping(ints(0, -1, 1), CudaArray(mapping, device), None)
    assert mapping.tolist() == [0, -1, 1]


def test_hidden_states_of_another_place_change_nothing() -> None:
    """Nothing is reserved, and nothing enqueued, for a hidden row that the ops do not reach."""
    h = MtpHarness(max_batch=2, max_tokens=64, page=8, ops=FaultInjector(NumpyDeviceOps()))
    h.endpoints = (9,)
    h.run(T(12))
    request, starts = h.admit(T(20), U(5))
    assert starts == [9, 0]
    assert h.coordinator.prepare_prefill(request) is OK
    seen, touches = h.observe(request), list(h.ops.log)

    def refuse(hidden: Any) -> None:
        with pytest.raises(ContractError, match=r"hidden states.* lies on"):
            h.coordinator.publish_hybrid_mtp_endpoint(request, 0, 12, hidden, 1)
        with pytest.raises(ContractError, match=r"hidden states.* lies on"):
            h.coordinator.restore_hybrid_mtp_boundary_hidden(request, 0, hidden, 1)
        assert h.observe(request) == seen
        assert h.ops.log == touches

    refuse(CudaArray(h.hidden))
    storage = h.coordinator._binding.link.storage
    assert storage is not None
    storage.location = Location(CUDA, 0)
    refuse(h.hidden)
    refuse(CudaArray(h.hidden, device=1))
    del storage.location
    assert h.coordinator.restore_hybrid_mtp_boundary_hidden(request, 0, h.hidden, 1) is OK
    assert h.coordinator.abandon(request) is OK


# The ops themselves, used directly


@pytest.fixture(params=[NumpyDeviceOps, NumbaDeviceOps], ids=["numpy", "numba"])
def ops(request: pytest.FixtureRequest) -> Any:
    """Each implementation in turn."""
    return request.param()


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_ops_refuse_what_is_no_int32_array(ops: Any, case: tuple[str, Callable[[], Any]]) -> None:
    """Whatever an op takes as int32 is checked by one rule, and neither lengths nor batch have changed."""
    cache = HybridCacheManager(hybrid_engine(), None, device_ops=ops)
    ops.reset_lengths(cache, ints(1, 2, 3), None)
    pattern, make = case
    array = make()
    for name, call in {
        "device_mapping": lambda: ops.upload_mapping(ints(1, 2, 3), array, None),
        "increment": lambda: ops.advance_lengths(cache, array, None),
        "mapping": lambda: ops.compact_slot_state(cache, array, 3, 1, None),
    }.items():
        with pytest.raises(ContractError, match=f"^{name}.*{pattern}"):
            call()
    assert ops.to_host(cache.kv_lengths).tolist() == [1, 2, 3]
    assert cache.active_batch_size == 3
    assert not np.any(getattr(array, "array", array))


def test_ops_write_no_read_only_array(ops: Any) -> None:
    """The kernels would write it all the same; a mapping that is only read may be read-only."""
    rig = build_rig(ops, mtp_deployment(hybrid_engine()))
    mapping, hidden = readonly(3), np.zeros((3, 2, 9), np.float16)
    hidden.flags.writeable = False
    rig.ops.capture_boundary_hidden(rig.storage, 0, HiddenRow(hidden, 0, 0), None)
    with pytest.raises(ContractError, match="device_mapping is read-only"):
        ops.upload_mapping(ints(0, -1, 1), mapping, None)
    with pytest.raises(ContractError, match="hidden states is read-only"):
        rig.ops.restore_boundary_hidden(rig.storage, 0, HiddenRow(hidden, 0, 0), None)
    assert not mapping.any()
    rig.base.reset_for_new_sequences([1, 2, 3], None)
    ops.compact_slot_state(rig.base, mapping, 3, 1, None)
    assert rig.base.active_batch_size == 1


@pytest.mark.parametrize(
    "kind", [int, np.int8, np.uint8, np.int32, np.int64, np.uint64], ids=lambda kind: kind.__name__
)
def test_numpys_integers_name_a_hidden_row(ops: Any, kind: type[Any]) -> None:
    """Slots and rows that come out of arrays of any width find the same row as Python's numbers."""
    rig = build_rig(ops, mtp_deployment(hybrid_engine()))
    hidden = ops.allocate((3, 40, 9), "float16")
    values = np.arange(3 * 40 * 9, dtype=np.float16).reshape(3, 40, 9)
    ops.to_device(hidden, values)
    rig.ops.capture_boundary_hidden(rig.storage, kind(3), HiddenRow(hidden, kind(2), kind(39)), None)
    rig.ops.restore_boundary_hidden(rig.storage, kind(3), HiddenRow(hidden, kind(1), kind(38)), None)
    values[1, 38] = values[2, 39]
    np.testing.assert_array_equal(ops.to_host(hidden), values)


@pytest.mark.parametrize("increment", [True, np.True_, -1, 2**31, np.int64(2**40), 1.0, None], ids=repr)
def test_ops_advance_by_a_number_of_tokens(ops: Any, increment: Any) -> None:
    """What is no number, or does not fit a length, is refused by the ops as by the cache, and no length moves."""
    cache = HybridCacheManager(hybrid_engine(), None, device_ops=ops)
    ops.reset_lengths(cache, ints(1, 2), None)
    with pytest.raises(ContractError, match=r"^increment"):
        ops.advance_lengths(cache, increment, None)
    assert ops.to_host(cache.kv_lengths).tolist() == [1, 2, 0]
    ops.advance_lengths(cache, np.int64(4), None)
    assert ops.to_host(cache.kv_lengths).tolist() == [5, 6, 0]


def test_batch_sizes_of_numpy_are_kept_as_numbers(ops: Any) -> None:
    """A compaction whose sizes come out of an array leaves a plain batch size."""
    cache = HybridCacheManager(hybrid_engine(), None, device_ops=ops)
    ops.reset_lengths(cache, ints(1, 2, 3), None)
    ops.compact_slot_state(cache, ints(0, -1, 1), np.int32(3), np.int64(2), None)
    assert type(cache.active_batch_size) is int
    assert ops.to_host(cache.kv_lengths)[:2].tolist() == [1, 3]


def test_kernels_of_a_gpu_take_no_host_memory() -> None:
    """Whatever array it is: a kernel would read or write somebody else's memory at that address."""
    ops = NumbaDeviceOps()
    rig = build_rig(ops, mtp_deployment(hybrid_engine()))
    rig.base.reset_for_new_sequences([1, 2, 3], None)
    ops._location = Location(CUDA, 0)
    array = np.zeros(3, np.int32)
    sums = np.zeros((1, 2, 256, 2), np.int64)
    launches = ops.num_launches
    for name, call in {
        "device_mapping": lambda: ops.upload_mapping(ints(0, -1, 1), array, None),
        "increment": lambda: ops.advance_lengths(rig.base, array, None),
        "mapping": lambda: ops.compact_slot_state(rig.base, array, 3, 2, None),
        "sums": lambda: ops.sum_pages(rig.base, ints(0), sums, None),
        "hidden states": lambda: ops.capture_boundary_hidden(
            rig.storage, 0, HiddenRow(np.zeros((3, 2, 9), np.float16), 0, 0), None
        ),
    }.items():
        with pytest.raises(ContractError, match=f"^{name} lies on host 0 and the device ops work on cuda 0"):
            call()
    assert ops.num_launches == launches
    assert rig.base.active_batch_size == 3
