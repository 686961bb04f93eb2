"""A runtime in miniature for tests of the manager: sequences of tokens in, leases and records out."""

from __future__ import annotations

import numpy as np

from ctxcache.ids import AcquireStatus, ResourceType
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.keys.chain import hash_exact_prefix, hash_full_blocks
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.manager.results import HybridCheckpointKey

HASH_KEY = bytes(16)
PAGE = 4


def run_of(letter: str, num_tokens: int) -> list[int]:
    """Tokens that no run of another letter shares."""
    return [1000 * ord(letter) + i for i in range(num_tokens)]


def keys_of(tokens: list[int], page: int = PAGE) -> np.ndarray:
    """Keys of the full blocks."""
    return hash_full_blocks(tokens, page, key=HASH_KEY)


def checkpoint_of(tokens: list[int], page: int = PAGE) -> HybridCheckpointKey:
    """Key of the state after exactly these tokens."""
    return HybridCheckpointKey(hash_exact_prefix(tokens, page, key=HASH_KEY), len(tokens))


class Runtime:
    """Drives one manager with tokens instead of keys; checks all invariants after every call."""

    def __init__(self, num_pages=8, *, page=PAGE, kind=Kind.VANILLA, mode=None, **options):
        self.page = page
        self.mode = mode or Mode.VANILLA
        self.manager = ContextCacheManager(tokens_per_page=page, num_base_pages=num_pages, kind=kind, **options)
        self.has_checkpoints = kind in {Kind.HYBRID, Kind.PURE_RECURRENT, Kind.HYBRID_MTP}

    def plan(self, tokens, *, mode=None, **options):
        keys = keys_of(tokens, self.page)
        if self.has_checkpoints and "exact_keys" not in options:
            lengths = self.manager.candidate_checkpoint_lengths(keys, len(tokens))
            options["exact_keys"] = [checkpoint_of(tokens[:length], self.page) for length in lengths]
        return self.manager.plan(keys, len(tokens), mode=mode or self.mode, **options)

    def acquire(self, tokens, **options):
        result = self.manager.acquire(self.plan(tokens, **options))
        self.manager.check_invariants()
        return result

    def begin(self, tokens, **options):
        """Acquire a lease that must be had."""
        result = self.acquire(tokens, **options)
        assert result.status is AcquireStatus.ACQUIRED
        return result.lease

    def publish(self, lease, tokens, resident=None, **options):
        resident = len(tokens) if resident is None else resident
        result = self.manager.publish(lease, keys_of(tokens, self.page), resident, **options)
        self.manager.check_invariants()
        return result

    def checkpoint(self, lease, tokens):
        """Reserve, publish and retire a checkpoint after all of `tokens`; `None` under pressure."""
        reservation = self.manager.reserve_snapshots(lease, len(tokens))
        self.manager.check_invariants()
        if reservation is None:
            return None
        keys = keys_of(tokens, self.page)
        result = self.manager.publish_checkpoint(lease, keys, checkpoint_of(tokens, self.page), reservation)
        self.manager.check_invariants()
        self.manager.retire_snapshots(lease, reservation)
        self.manager.check_invariants()
        return result

    def release(self, *leases):
        for lease in leases:
            self.manager.release(lease)
            self.manager.check_invariants()

    def run(self, tokens, *, mode=None, paired=None, **options):
        """Run a whole request that publishes everything it can; return where its prefill began."""
        mode = mode or self.mode
        result = self.acquire(tokens, mode=mode, **options)
        assert result.status is AcquireStatus.ACQUIRED
        if self.has_checkpoints:
            self.manager.release_restored_snapshots(result.lease)
            self.checkpoint(result.lease, tokens)
        elif len(tokens) >= self.page:
            paired = mode is Mode.EAGLE if paired is None else paired
            self.publish(result.lease, tokens, draft_state_length=len(tokens) if paired else 0)
        self.release(result.lease)
        return result.plan.reused_token_length

    def start(self, tokens, **options):
        """Where a request for these tokens would begin now."""
        return self.plan(tokens, **options).reused_token_length

    def free(self, kind=ResourceType.BASE_KV_PAGE):
        return self.manager.pool(kind).free

    def paths(self):
        """Base pages of every record, least recently used first."""
        return [record.base_page_path.tolist() for record in self.manager.records]

    def everything(self):
        """All that can be seen from outside: to check that a refusal changed nothing."""
        return (
            [self.manager.pool(kind) for kind in ResourceType],
            [
                (record.serial, record.base_page_path.tolist(), record.draft_page_path.tolist())
                for record in self.manager.records
            ],
            self.manager.num_leases,
            self.manager.num_indexed_blocks,
        )
