"""Resources must agree with the deployment, and lie on the device that the ops work on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.device import A, R, attention_engine, hybrid_engine, mtp_deployment
from support.lent_arrays import OpsOfDevice

from ctxcache import ContextCacheConfig, ContextCacheCoordinator
from ctxcache.config import AttentionLayerConfig, DeploymentConfig, EngineConfig, SpecDecodeConfig
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.ops import device_ordinal_of
from ctxcache.device.page_table import KVPageTable
from ctxcache.device.resources import ContextCachePhysicalResources, check_devices, check_resources
from ctxcache.device.snapshots import partial_kv_bytes_per_slot, recurrent_bytes_per_slot
from ctxcache.errors import DeploymentError
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import SpecDecodeMode
from ctxcache.testing import DeferredDeviceOps, FaultInjector


def cache_of(engine: EngineConfig) -> HybridCacheManager:
    """A cache on the host."""
    return HybridCacheManager(engine, None, device_ops=NumpyDeviceOps())


def table_of(engine: EngineConfig, **changes: int) -> KVPageTable:
    """The table that fits an engine, or one that does not."""
    sizes = {
        "max_batch": engine.max_batch_size,
        "max_pages_per_seq": engine.pages_per_sequence,
        "num_pages": max(engine.num_pages, 1),
    }
    return KVPageTable(**{**sizes, **changes}, device_ops=NumpyDeviceOps())


def resources_of(engine: EngineConfig, cache_ops: Any = None, table_ops: Any = None) -> ContextCachePhysicalResources:
    """The cache and the table that fit an engine, on the host unless ops are given."""
    return ContextCachePhysicalResources(
        HybridCacheManager(engine, None, device_ops=cache_ops or NumpyDeviceOps()),
        KVPageTable(
            engine.max_batch_size,
            engine.pages_per_sequence,
            engine.num_pages,
            device_ops=table_ops or NumpyDeviceOps(),
        ),
    )


def deployment_of(kind: Kind) -> tuple[DeploymentConfig, ContextCachePhysicalResources]:
    """A deployment of a kind, and resources that fit."""
    base, draft = attention_engine(), None
    if kind is Kind.HYBRID:
        deployment = DeploymentConfig(hybrid_engine())
    elif kind is Kind.PURE_RECURRENT:
        deployment = DeploymentConfig(replace(hybrid_engine(), layers=(R,), attention=(), num_pages=0))
    elif kind is Kind.HYBRID_MTP:
        deployment = mtp_deployment(hybrid_engine())
    elif kind is Kind.EAGLE:
        draft = attention_engine(layers=(A,), attention=(AttentionLayerConfig(2, 2),), num_pages=9)
        deployment = DeploymentConfig(base, draft, SpecDecodeConfig(SpecDecodeMode.EAGLE))
    elif kind is Kind.SHARED_KV:
        deployment = DeploymentConfig(base, spec=SpecDecodeConfig(SpecDecodeMode.SHARED_KV))
    else:
        deployment = DeploymentConfig(base)
    base, draft = deployment.base, deployment.draft
    return deployment, ContextCachePhysicalResources(
        cache_of(base),
        None if kind is Kind.PURE_RECURRENT else table_of(base),
        None if draft is None else cache_of(draft),
        None if draft is None else table_of(draft),
    )


@pytest.mark.parametrize("kind", Kind)
def test_resources_that_agree_are_taken(kind: Kind) -> None:
    """Each kind takes the resources built from its own engines, a larger pool included."""
    deployment, resources = deployment_of(kind)
    check_resources(deployment, kind, resources)
    assert resources.base_cache.owner is None
    if kind is Kind.VANILLA:
        large = attention_engine(num_pages=50)
        check_resources(DeploymentConfig(large), kind, resources_of(large))
    if kind is Kind.PURE_RECURRENT:
        check_resources(deployment, kind, replace(resources, base_page_table=table_of(attention_engine())))


BAD_RESOURCES: dict[str, tuple[Kind, str, Callable[[Any], Any]]] = {
    "wrong kind": (Kind.EAGLE, "EAGLE and the coordinator", lambda r: r),
    "no base table": (Kind.VANILLA, "no page table", lambda r: replace(r, base_page_table=None)),
    "table pages": (
        Kind.VANILLA,
        "num_pages 13",
        lambda r: replace(r, base_page_table=table_of(attention_engine(), num_pages=13)),
    ),
    "table batch": (
        Kind.VANILLA,
        "max_batch 5",
        lambda r: replace(r, base_page_table=table_of(attention_engine(), max_batch=5)),
    ),
    "table width": (
        Kind.VANILLA,
        "max_pages_per_seq 4",
        lambda r: replace(r, base_page_table=table_of(attention_engine(), max_pages_per_seq=4)),
    ),
    "cache pages": (
        Kind.VANILLA,
        "num_pages",
        lambda r: replace(r, base_cache=cache_of(attention_engine(num_pages=13))),
    ),
    "cache dtype": (
        Kind.VANILLA,
        "kv_dtype",
        lambda r: replace(r, base_cache=cache_of(attention_engine(kv_dtype="float32"))),
    ),
    "draft cache of a vanilla deployment": (
        Kind.VANILLA,
        "draft_cache and VANILLA",
        lambda r: replace(r, draft_cache=cache_of(attention_engine())),
    ),
    "draft table of shared KV": (
        Kind.SHARED_KV,
        "draft_page_table and SHARED_KV",
        lambda r: replace(r, draft_page_table=table_of(attention_engine())),
    ),
    "no draft cache": (Kind.EAGLE, "draft_cache is None", lambda r: replace(r, draft_cache=None)),
    "no draft table": (Kind.HYBRID_MTP, "draft_page_table is None", lambda r: replace(r, draft_page_table=None)),
    "draft table pages": (
        Kind.EAGLE,
        "draft page table has num_pages",
        lambda r: replace(r, draft_page_table=table_of(attention_engine())),
    ),
    "draft cache of the base": (Kind.EAGLE, "draft cache was built", lambda r: replace(r, draft_cache=r.base_cache)),
}


@pytest.mark.parametrize("case", BAD_RESOURCES.values(), ids=BAD_RESOURCES)
def test_resources_that_disagree_are_refused(case: tuple[Kind, str, Callable[[Any], Any]]) -> None:
    """Every mismatch is a `DeploymentError` that names both sides."""
    kind, pattern, spoil = case
    deployment, resources = deployment_of(kind)
    claimed = Kind.VANILLA if pattern.startswith("EAGLE and") else kind
    with pytest.raises(DeploymentError, match=pattern):
        check_resources(deployment, claimed, spoil(resources))


def test_base_and_draft_need_their_own_tables() -> None:
    """Equal engines may not share one cache or table."""
    engine = attention_engine()
    deployment = DeploymentConfig(engine, engine, SpecDecodeConfig(SpecDecodeMode.EAGLE))
    cache, table = cache_of(engine), table_of(engine)
    with pytest.raises(DeploymentError, match="share"):
        check_resources(deployment, Kind.EAGLE, ContextCachePhysicalResources(cache, table, cache, table_of(engine)))
    with pytest.raises(DeploymentError, match="share"):
        check_resources(deployment, Kind.EAGLE, ContextCachePhysicalResources(cache, table, cache_of(engine), table))


def test_a_pool_must_hold_one_longest_sequence() -> None:
    """Fewer pages than the longest sequence needs are refused; exactly as many are the user's choice."""
    small, exact = attention_engine(num_pages=2), attention_engine(num_pages=3)
    with pytest.raises(DeploymentError, match="2 pages and the longest sequence needs 3"):
        check_resources(DeploymentConfig(small), Kind.VANILLA, resources_of(small))
    check_resources(DeploymentConfig(exact), Kind.VANILLA, resources_of(exact))


