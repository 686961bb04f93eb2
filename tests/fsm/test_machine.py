"""The one door: what is legal, in which order hooks run, and where a failing one leads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lifecycle_subject import GUARDS, HOOKS, Subject, row_id, rows_with, taking

from ctxcache import fsm
from ctxcache.errors import ContractError, DeviceError, InvariantError
from ctxcache.fsm import (
    LIVE,
    PENDING,
    SANITIZER_TRANSITIONS,
    TRANSITIONS,
    TRIGGERS,
    DrainFailed,
    Guard,
    HookKind,
    Lifecycle,
    State,
    Transition,
    fire,
)
from ctxcache.fsm.machine import Machine

DECLARED = {(row.trigger, row.source) for row in TRANSITIONS}
OPERATIONS = {row.trigger: row.operation for row in TRANSITIONS}
UNDECLARED = [(trigger, state) for state in State for trigger in TRIGGERS if (trigger, state) not in DECLARED]
ENQUEUES = rows_with(HookKind.ENQUEUE)
PROVES = rows_with(HookKind.PROVE)
WAYS_OUT = ("finish", "abandon")
ASKED = [(row, guard.name) for row in TRANSITIONS for guard in (*row.guards, *row.unless)]


def accepts(row: Transition, answers: dict[str, bool]) -> bool:
    """Whether no guard of the row has anything against it."""
    return all(answers[guard.name] for guard in row.guards) and not any(answers[guard.name] for guard in row.unless)


def _ids(pairs: Any) -> list[str]:
    return [f"{row_id(row)}-{name}" for row, name in pairs]


@pytest.mark.parametrize("row", TRANSITIONS, ids=row_id)
def test_every_row_runs_its_hooks_in_order_and_enters_its_target(row: Transition) -> None:
    """Hooks run in the table's order: before the target is entered where the row proves, after it otherwise."""
    subject = taking(row)
    fire(subject, row.trigger)
    seen = row.source if row.proves else row.target
    assert subject.state is row.target
    assert subject.ran == [(hook.name, seen.value) for hook in row.hooks]


@pytest.mark.parametrize(("trigger", "state"), UNDECLARED, ids=str)
def test_h27_illegal_edges_are_refused_and_change_nothing(trigger: str, state: State) -> None:
    """A trigger that the table does not have in a state raises `ContractError`; nothing runs, nothing changes."""
    subject = Subject(state)
    before = subject.snapshot()
    with pytest.raises(
        ContractError, match=f"{OPERATIONS[trigger] or trigger} is not possible in state '{state.value}'"
    ):
        fire(subject, trigger)
    assert subject.snapshot() == before


@pytest.mark.parametrize("state", State, ids=str)
def test_h27_a_refusal_names_what_is_possible_instead(state: State) -> None:
    """The message lists the operations that a caller can use in that state, and not what the door itself fires."""
    possible = {OPERATIONS[trigger] for trigger in TRIGGERS if (trigger, state) in DECLARED} - {""}
    refused = next(trigger for trigger in TRIGGERS if (trigger, state) not in DECLARED)
    with pytest.raises(ContractError) as caught:
        fire(Subject(state), refused)
    listed = str(caught.value).partition("possible there: ")[2].split(", ")
    assert set(listed) == (possible or {"nothing"})


def test_h27_no_back_door_leads_past_the_table() -> None:
    """Neither the machine nor a request that went through it has `to_*`, `may_*` or `is_*` methods for a state."""
    subject = taking(TRANSITIONS[0])
    fire(subject, TRANSITIONS[0].trigger)
    machine = fsm.machine._REQUESTS._machine
    names = [state.value for state in State] + [state.name.lower() for state in State]
    names += [name.replace(".", "_") for name in names]
    for name in (*names, *TRIGGERS):
        for prefix in ("to_", "may_", "is_", "may_to_", "trigger_"):
            assert not hasattr(subject, prefix + name)
            assert not hasattr(machine, prefix + name)
    assert not machine.models
    assert not any(trigger.startswith("to_") for trigger in machine.events)
    assert set(machine.events) == {*TRIGGERS, *(row.trigger for row in SANITIZER_TRANSITIONS)}
    assert set(vars(subject)) == set(vars(Subject(State.ADMITTED)))


