"""The plain-Python manager behind a coordinator: it is told everything that the fast one is told, and must agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from ctxcache.ids import AcquireStatus, ResourceType
from ctxcache.manager.results import AcquireResult, CacheRequestLease, ReusePlan
from ctxcache.testing.reference.manager import ReferenceManager
from ctxcache.testing.taps import tap

_HIDDEN = frozenset({"_owner", "_proof", "lease", "plan"})
"""Fields of results that are handles, or belong to one manager."""


def plain(value: Any) -> Any:
    """Return a manager's result as a value that compares: arrays as lists, handles and owners left out."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "base_page_path"):
        return record_view(value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__ if name not in _HIDDEN}
    return value


def record_view(record: Any) -> tuple[Any, ...]:
    """Return everything to be seen of a record."""
    return (
        record.serial,
        record.base_page_path.tolist(),
        record.draft_page_path.tolist(),
        record.recurrent_snapshot_slot,
        record.partial_kv_snapshot_slot,
        record.exact_checkpoint_length,
    )


def manager_view(manager: Any) -> dict[str, Any]:
    """Return everything to be seen of a manager, plans and leases left out."""
    return {
        "pools": {kind.value: (manager.pool(kind).free, manager.pool(kind).capacity) for kind in ResourceType},
        "records": [record_view(record) for record in manager.records],
        "num_leases": manager.num_leases,
        "num_indexed_blocks": manager.num_indexed_blocks,
        "counters": plain(manager.counters()),
    }


class ShadowManager:
    """Repeats on a `ReferenceManager` what a coordinator does to its manager, and compares every answer.

    Attributes:
        violations: where the two differed, in words.
        num_calls: calls that were compared.
    """

    def __init__(self, manager: Any, reference: ReferenceManager) -> None:
        self.violations: list[str] = []
        self.num_calls = 0
        self._manager = manager
        self._reference = reference
        self._plans: list[tuple[ReusePlan, ReusePlan]] = []
        self._leases: dict[tuple[int, int], CacheRequestLease] = {}
        tap(manager, "plan", after=self._planned)
        tap(manager, "acquire", after=self._acquired)
        for name in ("grow_leases", "can_grow_leases"):
            tap(manager, name, after=self._repeat(name))
        for name in (
            "publish",
            "reserve_snapshots",
            "publish_checkpoint",
            "retire_snapshots",
            "release_restored_snapshots",
            "release",
        ):
            tap(manager, name, after=self._repeat_of_lease(name))
        tap(manager, "clear", after=self._repeat("clear"))

    def compare(self) -> None:
        """Compare everything to be seen of both."""
        fast, reference = manager_view(self._manager), manager_view(self._reference)
        for name, found in fast.items():
            if found != reference[name]:
                self.violations.append(f"{name} are {found}, by the reference {reference[name]}")

    def _planned(self, plan: ReusePlan, *arguments: Any, **options: Any) -> None:
        twin = self._reference.plan(*arguments, **options)
        self._plans = [*self._plans[-15:], (plan, twin)]  # what is acquired was planned a moment ago
        self._judge("plan", plan, twin)

    def _acquired(self, result: AcquireResult, plan: ReusePlan, **options: Any) -> None:
        twin_plan = next(twin for known, twin in reversed(self._plans) if known is plan)
        twin = self._reference.acquire(twin_plan, **options)
        self._judge("acquire", result, twin)
        if result.lease is None or twin.lease is None:
            if result.status is AcquireStatus.ACQUIRED or twin.status is AcquireStatus.ACQUIRED:
                self.violations.append(f"acquire is {result.status}, by the reference {twin.status}")
            return
        self._leases[result.lease.row, result.lease.generation] = twin.lease
        self._judge("base pages", result.lease.base_pages, twin.lease.base_pages)
        self._judge("draft pages", result.lease.draft_pages, twin.lease.draft_pages)

    def _repeat(self, method: str) -> Any:
        call = getattr(self._reference, method)

        def repeat(result: Any, *arguments: Any, **options: Any) -> None:
            self._judge(method, result, call(*arguments, **options))

        return repeat

    def _repeat_of_lease(self, method: str) -> Any:
        call = getattr(self._reference, method)

        def repeat(result: Any, lease: CacheRequestLease, *arguments: Any, **options: Any) -> None:
            key = (lease.row, lease.generation)
            twin = self._leases.pop(key, None) if method == "release" else self._leases.get(key)
            if twin is None:
                self.violations.append(f"{method} of a lease that the reference did not give")
                return
            self._judge(method, result, call(twin, *arguments, **options))

        return repeat

    def _judge(self, what: str, found: Any, expected: Any) -> None:
        self.num_calls += 1
        if plain(found) != plain(expected):
            self.violations.append(f"{what} gave {plain(found)}, by the reference {plain(expected)}")
