"""When what becomes reusable: one publication policy per execution mode, chosen when a request is admitted.

The coordinator calls the same moments for every mode. A moment that begins with `stage_` reserves and returns what is to
be captured; a moment that begins with `publish_` runs after the state is proven complete. What a moment publishes of a slot:

    attention        [0, committed // P)                        full blocks; the rest of the last page stays private
    shared KV        [0, min(frozen, common) // P)              and at the first verification only
    EAGLE            the same, as pairs of base and draft pages
    recurrent        the state after exactly `length` tokens, and the blocks [0, length // P) before it
    hybrid MTP       the same, and the blocks [0, (length - 1) // P): the boundary token's page is private
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from ctxcache.arguments import Int32s
from ctxcache.device.ops import SnapshotJobs
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.ids import PublicationPoint, PublishStatus, ResourceType
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.manager.results import HybridCheckpointKey
from ctxcache.metrics import CoordinatorCounters
from ctxcache.request.batch import NOT_FROZEN, Batch, StagedHybridPublication
from ctxcache.request.explain import IdentityMemory
from ctxcache.request.snapshot_jobs import SnapshotSlots, snapshot_jobs

_LOG = logging.getLogger("ctxcache")

_BUDGETS = {
    ResourceType.RECURRENT_SNAPSHOT: "recurrent_snapshot_pool_bytes",
    ResourceType.PARTIAL_KV_SNAPSHOT: "partial_kv_snapshot_pool_bytes",
}
"""By pool of snapshot slots: the field of the configuration that pays for it."""


class PublicationPolicy:
    """Publishes nothing: the policy of a bypass, and the ground that the others stand on."""

    def __init__(
        self,
        manager: ContextCacheManager,
        tokens_per_page: int,
        counters: CoordinatorCounters,
        identities: IdentityMemory,
    ) -> None:
        self._manager = manager
        self._tokens_per_page = tokens_per_page
        self._counters = counters
        self._identities = identities

    def stage_prefill(self, batch: Batch) -> SnapshotJobs | None:
        """Reserve what the end of the prefill captures; `None` when there is nothing."""
        del batch
        return None

    def publish_prefill(self, batch: Batch) -> None:
        """Publish, or freeze, what the prefill has computed."""

    def stage_decode(self, batch: Batch, slots: Int32s, committed: Int32s) -> SnapshotJobs | None:
        """Reserve what completed sequences capture at their new committed lengths; `None` when there is nothing."""
        del batch, slots, committed
        return None

    def publish_decode(self, batch: Batch, slots: Int32s) -> None:
        """Publish what completed sequences have."""

    def publish_frozen(self, batch: Batch) -> None:
        """Publish the prefill boundaries that awaited their first verification, now that it is proven."""

    def stage_boundary(self, batch: Batch, slot: int, length: int) -> SnapshotJobs | None:
        """Reserve what one boundary within the prompt captures; `None` when there is nothing."""
        del batch, slot, length
        return None

    def publish_boundary(self, batch: Batch, slot: int) -> None:
        """Publish one captured boundary."""

    def _note_identity(self, batch: Batch, slot: int, status: PublishStatus) -> None:
        if status is PublishStatus.PUBLISHED:
            length = int(batch.num_tokens[slot])
            media = batch.media_of(slot, length)
            self._identities.note(batch.keys[slot], batch.tokens[slot, :length], media, batch.extras[slot])


class FullBlockPublication(PublicationPolicy):
    """Plain attention: every full block, at the end of the prefill and of a completed sequence."""

    def publish_prefill(self, batch: Batch) -> None:
        """Publish the full blocks of every prompt."""
        for slot in range(batch.size):
            self._publish_blocks(batch, slot, int(batch.committed[slot]))

    def publish_decode(self, batch: Batch, slots: Int32s) -> None:
        """Publish the full blocks of the completed sequences."""
        for slot in slots.tolist():
            self._publish_blocks(batch, slot, int(batch.committed[slot]))

    def _publish_blocks(self, batch: Batch, slot: int, length: int, draft_length: int = 0) -> None:
        """Publish up to `length` tokens, where that is a full block more than this sequence has published."""
        if length // self._tokens_per_page <= batch.published_blocks[slot]:
            return
        result = self._manager.publish(
            batch.leases[slot], batch.extend_keys(slot, length), length, draft_state_length=draft_length
        )
        batch.published_blocks[slot] = result.published_full_block_count
        self._note_identity(batch, slot, result.status)


class SharedKvPublication(FullBlockPublication):
    """A draft that reads the base's pages: as plain attention, but the prompt waits for its first verification."""

    def publish_prefill(self, batch: Batch) -> None:
        """Freeze every prompt's boundary: whether its last block holds is known after the first verification."""
        batch.frozen[:] = batch.committed

    def publish_decode(self, batch: Batch, slots: Int32s) -> None:
        """Publish the completed sequences as far as base and draft agree."""
        for slot in slots.tolist():
            self._publish_common(batch, slot, int(batch.common[slot]))

    def publish_frozen(self, batch: Batch) -> None:
        """Publish each frozen boundary, no further than base and draft agree."""
        for slot in np.flatnonzero(batch.frozen != NOT_FROZEN).tolist():
            self._publish_common(batch, slot, int(min(batch.frozen[slot], batch.common[slot])))
            batch.frozen[slot] = NOT_FROZEN

    def _publish_common(self, batch: Batch, slot: int, length: int) -> None:
        self._publish_blocks(batch, slot, length)


