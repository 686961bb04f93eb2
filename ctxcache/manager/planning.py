"""What could be reused: pure reading. Plans hold nothing and may go stale; `acquire` looks again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ctxcache.arguments import Int32s, Words, as_integer, describe
from ctxcache.errors import ContractError
from ctxcache.ids import ContextCacheExecutionMode, Hash128, MissReason, ReusePlanKind, SpecReplayMode
from ctxcache.jit import njit_in_place
from ctxcache.manager.block_index import find_deepest, write_path
from ctxcache.manager.checkpoints import find_checkpoint
from ctxcache.manager.draft_pages import count_paired, write_draft_path
from ctxcache.manager.layout import (
    EXACT_LENGTH,
    GHOSTS,
    NUM_BLOCKS,
    NUM_RECORDS,
    PAIR_PAGE,
    PARTIAL_SLOT,
    RECURRENT_SLOT,
    Core,
)
from ctxcache.manager.results import HybridCheckpointKey, MatchResult, ReusePlan

_NO_PAGES = np.empty(0, np.int32)
_NO_PAGES_SHOWN = np.empty(0, np.int32)
_NO_PAGES_SHOWN.flags.writeable = False
_NO_KEY = np.zeros(2, np.uint64)


@njit_in_place
def match_blocks(core: Core, keys: Words, num_blocks: int, path: Int32s, drafts: Int32s) -> tuple[int, int]:
    """Return how many leading blocks are indexed, and how many of these are paired; fill both paths so far.

    `drafts` receives the draft pages of all paired blocks but the last one; without room, pairs are not looked at. -1
    when `keys` are no chain.
    """
    matched, deepest = find_deepest(core.key, core.slot, keys, num_blocks)
    if matched == 0:
        return 0, 0
    if not write_path(core.node, deepest, path[:matched]):
        return -1, 0
    if drafts.size == 0:
        return matched, 0
    num_paired = count_paired(core.node, path[:matched])
    for i in range(num_paired - 1):
        drafts[i] = core.node[PAIR_PAGE, path[i + 1]]
    return matched, num_paired


class PlanRequest(NamedTuple):
    """A checked request to plan.

    Attributes:
        keys: `uint64[b, 2]`, contiguous, at least `num_tokens // tokens_per_page` rows unless `bypass`.
        num_tokens: tokens of the input.
        tokens_per_page: P.
        mode: execution mode.
        bypass: look nothing up.
        has_pages: whether the deployment has attention layers.
        has_checkpoints: whether it has recurrent layers.
        paired: whether the mode runs a paired draft.
        base_extra_tokens: headroom of base pages.
        draft_extra_tokens: headroom of draft pages.
        exact_keys: checkpoints to look for.
    """

    keys: Words
    num_tokens: int
    tokens_per_page: int
    mode: ContextCacheExecutionMode
    bypass: bool
    has_pages: bool
    has_checkpoints: bool
    paired: bool
    base_extra_tokens: int
    draft_extra_tokens: int
    exact_keys: Sequence[HybridCheckpointKey]

    @property
    def num_full_blocks(self) -> int:
        """Full blocks of the input."""
        return self.num_tokens // self.tokens_per_page


def check_exact_keys(exact_keys: Iterable[HybridCheckpointKey]) -> tuple[HybridCheckpointKey, ...]:
    """Return checkpoint keys as a tuple, each with a digest and a length of at least 1."""
    try:
        checked = tuple(iter(exact_keys))
    except TypeError:
        raise ContractError(f"exact_keys is {describe(exact_keys)}; pass a run of HybridCheckpointKey") from None
    for key in checked:
        if not isinstance(key, HybridCheckpointKey) or not isinstance(key.exact_prefix_digest, Hash128):
            raise ContractError(f"exact_keys holds {describe(key)}; pass HybridCheckpointKey(Hash128(...), length)")
        as_integer("exact_length", key.exact_length, 1)
    return checked


def make_plan(core: Core, request: PlanRequest, owner: object) -> ReusePlan:
    """Plan a request; `ContractError` when its keys are no chain."""
    if request.bypass:
        return _cold_plan(request, owner)
    if request.has_checkpoints:
        return _checkpoint_plan(core, request, owner)
    return _attention_plan(core, request, owner)


def _attention_plan(core: Core, request: PlanRequest, owner: object) -> ReusePlan:
    blocks = request.num_full_blocks
    path = np.empty(blocks, np.int32)
    drafts = np.empty(blocks, np.int32) if request.paired else _NO_PAGES
    indexed, num_paired = match_blocks(core, request.keys, blocks, path, drafts)
    _refuse_broken_chain(indexed)
    matched = num_paired if request.paired else indexed
    if matched == 0:
        return _cold_plan(request, owner)
    replays = request.mode is not ContextCacheExecutionMode.VANILLA
    rewinds = matched * request.tokens_per_page == request.num_tokens
    reused = matched - 1 if replays or rewinds else matched
    if rewinds and not request.paired:
        kind = ReusePlanKind.FULL_INPUT_REWIND
    else:
        kind = ReusePlanKind.STANDARD if reused else ReusePlanKind.NO_REUSABLE_PREFIX
    base_demand, draft_demand = _page_demands(request, reused)
    path, drafts = path[:matched], drafts[:reused] if request.paired else _NO_PAGES
    shown = _shown(path)
    return ReusePlan(
        kind=kind,
        execution_mode=request.mode,
        bypass=False,
        input_token_count=request.num_tokens,
        matched_token_length=matched * request.tokens_per_page,
        reused_token_length=reused * request.tokens_per_page,
        matched_base_pages=shown,
        reused_base_pages=shown[:reused],
        reused_draft_pages=_shown(drafts) if request.paired else _NO_PAGES_SHOWN,
        base_page_demand=base_demand,
        draft_page_demand=draft_demand,
        recurrent_snapshot_slot=None,
        partial_kv_snapshot_slot=None,
        exact_checkpoint_length=0,
        spec_replay_mode=SpecReplayMode.FULL_PAGE if replays else SpecReplayMode.NONE,
        _owner=owner,
        _proof=(request.keys[matched - 1].copy(), -1, 0, path, drafts),
    )


def _checkpoint_plan(core: Core, request: PlanRequest, owner: object) -> ReusePlan:
    path = match_shared_blocks(core, request)
    record = _longest_checkpoint(core, request, path)
    if record < 0:
        return _cold_plan(request, owner)
    length, blocks = int(core.record[EXACT_LENGTH, record]), int(core.record[NUM_BLOCKS, record])
    path = path[:blocks]
    shown = _shown(path)
    drafts = np.empty(blocks if request.paired else 0, np.int32)
    write_draft_path(core, record, drafts)
    base_demand, draft_demand = _page_demands(request, blocks)
    partial = int(core.record[PARTIAL_SLOT, record])
    return ReusePlan(
        kind=ReusePlanKind.STANDARD,
        execution_mode=request.mode,
        bypass=False,
        input_token_count=request.num_tokens,
        matched_token_length=length,
        reused_token_length=length,
        matched_base_pages=shown,
        reused_base_pages=shown,
        reused_draft_pages=_shown(drafts),
        base_page_demand=base_demand,
        draft_page_demand=draft_demand,
        recurrent_snapshot_slot=int(core.record[RECURRENT_SLOT, record]),
        partial_kv_snapshot_slot=partial if partial >= 0 else None,
        exact_checkpoint_length=length,
        spec_replay_mode=SpecReplayMode.NONE,
        _owner=owner,
        _proof=(_NO_KEY, record, int(core.serial[record]), path, drafts),
    )


def match_shared_blocks(core: Core, request: PlanRequest) -> Int32s:
    """Return the canonical pages of the leading full blocks that are indexed."""
    if not request.has_pages:
        return _NO_PAGES
    path = np.empty(request.num_full_blocks, np.int32)
    matched, _ = match_blocks(core, request.keys, path.size, path, _NO_PAGES)
    _refuse_broken_chain(matched)
    return path[:matched]


def _longest_checkpoint(core: Core, request: PlanRequest, path: Int32s) -> int:
    for candidate in sorted(request.exact_keys, key=lambda key: key.exact_length, reverse=True):
        if candidate.exact_length < request.num_tokens:
            record = checkpoint_on_path(core, candidate, path)
            if record >= 0:
                return record
    return -1


def checkpoint_on_path(core: Core, candidate: HybridCheckpointKey, path: Int32s) -> int:
    """Return the record of this very checkpoint whose full blocks are those of `path`, or -1."""
    digest = candidate.exact_prefix_digest
    words = np.array((digest.hi, digest.lo), np.uint64)
    return int(find_checkpoint(core, words, candidate.exact_length, path))


def _cold_plan(request: PlanRequest, owner: object) -> ReusePlan:
    base_demand, draft_demand = _page_demands(request, 0)
    return ReusePlan(
        kind=ReusePlanKind.NO_REUSABLE_PREFIX,
        execution_mode=request.mode,
        bypass=request.bypass,
        input_token_count=request.num_tokens,
        matched_token_length=0,
        reused_token_length=0,
        matched_base_pages=_NO_PAGES_SHOWN,
        reused_base_pages=_NO_PAGES_SHOWN,
        reused_draft_pages=_NO_PAGES_SHOWN,
        base_page_demand=base_demand,
        draft_page_demand=draft_demand,
        recurrent_snapshot_slot=None,
        partial_kv_snapshot_slot=None,
        exact_checkpoint_length=0,
        spec_replay_mode=SpecReplayMode.NONE,
        _owner=owner,
        _proof=(_NO_KEY, -1, 0, _NO_PAGES, _NO_PAGES),
    )


def _shown(pages: Int32s) -> Int32s:
    """Return pages as a plan shows them: a view that cannot be written. Compiled code gets the array behind it."""
    view = pages[:]
    view.setflags(write=False)
    return view


def _page_demands(request: PlanRequest, reused_blocks: int) -> tuple[int, int]:
    """Private base and draft pages for a working set with headroom, beside so many shared ones."""
    page = request.tokens_per_page
    base = -(-(request.num_tokens + request.base_extra_tokens) // page) - reused_blocks if request.has_pages else 0
    draft = -(-(request.num_tokens + request.draft_extra_tokens) // page) - reused_blocks if request.paired else 0
    return base, draft


def _refuse_broken_chain(matched: int) -> None:
    if matched < 0:
        raise ContractError(
            "the keys are not one chain: a block's key was published behind other blocks; hash the whole sequence with one "
            "hash_full_blocks call"
        )


def explain_match(core: Core, request: PlanRequest) -> MatchResult:
    """Say how far a request matches and what stopped it."""
    plan = make_plan(core, request, None)
    indexed = 0 if request.bypass else _count_indexed(core, request)
    return MatchResult(
        matched_full_blocks=indexed,
        matched_token_length=plan.matched_token_length,
        reused_token_length=plan.reused_token_length,
        kind=plan.kind,
        reason=_reason(core, request, plan, indexed),
    )


def _count_indexed(core: Core, request: PlanRequest) -> int:
    return int(match_shared_blocks(core, request).size)


def _reason(core: Core, request: PlanRequest, plan: ReusePlan, indexed: int) -> MissReason:
    if request.bypass:
        return MissReason.BYPASS
    if core.state[NUM_RECORDS] == 0 and not _first_unmatched_was_evicted(core, request, indexed):
        return MissReason.EMPTY_CACHE
    if request.has_checkpoints:
        return _checkpoint_reason(core, request, plan, indexed)
    matched = plan.matched_token_length // request.tokens_per_page
    if matched == request.num_full_blocks and matched:
        if plan.spec_replay_mode is SpecReplayMode.FULL_PAGE:
            return MissReason.REPLAY
        return MissReason.REWIND if plan.kind is ReusePlanKind.FULL_INPUT_REWIND else MissReason.PARTIAL_BLOCK
    if matched < indexed:
        return MissReason.UNPAIRED_DRAFT
    if _first_unmatched_was_evicted(core, request, indexed):
        return MissReason.EVICTED
    if not request.num_full_blocks:
        return MissReason.PARTIAL_BLOCK
    return MissReason.DIVERGED if indexed else MissReason.NO_MATCH


def _checkpoint_reason(core: Core, request: PlanRequest, plan: ReusePlan, indexed: int) -> MissReason:
    if plan.reused_token_length == request.num_tokens - 1 and plan.reused_token_length:
        return MissReason.NONE
    if plan.reused_token_length:
        return MissReason.PARTIAL_BLOCK if indexed == request.num_full_blocks else MissReason.DIVERGED
    digests = [key.exact_prefix_digest.lo for key in request.exact_keys]
    if any(_was_evicted(core, low) for low in digests) or _first_unmatched_was_evicted(core, request, indexed):
        return MissReason.EVICTED
    path = match_shared_blocks(core, request)
    if any(checkpoint_on_path(core, key, path) >= 0 for key in request.exact_keys):
        return MissReason.WRONG_CHECKPOINT_LENGTH
    return MissReason.NO_CHECKPOINT if indexed else MissReason.NO_MATCH


def _first_unmatched_was_evicted(core: Core, request: PlanRequest, indexed: int) -> bool:
    if not request.has_pages:
        return any(_was_evicted(core, int(low)) for low in request.keys[: request.num_full_blocks, 1])
    if indexed >= request.num_full_blocks:
        return False
    return _was_evicted(core, int(request.keys[indexed, 1]))


def _was_evicted(core: Core, low: int) -> bool:
    return low != 0 and int(core.ghost[low % GHOSTS]) == low
