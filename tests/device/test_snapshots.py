"""Snapshot slots: what one costs, how many a budget pays for, and what the storage allocates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.device import A, R, build_rig, even_engine, hybrid_engine, ints, jobs, mtp_deployment

from ctxcache.config import DeploymentConfig, EngineConfig, SpecDecodeConfig
from ctxcache.device import op_checks
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.ops import SnapshotJobs
from ctxcache.device.snapshots import HybridSnapshotStorage, partial_kv_bytes_per_slot, recurrent_bytes_per_slot
from ctxcache.errors import ContractError, DeploymentError, InvariantError
from ctxcache.ids import SpecDecodeMode


class CountingOps(NumpyDeviceOps):
    """NumPy ops that add up what they allocate."""

    def __init__(self) -> None:
        self.allocated_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Add the array's bytes."""
        array = super().allocate(shape, dtype)
        self.allocated_bytes += array.nbytes
        return array


def test_a_slot_costs_what_the_geometry_says() -> None:
    """Recurrent: state and convolution state of each recurrent layer. Partial: one page of K and V of each attention layer.

    With MTP the hidden row, and the draft's page, come on top; for the bare engine they do not.
    """
    engine = hybrid_engine("bfloat16")
    assert recurrent_bytes_per_slot(engine) == 3 * (1 * 3 * 5 * 4 + 5 * 3 * 2)
    assert partial_kv_bytes_per_slot(engine) == 2 * 7 * (1 * 5 + 3 * 7) * 2
    hybrid = DeploymentConfig(engine)
    assert recurrent_bytes_per_slot(hybrid) == recurrent_bytes_per_slot(engine)
    assert partial_kv_bytes_per_slot(hybrid) == partial_kv_bytes_per_slot(engine)
    mtp = mtp_deployment(engine)
    assert recurrent_bytes_per_slot(mtp) == recurrent_bytes_per_slot(engine) + 9 * 2
    assert partial_kv_bytes_per_slot(mtp) == partial_kv_bytes_per_slot(engine) + 2 * 7 * (2 * 3) * 2


def test_engines_without_a_kind_of_layer_pay_nothing_for_it() -> None:
    """Pure recurrent engines need no partial slots, pure attention no recurrent ones; an EAGLE draft is in no snapshot."""
    recurrent = replace(hybrid_engine(), layers=(R,), attention=(), num_pages=0)
    attention = replace(hybrid_engine(), layers=(A, A), recurrent=None)
    assert partial_kv_bytes_per_slot(recurrent) == 0
    assert recurrent_bytes_per_slot(attention) == 0
    eagle = DeploymentConfig(attention, attention, SpecDecodeConfig(SpecDecodeMode.EAGLE))
    assert partial_kv_bytes_per_slot(eagle) == partial_kv_bytes_per_slot(attention)
    assert recurrent_bytes_per_slot(eagle) == 0


def build(
    config: EngineConfig | DeploymentConfig, recurrent_bytes: int, partial_bytes: int, ops: Any = None
) -> HybridSnapshotStorage:
    """A storage over caches on the host, with the given budgets and, when given, ops of its own."""
    base = config if isinstance(config, EngineConfig) else config.base
    draft = None if isinstance(config, EngineConfig) else config.draft
    return HybridSnapshotStorage(
        config,
        HybridCacheManager(base, None, device_ops=NumpyDeviceOps()),
        None if draft is None else HybridCacheManager(draft, None, device_ops=NumpyDeviceOps()),
        recurrent_snapshot_pool_bytes=recurrent_bytes,
        partial_kv_snapshot_pool_bytes=partial_bytes,
        device_ops=ops,
    )


@pytest.mark.parametrize("config", [hybrid_engine(), even_engine(), mtp_deployment(hybrid_engine("float8_e5m2"))])
def test_everything_that_is_allocated_is_charged(config: EngineConfig | DeploymentConfig) -> None:
    """As many slots as the budget pays for, rounded down, and not one byte beyond their price."""
    recurrent, partial = recurrent_bytes_per_slot(config), partial_kv_bytes_per_slot(config)
    ops = CountingOps()
    storage = build(config, 3 * recurrent - 1, 2 * partial, ops)
    assert (storage.num_recurrent_slots, storage.num_partial_kv_slots) == (2, 2)
    assert ops.allocated_bytes == 2 * recurrent + 2 * partial
    assert (storage.hidden_rows is not None) == isinstance(config, DeploymentConfig)