class EaglePublication(SharedKvPublication):
    """A draft with pages of its own: base and draft pages are published as pairs."""

    def _publish_common(self, batch: Batch, slot: int, length: int) -> None:
        self._publish_blocks(batch, slot, length, draft_length=length)


class SnapshotPublication(PublicationPolicy):
    """The ground of the policies that capture state: one checkpoint of one sequence, staged and published."""

    def _stage_one(self, batch: Batch, slot: int, length: int, point: PublicationPoint) -> SnapshotSlots | None:
        """Reserve one checkpoint; `None` when the length is published or staged already, or under pressure."""
        if length <= batch.published_exact[slot] or batch.staged[slot] is not None:
            return None
        lease = batch.leases[slot]
        snapshots = self._manager.reserve_snapshots(lease, length)
        if snapshots is None:
            self._counters.hybrid_snapshot_pressure_skips += 1
            self._tell_pressure(length)
            return None
        key = HybridCheckpointKey(batch.exact_key(slot, length), length)
        batch.staged[slot] = StagedHybridPublication(key, snapshots, point)
        return SnapshotSlots(slot, lease, length, snapshots.recurrent_snapshot_slot, snapshots.partial_kv_snapshot_slot)

    def _tell_pressure(self, length: int) -> None:
        """Log a skipped checkpoint, at the first, second, fourth ... time: it harms nobody, but later requests start earlier."""
        skips = self._counters.hybrid_snapshot_pressure_skips
        if skips & (skips - 1):
            return
        for resource, budget in _BUDGETS.items():
            capacity = self._manager.pool(resource).capacity
            if capacity and not self._manager.num_available(resource):
                _LOG.warning(
                    "checkpoint at %d tokens skipped (%d so far): running sequences hold %s of %s; give "
                    "ContextCacheConfig.%s at least a slot more, %d in all",
                    length,
                    skips,
                    "the one slot" if capacity == 1 else f"all {capacity} slots",
                    resource.name,
                    budget,
                    capacity + 1,
                )

    def _publish_one(self, batch: Batch, slot: int) -> None:
        """Publish one captured checkpoint, if there is one."""
        staged = batch.staged[slot]
        if staged is None:
            return
        length = staged.checkpoint.exact_length
        lease = batch.leases[slot]
        result = self._manager.publish_checkpoint(
            lease, batch.extend_keys(slot, length), staged.checkpoint, staged.snapshots
        )
        self._manager.retire_snapshots(lease, staged.snapshots)
        batch.staged[slot] = None
        batch.published_exact[slot] = length
        batch.published_blocks[slot] = result.published_full_block_count
        self._note_identity(batch, slot, result.status)

    def _release_restored(self, batch: Batch) -> None:
        """Drop the pins of restored snapshots: the runtime has proven the restore complete."""
        for lease in batch.leases:
            self._manager.release_restored_snapshots(lease)


