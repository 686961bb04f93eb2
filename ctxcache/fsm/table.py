"""The lifecycle of a request as data: which trigger leads where, behind which guard, with which device hooks.

Everything that talks about the lifecycle (the machine, the diagrams, the list of fault points) reads this table.
"""

from __future__ import annotations

from ctxcache.fsm.declaration import ALL_KINDS as ALL
from ctxcache.fsm.declaration import Guard, Hook, HookKind, Lifecycle
from ctxcache.fsm.declaration import Transition as Row
from ctxcache.fsm.states import State as S  # noqa: N817 - a column of the table
from ctxcache.ids import PAIRED_KINDS as PAIRED
from ctxcache.ids import RECURRENT_KINDS as RECURRENT
from ctxcache.ids import ContextCacheDeploymentKind as Kind

PAGED = ALL - {Kind.PURE_RECURRENT}
FROZEN = frozenset({Kind.EAGLE, Kind.SHARED_KV})
MTP = frozenset({Kind.HYBRID_MTP})
CAPTURING = RECURRENT - MTP  # MTP captures one boundary of one sequence at a time
ENQUEUE, PROVE = HookKind

# fmt: off

# Device touches: the request's method, what it does, the device op, the deployments that have it, whose resources.
BASE_ROWS        = Hook("upload_base_rows",        ENQUEUE, "upload_rows",             PAGED)
DRAFT_ROWS       = Hook("upload_draft_rows",       ENQUEUE, "upload_rows",             PAIRED, "draft")
ZERO_STATE       = Hook("zero_recurrent",          ENQUEUE, "zero_recurrent",          RECURRENT)
RESTORE          = Hook("restore_snapshots",       ENQUEUE, "restore",                 RECURRENT)
BASE_LENGTHS     = Hook("reset_base_lengths",      ENQUEUE, "reset_lengths",           ALL)
DRAFT_LENGTHS    = Hook("reset_draft_lengths",     ENQUEUE, "reset_lengths",           PAIRED, "draft")
CAPTURE          = Hook("capture_snapshots",       ENQUEUE, "capture",                 CAPTURING)
CAPTURE_BOUNDARY = Hook("capture_boundary",        ENQUEUE, "capture",                 MTP)
CAPTURE_HIDDEN   = Hook("capture_boundary_hidden", ENQUEUE, "capture_boundary_hidden", MTP)
RESTORE_HIDDEN   = Hook("restore_boundary_hidden", ENQUEUE, "restore_boundary_hidden", MTP)
UPLOAD_MAPPING   = Hook("upload_mapping",          ENQUEUE, "upload_mapping",          ALL)
MOVE_BASE_ROWS   = Hook("compact_base_rows",       ENQUEUE, "upload_rows",             PAGED)
MOVE_DRAFT_ROWS  = Hook("compact_draft_rows",      ENQUEUE, "upload_rows",             PAIRED, "draft")
MOVE_BASE_SLOTS  = Hook("compact_base_slots",      ENQUEUE, "compact_slot_state",      ALL)
MOVE_DRAFT_SLOTS = Hook("compact_draft_slots",     ENQUEUE, "compact_slot_state",      PAIRED, "draft")
SUM_BASE         = Hook("sum_base_pages",          ENQUEUE, "sum_pages",               PAGED)
SUM_DRAFT        = Hook("sum_draft_pages",         ENQUEUE, "sum_pages",               PAIRED, "draft")
SUM_MTP_DRAFT    = Hook("sum_draft_pages",         ENQUEUE, "sum_pages",               MTP,    "draft")
SYNCHRONIZE      = Hook("prove",                   PROVE,   "synchronize",             ALL)

