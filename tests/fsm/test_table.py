"""The table itself: it says what the specification says, and nothing in it is loose, dead or ambiguous."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from ctxcache.fsm import (
    DESCRIPTIONS,
    FAULTS,
    INITIAL,
    LIFECYCLES,
    LIVE,
    PENDING,
    PHASES,
    SANITIZER_TRANSITIONS,
    TRANSITIONS,
    TRIGGERS,
    HookKind,
    State,
    table,
)
from ctxcache.fsm.points import faults_of
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import Phase

S = State
ALL = frozenset(Kind)
FROZEN = frozenset({Kind.EAGLE, Kind.SHARED_KV})
MTP = frozenset({Kind.HYBRID_MTP})
CHECKPOINTS = frozenset({Kind.PURE_RECURRENT, Kind.HYBRID})

COMPACT = ("+upload_rows", "+upload_rows.draft", "+compact_slot_state", "+compact_slot_state.draft", "!synchronize")
ROWS = ("+upload_rows", "+upload_rows.draft")
PREFILL = (*ROWS, "+zero_recurrent", "+restore", "+reset_lengths", "+reset_lengths.draft")
DRAIN = ("!synchronize",)

# Written by hand from the specification of the lifecycle: trigger, from, to, hooks (+ enqueues, ! proves), deployments.
EXPECTED = [
    ("prepare_prefill", S.ADMITTED, S.PREFILLING, PREFILL, ALL),
    ("enqueue_captures", S.PREFILLING, S.PREFILLING, ("+capture",), ALL),
    (
        "publish_boundary",
        S.PREFILLING,
        S.PREFILLING,
        ("+capture", "+capture_boundary_hidden", "!synchronize"),
        MTP,
    ),
    ("restore_boundary", S.PREFILLING, S.PREFILLING, ("+restore_boundary_hidden",), MTP),
    ("finalize_prefill", S.PREFILLING, S.DRAFTING, (), FROZEN),
    ("finalize_prefill", S.PREFILLING, S.SETTLED, (), ALL),
    ("prepare_decode", S.SETTLED, S.DECODING, ROWS, ALL),
    ("prepare_decode", S.DRAFTING, S.DECODING, ROWS, FROZEN),
    ("capacity_exhausted", S.SETTLED, S.FINISHING_SETTLED, (), ALL),
    ("capacity_exhausted", S.DRAFTING, S.FINISHING_IN_FLIGHT, (), FROZEN),
    ("complete_decode", S.DECODING, S.SETTLED, ("+capture", "!synchronize"), CHECKPOINTS),
    ("complete_decode", S.DECODING, S.SETTLED, (), ALL),
    ("settle_draft", S.DRAFTING, S.SETTLED, DRAIN, FROZEN),
    ("begin_compaction", S.SETTLED, S.COMPACTING, ("+upload_mapping",), ALL),
    ("compact", S.COMPACTING, S.SETTLED, COMPACT, ALL),
    ("compact", S.COMPACTING, S.FINISHING_SETTLED, COMPACT, ALL),
    *(
        (way_out, source, S.RELEASED, hooks, kinds)
        for way_out in ("finish", "abandon")
        for source, hooks, kinds in (
            (S.ADMITTED, (), ALL),
            (S.PREFILLING, DRAIN, ALL),
            (S.DRAFTING, DRAIN, FROZEN),
            (S.DECODING, DRAIN, ALL),
            (S.COMPACTING, DRAIN, ALL),
            (S.SETTLED, (), ALL),
            (S.FINISHING_IN_FLIGHT, DRAIN, ALL),
            (S.FINISHING_SETTLED, (), ALL),
        )
    ),
    ("device_failed", S.ADMITTED, S.FINISHING_IN_FLIGHT, (), ALL),
    ("device_failed", S.PREFILLING, S.FINISHING_IN_FLIGHT, (), ALL),
    ("device_failed", S.DRAFTING, S.FINISHING_IN_FLIGHT, (), FROZEN),
    ("device_failed", S.DECODING, S.FINISHING_IN_FLIGHT, (), ALL),
    ("device_failed", S.COMPACTING, S.FINISHING_IN_FLIGHT, (), ALL),
    ("device_failed", S.SETTLED, S.FINISHING_IN_FLIGHT, (), ALL),
    ("device_failed", S.FINISHING_IN_FLIGHT, S.FINISHING_IN_FLIGHT, (), ALL),
    ("device_failed", S.FINISHING_SETTLED, S.FINISHING_IN_FLIGHT, (), ALL),
    ("drain_failed", S.PREFILLING, S.POISONED, (), ALL),
    ("drain_failed", S.DRAFTING, S.POISONED, (), FROZEN),
    ("drain_failed", S.DECODING, S.POISONED, (), ALL),
    ("drain_failed", S.COMPACTING, S.POISONED, (), ALL),
    ("drain_failed", S.FINISHING_IN_FLIGHT, S.POISONED, (), ALL),
    ("shutdown", S.POISONED, S.RELEASED, DRAIN, ALL),
]


def _said(row):
    marks = {HookKind.ENQUEUE: "+", HookKind.PROVE: "!"}
    hooks = tuple(marks[hook.kind] + hook.fault_point("") for hook in row.hooks)
    return (row.trigger, row.source, row.target, hooks, row.kinds)


def test_the_table_is_the_specification() -> None:
    """Row for row: triggers, sources, targets, device touches in order, and deployments are those of the specification."""
    key = repr
    assert sorted(map(_said, TRANSITIONS), key=key) == sorted(EXPECTED, key=key)


def test_phases_and_pending_states_are_those_of_the_specification() -> None:
    """Ten states; four phases and none; work is pending in exactly five of them."""
    assert {state: phase and phase.name for state, phase in PHASES.items()} == {
        "admitted": "ADMITTED",
        "executing.prefilling": "EXECUTING",
        "executing.drafting": "EXECUTING",
        "executing.decoding": "EXECUTING",
        "executing.compacting": "EXECUTING",
        "executing.settled": "EXECUTING",
        "finishing.in_flight": "FINISHING",
        "finishing.settled": "FINISHING",
        "poisoned": "POISONED",
        "released": None,
    }
    assert {state.value for state in PENDING} == {
        "executing.prefilling",
        "executing.drafting",
        "executing.decoding",
        "executing.compacting",
        "finishing.in_flight",
    }
    assert INITIAL == "admitted"
    assert set(PHASES.values()) == {*Phase, None}
    assert set(DESCRIPTIONS) == set(PHASES) == set(State)


def test_operations_are_those_that_the_coordinator_offers() -> None:
    """Each trigger belongs to the operation that the specification gives it to; the door's own two belong to none."""
    assert {row.trigger: row.operation for row in TRANSITIONS} == {
        "prepare_prefill": "prepare_prefill",
        "enqueue_captures": "enqueue_prefill_captures",
        "publish_boundary": "publish_hybrid_mtp_endpoint",
        "restore_boundary": "restore_hybrid_mtp_boundary_hidden",
        "finalize_prefill": "finalize_prefill_publication",
        "prepare_decode": "prepare_decode_step",
        "capacity_exhausted": "prepare_decode_step",
        "complete_decode": "complete_decode_step",
        "settle_draft": "begin_batch_compaction",
        "begin_compaction": "begin_batch_compaction",
        "compact": "compact_batch",
        "finish": "finish",
        "abandon": "abandon",
        "device_failed": "",
        "drain_failed": "",
        "shutdown": "shutdown",
    }


