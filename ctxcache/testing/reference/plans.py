"""Planning of the plain-Python manager: which record serves an input, and what is needed besides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.ids import Hash128, MissReason, ReusePlanKind, SpecReplayMode
from ctxcache.manager.results import HybridCheckpointKey, PageIds, ReusePlan
from ctxcache.testing.reference.state import PARTIAL, RECURRENT, Keys, RecordState, ReferenceState


@dataclass(frozen=True)
class Rules:
    """What a deployment kind and an execution mode mean for a plan."""

    kind: Kind
    mode: Mode

    @property
    def checkpoints(self) -> bool:
        """Whether reuse goes by exact checkpoints."""
        return self.kind in {Kind.PURE_RECURRENT, Kind.HYBRID, Kind.HYBRID_MTP}

    @property
    def attention(self) -> bool:
        """Whether there are base pages."""
        return self.kind is not Kind.PURE_RECURRENT

    @property
    def paired(self) -> bool:
        """Whether the request runs a draft with pages of its own."""
        return self.mode in {Mode.EAGLE, Mode.MTP}

    @property
    def replays(self) -> bool:
        """Whether the last matched block is always computed again."""
        return self.mode in {Mode.EAGLE, Mode.SHARED_KV}

    @property
    def always_cold(self) -> bool:
        """Whether the mode neither looks up nor publishes."""
        return self.kind is Kind.HYBRID_MTP and self.mode is Mode.VANILLA

    def shared_blocks(self, exact_length: int, tokens_per_page: int) -> int:
        """Return the full blocks that a checkpoint of this length shares."""
        if not self.attention:
            return 0
        return (exact_length - (self.kind is Kind.HYBRID_MTP)) // tokens_per_page


@dataclass(frozen=True)
class Match:
    """What an input finds: the blocks (keys) that match, and the record that serves it."""

    keys: Keys
    record: RecordState | None
    checkpoint_length: int = 0


class Proof(NamedTuple):
    """What must still be so at `acquire`: the blocks that matched, and the serial of the checkpoint's record (or 0)."""

    keys: Keys
    serial: int


def matched_prefix(state: ReferenceState, keys: Keys) -> int:
    """Return how many leading blocks are indexed."""
    count = 0
    while count < len(keys) and keys[count] in state.page_of:
        count += 1
    return count


