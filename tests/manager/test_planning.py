"""What a request may reuse, and what it needs besides: the table of plans, for each kind without recurrent layers."""

from __future__ import annotations

import numpy as np
import pytest
from support.manager import PAGE, Runtime, keys_of, run_of

from ctxcache.errors import ContractError
from ctxcache.ids import AcquireStatus, Hash128, MissReason, ResourceType, ReusePlanKind, SpecReplayMode
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.manager.results import HybridCheckpointKey


@pytest.mark.parametrize(("num_tokens", "pages"), [(127, 1), (128, 2), (255, 2), (256, 3), (511, 4)])
def test_a_cold_working_set_covers_input_and_headroom(num_tokens, pages):
    """With pages of 128 tokens and one token of headroom, n tokens take ceil((n + 1) / 128) pages."""
    runtime = Runtime(8, page=128)
    plan = runtime.plan(run_of("T", num_tokens))
    assert (plan.kind, plan.base_page_demand) == (ReusePlanKind.NO_REUSABLE_PREFIX, pages)


def test_h01_a_fully_cached_aligned_prompt_keeps_one_block_to_compute():
    """After T(257): T(256) starts at 128 by a rewind, T(257) at 256, T(129) at 128, T(128) at 0; its last page is private."""
    runtime = Runtime(8, page=128)
    runtime.run(run_of("T", 257))
    (cached,) = runtime.paths()
    rewind = runtime.plan(run_of("T", 256))
    assert (rewind.kind, rewind.matched_token_length, rewind.reused_token_length) == (
        ReusePlanKind.FULL_INPUT_REWIND,
        256,
        128,
    )
    assert [runtime.start(run_of("T", n)) for n in (256, 257, 129, 128)] == [128, 256, 128, 0]
    assert runtime.plan(run_of("T", 128)).kind is ReusePlanKind.FULL_INPUT_REWIND
    lease = runtime.begin(run_of("T", 256))
    assert lease.base_pages[0] == cached[0]
    assert lease.base_pages[1] != cached[1]


def test_a_bypass_looks_nothing_up():
    """A bypass plan reuses nothing of what is there, needs no keys, and says why."""
    runtime = Runtime()
    runtime.run(run_of("T", 9))
    plan = runtime.manager.plan(np.empty((0, 2), np.uint64), 9, bypass=True)
    assert (plan.kind, plan.bypass, plan.matched_token_length) == (ReusePlanKind.NO_REUSABLE_PREFIX, True, 0)
    assert plan.base_page_demand == 3
    match = runtime.manager.match(keys_of(run_of("T", 9)), 9, bypass=True)
    assert match.reason is MissReason.BYPASS


@pytest.mark.parametrize(
    ("num_tokens", "kind", "start", "replay"),
    [
        (13, ReusePlanKind.STANDARD, 8, SpecReplayMode.FULL_PAGE),
        (12, ReusePlanKind.FULL_INPUT_REWIND, 8, SpecReplayMode.FULL_PAGE),
        (5, ReusePlanKind.NO_REUSABLE_PREFIX, 0, SpecReplayMode.FULL_PAGE),
        (4, ReusePlanKind.FULL_INPUT_REWIND, 0, SpecReplayMode.FULL_PAGE),
        (3, ReusePlanKind.NO_REUSABLE_PREFIX, 0, SpecReplayMode.NONE),
    ],
)
def test_shared_kv_gives_one_block_back_once(num_tokens, kind, start, replay):
    """Drafts that read the base's KV replay one block, also when the whole input matched: one, not two."""
    runtime = Runtime(kind=Kind.SHARED_KV)
    runtime.run(run_of("T", 13))
    plan = runtime.plan(run_of("T", num_tokens), mode=Mode.SHARED_KV)
    assert (plan.kind, plan.reused_token_length, plan.spec_replay_mode) == (kind, start, replay)
    assert plan.matched_token_length == num_tokens // PAGE * PAGE
    assert plan.draft_page_demand == 0
    assert runtime.start(run_of("T", 13), mode=Mode.VANILLA) == 12


def test_a_plan_goes_stale_with_what_it_matched():
    """When a matched block is gone, acquiring reports STALE_PLAN and changes nothing; the plan made again works."""
    runtime = Runtime(4)
    runtime.run(run_of("T", 9))
    plan = runtime.plan(run_of("T", 9))
    runtime.run(run_of("U", 15))
    before = runtime.everything()
    result = runtime.manager.acquire(plan)
    assert (result.status, result.lease, result.plan) == (AcquireStatus.STALE_PLAN, None, plan)
    assert runtime.everything() == before
    assert runtime.acquire(run_of("T", 9)).status is AcquireStatus.ACQUIRED


def test_a_plan_is_stale_when_other_pages_are_canonical_now():
    """The same prefix published again on other pages does not revive a plan: it names pages of somebody else."""
    runtime = Runtime(6)
    runtime.run(run_of("T", 9))
    plan = runtime.plan(run_of("T", 9))
    runtime.manager.clear()
    blocker = runtime.begin(run_of("B", 2))
    runtime.run(run_of("T", 9))
    assert runtime.paths() != [plan.matched_base_pages.tolist()]
    assert runtime.manager.acquire(plan).status is AcquireStatus.STALE_PLAN
    runtime.release(blocker)


