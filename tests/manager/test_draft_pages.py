"""EAGLE: base and draft pages paired by one record, one block replayed, base-only records left alone."""

from __future__ import annotations

import numpy as np
import pytest
from support.manager import PAGE, Runtime, keys_of, run_of

from ctxcache.errors import ContractError
from ctxcache.ids import AcquireStatus, MissReason, PublishStatus, ResourceType, ReusePlanKind, SpecReplayMode
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode

DRAFT = ResourceType.DRAFT_KV_PAGE


def eagle(num_pages=16, num_draft_pages=16, **options):
    return Runtime(num_pages, kind=Kind.EAGLE, mode=Mode.EAGLE, num_draft_pages=num_draft_pages, **options)


def test_h08_one_paired_block_is_replayed_always():
    """With two paired blocks of T cached: T(258), T(256) and T(256)+[other] all start at 128, on private second pages."""
    runtime = eagle(page=128)
    runtime.run(run_of("T", 256))
    (record,) = runtime.manager.records
    assert record.base_page_path.size == record.draft_page_path.size == 2
    for tokens in (run_of("T", 258), run_of("T", 256), [*run_of("T", 256), 7]):
        plan = runtime.plan(tokens)
        assert (plan.reused_token_length, plan.matched_token_length) == (128, 256)
        assert (plan.kind, plan.spec_replay_mode) == (ReusePlanKind.STANDARD, SpecReplayMode.FULL_PAGE)
        lease = runtime.begin(tokens)
        assert lease.base_pages[0] == record.base_page_path[0]
        assert lease.draft_pages[0] == record.draft_page_path[0]
        assert lease.base_pages[1] != record.base_page_path[1]
        assert lease.draft_pages[1] != record.draft_page_path[1]
        runtime.release(lease)


def test_one_paired_block_is_a_hit_that_reuses_nothing():
    """Matched P, reused 0: NO_REUSABLE_PREFIX, and still a replayed page."""
    runtime = eagle()
    runtime.run(run_of("T", 5))
    plan = runtime.plan(run_of("T", 6))
    assert (plan.kind, plan.matched_token_length, plan.reused_token_length) == (
        ReusePlanKind.NO_REUSABLE_PREFIX,
        PAGE,
        0,
    )
    assert plan.spec_replay_mode is SpecReplayMode.FULL_PAGE


def test_headroom_counts_for_both_models():
    """Base and draft pages cover the input and each its own headroom, beside what is shared."""
    runtime = eagle()
    runtime.run(run_of("T", 13))
    plan = runtime.plan(run_of("T", 13), base_extra_tokens=4, draft_extra_tokens=8)
    assert (plan.reused_token_length, plan.base_page_demand, plan.draft_page_demand) == (8, 3, 4)


def test_a_base_only_record_never_serves_a_speculative_request():
    """Blocks published by a vanilla request match a vanilla request only, and the explanation names the draft."""
    runtime = eagle()
    runtime.run(run_of("T", 13), mode=Mode.VANILLA)
    assert runtime.start(run_of("T", 13), mode=Mode.VANILLA) == 12
    plan = runtime.plan(run_of("T", 13))
    assert (plan.kind, plan.matched_token_length) == (ReusePlanKind.NO_REUSABLE_PREFIX, 0)
    reason = runtime.manager.match(keys_of(run_of("T", 13)), 13, mode=Mode.EAGLE).reason
    assert reason is MissReason.UNPAIRED_DRAFT


def test_a_vanilla_request_leaves_the_draft_pool_alone():
    """On an EAGLE deployment a vanilla request reuses base pages as anywhere, and takes no draft page."""
    runtime = eagle()
    runtime.run(run_of("T", 13))
    before = runtime.free(DRAFT)
    lease = runtime.begin(run_of("T", 13), mode=Mode.VANILLA)
    assert (lease.base_pages.size, lease.draft_pages.size) == (4, 0)
    assert runtime.free(DRAFT) == before
    with pytest.raises(ContractError, match="paired draft"):
        runtime.publish(lease, run_of("T", 13), draft_state_length=8)


def test_a_record_gains_and_lengthens_its_draft_path_in_place():
    """A base-only record becomes paired, then longer paired, then stays: PUBLISHED, PUBLISHED, EXISTING; one record."""
    runtime = eagle()
    runtime.run(run_of("T", 13), mode=Mode.VANILLA)
    statuses = []
    for draft_length in (8, 12, 12, 4):
        lease = runtime.begin(run_of("T", 13))
        result = runtime.publish(lease, run_of("T", 13), draft_state_length=draft_length)
        statuses.append(result.status)
        runtime.release(lease)
    published, existing = PublishStatus.PUBLISHED, PublishStatus.EXISTING_RECORD
    assert statuses == [published, published, existing, existing]
    (record,) = runtime.manager.records
    assert (record.base_page_path.size, record.draft_page_path.size) == (3, 3)
    assert runtime.free(DRAFT) == 16 - 3
    assert runtime.manager.counters().spec_pair_publications == 2


