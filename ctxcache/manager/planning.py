"""What could be reused: pure reading. Plans hold nothing and may go stale; `acquire` looks again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ctxcache.arguments import Int32s, Words, as_flag, as_integer, as_keys, check_member
from ctxcache.errors import ContractError
from ctxcache.ids import ContextCacheExecutionMode, Hash128, MissReason, ReusePlanKind, SpecReplayMode
from ctxcache.jit import njit_in_place
from ctxcache.manager import layout as c
from ctxcache.manager.block_index import find_deepest
from ctxcache.manager.block_tree import write_path
from ctxcache.manager.checkpoints import check_exact_keys, find_checkpoint, find_longest, list_anchors, list_lengths
from ctxcache.manager.draft_pages import count_paired, write_draft_path
from ctxcache.manager.layout import CacheArrays
from ctxcache.manager.results import HybridCheckpointKey, MatchResult, ReusePlan
from ctxcache.manager.traits import PAIRED_MODES, DeploymentTraits

_NO_PAGES = np.empty(0, np.int32)
_NO_PAGES_SHOWN = np.empty(0, np.int32)
_NO_PAGES_SHOWN.flags.writeable = False


@njit_in_place
def match_blocks(cache: CacheArrays, keys: Words, num_blocks: int, path: Int32s, drafts: Int32s) -> tuple[int, int]:
    """Return how many leading blocks are indexed, and how many of these are paired; fill both paths so far.

    `drafts` receives the draft pages of all paired blocks but the last one; without room, pairs are not looked at. -1
    when `keys` are no chain.
    """
    matched, deepest = find_deepest(cache.key, cache.slot, keys, num_blocks)
    if matched == 0:
        return 0, 0
    if write_path(cache.node, deepest, path[:matched]) != -1:
        return -1, 0
    if drafts.size == 0:
        return matched, 0
    num_paired = count_paired(cache.node, path[:matched])
    for i in range(num_paired - 1):
        drafts[i] = cache.node[c.PAIR_PAGE, path[i + 1]]
    return matched, num_paired


class PlanProof(NamedTuple):
    """What `acquire` looks at again, to see whether a plan still holds. `-1`, 0 and no pages where nothing is reused.

        matched blocks:  [0, reused) shared with the lease | [reused, matched) computed again

    Attributes:
        last_key: `uint64[2]`, key of the last matched block.
        matched: canonical pages of the matched blocks. The plan shows the same memory, read-only.
        num_paired: how many of them have to be paired still; 0 where drafts do not matter.
        drafts: draft pages that the lease shares.
        record: row of the checkpoint to restore, or -1.
        serial: its serial.
    """

    last_key: Words
    matched: Int32s
    num_paired: int
    drafts: Int32s
    record: int
    serial: int


_NOTHING_TO_PROVE = PlanProof(np.zeros(2, np.uint64), _NO_PAGES, 0, _NO_PAGES, -1, 0)


class PlanRequest(NamedTuple):
    """A checked request to plan.

    Attributes:
        traits: of the deployment.
        keys: `uint64[b, 2]`, contiguous, at least `num_tokens // tokens_per_page` rows unless `bypass`.
        num_tokens: tokens of the input.
        mode: execution mode.
        bypass: look nothing up.
        paired: whether the mode runs a paired draft.
        base_extra_tokens: headroom of base pages.
        draft_extra_tokens: headroom of draft pages.
        exact_keys: checkpoints to look for.
    """

    traits: DeploymentTraits
    keys: Words
    num_tokens: int
    mode: ContextCacheExecutionMode
    bypass: bool
    paired: bool
    base_extra_tokens: int
    draft_extra_tokens: int
    exact_keys: Sequence[HybridCheckpointKey]

    @property
    def num_full_blocks(self) -> int:
        """Full blocks of the input."""
        return self.num_tokens // self.traits.tokens_per_page


def read_request(
    traits: DeploymentTraits,
    keys: Words,
    num_tokens: int,
    *,
    mode: ContextCacheExecutionMode,
    base_extra_tokens: int = 0,
    draft_extra_tokens: int = 0,
    bypass: bool = False,
    exact_keys: Iterable[HybridCheckpointKey] = (),
) -> PlanRequest:
    """Check what a caller asks to plan; `ContractError` says what is wrong."""
    check_member("mode", mode, ContextCacheExecutionMode)
    if mode not in traits.modes:
        served = ", ".join(served.name for served in traits.modes)
        raise ContractError(f"mode is {mode.name}; a {traits.kind.name} deployment serves {served}")
    num_tokens = as_integer("num_tokens", num_tokens, 1)
    draft_extra_tokens = as_integer("draft_extra_tokens", draft_extra_tokens)
    paired = mode in PAIRED_MODES
    if draft_extra_tokens and not paired:
        raise ContractError(
            f"draft_extra_tokens is {draft_extra_tokens}, but {mode.name} runs no paired draft; leave it 0"
        )
    # What can make no checkpoint can use none either.
    cold = as_flag("bypass", bypass) or (traits.has_checkpoints and mode not in traits.checkpoint_modes)
    exact = check_exact_keys(exact_keys)
    if exact and not traits.has_checkpoints:
        raise ContractError(f"exact_keys has entries, but a {traits.kind.name} deployment has no checkpoints")
    return PlanRequest(
        traits=traits,
        keys=as_keys(keys, 0 if cold else num_tokens // traits.tokens_per_page),
        num_tokens=num_tokens,
        mode=mode,
        bypass=cold,
        paired=paired,
        base_extra_tokens=as_integer("base_extra_tokens", base_extra_tokens),
        draft_extra_tokens=draft_extra_tokens,
        exact_keys=exact,
    )


def make_plan(cache: CacheArrays, request: PlanRequest, owner: object) -> ReusePlan:
    """Plan a request; `ContractError` when its keys are no chain."""
    if request.bypass:
        return _cold_plan(request, owner)
    if request.traits.has_checkpoints:
        return _checkpoint_plan(cache, request, owner)
    return _attention_plan(cache, request, owner)


def _attention_plan(cache: CacheArrays, request: PlanRequest, owner: object) -> ReusePlan:
    blocks = request.num_full_blocks
    path = np.empty(blocks, np.int32)
    drafts = np.empty(blocks, np.int32) if request.paired else _NO_PAGES
    indexed, num_paired = match_blocks(cache, request.keys, blocks, path, drafts)
    _refuse_broken_chain(indexed)
    matched = num_paired if request.paired else indexed
    if matched == 0:
        return _cold_plan(request, owner)
    # Blocks of the input: [0, reused) shared | [reused, matched) computed again, privately | [matched, n / P] computed
    # One is computed again for a draft, whose state there depends on the token behind it, or for the logits of the last token.
    replays = request.mode is not ContextCacheExecutionMode.VANILLA
    rewinds = matched * request.traits.tokens_per_page == request.num_tokens
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
        matched_token_length=matched * request.traits.tokens_per_page,
        reused_token_length=reused * request.traits.tokens_per_page,
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
        _proof=PlanProof(request.keys[matched - 1].copy(), path, matched if request.paired else 0, drafts, -1, 0),
    )


def _checkpoint_plan(cache: CacheArrays, request: PlanRequest, owner: object) -> ReusePlan:
    path = match_shared_blocks(cache, request)
    record = _longest_checkpoint(cache, request, path)
    if record < 0:
        return _cold_plan(request, owner)
    # Tokens of the input: [0, blocks * P) in shared pages | [blocks * P, length) copied from the partial-KV snapshot
    #                      [length, n) computed; the recurrent snapshot holds the state after [0, length)
    length, blocks = int(cache.record[c.EXACT_LENGTH, record]), int(cache.record[c.NUM_BLOCKS, record])
    path = path[:blocks]
    shown = _shown(path)
    drafts = np.empty(blocks if request.paired else 0, np.int32)
    write_draft_path(cache, record, drafts)
    base_demand, draft_demand = _page_demands(request, blocks)
    partial = int(cache.record[c.PARTIAL_SLOT, record])
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
        recurrent_snapshot_slot=int(cache.record[c.RECURRENT_SLOT, record]),
        partial_kv_snapshot_slot=partial if partial >= 0 else None,
        exact_checkpoint_length=length,
        spec_replay_mode=SpecReplayMode.NONE,
        _owner=owner,
        _proof=PlanProof(_NOTHING_TO_PROVE.last_key, path, 0, drafts, record, int(cache.serial[record])),
    )


def match_shared_blocks(cache: CacheArrays, request: PlanRequest) -> Int32s:
    """Return the canonical pages of the leading full blocks that are indexed."""
    if not request.traits.has_pages:
        return _NO_PAGES
    path = np.empty(request.num_full_blocks, np.int32)
    matched, _ = match_blocks(cache, request.keys, path.size, path, _NO_PAGES)
    _refuse_broken_chain(matched)
    return path[:matched]


def _longest_checkpoint(cache: CacheArrays, request: PlanRequest, path: Int32s) -> int:
    for candidate in sorted(request.exact_keys, key=lambda key: key.exact_length, reverse=True):
        if candidate.exact_length < request.num_tokens:
            record = checkpoint_on_path(cache, candidate, path)
            if record >= 0:
                return record
    return -1


def checkpoint_on_path(cache: CacheArrays, candidate: HybridCheckpointKey, path: Int32s) -> int:
    """Return the record of this very checkpoint whose full blocks are those of `path`, or -1."""
    digest = candidate.exact_prefix_digest
    words = np.array((digest.hi, digest.lo), np.uint64)
    return int(find_checkpoint(cache, words, candidate.exact_length, path))


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
        _proof=_NOTHING_TO_PROVE,
    )


def _shown(pages: Int32s) -> Int32s:
    """Return pages as a plan shows them: a view that cannot be written. Compiled code gets the array behind it."""
    view = pages[:]
    view.setflags(write=False)
    return view


def _page_demands(request: PlanRequest, reused_blocks: int) -> tuple[int, int]:
    """Private base and draft pages for a working set with headroom, beside so many shared ones."""
    page = request.traits.tokens_per_page
    base = (
        -(-(request.num_tokens + request.base_extra_tokens) // page) - reused_blocks if request.traits.has_pages else 0
    )
    draft = -(-(request.num_tokens + request.draft_extra_tokens) // page) - reused_blocks if request.paired else 0
    return base, draft


def _refuse_broken_chain(matched: int) -> None:
    if matched < 0:
        raise ContractError(
            "the keys are not one chain: a block's key was published behind other blocks; hash the whole sequence with one "
            "hash_full_blocks call"
        )


def candidate_lengths(cache: CacheArrays, request: PlanRequest) -> Int32s:
    """Return the exact lengths below the input's at which a checkpoint may match, distinct and falling."""
    lengths = np.empty(int(cache.state[c.NUM_RECORDS]), np.int32)
    path = match_shared_blocks(cache, request)
    count = list_lengths(cache, path, request.keys, request.num_full_blocks, request.num_tokens, lengths)
    return np.unique(lengths[:count])[::-1]