def test_budgets_below_one_slot_say_what_a_slot_needs() -> None:
    """A budget that gives no slot is a `DeploymentError` with the bytes of one; exactly one slot is enough."""
    engine = hybrid_engine()
    recurrent, partial = recurrent_bytes_per_slot(engine), partial_kv_bytes_per_slot(engine)
    with pytest.raises(DeploymentError, match=f"recurrent_snapshot_pool_bytes is 0 .* {recurrent} bytes"):
        build(engine, 0, partial)
    with pytest.raises(DeploymentError, match=f"partial_kv_snapshot_pool_bytes is {partial - 1} .* {partial} bytes"):
        build(engine, recurrent, partial - 1)
    assert build(engine, recurrent, partial).num_partial_kv_slots == 1


def test_pure_recurrent_models_need_no_partial_budget() -> None:
    """Without attention there are no partial slots and no budget for them is asked."""
    engine = replace(hybrid_engine(), layers=(R, R), attention=(), num_pages=0)
    storage = build(engine, 5 * recurrent_bytes_per_slot(engine), 0)
    assert (storage.num_recurrent_slots, storage.num_partial_kv_slots, storage.page_parts) == (5, 0, ())
    with pytest.raises(ContractError, match=r"partial_kv_snapshot_slots .* \[0, 0\)"):
        storage.device_ops.capture(storage, jobs((0, 0, 0, 0, -1, 1)), None)


def test_storages_that_cannot_serve_are_refused() -> None:
    """Attention-only models, and MTP without its draft cache, are `DeploymentError`s."""
    attention = replace(hybrid_engine(), layers=(A, A), recurrent=None)
    with pytest.raises(DeploymentError, match="recurrent layers"):
        build(attention, 1 << 20, 1 << 20)
    engine = hybrid_engine()
    with pytest.raises(DeploymentError, match="draft cache"):
        HybridSnapshotStorage(
            mtp_deployment(engine),
            HybridCacheManager(engine, None, device_ops=NumpyDeviceOps()),
            recurrent_snapshot_pool_bytes=1 << 20,
            partial_kv_snapshot_pool_bytes=1 << 20,
        )


@pytest.mark.parametrize("make_ops", [NumpyDeviceOps, NumbaDeviceOps])
def test_a_cold_slot_next_to_a_hit_starts_from_zero(make_ops: Any) -> None:
    """H18: with stale state everywhere, the hit gets the captured bytes and the cold slot zeros, in every layer."""
    ops = make_ops()
    engine = hybrid_engine()
    cache = HybridCacheManager(engine, None, device_ops=ops)
    storage = HybridSnapshotStorage(
        engine,
        cache,
        recurrent_snapshot_pool_bytes=2 * recurrent_bytes_per_slot(engine),
        partial_kv_snapshot_pool_bytes=2 * partial_kv_bytes_per_slot(engine),
    )
    rng = np.random.default_rng(18)
    captured = []
    for array in cache.slot_arrays:
        bits = rng.integers(0, 256, ops.to_host(array).nbytes, dtype=np.uint8)
        ops.to_device(array, bits.view(array.dtype).reshape(array.shape))
        captured.append(ops.to_host(array)[1])
    ops.capture(storage, jobs((1, 1, -1, -1, -1, 0)), None)
    for array in cache.slot_arrays:
        ops.to_device(array, np.full(array.shape, 0x5A, array.dtype))
    ops.restore(storage, jobs((0, 1, -1, -1, -1, 0)), None)
    ops.zero_recurrent(cache, ints(1), None)
    ops.synchronize(None, None)
    for array, bits in zip(cache.slot_arrays, captured, strict=True):
        host = ops.to_host(array)
        np.testing.assert_array_equal(host[0].view(np.uint8), bits.view(np.uint8))
        assert not host[1].any()
        assert (host[2] == 0x5A).all()


def test_a_check_that_refuses_sound_jobs_is_our_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiled check says no and the described one finds nothing, the caller is not blamed."""
    rig = build_rig(NumpyDeviceOps(), hybrid_engine())
    monkeypatch.setattr(op_checks, "are_sound_jobs", lambda *_arguments: False)
    with pytest.raises(InvariantError, match="nothing is wrong with them"):
        rig.ops.capture(rig.storage, jobs((0, 0, -1, -1, -1, 0)), None)


def test_jobs_of_uneven_fields_are_refused() -> None:
    """Every field has one entry per job."""
    engine = hybrid_engine()
    storage = build(engine, recurrent_bytes_per_slot(engine), partial_kv_bytes_per_slot(engine))
    uneven = SnapshotJobs(ints(0), ints(0), ints(-1), ints(-1), ints(-1), ints())
    with pytest.raises(ContractError, match="one entry per job"):
        storage.device_ops.capture(storage, uneven, None)
    assert len(uneven) == 1