class CheckpointPublication(SnapshotPublication):
    """Recurrent layers: the state at one exact length, captured at the end of the prefill or of the sequence."""

    def stage_prefill(self, batch: Batch) -> SnapshotJobs | None:
        """Reserve a checkpoint at the end of every prompt."""
        return self._stage(batch, range(batch.size), batch.num_tokens, PublicationPoint.PREFILL_END)

    def publish_prefill(self, batch: Batch) -> None:
        """Publish the captured checkpoints, and let go of those that were restored: pinned till then, they outlive them."""
        self._publish_staged(batch)
        self._release_restored(batch)

    def stage_decode(self, batch: Batch, slots: Int32s, committed: Int32s) -> SnapshotJobs | None:
        """Reserve a checkpoint at the new committed length of every completed sequence."""
        return self._stage(batch, slots.tolist(), committed, PublicationPoint.DECODE_END)

    def publish_decode(self, batch: Batch, slots: Int32s) -> None:
        """Publish the captured checkpoints."""
        del slots
        self._publish_staged(batch)

    def _stage(
        self, batch: Batch, slots: Iterable[int], lengths: Int32s, point: PublicationPoint
    ) -> SnapshotJobs | None:
        checkpoints = [self._stage_one(batch, slot, int(lengths[slot]), point) for slot in slots]
        return snapshot_jobs(
            [checkpoint for checkpoint in checkpoints if checkpoint is not None],
            self._tokens_per_page,
            paired=batch.rules.paired,
        )

    def _publish_staged(self, batch: Batch) -> None:
        for slot in range(batch.size):
            self._publish_one(batch, slot)


class BoundaryPublication(SnapshotPublication):
    """MTP: endpoints are published one by one during the prefill; its end only lets go of what was restored."""

    def publish_prefill(self, batch: Batch) -> None:
        """Let go of the checkpoints that were restored."""
        self._release_restored(batch)

    def stage_boundary(self, batch: Batch, slot: int, length: int) -> SnapshotJobs | None:
        """Reserve a checkpoint at a boundary within the prompt."""
        checkpoint = self._stage_one(batch, slot, length, PublicationPoint.PREFILL_END)
        return snapshot_jobs([checkpoint] if checkpoint else [], self._tokens_per_page, paired=True)

    def publish_boundary(self, batch: Batch, slot: int) -> None:
        """Publish the captured boundary."""
        self._publish_one(batch, slot)


_POLICIES: dict[Kind, dict[Mode, type[PublicationPolicy]]] = {
    Kind.VANILLA: {Mode.VANILLA: FullBlockPublication},
    Kind.PURE_RECURRENT: {Mode.VANILLA: CheckpointPublication},
    Kind.HYBRID: {Mode.VANILLA: CheckpointPublication},
    Kind.EAGLE: {Mode.VANILLA: FullBlockPublication, Mode.EAGLE: EaglePublication},
    Kind.HYBRID_MTP: {Mode.VANILLA: PublicationPolicy, Mode.MTP: BoundaryPublication},
    Kind.SHARED_KV: {Mode.VANILLA: FullBlockPublication, Mode.SHARED_KV: SharedKvPublication},
}


def choose_publication(kind: Kind, mode: Mode, *, publishes: bool) -> type[PublicationPolicy]:
    """Return the policy of one request: by deployment and mode, or none at all for a bypass."""
    return _POLICIES[kind][mode] if publishes else PublicationPolicy