def test_a_lagging_draft_limits_what_is_paired():
    """Three base blocks with two draft blocks: two are paired, one of them is reused."""
    runtime = eagle()
    lease = runtime.begin(run_of("T", 13))
    runtime.publish(lease, run_of("T", 13), draft_state_length=11)
    runtime.release(lease)
    assert runtime.plan(run_of("T", 13)).matched_token_length == 8
    assert runtime.start(run_of("T", 13)) == 4
    assert runtime.start(run_of("T", 13), mode=Mode.VANILLA) == 12


def test_draft_pages_are_shared_up_to_the_block_whose_successor_differs():
    """Two continuations share a stem's base pages, but the stem's last draft page is each record's own."""
    runtime = eagle()
    stem = run_of("S", 8)
    runtime.run(stem + run_of("A", 4))
    runtime.run(stem + run_of("B", 4))
    first, second = runtime.manager.records
    assert first.base_page_path.tolist()[:2] == second.base_page_path.tolist()[:2]
    assert first.draft_page_path[0] == second.draft_page_path[0]
    assert first.draft_page_path[1] != second.draft_page_path[1]
    lease = runtime.begin(stem + run_of("B", 5))
    assert lease.draft_pages.tolist()[:2] == second.draft_page_path.tolist()[:2]


def test_a_hit_of_a_stem_moves_no_record_that_ends_behind_it():
    """Neither the record that pairs what was hit nor a base-only one is refreshed beyond the blocks that matched."""
    runtime = eagle()
    stem = run_of("S", 8)
    runtime.run(stem + run_of("A", 4))
    runtime.run(stem + run_of("B", 4), mode=Mode.VANILLA)
    runtime.run(run_of("X", 4))
    paired, base_only, other = runtime.paths()
    runtime.release(runtime.begin(stem + run_of("C", 1)))
    assert runtime.paths() == [paired, base_only, other]


def test_paired_growth_is_whole_or_not_at_all():
    """With base pages but no draft pages left, neither side grows; one call grows both."""
    runtime = eagle(num_pages=8, num_draft_pages=3)
    lease = runtime.begin(run_of("T", 7))
    before = runtime.everything()
    assert not runtime.manager.grow(lease, 1, 2)
    assert runtime.everything() == before
    assert runtime.manager.grow(lease, 1, 1)
    assert (lease.base_pages.tolist(), lease.draft_pages.tolist()) == ([0, 1, 2], [0, 1, 2])


def test_a_batch_grows_both_sides():
    """grow_leases tells base and draft growth apart."""
    runtime = eagle()
    leases = [runtime.begin(run_of(letter, 3)) for letter in "AB"]
    rows = np.array([lease.row for lease in leases], np.int32)
    growth = runtime.manager.grow_leases(rows, np.array([1, 2], np.int32), np.array([2, 3], np.int32))
    assert growth.base.indices.tolist() == [1]
    assert growth.draft.indices.tolist() == [0, 1]
    assert growth.draft.page_counts.tolist() == [1, 2]
    assert growth.draft.page_ids.tolist() == [2, 3, 4]
    assert growth.draft.first_page_indices.tolist() == [1, 1]
    fits = runtime.manager.can_grow_leases(rows, np.array([2, 3], np.int32), np.array([99, 4], np.int32))
    assert fits.tolist() == [False, True]
    runtime.manager.check_invariants()


def test_where_draft_pages_are_lacking_only_they_go():
    """Draft pages lacking: the record gives them up from its end, as many as that, and stays with its base pages."""
    runtime = eagle(num_pages=16, num_draft_pages=3)
    runtime.run(run_of("T", 9))
    lease = runtime.begin(run_of("U", 9))
    assert lease.draft_pages.size == 3
    counters = runtime.manager.counters()
    assert (counters.reclaimed_base_kv_pages, counters.reclaimed_draft_kv_pages) == (0, 2)
    assert (counters.evicted_records, counters.shortened_records) == (0, 0)
    assert runtime.start(run_of("T", 9), mode=Mode.VANILLA) == 8


