"""The lifecycle as a caller meets it: every operation in every state, handles, orphans, threads."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings

import numpy as np
import pytest
from support.harness import OK, Harness, T, U, small

from ctxcache import (
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractError,
    DeviceError,
    NumpyDeviceOps,
    Phase,
)
from ctxcache.fsm import State
from ctxcache.testing import Fault, FaultInjector, FaultPlan


def operations(h: Harness, request: object) -> dict[str, object]:
    """Every operation on a request, with arguments that are right for two sequences of 20 tokens after their prefill."""
    prompt = [ContextCacheSequenceAdvance([7], 20)] * 2
    step = [ContextCacheSequenceAdvance([7], 21)] * 2
    c = h.coordinator
    return {
        "prepare_prefill": lambda: c.prepare_prefill(request),
        "enqueue_prefill_captures": lambda: c.enqueue_prefill_captures(request),
        "finalize_prefill_publication": lambda: c.finalize_prefill_publication(request, prompt),
        "prepare_decode_step": lambda: c.prepare_decode_step(request),
        "can_prepare_decode_step": lambda: c.can_prepare_decode_step(request),
        "complete_decode_step": lambda: c.complete_decode_step(request, step),
        "begin_batch_compaction": lambda: c.begin_batch_compaction(request, [0, -1], 1, h.mapping),
        "compact_batch": lambda: c.compact_batch(request),
    }


LEGAL = {
    State.ADMITTED: {"prepare_prefill"},
    State.PREFILLING: {"enqueue_prefill_captures", "finalize_prefill_publication"},
    State.SETTLED: {"prepare_decode_step", "can_prepare_decode_step", "begin_batch_compaction"},
    State.DECODING: {"complete_decode_step"},
    State.COMPACTING: {"compact_batch"},
    State.FINISHING_SETTLED: set(),
    State.FINISHING_IN_FLIGHT: set(),
    State.POISONED: set(),
    State.RELEASED: set(),
}


def request_in(h: Harness, state: State) -> object:
    """A request of two sequences of 20 tokens, brought to a state."""
    request, _ = h.admit(T(20), U(20))
    if state is State.ADMITTED:
        return request
    if state is State.FINISHING_IN_FLIGHT:
        h.ops.plan = FaultPlan(Fault("prepare_prefill.upload_rows"))
        with pytest.raises(DeviceError):
            h.coordinator.prepare_prefill(request)
        return request
    h.coordinator.prepare_prefill(request)
    if state is State.PREFILLING:
        return request
    if state in (State.RELEASED, State.POISONED):
        h.sync.outcomes = [9] if state is State.POISONED else []
        request.close()
        return request
    h.coordinator.finalize_prefill_publication(request, [ContextCacheSequenceAdvance([7], 20)] * 2)
    if state is State.DECODING:
        h.coordinator.prepare_decode_step(request)
    if state is State.COMPACTING:
        h.coordinator.begin_batch_compaction(request, [0, -1], 1, h.mapping)
    if state is State.FINISHING_SETTLED:
        h.keep()
    return request


@pytest.mark.parametrize("state", list(LEGAL), ids=lambda state: state.value)
def test_h27_every_operation_in_every_state(state: State) -> None:
    """What the lifecycle does not have is refused and changes nothing; what it has is accepted."""

    def fresh() -> tuple[Harness, object]:
        h = small(max_batch=2, ops=FaultInjector(NumpyDeviceOps()))
        return h, request_in(h, state)

    h, request = fresh()
    assert request.inspect().state is state
    for name, call in operations(h, request).items():
        if name in LEGAL[state]:
            continue
        seen = h.observe(request)
        with pytest.raises(ContractError):
            call()
        assert h.observe(request) == seen, name
    for name in sorted(LEGAL[state]):
        h, request = fresh()
        outcome = operations(h, request)[name]()
        assert outcome is OK or outcome.tolist() == [True, True], name
    for way_out in ("finish", "abandon"):
        h, request = fresh()
        assert getattr(h.coordinator, way_out)(request) is OK
        assert not request.valid


def test_h27_no_back_door_changes_a_state() -> None:
    """Neither handle nor request offers a generated transition method, and a view cannot be written."""
    h = small()
    request, _ = h.admit(T(5))
    for thing in (request, request._request):
        assert [name for name in dir(thing) if name.startswith(("to_", "may_", "is_", "trigger"))] == []
    with pytest.raises(AttributeError):
        request.phase = Phase.FINISHING
    with pytest.raises(AttributeError):
        request._request.state = State.RELEASED
    with pytest.raises(AttributeError):
        request.inspect().state = State.RELEASED
    h.coordinator.finish(request)


def test_handles_are_not_copied_and_belong_to_one_coordinator() -> None:
    """Copy, deepcopy and pickle fail; another coordinator refuses the handle, live or empty."""
    h, other = small(), small()
    request, _ = h.admit(T(5))
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            duplicate(request)
    for call in operations(other, request).values():
        with pytest.raises(ContractError, match="another coordinator"):
            call()
    for way_out in (other.coordinator.finish, other.coordinator.abandon):
        with pytest.raises(ContractError, match="another coordinator"):
            way_out(request)
    for way_out in (h.coordinator.finish, h.coordinator.abandon, h.coordinator.prepare_prefill):
        with pytest.raises(ContractError, match="RequestHandle"):
            way_out(None)
    assert request.valid
    h.coordinator.finish(request)


def test_the_with_block_finishes_or_abandons() -> None:
    """Leaving normally finishes; the published prompt is then reusable; nothing is left live."""
    h = small()
    request, _ = h.admit(T(40))
    with request as entered:
        assert entered is request
        h.prefill()
    assert not request.valid
    assert h.run(T(40)) == [32]


def test_a_dropped_handle_is_released_also_where_warnings_are_errors() -> None:
    """The warning is the last thing that happens, so that raising it costs nothing."""
    h = small()
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del request
    assert h.sync.calls == 1
    assert h.free == 4


def test_an_orphan_inside_an_operation_is_released_by_it() -> None:
    """A handle collected while an operation runs is marked, and the operation itself abandons the request."""
    h = small()
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    box = [request]
    del request

    class DropsTheHandle:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            box.clear()
            gc.collect()
            return np.array([1, 2, 3], np.int32)

    h.sync.calls = 0
    with pytest.warns(ResourceWarning, match="dropped"):
        h.coordinator.explain(ContextCacheBatchAdmission([ContextCacheSequenceAdmission(DropsTheHandle())]))
    assert h.sync.calls == 1
    assert h.free == 4
    assert h.attempt(T(5)).status is OK


def test_a_second_thread_waits() -> None:
    """Operations of one coordinator are serialised: a call from another thread runs when the first has returned."""
    inside, leave = threading.Event(), threading.Event()
    order: list[str] = []

    def synchronize(stream: object) -> None:
        inside.set()
        assert leave.wait(10)
        order.append("drained")

    h = small(synchronizer=synchronize)
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    first = threading.Thread(target=lambda: h.coordinator.finish(request))
    second = threading.Thread(target=lambda: (h.begin_only(T(3)), order.append("admitted")))
    first.start()
    assert inside.wait(10)
    second.start()
    second.join(0.2)
    assert order == []
    leave.set()
    first.join(10)
    second.join(10)
    assert order[:2] == ["drained", "admitted"]