# Hooks in order.
DRAIN    = (SYNCHRONIZE,)
ROWS     = (BASE_ROWS, DRAFT_ROWS)
PREPARE  = (BASE_ROWS, DRAFT_ROWS, ZERO_STATE, RESTORE, BASE_LENGTHS, DRAFT_LENGTHS)
SAVE     = (CAPTURE,)
STEP     = (CAPTURE, SYNCHRONIZE)
BOUNDARY = (CAPTURE_BOUNDARY, CAPTURE_HIDDEN, SYNCHRONIZE)
FOLD_IN  = (RESTORE_HIDDEN,)
MAP      = (UPLOAD_MAPPING,)
COMPACT  = (MOVE_BASE_ROWS, MOVE_DRAFT_ROWS, MOVE_BASE_SLOTS, MOVE_DRAFT_SLOTS, SYNCHRONIZE)
SUM      = (SUM_BASE, SUM_DRAFT, SYNCHRONIZE)
SUM_MTP  = (SUM_BASE, SUM_MTP_DRAFT, SYNCHRONIZE)  # EAGLE's prompts are frozen, and summed later

# Questions: the request's method, what is wrong where it has to hold, and where it must not.
DRAFTS = Guard(
    "awaits_first_verification",
    "the request's draft model has nothing to initialise",
    "the request's draft model awaits its first verification",
)
CAPTURES = Guard("has_captures", "there is no checkpoint to capture", "there are checkpoints to capture")
PUBLISHED = Guard(
    "publications_settled", "a staged or frozen publication is unpublished; complete the step that publishes it first"
)
SURVIVE = Guard("has_survivors", "no sequence survives the compaction", "a sequence survives the compaction")

# A row: trigger, the operation that fires it, from, to, hooks; guards and deployments, where not all.
TRANSITIONS: tuple[Row, ...] = (
    Row("prepare_prefill",  "prepare_prefill",                    S.ADMITTED,   S.PREFILLING, PREPARE),
    Row("enqueue_captures", "enqueue_prefill_captures",           S.PREFILLING, S.PREFILLING, SAVE),
    Row("publish_boundary", "publish_hybrid_mtp_endpoint",        S.PREFILLING, S.PREFILLING, BOUNDARY, kinds=MTP),
    Row("restore_boundary", "restore_hybrid_mtp_boundary_hidden", S.PREFILLING, S.PREFILLING, FOLD_IN,  kinds=MTP),

    Row("finalize_prefill", "finalize_prefill_publication", S.PREFILLING, S.DRAFTING, (), guards=(DRAFTS,), kinds=FROZEN),
    Row("finalize_prefill", "finalize_prefill_publication", S.PREFILLING, S.SETTLED,  (), unless=(DRAFTS,)),

    Row("prepare_decode",     "prepare_decode_step", S.SETTLED,  S.DECODING,            ROWS),
    Row("prepare_decode",     "prepare_decode_step", S.DRAFTING, S.DECODING,            ROWS, kinds=FROZEN),
    Row("capacity_exhausted", "prepare_decode_step", S.SETTLED,  S.FINISHING_SETTLED,   ()),
    Row("capacity_exhausted", "prepare_decode_step", S.DRAFTING, S.FINISHING_IN_FLIGHT, (),   kinds=FROZEN),

    Row("complete_decode", "complete_decode_step", S.DECODING, S.SETTLED, STEP, guards=(CAPTURES,), kinds=CAPTURING),
    Row("complete_decode", "complete_decode_step", S.DECODING, S.SETTLED, (),   unless=(CAPTURES,)),

    Row("settle_draft",     "begin_batch_compaction", S.DRAFTING, S.SETTLED,    DRAIN, kinds=FROZEN),
    Row("begin_compaction", "begin_batch_compaction", S.SETTLED,  S.COMPACTING, MAP),

    Row("compact", "compact_batch", S.COMPACTING, S.SETTLED,           COMPACT, guards=(PUBLISHED, SURVIVE)),
    Row("compact", "compact_batch", S.COMPACTING, S.FINISHING_SETTLED, COMPACT, guards=(PUBLISHED,), unless=(SURVIVE,)),

    Row("finish", "finish", S.ADMITTED,            S.RELEASED, ()),
    Row("finish", "finish", S.PREFILLING,          S.RELEASED, DRAIN),
    Row("finish", "finish", S.DRAFTING,            S.RELEASED, DRAIN, kinds=FROZEN),
    Row("finish", "finish", S.DECODING,            S.RELEASED, DRAIN),
    Row("finish", "finish", S.COMPACTING,          S.RELEASED, DRAIN),
    Row("finish", "finish", S.SETTLED,             S.RELEASED, ()),
    Row("finish", "finish", S.FINISHING_IN_FLIGHT, S.RELEASED, DRAIN),
    Row("finish", "finish", S.FINISHING_SETTLED,   S.RELEASED, ()),

    Row("abandon", "abandon", S.ADMITTED,            S.RELEASED, ()),
    Row("abandon", "abandon", S.PREFILLING,          S.RELEASED, DRAIN),
    Row("abandon", "abandon", S.DRAFTING,            S.RELEASED, DRAIN, kinds=FROZEN),
    Row("abandon", "abandon", S.DECODING,            S.RELEASED, DRAIN),
    Row("abandon", "abandon", S.COMPACTING,          S.RELEASED, DRAIN),
    Row("abandon", "abandon", S.SETTLED,             S.RELEASED, ()),
    Row("abandon", "abandon", S.FINISHING_IN_FLIGHT, S.RELEASED, DRAIN),
    Row("abandon", "abandon", S.FINISHING_SETTLED,   S.RELEASED, ()),

    Row("device_failed", "", S.ADMITTED,            S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.PREFILLING,          S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.DRAFTING,            S.FINISHING_IN_FLIGHT, (), kinds=FROZEN),
    Row("device_failed", "", S.DECODING,            S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.COMPACTING,          S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.SETTLED,             S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.FINISHING_IN_FLIGHT, S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.FINISHING_SETTLED,   S.FINISHING_IN_FLIGHT, ()),

    Row("drain_failed", "", S.PREFILLING,          S.POISONED, ()),
    Row("drain_failed", "", S.DRAFTING,            S.POISONED, (), kinds=FROZEN),
    Row("drain_failed", "", S.DECODING,            S.POISONED, ()),
    Row("drain_failed", "", S.COMPACTING,          S.POISONED, ()),
    Row("drain_failed", "", S.FINISHING_IN_FLIGHT, S.POISONED, ()),

    Row("shutdown", "shutdown", S.POISONED, S.RELEASED, DRAIN),
)
"""The whole lifecycle. Nothing outside this table changes a state."""

