"""What must be refused, and change nothing, asked when it matters: while a request is active, and after a failed drain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ctxcache.admission import ContextCacheBatchAdmission, ContextCacheSequenceAdmission
from ctxcache.errors import ContractError
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import Phase

if TYPE_CHECKING:
    from ctxcache.testing.fake_runtime import FakeRuntime

_ADMISSION = ContextCacheBatchAdmission([ContextCacheSequenceAdmission([1, 2, 3])])
_REFUSED = "ContractError"


def probe_active(runtime: FakeRuntime) -> None:
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


def probe_poisoned(runtime: FakeRuntime) -> None:
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


def _ask(runtime: FakeRuntime, when: str, what: str, call: Callable[[], Any], expected: str) -> None:
    try:
        outcome = call()
    except ContractError:
        found = _REFUSED
    else:
        found = outcome.name if isinstance(outcome, Status) else repr(outcome)
    if found != expected:
        runtime.violations.append(f"{what} while {when} gave {found}; it must be {expected}")