def test_a_longer_match_does_not_make_a_plan_stale():
    """What was matched is still there, so the plan holds although more could be reused now."""
    runtime = Runtime(8)
    runtime.run(run_of("T", 5))
    plan = runtime.plan(run_of("T", 13))
    runtime.run(run_of("T", 13))
    lease = runtime.manager.acquire(plan).lease
    assert lease.base_pages[0] == plan.reused_base_pages[0]
    assert plan.reused_token_length == 4 < runtime.start(run_of("T", 13))


def test_planning_changes_nothing():
    """Plans and matches, hit or miss, leave order, pools and counters as they are."""
    runtime = Runtime()
    runtime.run(run_of("T", 9))
    runtime.run(run_of("U", 9))
    before, counters = runtime.everything(), runtime.manager.counters()
    for letter in "TUV":
        runtime.plan(run_of(letter, 13))
        runtime.manager.match(keys_of(run_of(letter, 13)), 13)
    assert (runtime.everything(), runtime.manager.counters()) == (before, counters)


def test_match_says_what_stopped_it():
    """Each reason of the attention modes, at the input that provokes it."""
    runtime = Runtime(4)
    tokens = run_of("T", 13)

    def reason(wanted):
        return runtime.manager.match(keys_of(wanted), len(wanted)).reason

    assert reason(tokens) is MissReason.EMPTY_CACHE
    runtime.run(tokens)
    assert reason(tokens) is MissReason.PARTIAL_BLOCK
    assert reason(tokens[:12]) is MissReason.REWIND
    assert reason(tokens[:8] + run_of("U", 8)) is MissReason.DIVERGED
    assert reason(run_of("U", 8)) is MissReason.NO_MATCH
    assert reason(run_of("U", 3)) is MissReason.PARTIAL_BLOCK
    runtime.run(run_of("V", 15))
    assert reason(tokens) is MissReason.EVICTED


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_tokens": 0},
        {"num_tokens": True},
        {"num_tokens": 9.0},
        {"num_tokens": 2**31},
        {"keys": np.zeros((1, 2), np.uint64)},
        {"keys": np.zeros((2, 2), np.int64)},
        {"keys": np.zeros((2, 3), np.uint64)},
        {"keys": [[1, 2], [3, 4]]},
        {"mode": Mode.EAGLE},
        {"base_extra_tokens": -1},
        {"draft_extra_tokens": 1},
        {"exact_keys": ["digest"]},
    ],
)
def test_bad_arguments_of_a_plan_are_refused(arguments):
    """Each wrong argument is a ContractError that names it."""
    runtime = Runtime()
    good = {"keys": keys_of(run_of("T", 9)), "num_tokens": 9, **arguments}
    with pytest.raises(ContractError, match=next(iter(arguments)).split("_")[0]):
        runtime.manager.plan(**good)


def test_exact_keys_are_for_checkpoints():
    """A kind without recurrent layers has no checkpoints to look for."""
    runtime = Runtime()
    key = HybridCheckpointKey(Hash128(1, 2), 3)
    with pytest.raises(ContractError, match="no checkpoints"):
        runtime.manager.plan(keys_of(run_of("T", 9)), 9, exact_keys=[key])
    with pytest.raises(ContractError, match="no checkpoints"):
        runtime.manager.candidate_checkpoint_lengths(keys_of(run_of("T", 9)), 9)


def test_keys_that_are_no_chain_are_refused():
    """A block's key in front of which other blocks are missing cannot come from one sequence."""
    runtime = Runtime()
    runtime.run(run_of("T", 13))
    keys = keys_of(run_of("T", 13))
    with pytest.raises(ContractError, match="one chain"):
        runtime.manager.plan(keys[1:], 8)


def test_a_plan_belongs_to_its_manager():
    """Another manager's plan is refused, and so is anything that is no plan."""
    one, other = Runtime(), Runtime()
    with pytest.raises(ContractError, match="no plan of this manager"):
        one.manager.acquire(other.plan(run_of("T", 9)))
    with pytest.raises(ContractError, match="no plan"):
        one.manager.acquire(None)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tokens_per_page": 0}, "tokens_per_page"),
        ({"num_base_pages": -1}, "num_base_pages"),
        ({"max_records": 1.5}, "max_records"),
        ({"num_draft_pages": 4}, "num_draft_pages"),
        ({"num_recurrent_snapshots": 1}, "num_recurrent_snapshots"),
        ({"num_partial_kv_snapshots": 1, "kind": Kind.PURE_RECURRENT, "num_base_pages": 0}, "num_partial_kv"),
        ({"kind": Kind.PURE_RECURRENT}, "num_base_pages"),
    ],
)
def test_a_manager_refuses_sizes_that_make_no_sense(options, name):
    """Negative sizes, and pools that the deployment has no use for."""
    with pytest.raises(ContractError, match=name):
        ContextCacheManager(**{"tokens_per_page": 4, "num_base_pages": 4, **options})


def test_pools_report_free_and_capacity():
    """All four pools are there in every deployment; those without a use have no capacity."""
    manager = ContextCacheManager(tokens_per_page=4, num_base_pages=5)
    assert [(manager.pool(kind).free, manager.pool(kind).capacity) for kind in ResourceType] == [
        (5, 5),
        (0, 0),
        (0, 0),
        (0, 0),
    ]
    assert (manager.kind, manager.tokens_per_page) == (Kind.VANILLA, 4)
