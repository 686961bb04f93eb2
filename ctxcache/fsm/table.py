"""The lifecycle as data: which trigger leads where, behind which guard, with which device hooks.

Everything that talks about the lifecycle (the machine, the diagram, the list of fault points) reads this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ctxcache.fsm.states import LIVE, PENDING, State
from ctxcache.ids import PAIRED_KINDS, RECURRENT_KINDS
from ctxcache.ids import ContextCacheDeploymentKind as Kind

ALL_KINDS = frozenset(Kind)
PAGED_KINDS = ALL_KINDS - {Kind.PURE_RECURRENT}
FROZEN_KINDS = frozenset({Kind.EAGLE, Kind.SHARED_KV})
MTP_KINDS = frozenset({Kind.HYBRID_MTP})
BATCH_CAPTURE_KINDS = RECURRENT_KINDS - MTP_KINDS  # MTP captures one boundary of one sequence at a time


class HookKind(Enum):
    """What a hook does to the stream."""

    ENQUEUE = "enqueue"
    PROVE = "prove"


@dataclass(frozen=True, slots=True)
class Hook:
    """One device touch of a transition.

    Attributes:
        name: the model's method that runs it.
        kind: whether it enqueues work or proves enqueued work complete.
        op: the device op it calls, and so its fault point; `role` follows where the draft's resources are touched.
        kinds: deployments in which it can touch the device.
        role: "" for the base's resources, "draft" for the draft's.
    """

    name: str
    kind: HookKind
    op: str
    kinds: frozenset[Kind]
    role: str = ""

    def fault_point(self, operation: str) -> str:
        """Name of this hook's fault point within a coordinator operation: `<operation>.<op>[.<role>]`."""
        return ".".join(part for part in (operation, self.op, self.role) if part)


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition on a transition: the model's method that decides, and what to tell a refused caller."""

    name: str
    refusal: str


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the lifecycle.

    Attributes:
        trigger: the event.
        source: the state it leaves.
        target: the state it enters.
        hooks: device touches in order.
        guards: all must hold; of several rows with one trigger and source the first whose guards hold is taken.
        operation: the coordinator operation that fires it; empty where the one door does.
        kinds: deployments in which it can happen.
    """

    trigger: str
    source: State
    target: State
    hooks: tuple[Hook, ...] = ()
    guards: tuple[Guard, ...] = ()
    operation: str = ""
    kinds: frozenset[Kind] = ALL_KINDS

    @property
    def proves(self) -> bool:
        """Whether a hook proves the enqueued work complete.

        A transition that proves runs all its hooks before it enters its target, because the target claims completion.
        One that only enqueues runs them after, so that what was enqueued before a failure is accounted as pending.
        """
        return any(hook.kind is HookKind.PROVE for hook in self.hooks)


def _enqueue(name: str, op: str, kinds: frozenset[Kind], role: str = "") -> Hook:
    return Hook(name, HookKind.ENQUEUE, op, kinds, role)


_BASE_ROWS = _enqueue("upload_base_rows", "upload_rows", PAGED_KINDS)
_DRAFT_ROWS = _enqueue("upload_draft_rows", "upload_rows", PAIRED_KINDS, "draft")
_CAPTURE = _enqueue("capture_snapshots", "capture", BATCH_CAPTURE_KINDS)
_PROVE = Hook("prove", HookKind.PROVE, "synchronize", ALL_KINDS)

_PREPARE_PREFILL_HOOKS = (
    _BASE_ROWS,
    _DRAFT_ROWS,
    _enqueue("zero_recurrent", "zero_recurrent", RECURRENT_KINDS),
    _enqueue("restore_snapshots", "restore", RECURRENT_KINDS),
    _enqueue("reset_base_lengths", "reset_lengths", ALL_KINDS),
    _enqueue("reset_draft_lengths", "reset_lengths", PAIRED_KINDS, "draft"),
)
_PUBLISH_BOUNDARY_HOOKS = (
    _enqueue("capture_boundary", "capture", MTP_KINDS),
    _enqueue("capture_boundary_hidden", "capture_boundary_hidden", MTP_KINDS),
    _PROVE,
)
_COMPACT_HOOKS = (
    _enqueue("compact_base_rows", "upload_rows", PAGED_KINDS),
    _enqueue("compact_draft_rows", "upload_rows", PAIRED_KINDS, "draft"),
    _enqueue("compact_base_slots", "compact_slot_state", ALL_KINDS),
    _enqueue("compact_draft_slots", "compact_slot_state", PAIRED_KINDS, "draft"),
    _PROVE,
)

_SETTLED_PUBLICATIONS = Guard(
    "publications_settled", "a staged or frozen publication is unpublished; complete the step that publishes it first"
)
_SURVIVORS = Guard("has_survivors", "no sequence survives the compaction")
_NO_SURVIVOR = Guard("has_no_survivor", "a sequence survives the compaction")
_CAPTURES = Guard("has_captures", "there is no checkpoint to capture")
_NO_CAPTURES = Guard("has_no_captures", "there are checkpoints to capture")
_DRAFTS = Guard("awaits_first_verification", "the request's draft model has nothing to initialise")
_NO_DRAFTS = Guard("awaits_no_verification", "the request's draft model awaits its first verification")

_FORWARD = (
    Transition(
        "prepare_prefill", State.ADMITTED, State.PREFILLING, _PREPARE_PREFILL_HOOKS, operation="prepare_prefill"
    ),
    Transition(
        "enqueue_captures", State.PREFILLING, State.PREFILLING, (_CAPTURE,), operation="enqueue_prefill_captures"
    ),
    Transition(
        "publish_boundary",
        State.PREFILLING,
        State.PREFILLING,
        _PUBLISH_BOUNDARY_HOOKS,
        operation="publish_hybrid_mtp_endpoint",
        kinds=MTP_KINDS,
    ),
    Transition(
        "restore_boundary",
        State.PREFILLING,
        State.PREFILLING,
        (_enqueue("restore_boundary_hidden", "restore_boundary_hidden", MTP_KINDS),),
        operation="restore_hybrid_mtp_boundary_hidden",
        kinds=MTP_KINDS,
    ),
    Transition(
        "finalize_prefill",
        State.PREFILLING,
        State.DRAFTING,
        guards=(_DRAFTS,),
        operation="finalize_prefill_publication",
        kinds=FROZEN_KINDS,
    ),
    Transition(
        "finalize_prefill",
        State.PREFILLING,
        State.SETTLED,
        guards=(_NO_DRAFTS,),
        operation="finalize_prefill_publication",
    ),
    *(
        Transition(
            "prepare_decode",
            source,
            State.DECODING,
            (_BASE_ROWS, _DRAFT_ROWS),
            operation="prepare_decode_step",
            kinds=kinds,
        )
        for source, kinds in ((State.SETTLED, ALL_KINDS), (State.DRAFTING, FROZEN_KINDS))
    ),
    Transition("capacity_exhausted", State.SETTLED, State.FINISHING_SETTLED, operation="prepare_decode_step"),
    Transition(
        "capacity_exhausted",
        State.DRAFTING,
        State.FINISHING_IN_FLIGHT,
        operation="prepare_decode_step",
        kinds=FROZEN_KINDS,
    ),
    Transition(
        "complete_decode",
        State.DECODING,
        State.SETTLED,
        (_CAPTURE, _PROVE),
        guards=(_CAPTURES,),
        operation="complete_decode_step",
        kinds=BATCH_CAPTURE_KINDS,
    ),
    Transition(
        "complete_decode", State.DECODING, State.SETTLED, guards=(_NO_CAPTURES,), operation="complete_decode_step"
    ),
    Transition(
        "settle_draft",
        State.DRAFTING,
        State.SETTLED,
        (_PROVE,),
        operation="begin_batch_compaction",
        kinds=FROZEN_KINDS,
    ),
    Transition(
        "begin_compaction",
        State.SETTLED,
        State.COMPACTING,
        (_enqueue("upload_mapping", "upload_mapping", ALL_KINDS),),
        operation="begin_batch_compaction",
    ),
    Transition(
        "compact",
        State.COMPACTING,
        State.SETTLED,
        _COMPACT_HOOKS,
        guards=(_SETTLED_PUBLICATIONS, _SURVIVORS),
        operation="compact_batch",
    ),
    Transition(
        "compact",
        State.COMPACTING,
        State.FINISHING_SETTLED,
        _COMPACT_HOOKS,
        guards=(_SETTLED_PUBLICATIONS, _NO_SURVIVOR),
        operation="compact_batch",
    ),
)


def _kinds_of(state: State) -> frozenset[Kind]:
    return FROZEN_KINDS if state is State.DRAFTING else ALL_KINDS


def _way_out(trigger: str, source: State) -> Transition:
    hooks = (_PROVE,) if source in PENDING else ()
    return Transition(trigger, source, State.RELEASED, hooks, operation=trigger, kinds=_kinds_of(source))


TRANSITIONS: tuple[Transition, ...] = (
    *_FORWARD,
    *(_way_out("finish", source) for source in LIVE),
    *(_way_out("abandon", source) for source in LIVE),
    *(Transition("device_failed", source, State.FINISHING_IN_FLIGHT, kinds=_kinds_of(source)) for source in LIVE),
    *(
        Transition("drain_failed", source, State.POISONED, kinds=_kinds_of(source))
        for source in LIVE
        if source in PENDING
    ),
    Transition("shutdown", State.POISONED, State.RELEASED, (_PROVE,), operation="shutdown"),
)
"""The whole lifecycle. Nothing outside this table changes a state."""


def _sum(
    trigger: str, source: State, operation: str, kinds: frozenset[Kind], draft_kinds: frozenset[Kind] = PAIRED_KINDS
) -> Transition:
    hooks = (
        _enqueue("sum_base_pages", "sum_pages", PAGED_KINDS),
        _enqueue("sum_draft_pages", "sum_pages", draft_kinds, "draft"),
        _PROVE,
    )
    return Transition(trigger, source, source, hooks, operation=operation, kinds=kinds)


SANITIZER_TRANSITIONS: tuple[Transition, ...] = (
    _sum("check_pages", State.PREFILLING, "prepare_prefill", PAGED_KINDS),
    _sum("sum_boundary", State.PREFILLING, "publish_hybrid_mtp_endpoint", MTP_KINDS),
    _sum("sum_prompts", State.PREFILLING, "finalize_prefill_publication", PAGED_KINDS, MTP_KINDS),  # EAGLE's are frozen
    _sum("sum_step", State.DECODING, "complete_decode_step", PAGED_KINDS),
    _sum("sum_settled", State.DRAFTING, "begin_batch_compaction", FROZEN_KINDS),
    *(
        _sum("sum_finished", source, "finish", FROZEN_KINDS)
        for source in (State.DRAFTING, State.DECODING, State.FINISHING_IN_FLIGHT)
    ),
)
"""What the page sanitizer adds where it is switched on: it sums pages within a state, and leaves it only by a failure."""

TRIGGERS: tuple[str, ...] = tuple(dict.fromkeys(row.trigger for row in TRANSITIONS))
"""Every trigger once, in the order of a request's life."""