def test_what_enqueues_and_proves_leaves_a_pending_state() -> None:
    """A row that proves runs its enqueue hooks before it moves, so its source must already account for them."""
    for row in TRANSITIONS:
        if row.proves and any(hook.kind is HookKind.ENQUEUE for hook in row.hooks):
            assert row.source in PENDING


def test_what_only_enqueues_enters_a_pending_state() -> None:
    """Whatever was enqueued before a failure is accounted as pending by the state that was entered."""
    for row in TRANSITIONS:
        if row.hooks and not row.proves:
            assert row.target in PENDING


def test_only_the_runtime_settles_work_without_a_drain_of_ours() -> None:
    """A pending state is left for one without work only by a drain, or where the runtime has synchronised itself."""
    undrained = {
        (row.trigger, row.source)
        for row in TRANSITIONS
        if row.source in PENDING and row.target not in PENDING | {S.POISONED} and not row.proves
    }
    assert undrained == {("finalize_prefill", S.PREFILLING), ("complete_decode", S.DECODING)}


def test_a_drain_is_the_last_hook_of_its_row() -> None:
    """Nothing is enqueued after the drain that claims completion, and no row drains twice."""
    for row in TRANSITIONS:
        if row.proves:
            assert [hook.kind for hook in row.hooks].index(HookKind.PROVE) == len(row.hooks) - 1


@pytest.mark.parametrize("state", sorted(PENDING), ids=str)
def test_every_pending_state_has_its_ways_out_with_a_drain(state: State) -> None:
    """Finish and abandon drain, a failed enqueue keeps it pending, a failed drain poisons."""
    rows = {row.trigger: row for row in TRANSITIONS if row.source is state}
    for way_out in ("finish", "abandon"):
        assert rows[way_out].target is S.RELEASED
        assert rows[way_out].proves
    assert rows["device_failed"].target is S.FINISHING_IN_FLIGHT
    assert rows["drain_failed"].target is S.POISONED


def test_every_live_state_can_be_left_and_released_is_final() -> None:
    """Every state but released has a row out of it, and every live one can be finished, abandoned and failed."""
    sources = defaultdict(set)
    for row in TRANSITIONS:
        sources[row.source].add(row.trigger)
    assert set(sources) == set(State) - {S.RELEASED}
    for state in LIVE:
        assert {"finish", "abandon", "device_failed"} <= sources[state]
    assert sources[S.POISONED] == {"shutdown"}


