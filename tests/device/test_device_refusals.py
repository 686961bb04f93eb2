"""What configurations, tables, caches and storages refuse: values of the wrong type or size, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.device import build_rig, hybrid_engine, mtp_deployment

from ctxcache import (
    AttentionLayerConfig,
    ContextCacheConfig,
    EngineConfig,
    HybridCacheManager,
    HybridSnapshotStorage,
    KVPageTable,
    LayerType,
    NumpyDeviceOps,
    RecurrentStateConfig,
    partial_kv_bytes_per_slot,
    recurrent_bytes_per_slot,
)
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.ops import HiddenRow, SnapshotJobs
from ctxcache.errors import ContractError, DeploymentError

OPS = NumpyDeviceOps()
NO_NUMBERS: list[Any] = [None, "x", 1.5, float("nan"), True, np.True_, [], np.zeros(2), np.array(1)]
"""Values that are no whole number; the last ones index, compare or convert like one."""

A, R = LayerType.ATTENTION, LayerType.RECURRENT
PLAIN = EngineConfig((A,), (AttentionLayerConfig(1, 4),))
ENGINE = EngineConfig(
    (A, R),
    (AttentionLayerConfig(1, 4),),
    RecurrentStateConfig(1, 2, 2, 2, 2),
    max_batch_size=3,
    max_sequence_length=32,
    tokens_per_page=8,
)


def table_rows(table: KVPageTable) -> list[list[int]]:
    """Every host row."""
    return [table.host_row(slot).tolist() for slot in range(table.max_batch)]


def a_cache() -> HybridCacheManager:
    """A cache on the host, with two sequences in it."""
    cache = HybridCacheManager(ENGINE, None, device_ops=OPS)
    cache.reset_for_new_sequences([1, 2], None)
    return cache


@pytest.mark.parametrize("size", [2**31, 2**64])
@pytest.mark.parametrize(
    "name", ["max_batch_size", "max_sequence_length", "num_pages", "tokens_per_page", "hidden_size"]
)
def test_an_engine_that_int32_cannot_number_is_refused(name: str, size: int) -> None:
    """Tokens, pages and slots are int32 everywhere below, so that a larger size is refused where it is said."""
    changes: dict[str, Any] = {name: size}
    with pytest.raises(DeploymentError, match=rf"{name} is {size}; it must be in \d \.\. 2147483647"):
        replace(PLAIN, **changes)


def test_a_default_pool_that_int32_cannot_number_is_refused() -> None:
    """The number of pages that follows from batch and length is checked like one that is given."""
    with pytest.raises(DeploymentError, match=r"num_pages, by default .* is 4294967296"):
        replace(PLAIN, num_pages=0, max_batch_size=2**16, max_sequence_length=2**20, tokens_per_page=16)


def test_budgets_of_bytes_may_be_larger_than_int32() -> None:
    """A snapshot pool of 64 GiB is a budget; as many records are none."""
    assert ContextCacheConfig(recurrent_snapshot_pool_bytes=2**36).recurrent_snapshot_pool_bytes == 2**36
    with pytest.raises(DeploymentError, match="max_records is 68719476736"):
        ContextCacheConfig(max_records=2**36)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, -1, 2**70], ids=repr)
def test_a_table_is_built_with_whole_numbers(position: int, value: Any) -> None:
    """Rows, columns and pages are positive integers that int32 can hold; the refusal names which one is wrong."""
    sizes: list[Any] = [3, 4, 12]
    sizes[position] = value
    name = ("max_batch", "max_pages_per_seq", "num_pages")[position]
    with pytest.raises(DeploymentError, match=f"KVPageTable {name} is"):
        KVPageTable(*sizes, device_ops=OPS)


def test_numpys_own_integers_are_numbers() -> None:
    """Sizes and slots that come out of arrays serve as Python's do."""
    one: Any = np.int64(1)
    sizes: list[Any] = [np.int64(3), np.int32(4), np.uint8(12)]
    table = KVPageTable(*sizes, device_ops=OPS)
    table.set_row(one, [5])
    table.compact_rows([-1, 0, -1], one)
    assert table_rows(table) == [[5, -1, -1, -1], [-1] * 4, [-1] * 4]
    assert type(table.num_pages) is int


@pytest.mark.parametrize("value", [*NO_NUMBERS, -1, 4, 2**70], ids=repr)
def test_a_slot_is_a_whole_number_of_the_table(value: Any) -> None:
    """No truth value, fraction or array stands for a row or a number of rows; the rows stay as they were."""
    table = KVPageTable(3, 4, 12, device_ops=OPS)
    table.set_row(0, [7])
    table.upload(None)
    before = table_rows(table)
    calls: list[Callable[[], object]] = [
        lambda: table.host_row(value),
        lambda: table.set_row(value, [1]),
        lambda: table.compact_rows([0, 1, 2], value),
    ]
    for call in calls:
        with pytest.raises(ContractError, match=r"(slot|new_batch) is"):
            call()
    assert table_rows(table) == before
    assert not table.has_changes