def test_h27_an_unknown_trigger_is_refused() -> None:
    """A name that is no trigger at all is refused as one that is not possible here."""
    subject = Subject(State.ADMITTED)
    with pytest.raises(ContractError, match="to_released is not possible"):
        fire(subject, "to_released")
    assert subject.state is State.ADMITTED


@pytest.mark.parametrize(("row", "hook"), ENQUEUES, ids=_ids(ENQUEUES))
def test_h26_an_enqueue_hook_that_raises_leaves_pending_work_accounted(row: Transition, hook: str) -> None:
    """The request is finishing with work pending, the caller gets the cause, later hooks do not run, finish drains."""
    boom = RuntimeError("launch failed")
    subject = taking(row, **{hook: boom})
    with pytest.raises(DeviceError, match=hook) as caught:
        fire(subject, row.trigger)
    assert caught.value.__cause__ is boom
    assert subject.state is State.FINISHING_IN_FLIGHT
    assert subject.hooks_run[-1] == hook
    subject.ran.clear()
    fire(subject, "finish")
    assert (subject.state, subject.hooks_run) == (State.RELEASED, ["prove"])


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize(("row", "hook"), ENQUEUES, ids=_ids(ENQUEUES))
def test_h26_an_interrupted_enqueue_hook_is_accounted_for_and_re_raised(
    row: Transition, hook: str, interrupt: type[BaseException]
) -> None:
    """An interrupt inside an enqueue hook leads where an exception does, and reaches the caller as it came."""
    stop = interrupt("now")
    subject = taking(row, **{hook: stop})
    with pytest.raises(interrupt) as caught:
        fire(subject, row.trigger)
    assert caught.value is stop
    assert subject.state is State.FINISHING_IN_FLIGHT


@pytest.mark.parametrize(("row", "hook"), ENQUEUES, ids=_ids(ENQUEUES))
def test_h26_an_enqueue_hook_that_returns_a_code_has_failed(row: Transition, hook: str) -> None:
    """A non-zero code of an enqueue hook is a failure like an exception, and the message shows it."""
    subject = taking(row, **{hook: 719})
    with pytest.raises(DeviceError, match="719"):
        fire(subject, row.trigger)
    assert subject.state is State.FINISHING_IN_FLIGHT


@pytest.mark.parametrize(
    "outcome",
    [RuntimeError("sticky"), KeyboardInterrupt("now"), 719, -1, np.int32(700), [], "", (0,), np.zeros(2)],
    ids=repr,
)
@pytest.mark.parametrize(("row", "hook"), PROVES, ids=_ids(PROVES))
def test_h26_a_failed_drain_poisons_and_never_claims_completion(row: Transition, hook: str, outcome: Any) -> None:
    """Whatever is not `None` or 0 from a drain, or raises in it, poisons; a request already poisoned stays so."""
    subject = taking(row, **{hook: outcome})
    with pytest.raises(DrainFailed) as caught:
        fire(subject, row.trigger)
    assert subject.state is State.POISONED
    assert caught.value.cause is outcome or isinstance(outcome, np.ndarray)
    subject.ran.clear()
    subject.outcomes.clear()
    fire(subject, "shutdown")
    assert (subject.state, subject.hooks_run) == (State.RELEASED, ["prove"])


@pytest.mark.parametrize("success", [None, 0, np.int32(0), False], ids=repr)
@pytest.mark.parametrize(("row", "hook"), PROVES, ids=_ids(PROVES))
def test_none_and_zero_prove_the_stream_idle(row: Transition, hook: str, success: Any) -> None:
    """A drain that returns `None` or 0 has succeeded, also where a binding wraps the number."""
    subject = taking(row, **{hook: success})
    fire(subject, row.trigger)
    assert subject.state is row.target


