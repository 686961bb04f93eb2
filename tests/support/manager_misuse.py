"""What both managers must refuse, and stay as they are."""

from __future__ import annotations

import numpy as np

from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.manager.results import HybridSnapshotReservation
from support.manager_twins import Sequence, Twins
from support.manager_views import keys_of


def use_a_released_lease(twins: Twins, leases, tokens_per_page: int) -> None:
    """A lease is released once, and means nothing afterwards."""
    keys = keys_of((1,) * 6, tokens_per_page)
    assert all(lease.released for lease in leases)
    for method, rest in (
        ("release", ()),
        ("grow", (1,)),
        ("publish", (keys, 3)),
        ("release_restored_snapshots", ()),
    ):
        twins.refused(method, lambda side, rest=rest: (leases[side], *rest))


def publish_another_sequence(twins: Twins, sequence: Sequence, position: int, tokens_per_page: int) -> None:
    """Keys of a sequence that differs in one token: refused where the lease reused or published that token's block."""
    known_tokens = len(twins.twin.lease_known_keys(sequence.leases[1])) * tokens_per_page
    if known_tokens == 0:
        return
    tokens, at = sequence.tokens, position % known_tokens
    keys = keys_of((*tokens[:at], 3 - tokens[at], *tokens[at + 1 :]), tokens_per_page)
    twins.refused("publish", lambda side: (sequence.leases[side], keys, len(tokens)))


def pass_wrong_arguments(twins: Twins, sequence: Sequence, which: int, tokens_per_page: int, modes: list[Mode]) -> None:
    """Another manager's handles, missing keys, lengths beyond the lease, modes and draft pages that are not there."""
    tokens, leases, page, mode = sequence.tokens, sequence.leases, tokens_per_page, modes[0]
    foreign, length, keys = leases[::-1], len(tokens), keys_of(tokens, page)
    stray = HybridSnapshotReservation(99, 99)
    missing = next(mode for mode in Mode if mode not in modes)
    rows, targets = np.array([leases[0].row, 99], np.int32), np.array([20, 20], np.int32)
    calls = [
        ("release", lambda side: (foreign[side],), {}),
        ("grow", lambda side: (leases[side], -1), {}),
        ("publish", lambda side: (foreign[side], keys, length), {}),
        ("publish", lambda side: (leases[side], keys, 0), {}),
        ("publish", lambda side: (leases[side], keys[:0], page), {}),
        ("publish", lambda side: (leases[side], keys, length), {"draft_state_length": length + 1}),
        ("retire_snapshots", lambda side: (foreign[side], stray), {}),
        ("retire_snapshots", lambda side: (leases[side], stray), {}),
        ("plan", lambda _side: (keys[:0], page), {"mode": mode}),
        ("plan", lambda _side: (keys, 0), {"mode": mode}),
        ("plan", lambda _side: (keys, length), {"mode": mode, "base_extra_tokens": -1}),
        ("plan", lambda _side: (keys, length), {"mode": missing}),
        ("grow_leases", lambda _side: (rows, targets), {}),
        ("can_grow_leases", lambda _side: (rows[:1], targets), {}),
    ]
    method, arguments, options = calls[which % len(calls)]
    twins.refused(method, arguments, **options)