@pytest.mark.parametrize("value", [None, "x", 5, [], ()], ids=repr)
def test_a_cache_is_built_from_an_engine(value: Any) -> None:
    """What is no `EngineConfig` is refused by caches, storages and the functions that say what a slot costs."""
    calls: list[Callable[[], object]] = [
        lambda: HybridCacheManager(value, None, device_ops=OPS),
        lambda: HybridCacheManager.from_arrays(value, device_ops=OPS),
        lambda: recurrent_bytes_per_slot(value),
        lambda: partial_kv_bytes_per_slot(value),
        lambda: HybridSnapshotStorage(value, a_cache(), recurrent_snapshot_pool_bytes=1024),
    ]
    for call in calls:
        with pytest.raises(DeploymentError, match=r"config is .*; give an EngineConfig"):
            call()


@pytest.mark.parametrize("group", ["kv_pools", "recurrent", "conv"])
@pytest.mark.parametrize("value", [None, 5, "x", []], ids=repr)
def test_arrays_are_lent_in_a_run(group: str, value: Any) -> None:
    """A group of arrays that is no run, is too short, or holds something else is refused by its name."""
    whole = {"kv_pools": a_cache().kv_pools, "recurrent": a_cache().slot_arrays[:1], "conv": a_cache().slot_arrays[1:]}
    with pytest.raises(DeploymentError, match=group):
        HybridCacheManager.from_arrays(ENGINE, **{**whole, group: value}, device_ops=OPS)


@pytest.mark.parametrize("ops", [5, "numpy", NumpyDeviceOps.allocate], ids=["number", "name", "function"])
def test_device_ops_are_an_object_with_the_ops(ops: Any) -> None:
    """What cannot allocate is refused before anything is built on it."""
    with pytest.raises(DeploymentError, match="device_ops is"):
        KVPageTable(1, 1, 1, device_ops=ops)


@pytest.mark.parametrize("budget", [*NO_NUMBERS, -1], ids=repr)
def test_a_budget_is_a_number_of_bytes(budget: Any) -> None:
    """Budgets of snapshot pools are whole numbers."""
    with pytest.raises(DeploymentError, match="recurrent_snapshot_pool_bytes is"):
        HybridSnapshotStorage(ENGINE, a_cache(), recurrent_snapshot_pool_bytes=budget)


@pytest.mark.parametrize("increment", [*NO_NUMBERS, -1, 2**31, 2**70], ids=repr)
def test_lengths_advance_by_a_number_of_tokens(increment: Any) -> None:
    """An increment that int32 cannot hold, goes backwards, or is no number leaves the lengths as they are."""
    cache = a_cache()
    with pytest.raises(ContractError):
        cache.commit_sequence_length(increment, None)
    assert OPS.to_host(cache.kv_lengths).tolist() == [1, 2, 0]


@pytest.mark.parametrize("layer", [*NO_NUMBERS, 2, -1, {}], ids=repr)
def test_a_layer_is_named_by_its_number(layer: Any) -> None:
    """`True` is not layer 1, and what does not hash is refused like what is not there."""
    cache = a_cache()
    zero: Any = np.int64(0)
    for ask in (cache.kv_pool, cache.recurrent_state, cache.conv_state):
        with pytest.raises(ContractError, match=r"layer .* is not"):
            ask(layer)
    assert cache.kv_pool(zero) is cache.kv_pools[0]


@pytest.mark.parametrize("value", [*NO_NUMBERS, -1, 4], ids=repr)
def test_batch_sizes_are_whole_numbers_of_the_cache(value: Any) -> None:
    """A compaction from or to something else moves nothing."""
    cache = a_cache()
    for mapping in ([0, -1], np.array([0, -1], np.int32)):
        for old_batch, new_batch in ((value, 1), (2, value)):
            with pytest.raises(ContractError):
                cache.compact_batch_slot_state(mapping, old_batch, new_batch, None)
    assert OPS.to_host(cache.kv_lengths).tolist() == [1, 2, 0]
    assert cache.active_batch_size == 2


@pytest.mark.parametrize("field", ["slots", "base_pages", "num_tokens"])
@pytest.mark.parametrize("value", [[0.5], [True], [2**40], [[0]], [[0], [0, 1]], [0, 1], 0, None], ids=repr)
def test_jobs_are_runs_of_integers(field: str, value: Any) -> None:
    """A field of snapshot jobs that is no run of int32 values, one a job, is refused instead of being rounded."""
    rig = build_rig(OPS, hybrid_engine())
    jobs = {name: [0] for name in ("slots", "recurrent_snapshot_slots", "partial_kv_snapshot_slots", "base_pages")}
    fields: dict[str, Any] = {**jobs, "draft_pages": [-1], "num_tokens": [1], field: value}
    for move in (OPS.capture, OPS.restore):
        with pytest.raises(ContractError):
            move(rig.storage, SnapshotJobs(**fields), None)