def test_a_shutdown_that_fails_can_be_tried_again() -> None:
    """A failing shutdown makes no transition; the next one that succeeds releases."""
    subject = Subject(State.POISONED, outcomes={"prove": 1})
    for _ in range(3):
        with pytest.raises(DrainFailed):
            fire(subject, "shutdown")
        assert subject.state is State.POISONED
    subject.outcomes.clear()
    fire(subject, "shutdown")
    assert subject.state is State.RELEASED


@pytest.mark.parametrize(("row", "guard"), ASKED, ids=[f"{row_id(row)}-{guard}" for row, guard in ASKED])
def test_a_row_is_taken_only_where_its_guards_hold_and_none_that_must_not(row: Transition, guard: str) -> None:
    """With one answer turned round the trigger takes a sibling that accepts, or is refused, and nothing has changed."""
    subject = taking(row)
    subject.answers[guard] = not subject.answers[guard]
    siblings = [other for other in TRANSITIONS if (other.trigger, other.source) == (row.trigger, row.source)]
    accepting = [other for other in siblings if accepts(other, subject.answers)]
    assert row not in accepting
    before = subject.snapshot()
    if accepting:
        fire(subject, row.trigger)
        assert (subject.state, subject.hooks_run) == (accepting[0].target, [hook.name for hook in accepting[0].hooks])
        return
    with pytest.raises(ContractError, match=f"{row.trigger} is refused in state '{row.source.value}'"):
        fire(subject, row.trigger)
    assert subject.snapshot() == before
    subject.answers = taking(row).answers
    fire(subject, row.trigger)
    assert subject.state is row.target


def test_a_guard_that_alone_refuses_is_the_one_that_is_named() -> None:
    """A compaction with an unpublished boundary says so, whatever else is true of the request."""
    for survives in (True, False):
        answers = {"publications_settled": False, "has_survivors": survives}
        with pytest.raises(ContractError, match="staged or frozen publication is unpublished"):
            fire(Subject(State.COMPACTING, answers=answers), "compact")


def test_a_refusal_says_what_is_wrong_in_either_sense() -> None:
    """A guard that has to hold and does not, and one that must not hold and does, each tell the caller in their own words."""
    guard = Guard("has_captures", "there is none", "there is one")
    for options, answer, said in (
        ({"guards": (guard,)}, False, "there is none"),
        ({"unless": (guard,)}, True, "there is one"),
    ):
        row = Transition("go", "go", State.ADMITTED, State.RELEASED, **options)
        machine = Machine(Lifecycle("small", (State.ADMITTED, State.RELEASED), (row,)))
        subject = Subject(State.ADMITTED, answers={"has_captures": answer})
        with pytest.raises(ContractError, match=f"go is refused in state 'admitted': {said}"):
            machine.fire(subject, "go")
        assert subject.state is State.ADMITTED
        subject.answers["has_captures"] = not answer
        machine.fire(subject, "go")
        assert subject.state is State.RELEASED


def test_a_lifecycle_names_the_triggers_that_account_for_its_failures() -> None:
    """Another lifecycle with triggers of its own needs no change of the machine: it is data."""
    rows = (
        Transition("go", "go", State.ADMITTED, State.DECODING, (HOOKS["upload_mapping"],)),
        Transition("broken", "", State.DECODING, State.FINISHING_IN_FLIGHT),
        Transition("close", "close", State.DECODING, State.RELEASED, (HOOKS["prove"],)),
        Transition("lost", "", State.DECODING, State.POISONED),
    )
    machine = Machine(Lifecycle("small", tuple(State), rows, enqueue_failed="broken", drain_failed="lost"))
    subject = Subject(State.ADMITTED, outcomes={"upload_mapping": RuntimeError()})
    with pytest.raises(DeviceError):
        machine.fire(subject, "go")
    assert subject.state is State.FINISHING_IN_FLIGHT
    subject = Subject(State.DECODING, outcomes={"prove": 7})
    with pytest.raises(DrainFailed):
        machine.fire(subject, "close")
    assert subject.state is State.POISONED


