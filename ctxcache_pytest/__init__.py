"""Pytest fixtures for a runtime that uses `ctxcache`: make its device fail, run late, and watch who owns what.

A package of its own, beside `ctxcache`: pytest loads it in every run of every project that has `ctxcache` installed, and
importing `ctxcache` imports Numba, which takes a second. Nothing of either is imported before a fixture runs.

The fixtures take the coordinator that the runtime built, and wrap what it has. They can be combined, in any order:

    def test_my_runtime_survives_a_failing_upload(ctxcache_faults, ctxcache_watch):
        runtime = MyRuntime(...)
        watch = ctxcache_watch(runtime.coordinator)
        faults = ctxcache_faults(runtime.coordinator, Fault("prepare_prefill.upload_rows"))
        ...
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ctxcache import ContextCacheCoordinator
    from ctxcache.testing import DeferredDeviceOps, Fault, FaultInjector, OwnershipLedger, PageGuard


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the one option."""
    parser.getgroup("ctxcache").addoption(
        "--ctxcache-seed",
        type=int,
        default=None,
        help="seed of the schedules of lazy streams; by default each test has its own, the same in every run",
    )


@pytest.fixture
def ctxcache_seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test's schedules: of `--ctxcache-seed`, or of the test's name."""
    chosen: int | None = request.config.getoption("--ctxcache-seed")
    return zlib.crc32(request.node.nodeid.encode()) if chosen is None else chosen


@pytest.fixture
def ctxcache_faults() -> Callable[..., FaultInjector]:
    """A function `(coordinator, *faults)` that makes the coordinator's device fail at those points.

    Returns the `FaultInjector`: replace its `plan` later, read `fired`, `log` and `counts`.
    """

    def wrap(coordinator: ContextCacheCoordinator, *faults: Fault) -> FaultInjector:
        from ctxcache.testing import FaultInjector, FaultPlan  # noqa: PLC0415 - not before a fixture runs

        _check_coordinator(coordinator)
        injector = FaultInjector(coordinator.device_ops, FaultPlan(*faults))
        coordinator.replace_device_ops(injector)
        return injector

    return wrap


@pytest.fixture
def ctxcache_deferred(ctxcache_seed: int) -> Callable[[ContextCacheCoordinator], DeferredDeviceOps]:
    """A function `(coordinator)` that makes the coordinator's stream lazy, behind any faults.

    Returns the `DeferredDeviceOps`. The runtime's own work joins the stream through its `enqueue`.
    """

    def wrap(coordinator: ContextCacheCoordinator) -> DeferredDeviceOps:
        return _deferred(coordinator, ctxcache_seed)

    return wrap


@pytest.fixture
def ctxcache_watch(
    ctxcache_seed: int,
) -> Iterator[Callable[..., OwnershipLedger]]:
    """A function `(coordinator, *, strict=True)` that watches every report and every change of an owner, on a lazy stream.

    Returns the `OwnershipLedger`. A report with work that is not proven complete fails at the call, where `strict` is true. When the test ends, what broke its rule fails the test, and so do a damaged manager and
    a lease that is out although no request is active or quarantined.
    """
    watched: list[tuple[ContextCacheCoordinator, OwnershipLedger]] = []

    def watch(coordinator: ContextCacheCoordinator, *, strict: bool = True) -> OwnershipLedger:
        from ctxcache.testing import OwnershipLedger  # noqa: PLC0415 - not before a fixture runs

        ledger = OwnershipLedger(coordinator, _deferred(coordinator, ctxcache_seed), strict=strict)
        watched.append((coordinator, ledger))
        return ledger

    yield watch
    for coordinator, ledger in watched:
        judge(coordinator, ledger)


@pytest.fixture
def ctxcache_guard() -> Iterator[Callable[[ContextCacheCoordinator], PageGuard]]:
    """A function `(coordinator)` that finds writes into pages where the runtime has nothing to write.

    Returns the `PageGuard`. It looks at every report and at every end of a request, and fails there; and once more when the
    test ends.
    """
    guards: list[PageGuard] = []

    def guard(coordinator: ContextCacheCoordinator) -> PageGuard:
        from ctxcache.testing import PageGuard  # noqa: PLC0415 - not before a fixture runs

        _check_coordinator(coordinator)
        guards.append(PageGuard(coordinator, strict=True))
        return guards[-1]

    yield guard
    for each in guards:
        each.check()


def judge(coordinator: ContextCacheCoordinator, ledger: OwnershipLedger) -> None:
    """Fail the running test where an owner changed too early, the manager is damaged, or a lease is lost."""
    ledger.check()
    coordinator.manager.check_invariants()
    if coordinator.idle and coordinator.manager.num_leases:
        pytest.fail(f"{coordinator.manager.num_leases} leases are out, and no request holds them")


def _check_coordinator(coordinator: Any) -> None:
    from ctxcache import ContextCacheCoordinator, ContractError  # noqa: PLC0415 - not before a fixture runs

    if not isinstance(coordinator, ContextCacheCoordinator):
        raise ContractError(
            f"the fixture got a {type(coordinator).__name__}; pass the ContextCacheCoordinator that your runtime holds"
        )


def _deferred(coordinator: ContextCacheCoordinator, seed: int) -> DeferredDeviceOps:
    """Return the lazy stream of a coordinator, made where there is none: innermost but for the ops that do the work."""
    import random  # noqa: PLC0415 - likewise

    from ctxcache.testing import DeferredDeviceOps, FaultInjector  # noqa: PLC0415 - likewise

    _check_coordinator(coordinator)
    outer: FaultInjector | None = None
    ops: Any = coordinator.device_ops
    while isinstance(ops, FaultInjector):
        outer, ops = ops, ops.inner
    if isinstance(ops, DeferredDeviceOps):
        return ops
    deferred = DeferredDeviceOps(ops, random.Random(seed))  # noqa: S311 - a schedule is no secret
    if outer is None:
        coordinator.replace_device_ops(deferred)
    else:
        outer.inner = deferred
    return deferred