def test_resources_of_another_device_are_refused() -> None:
    """Where ops say their device, caches and tables must lie on the coordinator's; ops that do not say are believed."""
    engine = attention_engine()

    def build(cache_ops: Any, table_ops: Any, ops: Any) -> ContextCacheCoordinator:
        resources = resources_of(engine, cache_ops, table_ops)
        return ContextCacheCoordinator(
            ContextCacheConfig(), DeploymentConfig(engine), Kind.VANILLA, resources, None, device_ops=ops
        )

    one, two, silent = OpsOfDevice(1), OpsOfDevice(2), NumpyDeviceOps()
    for cache_ops, table_ops, ops in (
        (one, one, None),
        (one, OpsOfDevice(1), one),
        (one, silent, one),
        (two, one, silent),
    ):
        assert build(cache_ops, table_ops, ops).idle
    with pytest.raises(DeploymentError, match=r"base_cache lies on device 2 .* ops work on device 1; build both"):
        build(two, one, one)
    with pytest.raises(DeploymentError, match="base_page_table lies on device 2"):
        build(one, two, None)


def test_drafts_on_another_device_are_refused_and_an_unused_table_is_not() -> None:
    """Every resource that the kind uses is looked at, and none that it does not."""
    deployment, resources = deployment_of(Kind.EAGLE)
    one, two = OpsOfDevice(1), OpsOfDevice(2)
    for name in ("base_cache", "base_page_table", "draft_cache", "draft_page_table"):
        for other in ("base_cache", "base_page_table", "draft_cache", "draft_page_table"):
            getattr(resources, other).device_ops = two if other == name else one
        with pytest.raises(DeploymentError, match=f"{name} lies on device 2"):
            ContextCacheCoordinator(ContextCacheConfig(), deployment, Kind.EAGLE, resources, None, device_ops=one)
    deployment, resources = deployment_of(Kind.PURE_RECURRENT)
    resources.base_cache.device_ops = one
    check_devices(one, Kind.PURE_RECURRENT, replace(resources, base_page_table=table_of(attention_engine())))
    table = KVPageTable(2, 2, 4, device_ops=two)
    check_devices(one, Kind.PURE_RECURRENT, replace(resources, base_page_table=table))