SANITIZER_TRANSITIONS: tuple[Row, ...] = (
    Row("check_pages",  "prepare_prefill",              S.PREFILLING, S.PREFILLING, SUM,     kinds=PAGED),
    Row("sum_boundary", "publish_hybrid_mtp_endpoint",  S.PREFILLING, S.PREFILLING, SUM,     kinds=MTP),
    Row("sum_prompts",  "finalize_prefill_publication", S.PREFILLING, S.PREFILLING, SUM_MTP, kinds=PAGED),
    Row("sum_step",     "complete_decode_step",         S.DECODING,   S.DECODING,   SUM,     kinds=PAGED),
    Row("sum_settled",  "begin_batch_compaction",       S.DRAFTING,   S.DRAFTING,   SUM,     kinds=FROZEN),

    Row("sum_finished", "finish", S.DRAFTING,            S.DRAFTING,            SUM, kinds=FROZEN),
    Row("sum_finished", "finish", S.DECODING,            S.DECODING,            SUM, kinds=FROZEN),
    Row("sum_finished", "finish", S.FINISHING_IN_FLIGHT, S.FINISHING_IN_FLIGHT, SUM, kinds=FROZEN),
)
"""What the page sanitizer adds where it is switched on: it sums pages within a state, and leaves it only by a failure."""

# fmt: on

TRIGGERS: tuple[str, ...] = tuple(dict.fromkeys(row.trigger for row in TRANSITIONS))
"""Every trigger once, in the order of a request's life."""

REQUEST = Lifecycle("request", tuple(S), TRANSITIONS, SANITIZER_TRANSITIONS)

LIFECYCLES: dict[str, Lifecycle] = {lifecycle.name: lifecycle for lifecycle in (REQUEST,)}
"""Every declared lifecycle, by name."""
