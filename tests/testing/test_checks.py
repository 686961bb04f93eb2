"""What the test doubles look for they find: each check of `ctxcache.testing` is given what it must object to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.manager import checkpoint_of, keys_of, run_of

from ctxcache import ContractError, InvariantError, NumpyDeviceOps
from ctxcache.fsm import FaultGroup
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.ids import ResourceType
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.testing import Fault, FaultInjector, FaultMode, FaultPlan, ReferenceManager
from ctxcache.testing.deferred import DeferredDeviceOps
from ctxcache.testing.fault_runs import FaultRun, Touches
from ctxcache.testing.kind_sweep import aftermath, sweep
from ctxcache.testing.runtime.runtime import FakeRuntime
from ctxcache.testing.shadow import ShadowManager

TOKENS = run_of("a", 10)
KEYS = keys_of(TOKENS)
BOTH = pytest.mark.parametrize("make", [ContextCacheManager, ReferenceManager], ids=["fast", "twin"])


def published(make: Any) -> Any:
    """A manager with a record of two blocks, and no lease."""
    manager = make(tokens_per_page=4, num_base_pages=8)
    lease = manager.acquire(manager.plan(KEYS, len(TOKENS))).lease
    manager.publish(lease, KEYS, len(TOKENS))
    manager.release(lease)
    manager.check_invariants()
    return manager


# The plain manager: an oracle that is broken itself must not agree in silence


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda state: state.pools[ResourceType.BASE_KV_PAGE].free.pop(), "BASE_KV_PAGE: free"),
        (lambda state: state.pools[ResourceType.BASE_KV_PAGE].free.append(7), "BASE_KV_PAGE: free"),
        (lambda state: state.pools[ResourceType.BASE_KV_PAGE].free.append(0), "BASE_KV_PAGE: free"),
        (lambda state: state.page_of.update({"stranger": 5}), "the index holds .*stranger"),
        (lambda state: state.page_of.update(dict.fromkeys(state.page_of, 0)), "BASE_KV_PAGE|two blocks share a page"),
    ],
    ids=["a lost page", "a page free twice", "a page free and held", "an orphaned block", "a shared page"],
)
def test_the_plain_manager_checks_itself(spoil: Callable[[Any], object], said: str) -> None:
    """A pool or an index that does not add up is an `InvariantError`."""
    manager = published(ReferenceManager)
    spoil(manager._state)
    with pytest.raises(InvariantError, match=said):
        manager.check_invariants()


@BOTH
@pytest.mark.parametrize(
    "ask",
    [
        lambda manager: manager.plan(KEYS, 0),
        lambda manager: manager.plan(KEYS[:1], len(TOKENS)),
        lambda manager: manager.plan(KEYS.astype(np.int64), len(TOKENS)),
        lambda manager: manager.plan(KEYS, len(TOKENS), base_extra_tokens=-1),
        lambda manager: manager.plan(KEYS, len(TOKENS), draft_extra_tokens=1),
        lambda manager: manager.plan(KEYS, len(TOKENS), mode=Mode.EAGLE),
        lambda manager: manager.plan(KEYS, len(TOKENS), exact_keys=[checkpoint_of(TOKENS)]),
        lambda manager: manager.acquire(published(type(manager)).plan(KEYS, len(TOKENS))),
        lambda manager: manager.grow_leases(np.array([3], np.int32), np.array([5], np.int32)),
        lambda manager: manager.grow_leases(np.zeros(1, np.int32), np.array([5, 6], np.int32)),
    ],
    ids=[
        "no tokens",
        "too few keys",
        "signed keys",
        "negative headroom",
        "draft headroom without drafts",
        "a mode of other kinds",
        "checkpoints without recurrent layers",
        "another manager's plan",
        "no lease's row",
        "runs of different lengths",
    ],
)
def test_the_twin_refuses_what_the_fast_manager_refuses(make: Any, ask: Callable[[Any], object]) -> None:
    """Both raise `ContractError`, and nothing has changed."""
    manager = published(make)
    pool, records = manager.pool(ResourceType.BASE_KV_PAGE), len(manager.records)
    with pytest.raises(ContractError):
        ask(manager)
    assert (manager.pool(ResourceType.BASE_KV_PAGE), len(manager.records)) == (pool, records)
    manager.check_invariants()


@BOTH
def test_clear_waits_for_the_leases(make: Any) -> None:
    """With a lease out it is refused; a record that was cleared away shows nothing any more."""
    manager = published(make)
    (record,) = manager.records
    lease = manager.acquire(manager.plan(KEYS, len(TOKENS))).lease
    with pytest.raises(ContractError, match="1 lease"):
        manager.clear()
    assert record.cached
    manager.release(lease)
    manager.clear()
    assert not record.cached
    with pytest.raises(ContractError):
        _ = record.base_page_path


def test_the_shadow_sees_a_lease_that_its_twin_did_not_give() -> None:
    """A runtime that releases a lease from before the shadow came is named, and nothing crashes."""
    manager = ContextCacheManager(tokens_per_page=4, num_base_pages=8)
    lease = manager.acquire(manager.plan(KEYS, len(TOKENS))).lease
    shadow = ShadowManager(manager, ReferenceManager(tokens_per_page=4, num_base_pages=8))
    manager.release(lease)
    assert shadow.violations == ["release of a lease that the reference did not give"]


# Faults


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Fault("finish.synchronize", "raise_before"), "pass a FaultMode member"),
        (lambda: Fault("finish.synchronize", occurrence=0), "the first time is 1"),
        (lambda: Fault("finish.synchronize", FaultMode.ERROR_CODE, code=0), "choose another code"),
        (lambda: FaultPlan("finish.synchronize"), "pass Fault values"),
        (lambda: FaultInjector(NumpyDeviceOps(), "finish.synchronize"), "pass a FaultPlan"),
        (lambda: FaultInjector(NumpyDeviceOps(), FaultPlan(Fault("finish.synchronise"))), "no device touch is called"),
    ],
)
def test_a_fault_that_could_never_strike_is_refused(make: Callable[[], object], said: str) -> None:
    """A test with a misspelt fault would pass for the wrong reason."""
    with pytest.raises(ContractError, match=said):
        make()


@pytest.mark.parametrize(
    "wrap", [FaultInjector, lambda ops: DeferredDeviceOps(ops, np.random.default_rng(0))], ids=["injector", "lazy"]
)
def test_a_wrapper_lets_memory_through(wrap: Callable[[Any], Any]) -> None:
    """What is allocated, written and read through a wrapper is what its inner ops have."""
    ops = wrap(NumpyDeviceOps())
    array = ops.allocate((2, 3), "int32")
    ops.to_device(array, np.arange(6, dtype=np.int32).reshape(2, 3))
    assert ops.to_host(array).tolist() == [[0, 1, 2], [3, 4, 5]]


# The sweep


def test_a_single_fault_that_does_not_fire_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point that a script reaches once cannot fail the second time: the sweep says so instead of passing it."""
    never = FaultRun((Fault("prepare_prefill.reset_lengths", occurrence=10_000),))
    monkeypatch.setattr(Touches, "singles", lambda touches: [never])
    result = sweep(FaultGroup(Kind.VANILLA), pairs=False)
    assert (result.violations, result.runs) == ([], {"singles": 1, "pairs": 0})
    assert result.unfired == ["vanilla: prepare_prefill.reset_lengths raise_before at occurrence 10000"]


def test_a_runtime_that_does_not_settle_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisoning that a healthy device does not end is a violation."""
    runtime = FakeRuntime(Kind.VANILLA)
    monkeypatch.setattr(runtime, "settle", lambda: False)
    assert "a healthy device did not end the poisoning" in aftermath(runtime)