def test_wrappers_tell_the_device_of_the_ops_inside() -> None:
    """So that a test double over ops of one device does not hide that resources lie on another."""
    one = OpsOfDevice(1)
    for wrapped in (FaultInjector(one), DeferredDeviceOps(one, random.Random(1)), FaultInjector(FaultInjector(one))):
        assert device_ordinal_of(wrapped) == 1
    assert device_ordinal_of(FaultInjector(NumpyDeviceOps())) is None


def test_ops_are_not_replaced_by_those_of_another_device() -> None:
    """Wrappers of the present ones are taken; the coordinator goes on with what it had otherwise."""
    engine, one = attention_engine(), OpsOfDevice(1)
    resources = resources_of(engine, one, one)
    coordinator = ContextCacheCoordinator(
        ContextCacheConfig(), DeploymentConfig(engine), Kind.VANILLA, resources, None, device_ops=one
    )
    wrapped = FaultInjector(one)
    coordinator.replace_device_ops(wrapped)
    with pytest.raises(
        DeploymentError, match="base_cache lies on device 1 and the coordinator's device ops work on device 2"
    ):
        coordinator.replace_device_ops(FaultInjector(OpsOfDevice(2)))
    assert coordinator.device_ops is wrapped


def test_ops_are_not_replaced_by_those_of_another_device_though_the_resources_do_not_say() -> None:
    """The snapshots were allocated by the present ops, and lie where those work."""
    engine = hybrid_engine()
    resources = resources_of(engine)
    coordinator = ContextCacheCoordinator(
        ContextCacheConfig(
            recurrent_snapshot_pool_bytes=recurrent_bytes_per_slot(engine),
            partial_kv_snapshot_pool_bytes=partial_kv_bytes_per_slot(engine),
        ),
        DeploymentConfig(engine),
        Kind.HYBRID,
        resources,
        None,
        device_ops=OpsOfDevice(1),
    )
    with pytest.raises(DeploymentError, match="new device ops work on device 0 and the present ones on device 1"):
        coordinator.replace_device_ops(OpsOfDevice(0))
    coordinator.replace_device_ops(FaultInjector(OpsOfDevice(1)))