def test_a_draft_path_shrinks_by_a_page():
    """One draft page lacking: of two paired records the older pairs one block less, and is found up to there."""
    runtime = eagle(num_pages=32, num_draft_pages=9)
    runtime.run(run_of("T", 16))
    runtime.run(run_of("U", 16))
    runtime.begin(run_of("V", 8))
    assert [record.draft_page_path.size for record in runtime.manager.records] == [3, 4]
    assert [record.base_page_path.size for record in runtime.manager.records] == [4, 4]
    assert runtime.plan(run_of("T", 17)).matched_token_length == 12
    assert runtime.start(run_of("U", 17)) == 12


def test_a_base_page_takes_its_draft_page_along():
    """Base pages lacking: each block that goes takes its draft page with it, a lagging draft's none."""
    runtime = eagle(num_pages=9, num_draft_pages=20)
    runtime.run(run_of("T", 16), base_extra_tokens=0)
    lease = runtime.begin(run_of("U", 16), base_extra_tokens=0)
    runtime.publish(lease, run_of("U", 16), draft_state_length=8)
    runtime.release(lease)
    runtime.release(runtime.begin(run_of("V", 12), mode=Mode.VANILLA, base_extra_tokens=0))
    assert [record.draft_page_path.size for record in runtime.manager.records] == [2, 2]
    assert runtime.free(DRAFT) == 16
    runtime.release(runtime.begin(run_of("V", 28), mode=Mode.VANILLA, base_extra_tokens=0))
    (record,) = runtime.manager.records
    assert (record.base_page_path.size, record.draft_page_path.size) == (2, 2)


def test_records_without_drafts_are_passed_over_for_draft_pages():
    """The oldest record is base-only: lacking draft pages, the younger paired one gives up its own."""
    runtime = eagle(num_pages=16, num_draft_pages=3)
    runtime.run(run_of("V", 9), mode=Mode.VANILLA)
    runtime.run(run_of("T", 9))
    paths = runtime.paths()
    runtime.begin(run_of("U", 9))
    assert runtime.paths() == paths
    assert [record.draft_page_path.size for record in runtime.manager.records] == [0, 0]


def test_conversation_turns_share_their_draft_pages():
    """Prompt and answer published by one lease: one set of draft pages, whose eviction leaves the earlier record whole."""
    runtime = eagle()
    tokens = run_of("T", 17)
    lease = runtime.begin(tokens[:9])
    runtime.publish(lease, tokens[:9], draft_state_length=8)
    assert runtime.manager.grow(lease, 3, 3)
    runtime.publish(lease, tokens, draft_state_length=17)
    runtime.release(lease)
    first, second = runtime.manager.records
    assert second.draft_page_path.tolist()[:2] == first.draft_page_path.tolist()
    assert runtime.free(DRAFT) == 12
    assert runtime.start(tokens) == 12


def test_what_only_several_records_together_hold_is_given_up_by_all_of_them():
    """Two records of one lagging lease end with the same draft page: when it is lacking, both lose it."""
    runtime = eagle(num_pages=16, num_draft_pages=3)
    tokens = run_of("T", 13)
    lease = runtime.begin(tokens[:9])
    runtime.publish(lease, tokens[:9], draft_state_length=8)
    assert runtime.manager.grow(lease, 1)
    runtime.publish(lease, tokens, draft_state_length=8)
    runtime.release(lease)
    assert [record.draft_page_path.size for record in runtime.manager.records] == [2, 2]
    cold = runtime.begin(run_of("U", 9))
    assert cold.draft_pages.size == 3
    assert [record.draft_page_path.size for record in runtime.manager.records] == [0, 0]


def test_a_plan_goes_stale_with_its_pairs():
    """Base blocks still there but the pairing record gone: the plan is stale."""
    runtime = eagle(num_pages=32, num_draft_pages=4)
    runtime.run(run_of("T", 13))
    plan = runtime.plan(run_of("T", 13))
    runtime.run(run_of("T", 13), mode=Mode.VANILLA)
    runtime.run(run_of("T", 17), mode=Mode.VANILLA)
    runtime.run(run_of("U", 13))
    before = runtime.everything()
    assert runtime.manager.acquire(plan).status is AcquireStatus.STALE_PLAN
    assert runtime.everything() == before
    assert runtime.start(run_of("T", 17), mode=Mode.VANILLA) == 16


def test_draft_lengths_that_cannot_be_are_refused():
    """A draft beyond the resident base, or beyond the lease's draft pages."""
    runtime = eagle()
    lease = runtime.begin(run_of("T", 9))
    assert runtime.manager.grow(lease, 2)
    before = runtime.everything()
    with pytest.raises(ContractError, match="more than the 9 resident"):
        runtime.publish(lease, run_of("T", 17), 9, draft_state_length=10)
    with pytest.raises(ContractError, match="more than the lease has pages"):
        runtime.publish(lease, run_of("T", 17), 17, draft_state_length=16)
    assert runtime.everything() == before