def longest_checkpoint(
    cache: CacheArrays, request: PlanRequest, exact_keys_behind: Callable[[int], Words]
) -> HybridCheckpointKey | None:
    """Return the key of the longest checkpoint that serves an input, hashing only behind blocks where some end."""
    path, blocks = match_shared_blocks(cache, request), request.num_full_blocks
    counts = np.empty(blocks + 1, np.int32)
    for num_blocks in counts[: list_anchors(cache, path, request.keys, blocks, counts)].tolist():
        digests, first = exact_keys_behind(num_blocks), num_blocks * request.traits.tokens_per_page
        length = find_longest(cache, digests, first, request.num_tokens, path)
        if length:
            high, low = digests[length - first].tolist()
            return HybridCheckpointKey(Hash128(high, low), length)
    return None


def match_input(cache: CacheArrays, request: PlanRequest) -> MatchResult:
    """Say how far a request matches and what stopped it."""
    plan = make_plan(cache, request, None)
    path = _NO_PAGES if request.bypass else match_shared_blocks(cache, request)
    return MatchResult(
        matched_full_blocks=path.size,
        matched_token_length=plan.matched_token_length,
        reused_token_length=plan.reused_token_length,
        kind=plan.kind,
        reason=_reason(cache, request, plan, path),
    )