@pytest.mark.parametrize("value", [*NO_NUMBERS, -1, 99], ids=repr)
def test_hidden_rows_are_named_by_numbers(value: Any) -> None:
    """Snapshot slot, batch slot and row of a hidden row are checked before anything is copied."""
    rig = build_rig(OPS, mtp_deployment(hybrid_engine()))
    hidden = np.zeros((3, 2, 9), np.float16)
    for slot, row in (
        (value, HiddenRow(hidden, 0, 0)),
        (0, HiddenRow(hidden, value, 0)),
        (0, HiddenRow(hidden, 0, value)),
    ):
        with pytest.raises(ContractError, match=r"(snapshot_slot|hidden slot|hidden row) is"):
            OPS.capture_boundary_hidden(rig.storage, slot, row, None)


def test_a_hidden_row_lies_in_one_piece() -> None:
    """An array whose rows have gaps would be copied with what lies in them."""
    rig = build_rig(OPS, mtp_deployment(hybrid_engine()))
    width = rig.storage.hidden_shape[0]
    hidden = np.zeros((3, 2, 2 * width), np.float16)[:, :, ::2]
    with pytest.raises(ContractError, match=r"strides .*; each row must be contiguous"):
        OPS.capture_boundary_hidden(rig.storage, 0, HiddenRow(hidden, 0, 0), None)


def test_a_mapping_is_no_longer_than_the_table() -> None:
    """Entries for rows that are not there are refused, and nothing moves."""
    table = KVPageTable(2, 4, 12, device_ops=OPS)
    table.set_row(0, [7])
    with pytest.raises(ContractError, match="old_to_new has 3 entries; the table has 2 rows"):
        table.compact_rows([0, -1, -1], 1)
    assert table_rows(table) == [[7, -1, -1, -1], [-1] * 4]


@pytest.mark.parametrize("values", [np.arange(8, dtype=np.int32)[::4], np.array([0, 4], np.int64), [0, 4]], ids=str)
def test_a_run_of_integers_may_lie_in_memory_in_any_way(values: Any) -> None:
    """Strided, wider or in a list: the same lengths arrive on the device."""
    cache = HybridCacheManager(ENGINE, None, device_ops=OPS)
    cache.reset_for_new_sequences(values, None)
    assert OPS.to_host(cache.kv_lengths).tolist() == [0, 4, 0]


def test_arrays_with_gaps_are_not_copied() -> None:
    """Kernels' arrays go to the host and back in one piece, or not at all."""
    ops = NumbaDeviceOps()
    gaps = np.zeros((4, 4), np.int32)[:, ::2]
    for call in (lambda: ops.to_host(gaps), lambda: ops.to_device(gaps, np.zeros((4, 2), np.int32))):
        with pytest.raises(ContractError, match=r"strides .*; pass a C-contiguous one"):
            call()


def test_without_ops_a_table_is_on_the_kernels() -> None:
    """Whoever names no device ops gets those of the device."""
    table = KVPageTable(1, 2, 4)
    assert isinstance(table.device_ops, NumbaDeviceOps)
    table.set_row(0, [3])
    table.upload(None)
    assert table.device_ops.num_launches == 1
    assert table.device_ops.num_prepared_launches == 0  # the simulator has no handles


@pytest.mark.parametrize("ops", [OPS, NumbaDeviceOps()], ids=["numpy", "numba"])
def test_an_empty_batch_advances_by_nothing(ops: Any) -> None:
    """Without an active slot no length moves."""
    cache = HybridCacheManager(ENGINE, None, device_ops=ops)
    cache.reset_for_new_sequences([], None)
    cache.commit_sequence_length(3, None)
    assert ops.to_host(cache.kv_lengths).tolist() == [0, 0, 0]


@pytest.mark.parametrize("ops", [OPS, NumbaDeviceOps()], ids=["numpy", "numba"])
def test_a_mapping_may_be_on_the_device_already(ops: Any) -> None:
    """A device array is used as it is, as the coordinator uses it."""
    cache = HybridCacheManager(ENGINE, None, device_ops=ops)
    cache.reset_for_new_sequences([1, 2], None)
    mapping = ops.allocate((2,), "int32")
    ops.upload_mapping(np.array([-1, 0], np.int32), mapping, None)
    given = mapping if not isinstance(mapping, np.ndarray) else Lent(mapping)
    cache.compact_batch_slot_state(given, 2, 1, None)
    assert ops.to_host(cache.kv_lengths).tolist()[:1] == [2]
    assert cache.active_batch_size == 1


class Lent:
    """An array of another library, on the host."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()
