"""Recurrent state at exact lengths: which checkpoint is picked, which slots it holds, and what pressure does."""

from __future__ import annotations

import pytest
from support.manager import Runtime, checkpoint_of, keys_of, run_of

from ctxcache.errors import ContractError
from ctxcache.ids import AcquireStatus, Hash128, MissReason, PublishStatus, ResourceType, ReusePlanKind
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.manager.results import HybridCheckpointKey, HybridSnapshotReservation

RECURRENT, PARTIAL = ResourceType.RECURRENT_SNAPSHOT, ResourceType.PARTIAL_KV_SNAPSHOT


def hybrid(num_pages=16, slots=2, **options):
    sizes = {"num_recurrent_snapshots": slots, "num_partial_kv_snapshots": slots, **options}
    return Runtime(num_pages, kind=Kind.HYBRID, **sizes)


def recurrent(slots=2):
    return Runtime(0, kind=Kind.PURE_RECURRENT, num_recurrent_snapshots=slots)


def mtp(num_pages=16, slots=3):
    return Runtime(
        num_pages,
        kind=Kind.HYBRID_MTP,
        mode=Mode.MTP,
        num_draft_pages=num_pages,
        num_recurrent_snapshots=slots,
        num_partial_kv_snapshots=slots,
    )


def test_h17_the_longest_checkpoint_strictly_below_the_input_is_picked():
    """After runs of 130 and 200 tokens: starts 0, 130, 130, 130, 200 for inputs of 130, 131, 180, 200, 201 tokens."""
    runtime = hybrid(page=128)
    assert runtime.run(run_of("T", 130)) == 0
    assert runtime.run(run_of("T", 200)) == 130
    slots = {record.exact_checkpoint_length: record.recurrent_snapshot_slot for record in runtime.manager.records}
    for length, start in ((130, 0), (131, 130), (180, 130), (200, 130), (201, 200)):
        plan = runtime.plan(run_of("T", length))
        assert (plan.reused_token_length, plan.recurrent_snapshot_slot) == (start, slots.get(start))
        assert plan.kind is (ReusePlanKind.STANDARD if start else ReusePlanKind.NO_REUSABLE_PREFIX)
        assert plan.exact_checkpoint_length == plan.matched_token_length == start
        assert plan.base_page_demand == -(-(length + 1) // 128) - start // 128


def test_a_checkpoint_with_another_tail_is_not_picked():
    """Same full blocks, same length, another token behind them: the exact key tells them apart."""
    runtime = hybrid()
    runtime.run([*run_of("T", 4), 1, 2])
    assert runtime.start([*run_of("T", 4), 1, 2, 9]) == 6
    assert runtime.start([*run_of("T", 4), 1, 3, 9]) == 0


def test_lengths_worth_hashing_are_those_on_the_inputs_own_blocks():
    """Distinct lengths of the checkpoints that end on matching blocks, longest first, below the input; nobody else's."""
    runtime = hybrid(slots=8)
    for tokens in (run_of("T", 2), run_of("T", 6), [*run_of("T", 4), 1, 2], run_of("T", 9), run_of("U", 7)):
        runtime.run(tokens)
    for tokens, lengths in ((run_of("T", 12), [9, 6, 2]), (run_of("T", 9), [6, 2]), (run_of("U", 8), [7, 2])):
        assert runtime.manager.candidate_checkpoint_lengths(keys_of(tokens), len(tokens)).tolist() == lengths


def test_a_record_holds_its_shared_pages_and_its_slots():
    """Nine tokens in pages of four: two shared pages, one recurrent slot, one partial slot for the ninth token."""
    runtime = hybrid()
    lease = runtime.begin(run_of("T", 9))
    result = runtime.checkpoint(lease, run_of("T", 9))
    record = result.record
    assert result.status is PublishStatus.PUBLISHED
    assert result.canonical_base_pages.tolist() == record.base_page_path.tolist() == [0, 1]
    assert (record.recurrent_snapshot_slot, record.partial_kv_snapshot_slot) == (0, 0)
    assert record.exact_checkpoint_length == 9
    assert lease.published_full_block_count == 2
    runtime.release(lease)
    assert (runtime.free(), runtime.free(RECURRENT), runtime.free(PARTIAL)) == (14, 1, 1)


def test_a_page_aligned_checkpoint_needs_no_partial_slot():
    """Eight tokens fill two pages: no partial snapshot is taken or restored."""
    runtime = hybrid()
    runtime.run(run_of("T", 8))
    plan = runtime.plan(run_of("T", 9))
    assert (plan.reused_token_length, plan.partial_kv_snapshot_slot) == (8, None)
    assert runtime.free(PARTIAL) == 2


def test_a_checkpoint_within_the_first_page_shares_no_page():
    """Three tokens: slots only. It is found, restored, and evicted like any other."""
    runtime = hybrid()
    runtime.run(run_of("T", 3))
    lease = runtime.begin(run_of("T", 4))
    assert (lease.recurrent_snapshot_slot, lease.partial_kv_snapshot_slot) == (0, 0)
    assert runtime.paths() == [[]]
    runtime.release(lease)
    for letter in "UV":
        runtime.run(run_of(letter, 3))
    assert runtime.start(run_of("T", 4)) == 0


def test_pure_recurrent_models_have_no_pages_at_all():
    """Plans demand nothing; a checkpoint at any length is restored from its slot; other identities are not found."""
    runtime = recurrent()
    assert runtime.run(run_of("T", 9)) == 0
    plan = runtime.plan(run_of("T", 10))
    assert (plan.reused_token_length, plan.base_page_demand, plan.matched_base_pages.size) == (9, 0, 0)
    lease = runtime.begin(run_of("T", 10))
    assert (lease.recurrent_snapshot_slot, lease.partial_kv_snapshot_slot, lease.base_pages.size) == (0, None, 0)
    assert runtime.manager.grow(lease, 0)
    assert not runtime.manager.grow(lease, 1)
    assert runtime.manager.candidate_checkpoint_lengths(keys_of(run_of("U", 10)), 10).tolist() == []
    runtime.run(run_of("T", 2))
    assert runtime.manager.candidate_checkpoint_lengths(keys_of(run_of("T", 10)), 10).tolist() == [9, 2]


def test_h19_a_restored_snapshot_is_no_victim():
    """Two slots, T and U cached, T restored by a running request: its new checkpoint evicts U, and T stays."""
    runtime = hybrid(page=128)
    t = run_of("T", 131)
    runtime.run(t[:130])
    runtime.run(run_of("U", 130))
    lease = runtime.begin(t)
    assert runtime.checkpoint(lease, t).status is PublishStatus.PUBLISHED
    runtime.manager.release_restored_snapshots(lease)
    runtime.release(lease)
    assert runtime.start(run_of("U", 131)) == 0
    assert runtime.start(run_of("T", 132)) == 131
    assert runtime.start(t) == 130


def test_h19_when_every_slot_is_pinned_it_is_pressure_and_changes_nothing():
    """One slot, pinned by the restore: no reservation, nothing evicted, and the old checkpoint still serves."""
    runtime = hybrid(slots=1, page=128)
    runtime.run(run_of("T", 130))
    lease = runtime.begin(run_of("T", 131))
    before = runtime.everything()
    assert runtime.manager.reserve_snapshots(lease, 131) is None
    assert runtime.everything() == before
    runtime.release(lease)
    assert (runtime.start(run_of("T", 131)), runtime.free(RECURRENT)) == (130, 0)


def test_slots_of_both_kinds_are_had_together_or_not_at_all():
    """With a free recurrent slot but every partial slot pinned, nothing is taken; an aligned length needs only the one."""
    runtime = hybrid(num_recurrent_snapshots=3, num_partial_kv_snapshots=1)
    runtime.run(run_of("T", 5))
    lease = runtime.begin(run_of("T", 8), base_extra_tokens=0)
    assert runtime.manager.reserve_snapshots(lease, 7) is None
    assert runtime.free(RECURRENT) == 2
    reservation = runtime.manager.reserve_snapshots(lease, 8)
    assert reservation == HybridSnapshotReservation(1, None)


def test_h20_a_dropped_attempt_leaves_no_binding():
    """A lease that restored a slot and was dropped pins nothing: the slot is reused and the old prefix starts cold."""
    runtime = hybrid()
    runtime.run(run_of("T", 6))
    runtime.release(runtime.begin(run_of("T", 7)))
    for letter in "UV":
        runtime.run(run_of(letter, 6))
    assert runtime.start(run_of("T", 7)) == 0
    assert runtime.free(RECURRENT) == runtime.free(PARTIAL) == 0


def test_a_reservation_returns_with_its_lease():
    """Slots that were reserved and never published go back to their pools when the lease ends."""
    runtime = hybrid()
    lease = runtime.begin(run_of("T", 6))
    assert runtime.manager.reserve_snapshots(lease, 6) == HybridSnapshotReservation(0, 0)
    assert runtime.free(RECURRENT) == 1
    runtime.release(lease)
    assert (runtime.free(RECURRENT), runtime.free(PARTIAL)) == (2, 2)


def test_a_checkpoint_that_stands_already_is_touched_and_the_slots_return():
    """A second producer of the same state: EXISTING, most recent, and its reservation goes back to the pools."""
    runtime = hybrid(slots=3)
    runtime.run(run_of("T", 6))
    runtime.run(run_of("U", 6))
    lease = runtime.begin(run_of("T", 6), bypass=True)
    result = runtime.checkpoint(lease, run_of("T", 6))
    assert result.status is PublishStatus.EXISTING_RECORD
    assert list(runtime.manager.records)[-1] == result.record
    assert runtime.free(RECURRENT) == 1
    assert runtime.manager.counters().existing_publications == 1


def test_evicting_for_pages_returns_the_slots_too():
    """A checkpoint that goes for its pages' sake gives its slots back with them, counted as reclaimed."""
    runtime = hybrid(num_pages=3)
    runtime.run(run_of("T", 9))
    runtime.begin(run_of("U", 9))
    counters = runtime.manager.counters()
    assert (counters.evicted_records, counters.reclaimed_base_kv_pages) == (1, 2)
    assert (counters.reclaimed_recurrent_snapshots, counters.reclaimed_partial_kv_snapshots) == (1, 1)
    assert runtime.free(RECURRENT) == 2


def test_checkpoints_that_share_a_page_go_together_for_it():
    """Two checkpoints on one full block: neither frees it alone, so when it is lacking both go, oldest first."""
    runtime = hybrid(num_pages=2, slots=3)
    runtime.run(run_of("T", 5))
    runtime.run(run_of("T", 6))
    lease = runtime.begin(run_of("U", 7))
    assert len(runtime.manager.records) == 0
    assert sorted(lease.base_pages.tolist()) == [0, 1]


def test_a_hybrid_plan_goes_stale_with_its_checkpoint():
    """When the checkpoint is gone the plan is stale, also when the same state was published again in another slot."""
    runtime = hybrid()
    runtime.run(run_of("T", 6))
    plan = runtime.plan(run_of("T", 7))
    runtime.manager.clear()
    runtime.run(run_of("U", 6))
    runtime.run(run_of("T", 6))
    before = runtime.everything()
    assert runtime.manager.acquire(plan).status is AcquireStatus.STALE_PLAN
    assert runtime.everything() == before


def test_match_says_why_a_checkpoint_is_not_reused():
    """No checkpoint, the wrong length, evicted, nothing at all; and what limits a hit."""
    runtime = hybrid()
    t = run_of("T", 9)

    def reason(tokens, *lengths):
        exact = [checkpoint_of(tokens[:length]) for length in lengths]
        return runtime.manager.match(keys_of(tokens), len(tokens), exact_keys=exact).reason

    assert reason(t) is MissReason.EMPTY_CACHE
    runtime.run(t)
    assert reason(run_of("U", 9)) is MissReason.NO_MATCH
    assert reason(t) is MissReason.NO_CHECKPOINT
    assert reason(t, 9) is MissReason.WRONG_CHECKPOINT_LENGTH
    assert reason([*t, 1], 9) is MissReason.NONE
    assert reason([*t, 1, 2], 9) is MissReason.PARTIAL_BLOCK
    assert reason([*t, *run_of("V", 9)], 9) is MissReason.DIVERGED
    for letter in "WX":
        runtime.run(run_of(letter, 3))
    assert reason(t, 9) is MissReason.EVICTED


def test_checkpoint_calls_that_cannot_be_are_refused():
    """Wrong lengths, foreign or spent reservations, a second reservation: refused, and nothing changes."""
    runtime = hybrid(slots=3)
    manager = runtime.manager
    tokens = run_of("T", 8)
    lease, other = runtime.begin(tokens), runtime.begin(run_of("U", 8))
    with pytest.raises(ContractError, match="exact_length"):
        manager.reserve_snapshots(lease, 0)
    with pytest.raises(ContractError, match="beyond"):
        manager.reserve_snapshots(lease, 13)
    reservation = manager.reserve_snapshots(lease, 6)
    before = runtime.everything()
    with pytest.raises(ContractError, match="already"):
        manager.reserve_snapshots(lease, 7)
    with pytest.raises(ContractError, match="reserved for 6"):
        manager.publish_checkpoint(lease, keys_of(tokens), checkpoint_of(tokens[:7]), reservation)
    with pytest.raises(ContractError, match="not what the lease holds"):
        manager.publish_checkpoint(other, keys_of(tokens), checkpoint_of(tokens[:6]), reservation)
    with pytest.raises(ContractError, match="not what the lease holds"):
        manager.retire_snapshots(other, reservation)
    with pytest.raises(ContractError, match="call publish_checkpoint"):
        manager.publish(lease, keys_of(tokens), 8)
    assert runtime.everything() == before
    manager.publish_checkpoint(lease, keys_of(tokens), checkpoint_of(tokens[:6]), reservation)
    stranger = HybridCheckpointKey(Hash128(1, 2), 6)
    with pytest.raises(ContractError, match="published before"):
        manager.publish_checkpoint(lease, keys_of(tokens), stranger, reservation)
    manager.retire_snapshots(lease, reservation)
    with pytest.raises(ContractError, match="not what the lease holds"):
        manager.retire_snapshots(lease, reservation)
    manager.release_restored_snapshots(lease)
    manager.check_invariants()


def test_attention_leases_make_no_checkpoints():
    """Reserving or publishing a checkpoint is refused where there is no recurrent state."""
    runtime = Runtime()
    lease = runtime.begin(run_of("T", 9))
    with pytest.raises(ContractError, match="no checkpoints"):
        runtime.manager.reserve_snapshots(lease, 9)


def test_mtp_keeps_the_boundary_token_in_a_private_page():
    """A page-aligned length shares one block fewer, and takes a partial slot for the whole last page."""
    runtime = mtp()
    runtime.run(run_of("T", 8))
    (record,) = runtime.manager.records
    assert (record.base_page_path.tolist(), record.draft_page_path.tolist()) == ([0], [0])
    assert record.partial_kv_snapshot_slot == 0
    plan = runtime.plan(run_of("T", 9))
    assert (plan.reused_token_length, plan.reused_base_pages.size, plan.reused_draft_pages.size) == (8, 1, 1)
    assert (plan.base_page_demand, plan.draft_page_demand) == (2, 2)
    assert plan.partial_kv_snapshot_slot == 0


def test_mtp_draft_pages_belong_to_their_checkpoint():
    """Two continuations of one block have draft pages of their own for it: its last position knew different successors."""
    runtime = mtp()
    stem = run_of("S", 4)
    a, b = [*stem, 1], [*stem, 2]
    runtime.run(a)
    runtime.run(b)
    first, second = runtime.manager.records
    assert first.base_page_path.tolist() == second.base_page_path.tolist()
    assert first.draft_page_path.tolist() != second.draft_page_path.tolist()
    for tokens, record in ((a, first), (b, second)):
        lease = runtime.begin([*tokens, 9])
        assert lease.draft_pages.tolist()[:1] == record.draft_page_path.tolist()
        runtime.release(lease)


def test_mtp_in_plain_mode_runs_cold_and_publishes_nothing():
    """A vanilla request on an MTP deployment reuses nothing, takes no draft page, and may not make a checkpoint."""
    runtime = mtp()
    runtime.run(run_of("T", 9))
    plan = runtime.plan(run_of("T", 10), mode=Mode.VANILLA)
    assert (plan.bypass, plan.reused_token_length, plan.draft_page_demand) == (True, 0, 0)
    lease = runtime.manager.acquire(plan).lease
    with pytest.raises(ContractError, match="no checkpoints"):
        runtime.manager.reserve_snapshots(lease, 10)


def test_mtp_eviction_returns_both_sides_and_the_slots():
    """A checkpoint that goes gives back base pages, draft pages and both slots."""
    runtime = mtp(num_pages=4)
    runtime.run(run_of("T", 9))
    runtime.begin(run_of("U", 15))
    counters = runtime.manager.counters()
    assert (counters.reclaimed_base_kv_pages, counters.reclaimed_draft_kv_pages) == (2, 2)
    assert (counters.reclaimed_recurrent_snapshots, counters.reclaimed_partial_kv_snapshots) == (1, 1)
    assert counters.spec_pair_publications == 1
