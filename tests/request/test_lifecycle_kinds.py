"""The lifecycle as callers meet it in every deployment kind: all states times all operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import (
    OK,
    EagleHarness,
    Harness,
    HybridHarness,
    MtpHarness,
    PureRecurrentHarness,
    SharedKvHarness,
    T,
    U,
)

from ctxcache import (
    ContextCacheDeploymentKind,
    ContextCacheSequenceAdvance,
    ContractError,
    DeviceError,
    NumpyDeviceOps,
    RequestHandle,
)
from ctxcache.fsm import TRANSITIONS, State
from ctxcache.testing import Fault, FaultInjector, FaultPlan

HARNESSES: dict[ContextCacheDeploymentKind, type[Harness]] = {
    harness.kind: harness
    for harness in (Harness, PureRecurrentHarness, HybridHarness, EagleHarness, MtpHarness, SharedKvHarness)
}
FROZEN = {ContextCacheDeploymentKind.EAGLE, ContextCacheDeploymentKind.SHARED_KV}
MTP = ContextCacheDeploymentKind.HYBRID_MTP
STEP = {"prepare_decode_step", "can_prepare_decode_step", "begin_batch_compaction"}


def legal(kind: ContextCacheDeploymentKind, state: State) -> set[str]:
    """Operations that a live request accepts in a state, by hand."""
    prefilling = {"enqueue_prefill_captures", "finalize_prefill_publication"}
    return {
        State.ADMITTED: {"prepare_prefill"},
        State.PREFILLING: prefilling | ({"publish_hybrid_mtp_endpoint"} if kind is MTP else set()),
        State.DRAFTING: STEP,
        State.SETTLED: STEP,
        State.DECODING: {"complete_decode_step"},
        State.COMPACTING: {"compact_batch"},
    }.get(state, set())


def states_of(kind: ContextCacheDeploymentKind) -> list[State]:
    """States that a request of this kind can be in."""
    return [state for state in State if state is not State.DRAFTING or kind in FROZEN]


def make(kind: ContextCacheDeploymentKind) -> Harness:
    """Two sequences of pages of 16 tokens; room for everything."""
    options: dict[str, Any] = {"max_batch": 2, "page": 16, "max_tokens": 64, "ops": FaultInjector(NumpyDeviceOps())}
    if kind in (ContextCacheDeploymentKind.PURE_RECURRENT, ContextCacheDeploymentKind.HYBRID, MTP):
        options["snapshots"] = 6
    return HARNESSES[kind](**options)


def operations(h: Harness, request: RequestHandle) -> dict[str, Callable[[], Any]]:
    """Every operation on a request, with arguments that are right for two sequences of 20 tokens."""
    c = h.coordinator
    common = [[20, 20], [21, 21]] if h.kind is ContextCacheDeploymentKind.EAGLE else [None, None]
    prompt = [ContextCacheSequenceAdvance([7], 20)] * 2
    step = [ContextCacheSequenceAdvance([7], 21)] * 2
    hidden = np.zeros((2, 3, 4), np.float16) if h.hidden is None else h.hidden
    return {
        "prepare_prefill": lambda: c.prepare_prefill(request),
        "enqueue_prefill_captures": lambda: c.enqueue_prefill_captures(request),
        "finalize_prefill_publication": lambda: c.finalize_prefill_publication(request, prompt, common[0]),
        "prepare_decode_step": lambda: c.prepare_decode_step(request),
        "can_prepare_decode_step": lambda: c.can_prepare_decode_step(request),
        "complete_decode_step": lambda: c.complete_decode_step(request, step, [0], common[1]),
        "begin_batch_compaction": lambda: c.begin_batch_compaction(request, [0, -1], 1, h.mapping),
        "compact_batch": lambda: c.compact_batch(request),
        "publish_hybrid_mtp_endpoint": lambda: c.publish_hybrid_mtp_endpoint(request, 0, 16, hidden, 1),
        "restore_hybrid_mtp_boundary_hidden": lambda: c.restore_hybrid_mtp_boundary_hidden(request, 0, hidden, 1),
    }


def bring(h: Harness, state: State) -> RequestHandle:
    """A request of two sequences of 20 tokens, brought to a state by legal operations."""
    request, _ = h.admit(T(20), U(20))
    run = operations(h, request)
    if state is State.FINISHING_IN_FLIGHT:
        h.ops.plan = FaultPlan(Fault("prepare_prefill.reset_lengths"))
        with pytest.raises(DeviceError):
            run["prepare_prefill"]()
    way = {
        State.ADMITTED: [],
        State.FINISHING_IN_FLIGHT: [],
        State.PREFILLING: ["prepare_prefill"],
        State.POISONED: ["prepare_prefill"],
        State.RELEASED: ["prepare_prefill"],
        State.DRAFTING: ["prepare_prefill", "finalize_prefill_publication"],
    }.get(state, ["prepare_prefill", "finalize_prefill_publication", "prepare_decode_step", "complete_decode_step"])
    for name in way:
        assert run[name]() is OK
    if state in (State.POISONED, State.RELEASED):
        h.sync.outcomes = [9] if state is State.POISONED else []
        request.close()
    if state is State.DECODING:
        assert run["prepare_decode_step"]() is OK
    if state is State.COMPACTING:
        assert run["begin_batch_compaction"]() is OK
    if state is State.FINISHING_SETTLED:
        h.keep()
    assert request.inspect().state is state
    return request


CELLS = [(kind, state) for kind in HARNESSES for state in states_of(kind)]


@pytest.mark.parametrize(("kind", "state"), CELLS, ids=lambda value: value.value)
def test_h27_every_operation_in_every_state_of_every_kind(kind: ContextCacheDeploymentKind, state: State) -> None:
    """What the lifecycle does not have is refused with nothing changed; what it has is accepted; ways out always work."""
    h = make(kind)
    request = bring(h, state)
    for name, call in operations(h, request).items():
        if name in legal(kind, state):
            continue
        seen = h.observe(request)
        with pytest.raises(ContractError):
            call()
        assert h.observe(request) == seen, name
    for way_out in ("finish", "abandon"):
        h = make(kind)
        request = bring(h, state)
        assert getattr(h.coordinator, way_out)(request) is OK
        assert not request.valid
        if state is State.POISONED:
            assert h.coordinator.shutdown() is OK
        assert h.coordinator.manager.num_leases == 0
        h.coordinator.manager.check_invariants()


@pytest.mark.parametrize(("kind", "state"), CELLS, ids=lambda value: value.value)
def test_every_legal_operation_is_accepted(kind: ContextCacheDeploymentKind, state: State) -> None:
    """The other half of the table: what it has, works."""
    for name in sorted(legal(kind, state)):
        h = make(kind)
        request = bring(h, state)
        if state is State.DECODING:  # `bring` has completed one step, so this one ends at 22 tokens
            common = [22, 22] if kind is ContextCacheDeploymentKind.EAGLE else None
            outcome = h.coordinator.complete_decode_step(
                request, [ContextCacheSequenceAdvance([7], 22)] * 2, [1], common
            )
        else:
            outcome = operations(h, request)[name]()
        assert outcome is OK or outcome.tolist() == [True, True], name


def test_the_cells_cover_the_declared_lifecycle() -> None:
    """Every state that a kind's rows name is a cell of that kind."""
    for kind in HARNESSES:
        declared = {state for row in TRANSITIONS if kind in row.kinds for state in (row.source, row.target)}
        assert declared == set(states_of(kind)), kind