@pytest.mark.parametrize("kind", Kind)
def test_no_state_or_row_of_a_deployment_is_out_of_reach(kind: Kind) -> None:
    """Walking a deployment's own rows from the start reaches the source of each of them; other states have none."""
    rows = [row for row in TRANSITIONS if kind in row.kinds]
    reached = {INITIAL}
    while grown := {row.target for row in rows if row.source in reached} - reached:
        reached |= grown
    assert {row.source for row in rows} | {S.RELEASED} == reached
    drafts = kind in FROZEN
    assert reached == set(State) if drafts else reached == set(State) - {S.DRAFTING}


def test_every_state_is_reached_by_some_deployment_and_every_row_happens_in_one() -> None:
    """No row is declared for no deployment, no hook for a row that cannot run it, no state without a way in."""
    assert {row.target for row in TRANSITIONS} | {INITIAL} == set(State)
    for row in TRANSITIONS:
        assert row.kinds
        for hook in row.hooks:
            assert row.kinds & hook.kinds


def test_rows_with_one_trigger_and_source_are_told_apart_by_one_question() -> None:
    """No row hides another: of each pair one asks for what the other rules out, and they agree on everything else."""
    siblings = defaultdict(list)
    for row in TRANSITIONS:
        siblings[row.trigger, row.source].append(row)
    pairs = [rows for rows in siblings.values() if len(rows) > 1]
    assert {rows[0].trigger for rows in pairs} == {"finalize_prefill", "complete_decode", "compact"}
    for one, other in pairs:
        (question,) = other.unless
        assert one.unless == ()
        assert one.guards == (*other.guards, question)
        assert question.refusal_unless


def test_the_table_can_be_read_aloud() -> None:
    """Every row is written out, one a line: no splat, no comprehension, no helper that makes several."""
    tree = ast.parse(Path(table.__file__).read_text(encoding="utf-8"))
    found = {node.target.id: node.value for node in tree.body if isinstance(node, ast.AnnAssign)}
    for name, rows in (("TRANSITIONS", TRANSITIONS), ("SANITIZER_TRANSITIONS", SANITIZER_TRANSITIONS)):
        written = found[name].elts
        assert len(written) == len(rows)
        for call in written:
            assert call.func.id == "Row"
            assert call.lineno == call.end_lineno
            kinds = (ast.Call, ast.Name, ast.Attribute, ast.Constant, ast.Tuple, ast.keyword, ast.Load)
            assert all(isinstance(node, kinds) for node in ast.walk(call))


def test_a_name_means_one_thing() -> None:
    """A hook's or guard's name stands for one declaration, and no name is both."""
    hooks = {hook for row in TRANSITIONS for hook in row.hooks}
    guards = {guard for row in TRANSITIONS for guard in (*row.guards, *row.unless)}
    names = [hook.name for hook in hooks] + [guard.name for guard in guards]
    assert len(names) == len(set(names))
    assert all(name.isidentifier() for name in names)


def test_a_trigger_is_listed_once_and_in_the_order_of_life() -> None:
    """`TRIGGERS` holds every trigger of the table once, from the first operation to the last."""
    assert set(TRIGGERS) == {row.trigger for row in TRANSITIONS}
    assert len(TRIGGERS) == len(set(TRIGGERS))
    assert TRIGGERS[0] == "prepare_prefill"
    assert TRIGGERS[-1] == "shutdown"


def test_no_row_stands_twice() -> None:
    """The table has no duplicate row."""
    assert len(set(TRANSITIONS)) == len(TRANSITIONS)


@pytest.mark.parametrize("kind", Kind)
def test_a_lifecycle_of_one_kind_is_the_rows_and_hooks_that_it_can_have(kind: Kind) -> None:
    """Restricted to a deployment kind, rows, hooks and states of others are gone, and nothing else is."""
    whole, only = LIFECYCLES["request"], LIFECYCLES["request"].of_kind(kind)
    rows = [row for row in TRANSITIONS if kind in row.kinds]
    assert [(row.trigger, row.source, row.target) for row in only.transitions] == [
        (row.trigger, row.source, row.target) for row in rows
    ]
    for mine, row in zip(only.transitions, rows, strict=True):
        assert [hook.name for hook in mine.hooks] == [hook.name for hook in row.hooks if kind in hook.kinds]
        assert {mine.kinds, *(hook.kinds for hook in mine.hooks)} == {frozenset({kind})}
    assert (S.DRAFTING in only.states) == (kind in FROZEN)
    assert set(whole.states) - set(only.states) <= {S.DRAFTING}
    assert only.of_kind(kind) == only
    assert [fault.name for fault in faults_of(only, only.transitions)] == [
        fault.name for fault in FAULTS if kind in fault.kinds
    ]