@pytest.mark.parametrize("row", dict.fromkeys(row for row, _ in ASKED), ids=row_id)
def test_h26_a_guard_that_raises_is_our_bug_and_leaves_a_state_that_drains(row: Transition) -> None:
    """An exception of host code inside a transition is an `InvariantError`; the request can be finished, with a drain."""
    boom = ZeroDivisionError("host bug")
    subject = taking(row)
    subject.answers[(*row.guards, *row.unless)[0].name] = boom  # type: ignore[assignment]
    with pytest.raises(InvariantError, match="host bug") as caught:
        fire(subject, row.trigger)
    assert caught.value.__cause__ is boom
    assert subject.state is State.FINISHING_IN_FLIGHT


def test_h26_an_interrupt_in_host_code_leaves_a_state_that_drains() -> None:
    """An interrupt between the hooks re-raises as it came, and the request is as after a failed enqueue."""
    subject = Subject(State.PREFILLING, answers={"awaits_first_verification": KeyboardInterrupt()})  # type: ignore[dict-item]
    with pytest.raises(KeyboardInterrupt):
        fire(subject, "finalize_prefill")
    assert subject.state is State.FINISHING_IN_FLIGHT


@pytest.mark.parametrize("way_out", WAYS_OUT)
@pytest.mark.parametrize("state", LIVE, ids=str)
def test_every_live_state_has_both_ways_out_and_drains_exactly_when_work_is_pending(state: State, way_out: str) -> None:
    """Finish and abandon release from everywhere; one drain where work is pending, none elsewhere."""
    subject = Subject(state)
    fire(subject, way_out)
    assert subject.state is State.RELEASED
    assert subject.hooks_run == (["prove"] if state in PENDING else [])


RUNTIME_PROVES = {"finalize_prefill", "complete_decode"}
"""Before these the runtime has itself synchronised; the draft's initialisation is what may still run."""

OUTCOMES = st.sampled_from([RuntimeError("device"), KeyboardInterrupt(), 700])
STEPS = st.tuples(
    st.integers(0, 1_000),
    st.fixed_dictionaries({name: st.booleans() for name in sorted(GUARDS)}),
    st.one_of(st.just({}), st.dictionaries(st.sampled_from(sorted(HOOKS)), OUTCOMES, max_size=2)),
)


class _Stream:
    """What a device would know: whether anything was enqueued since it was last proven idle."""

    def __init__(self) -> None:
        self.busy = False

    def after(self, subject: Subject, trigger: str) -> None:
        for name in subject.hooks_run:
            failed = subject.outcomes.get(name) is not None
            proves = HOOKS[name].kind is HookKind.PROVE
            self.busy = self.busy and failed if proves else True
        subject.ran.clear()
        if trigger in RUNTIME_PROVES and subject.state is State.SETTLED:
            self.busy = False
        if subject.state in PENDING:
            self.busy = True  # the runtime enqueues its own work in these


def _possible(state: State, choice: int) -> str:
    """A trigger that the state has; one step in ten is a way out, so that walks are long."""
    triggers = [trigger for trigger in TRIGGERS if (trigger, state) in DECLARED and not trigger.endswith("_failed")]
    onward = [trigger for trigger in triggers if trigger not in WAYS_OUT]
    pick = triggers if choice % 10 == 0 else onward or triggers
    return pick[choice // 10 % len(pick)]


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_no_path_leaves_a_state_that_its_device_work_contradicts(steps: list[Any]) -> None:
    """Random triggers, guards and failures: a busy stream is always a pending or poisoned state, never a released one."""
    subject, stream = Subject(State.ADMITTED), _Stream()
    for choice, answers, outcomes in steps:
        if subject.state is State.RELEASED:
            subject = Subject(State.ADMITTED)
        subject.answers, subject.outcomes = answers, outcomes
        before, trigger = subject.state, _possible(subject.state, choice)
        try:
            fire(subject, trigger)
        except ContractError:
            assert (subject.state, subject.ran) == (before, [])
            continue
        except (DeviceError, DrainFailed, KeyboardInterrupt):
            assert subject.state in {State.FINISHING_IN_FLIGHT, State.POISONED}
        stream.after(subject, trigger)
        assert not stream.busy or subject.state in PENDING | {State.POISONED}
