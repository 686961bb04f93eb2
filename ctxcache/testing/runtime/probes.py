"""What must be refused or found, asked when it matters: beside an active request, after a failed drain, behind a stray write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ctxcache.errors import ContractError, PageCorruptionError
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.ids import Phase
from ctxcache.request.admission import (
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
)
from ctxcache.request.execution_modes import STEP_RULES
from ctxcache.testing.runtime.steps import Runtime

_ADMISSION = ContextCacheBatchAdmission([ContextCacheSequenceAdmission([1, 2, 3])])
_REFUSED = "ContractError"


def probe_active(runtime: Runtime) -> None:
    """While a request is active there is no second one, no shutdown, no recovery, and nothing to clear."""
    coordinator = runtime.coordinator
    state = runtime.request.inspect().state
    leases = coordinator.manager.num_leases
    _ask(
        runtime, "active", "begin_request", lambda: coordinator.begin_request(_ADMISSION, None).status, "REQUEST_FAILED"
    )
    _ask(runtime, "active", "shutdown", coordinator.shutdown, "REQUEST_FAILED")
    _ask(runtime, "active", "clear", coordinator.clear, _REFUSED)
    _ask(runtime, "active", "recover", coordinator.recover, _REFUSED)
    if runtime.request.inspect().state is not state or coordinator.manager.num_leases != leases:
        runtime.violations.append("a refusal changed the active request")


def probe_poisoned(runtime: Runtime) -> None:
    """While a request is quarantined nothing is admitted, recovered or cleared, and its leases stay out."""
    coordinator = runtime.coordinator
    leases = coordinator.manager.num_leases
    _ask(runtime, "poisoned", "begin_request", lambda: coordinator.begin_request(_ADMISSION, None).status, "POISONED")
    if not coordinator.idle:
        _ask(runtime, "poisoned", "clear", coordinator.clear, _REFUSED)
        _ask(runtime, "poisoned", "recover", coordinator.recover, _REFUSED)
        if not leases:
            runtime.violations.append("a request is quarantined, and holds no lease")
        if runtime.handle is not None and runtime.handle.phase is not Phase.POISONED:
            runtime.violations.append(f"the handle of a quarantined request is in phase {runtime.handle.phase}")
    if coordinator.manager.num_leases != leases or not coordinator.poisoned:
        runtime.violations.append("a refusal changed the quarantine")


def probe_lengths(runtime: Runtime) -> None:
    """At the end of a step, nothing can be committed beyond the pages that it was prepared with."""
    if STEP_RULES[runtime.mode].single_token:
        return
    states = runtime.request.inspect().sequences
    advances = []
    for state in states:
        count = state.capacity + 1 - state.committed_state_length
        advances.append(ContextCacheSequenceAdvance([1] * count, state.capacity + 1))
    common = runtime.common_lengths([state.common_state_length for state in states])
    _ask(
        runtime,
        "a step is over",
        "a commit beyond the pages",
        lambda: runtime.coordinator.complete_decode_step(runtime.request, advances, (), common),
        _REFUSED,
    )


def probe_sanitizer(runtime: Runtime, which: int, at: int) -> None:
    """Write one byte into a page that the admitted request shares, as a wrong kernel would: the sanitizer must find it.

    Args:
        runtime: with an admitted request and the page sanitizer switched on.
        which: chooses the page.
        at: chooses layer, half, byte and bit.
    """
    fold = int(runtime.mode is Mode.MTP)  # with MTP the boundary token lives in a page of its own
    size = runtime.sizes.tokens_per_page
    shared = [
        page
        for running in runtime.running
        for page in running.lease.base_pages[: max(running.reused - fold, 0) // size].tolist()
    ]
    if not shared:
        return
    pools = runtime.resources.base_cache.kv_pools
    content = np.asarray(pools[at % len(pools)])[at % 2, shared[which % len(shared)]].reshape(-1).view(np.uint8)
    content[at % content.size] ^= 1 << at % 8
    try:
        runtime.prepare()
        runtime.violations.append("a stray write into a shared page was not found")
    except PageCorruptionError:
        pass
    finally:
        content[at % content.size] ^= 1 << at % 8


def _ask(runtime: Runtime, when: str, what: str, call: Callable[[], Any], expected: str) -> None:
    try:
        outcome = call()
    except ContractError:
        found = _REFUSED
    else:
        found = outcome.name if isinstance(outcome, Status) else repr(outcome)
    if found != expected:
        runtime.violations.append(f"{what} while {when} gave {found}; it must be {expected}")