def common_prefix(left: Keys, right: Keys) -> int:
    """Return how many leading keys two sequences share."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


def find_blocks(state: ReferenceState, keys: Keys, *, paired: bool) -> Match:
    """Find the longest prefix of `keys` that is indexed; with `paired`, that one record holds in base and draft."""
    if paired:
        depth = max(
            (min(len(record.draft_pages), common_prefix(record.keys, keys)) for record in state.records), default=0
        )
    else:
        depth = matched_prefix(state, keys)
    matched = keys[:depth]
    return Match(matched, hit_record(state, matched, paired=paired))


def hit_record(state: ReferenceState, matched: Keys, *, paired: bool) -> RecordState | None:
    """Return the record that a hit makes most recent: the one that ends there, else the one made last of those through.

    `None` when nothing matched, or what matched is gone.
    """
    through = [
        record
        for record in state.records
        if matched
        and record.keys[: len(matched)] == matched
        and (not paired or len(record.draft_pages) >= len(matched))
    ]
    ending = [record for record in through if len(record.keys) == len(matched)]
    return max(ending or through, key=lambda record: record.serial, default=None)


def find_checkpoint(
    state: ReferenceState,
    rules: Rules,
    keys: Keys,
    num_tokens: int,
    exact_keys: Iterable[HybridCheckpointKey],
    tokens_per_page: int,
) -> Match:
    """Find the longest checkpoint shorter than the input whose exact key is among those given and whose blocks match."""
    wanted = set(exact_keys)
    found = [
        record
        for record in state.records
        if record.checkpoint in wanted
        and record.checkpoint.exact_length < num_tokens
        and record.keys == keys[: rules.shared_blocks(record.checkpoint.exact_length, tokens_per_page)]
    ]
    if not found:
        return Match((), None)
    length, _, record = max(
        (record.checkpoint.exact_length, record.serial, record) for record in found if record.checkpoint
    )
    return Match(record.keys, record, length)


def make_plan(
    state: ReferenceState,
    rules: Rules,
    match: Match,
    *,
    tokens_per_page: int,
    num_tokens: int,
    base_extra_tokens: int,
    draft_extra_tokens: int,
    bypass: bool,
    owner: object,
) -> ReusePlan:
    """Turn a match into a plan."""
    matched_tokens = match.checkpoint_length or len(match.keys) * tokens_per_page
    whole_input = matched_tokens == num_tokens
    reused = len(match.keys)
    if not rules.checkpoints and reused and (rules.replays or whole_input):
        reused -= 1
    reused_tokens = match.checkpoint_length or reused * tokens_per_page
    if whole_input and not rules.paired:
        kind = ReusePlanKind.FULL_INPUT_REWIND
    elif reused_tokens:
        kind = ReusePlanKind.STANDARD
    else:
        kind = ReusePlanKind.NO_REUSABLE_PREFIX
    base_pages = [state.page_of[key] for key in match.keys]
    draft_pages = match.record.draft_pages[:reused] if rules.paired and match.record else []
    snapshots = match.record.snapshots if match.checkpoint_length and match.record else {}

    def demand(extra_tokens: int) -> int:
        return -(-(num_tokens + extra_tokens) // tokens_per_page) - reused

    return ReusePlan(
        kind=kind,
        execution_mode=rules.mode,
        bypass=bypass,
        input_token_count=num_tokens,
        matched_token_length=matched_tokens,
        reused_token_length=reused_tokens,
        matched_base_pages=page_ids(base_pages),
        reused_base_pages=page_ids(base_pages[:reused]),
        reused_draft_pages=page_ids(draft_pages),
        base_page_demand=demand(base_extra_tokens) if rules.attention else 0,
        draft_page_demand=demand(draft_extra_tokens) if rules.paired else 0,
        recurrent_snapshot_slot=snapshots.get(RECURRENT),
        partial_kv_snapshot_slot=snapshots.get(PARTIAL),
        exact_checkpoint_length=match.checkpoint_length,
        spec_replay_mode=SpecReplayMode.FULL_PAGE if rules.replays and match.keys else SpecReplayMode.NONE,
        _owner=owner,
        _proof=Proof(match.keys, match.record.serial if match.record is not None and match.checkpoint_length else 0),
    )


def miss_reason(
    state: ReferenceState,
    rules: Rules,
    plan: ReusePlan,
    keys: Keys,
    exact_keys: tuple[HybridCheckpointKey, ...],
    *,
    tokens_per_page: int,
) -> MissReason:
    """Say why a plan does not reuse the whole input, in the order of `MatchResult.reason`."""
    if plan.bypass:
        return MissReason.BYPASS
    indexed = matched_prefix(state, keys) if rules.attention else 0
    if rules.attention:
        evicted = indexed < len(keys) and keys[indexed] in state.gone
    else:
        evicted = any(key in state.gone for key in keys)
    if not state.records and not evicted:
        return MissReason.EMPTY_CACHE
    if rules.checkpoints:
        lately = evicted or any(key.exact_prefix_digest in state.gone for key in exact_keys)
        return _checkpoint_miss_reason(state, rules, plan, keys, exact_keys, tokens_per_page, evicted=lately)
    matched = plan.matched_base_pages.size
    if matched and matched == len(keys):
        if rules.replays:
            return MissReason.REPLAY
        rewound = plan.matched_token_length == plan.input_token_count
        return MissReason.REWIND if rewound else MissReason.PARTIAL_BLOCK
    if matched < indexed:
        return MissReason.UNPAIRED_DRAFT
    if evicted:
        return MissReason.EVICTED
    if not keys:
        return MissReason.PARTIAL_BLOCK
    return MissReason.DIVERGED if indexed else MissReason.NO_MATCH


def _checkpoint_miss_reason(
    state: ReferenceState,
    rules: Rules,
    plan: ReusePlan,
    keys: Keys,
    exact_keys: tuple[HybridCheckpointKey, ...],
    tokens_per_page: int,
    *,
    evicted: bool,
) -> MissReason:
    indexed = matched_prefix(state, keys) if rules.attention else 0
    if plan.reused_token_length:
        if plan.reused_token_length == plan.input_token_count - 1:
            return MissReason.NONE
        return MissReason.PARTIAL_BLOCK if indexed == len(keys) else MissReason.DIVERGED
    if evicted:
        return MissReason.EVICTED
    unlimited = 1 << 62
    if find_checkpoint(state, rules, keys, unlimited, exact_keys, tokens_per_page).record is not None:
        return MissReason.WRONG_CHECKPOINT_LENGTH
    return MissReason.NO_CHECKPOINT if indexed else MissReason.NO_MATCH


def page_ids(pages: list[int]) -> PageIds:
    """Return pages as the array that results hold."""
    return np.array(pages, dtype=np.int32)


def keys_of(rows: NDArray[np.uint64], count: int) -> Keys:
    """Return the first rows of a key array as values."""
    return tuple(Hash128(int(hi), int(lo)) for hi, lo in rows[:count])
