"""What the cache has done so far, and what it holds now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolOccupancy:
    """Resources of one pool: how many nobody holds, and how many there are."""

    free: int
    capacity: int


@dataclass(frozen=True, slots=True)
class ContextCacheMetrics:
    """A snapshot. Counters never decrease; `current_records` and the four pools are the present state.

    `matched_tokens` counts what matched, also where a rewind computes it again. `hit_sequences` counts
    sequences that matched at least one token. `publication_attempts` counts publish calls that had something
    to publish and equals `committed_publications + existing_publications + refused_publications`;
    `published_endpoints` is `committed_publications + existing_publications`. `planning_nanoseconds` is wall time
    of hashing, planning and acquiring.
    """

    admitted_sequences: int
    hit_sequences: int
    media_aware_sequences: int
    lookup_bypass_sequences: int
    forced_cold_sequences: int
    standard_plans: int
    no_reusable_prefix_plans: int
    full_input_rewind_plans: int
    matched_tokens: int
    reused_tokens: int
    publication_attempts: int
    committed_publications: int
    existing_publications: int
    refused_publications: int
    published_endpoints: int
    hybrid_restores: int
    hybrid_snapshot_pressure_skips: int
    hybrid_capture_synchronizations: int
    spec_full_page_replays: int
    spec_pair_publications: int
    planning_nanoseconds: int
    current_records: int
    evicted_records: int
    shortened_records: int
    reclaimed_base_kv_pages: int
    reclaimed_draft_kv_pages: int
    reclaimed_recurrent_snapshots: int
    reclaimed_partial_kv_snapshots: int
    drains: int
    failed_drains: int
    quarantines: int
    base_kv_pages: PoolOccupancy
    draft_kv_pages: PoolOccupancy
    recurrent_snapshots: PoolOccupancy
    partial_kv_snapshots: PoolOccupancy


@dataclass(slots=True)
class CoordinatorCounters:
    """The counters that the coordinator itself keeps; see `ContextCacheMetrics` for what each counts."""

    admitted_sequences: int = 0
    hit_sequences: int = 0
    media_aware_sequences: int = 0
    lookup_bypass_sequences: int = 0
    forced_cold_sequences: int = 0
    standard_plans: int = 0
    no_reusable_prefix_plans: int = 0
    full_input_rewind_plans: int = 0
    matched_tokens: int = 0
    reused_tokens: int = 0
    hybrid_restores: int = 0
    hybrid_snapshot_pressure_skips: int = 0
    hybrid_capture_synchronizations: int = 0
    spec_full_page_replays: int = 0
    planning_nanoseconds: int = 0
    drains: int = 0
    failed_drains: int = 0
    quarantines: int = 0
