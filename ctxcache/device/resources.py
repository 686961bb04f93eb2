"""The physical resources of a coordinator, and the check that they fit the deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ctxcache.arguments import describe
from ctxcache.config import DeploymentConfig, EngineConfig, validate_context_cache_deployment
from ctxcache.device.defaults import ops_or_default
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.ops import REQUIRED_OPS, DeviceOps, RuntimeDeviceOps, device_ordinal_of
from ctxcache.device.page_table import KVPageTable
from ctxcache.errors import DeploymentError
from ctxcache.ids import PAIRED_KINDS, ContextCacheDeploymentKind


@dataclass(frozen=True, slots=True, eq=False)
class ContextCachePhysicalResources:
    """Pools and page tables, allocated or borrowed before the coordinator is built; they outlive it.

    Attributes:
        base_cache: pools of the base engine.
        base_page_table: its page table; unused and unchecked for `PURE_RECURRENT`, where it may be `None`.
        draft_cache: pools of the draft engine, exactly for `EAGLE` and `HYBRID_MTP`.
        draft_page_table: its page table, likewise.
    """

    base_cache: HybridCacheManager
    base_page_table: KVPageTable | None
    draft_cache: HybridCacheManager | None = None
    draft_page_table: KVPageTable | None = None


def make_resources(
    deployment: DeploymentConfig,
    stream: Any,
    device_ops: RuntimeDeviceOps | None = None,
    **borrowed: Sequence[Any] | None,
) -> ContextCachePhysicalResources:
    """Allocate the pools and page tables of a deployment.

    Args:
        deployment: it.
        stream: the stream that the caches are used on.
        device_ops: who allocates.
        borrowed: arrays of the base engine to borrow instead, as for `HybridCacheManager.from_arrays`.

    Raises:
        DeploymentError: as `HybridCacheManager` and `KVPageTable` have it.
    """
    ops = ops_or_default(device_ops)

    def table(engine: EngineConfig) -> KVPageTable | None:
        if not engine.num_attention_layers:
            return None
        return KVPageTable(engine.max_batch_size, engine.pages_per_sequence, engine.num_pages, device_ops=ops)

    base, draft = deployment.base, deployment.draft
    lent = {name: arrays for name, arrays in borrowed.items() if arrays is not None}
    cache = (
        HybridCacheManager.from_arrays(base, **lent, stream=stream, device_ops=ops)
        if lent
        else HybridCacheManager(base, stream, device_ops=ops)
    )
    if draft is None:
        return ContextCachePhysicalResources(cache, table(base))
    draft_cache = HybridCacheManager(draft, stream, device_ops=ops)
    return ContextCachePhysicalResources(cache, table(base), draft_cache, table(draft))


def check_resources(
    deployment: DeploymentConfig, kind: ContextCacheDeploymentKind, resources: ContextCachePhysicalResources
) -> None:
    """Check that kind, deployment, pools and tables agree. Binds and changes nothing.

    Raises:
        DeploymentError: naming both sides of the first disagreement, and what would mend it.
    """
    actual = validate_context_cache_deployment(deployment)
    if kind is not actual:
        stated = kind.name if isinstance(kind, ContextCacheDeploymentKind) else repr(kind)
        raise DeploymentError(f"the deployment is {actual.name} and the coordinator is built for {stated}; pass that")
    if not isinstance(resources, ContextCachePhysicalResources):
        raise DeploymentError(f"resources are a {type(resources).__name__}; pass ContextCachePhysicalResources")
    _check_cache("base", deployment.base, resources.base_cache)
    if kind is not ContextCacheDeploymentKind.PURE_RECURRENT:
        _check_table("base", deployment.base, resources.base_page_table)
    drafts = {"draft_cache": resources.draft_cache, "draft_page_table": resources.draft_page_table}
    if kind not in PAIRED_KINDS:
        for name, resource in drafts.items():
            if resource is not None:
                raise DeploymentError(f"there is a {name} and {kind.name} has no draft pages; leave it at None")
        return
    for name, resource in drafts.items():
        if resource is None:
            raise DeploymentError(f"{kind.name} pairs base and draft pages and {name} is None; pass it")
    assert deployment.draft is not None  # noqa: S101 - validated above
    assert resources.draft_cache is not None  # noqa: S101 - checked above
    _check_cache("draft", deployment.draft, resources.draft_cache)
    _check_table("draft", deployment.draft, resources.draft_page_table)
    if resources.draft_cache is resources.base_cache or resources.draft_page_table is resources.base_page_table:
        raise DeploymentError("base and draft share a cache or a page table; each engine needs its own")


def check_devices(ops: DeviceOps, kind: ContextCacheDeploymentKind, resources: ContextCachePhysicalResources) -> None:
    """Check that caches and tables lie on the device that the coordinator's ops work on, where both say which that is.

    Raises:
        DeploymentError: one lies on another device, or the ops lack a method.
    """
    lacking = [name for name in REQUIRED_OPS if not callable(getattr(ops, name, None))]
    if lacking:
        raise DeploymentError(f"device_ops is {describe(ops)} and lacks {', '.join(lacking)}; pass DeviceOps")
    ordinal = device_ordinal_of(ops)
    for field in fields(resources):
        resource = getattr(resources, field.name)
        is_used = field.name != "base_page_table" or kind is not ContextCacheDeploymentKind.PURE_RECURRENT
        device = None if resource is None or not is_used else device_ordinal_of(resource.device_ops)
        if None not in (ordinal, device) and device != ordinal:
            raise DeploymentError(
                f"{field.name} lies on device {device} and the coordinator's device ops work on device {ordinal}; build both "
                "with the same ops"
            )


def check_successor(ops: DeviceOps, present: DeviceOps) -> None:
    """Check that ops work on the same device as those that they replace, where both say it; `DeploymentError` otherwise."""
    new, old = device_ordinal_of(ops), device_ordinal_of(present)
    if None not in (new, old) and new != old:
        raise DeploymentError(
            f"the new device ops work on device {new} and the present ones on device {old}, where the snapshots lie; wrap the "
            "present ones"
        )


def _check_cache(role: str, engine: EngineConfig, cache: HybridCacheManager) -> None:
    if not isinstance(cache, HybridCacheManager):
        raise DeploymentError(f"the {role} cache is a {type(cache).__name__}; pass a HybridCacheManager")
    for field in fields(EngineConfig):
        wanted, found = getattr(engine, field.name), getattr(cache.config, field.name)
        if found != wanted:
            raise DeploymentError(
                f"the {role} cache was built with {field.name} {found!r} and the deployment's {role} engine says "
                f"{wanted!r}; build both from one EngineConfig"
            )
    if engine.num_attention_layers and engine.num_pages < engine.pages_per_sequence:
        raise DeploymentError(
            f"the {role} pool has {engine.num_pages} pages and the longest sequence needs {engine.pages_per_sequence}; "
            "give at least that many"
        )


def _check_table(role: str, engine: EngineConfig, table: KVPageTable | None) -> None:
    if table is None:
        raise DeploymentError(f"the {role} engine has attention layers and no page table; pass a KVPageTable")
    if not isinstance(table, KVPageTable):
        raise DeploymentError(f"the {role} page table is a {type(table).__name__}; pass a KVPageTable")
    agreements = (
        ("num_pages", table.num_pages, engine.num_pages),
        ("max_batch", table.max_batch, engine.max_batch_size),
        ("max_pages_per_seq", table.max_pages_per_seq, engine.pages_per_sequence),
    )
    for name, found, wanted in agreements:
        if found != wanted:
            raise DeploymentError(
                f"the {role} page table has {name} {found} and the {role} engine needs {wanted}; build it with that"
            )