def _reason(cache: CacheArrays, request: PlanRequest, plan: ReusePlan, path: Int32s) -> MissReason:
    indexed = path.size
    if request.bypass:
        return MissReason.BYPASS
    if cache.state[c.NUM_RECORDS] == 0 and not _first_unmatched_was_evicted(cache, request, indexed):
        return MissReason.EMPTY_CACHE
    if request.traits.has_checkpoints:
        return _checkpoint_reason(cache, request, plan, path)
    matched = plan.matched_token_length // request.traits.tokens_per_page
    if matched == request.num_full_blocks and matched:
        if plan.spec_replay_mode is SpecReplayMode.FULL_PAGE:
            return MissReason.REPLAY
        return MissReason.REWIND if plan.kind is ReusePlanKind.FULL_INPUT_REWIND else MissReason.PARTIAL_BLOCK
    if matched < indexed:
        return MissReason.UNPAIRED_DRAFT
    if _first_unmatched_was_evicted(cache, request, indexed):
        return MissReason.EVICTED
    if not request.num_full_blocks:
        return MissReason.PARTIAL_BLOCK
    return MissReason.DIVERGED if indexed else MissReason.NO_MATCH


def _checkpoint_reason(cache: CacheArrays, request: PlanRequest, plan: ReusePlan, path: Int32s) -> MissReason:
    indexed = path.size
    if plan.reused_token_length == request.num_tokens - 1 and plan.reused_token_length:
        return MissReason.NONE
    if plan.reused_token_length:
        return MissReason.PARTIAL_BLOCK if indexed == request.num_full_blocks else MissReason.DIVERGED
    digests = [key.exact_prefix_digest.lo for key in request.exact_keys]
    if any(_was_evicted(cache, low) for low in digests) or _first_unmatched_was_evicted(cache, request, indexed):
        return MissReason.EVICTED
    if any(checkpoint_on_path(cache, key, path) >= 0 for key in request.exact_keys):
        return MissReason.WRONG_CHECKPOINT_LENGTH
    return MissReason.NO_CHECKPOINT if indexed else MissReason.NO_MATCH


def _first_unmatched_was_evicted(cache: CacheArrays, request: PlanRequest, indexed: int) -> bool:
    if not request.traits.has_pages:
        return any(_was_evicted(cache, int(low)) for low in request.keys[: request.num_full_blocks, 1])
    if indexed >= request.num_full_blocks:
        return False
    return _was_evicted(cache, int(request.keys[indexed, 1]))


def _was_evicted(cache: CacheArrays, low: int) -> bool:
    return low != 0 and int(cache.ghost[low % c.GHOSTS]) == low
