"""What the device may still write after a failed drain, kept until a drain proves it idle; and whether anything is admitted."""

from __future__ import annotations

import logging
from typing import Any

from ctxcache.errors import ContractError
from ctxcache.fsm import DrainFailed, State, fire
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.metrics import CoordinatorCounters
from ctxcache.request.request import Request

_LOG = logging.getLogger("ctxcache")

_UNPROVEN: list[Any] = []
"""What a device may still write at the end. It is kept for the rest of the process: freed memory could become somebody else's."""


def keep_for_ever(*unproven: Any) -> None:
    """Keep things that a device could not be proven to be done with referenced for the rest of the process."""
    _LOG.error("shut down without a proof that the device is idle: its caches and page tables are never freed")
    _UNPROVEN.append(unproven)


class Quarantine:
    """A request whose drain failed, with all its leases; and what follows from it for the coordinator.

    Attributes:
        request: what is in it, or `None`.
        poisoned: whether a drain has failed; `reopen()` clears it.
        cause: what made it fail: the exception, or the synchroniser's code.
        shut: whether the coordinator admits nothing any more.
    """

    def __init__(self, counters: CoordinatorCounters) -> None:
        self._counters = counters
        self.request: Request | None = None
        self.poisoned = False
        self.cause: BaseException | int | None = None
        self.shut = False

    def take(self, request: Request, cause: BaseException | int) -> None:
        """Take in a poisoned request."""
        self.request = request
        self.poisoned = True
        self.cause = cause
        self._counters.quarantines += 1
        _LOG.error(
            "a drain failed (%r): %d leases are quarantined until shutdown() proves the device idle",
            cause,
            len(request.batch.leases),
        )

    def prove(self) -> bool:
        """Drain once more; whether the request may be released now, or there is none. An interrupt is raised again."""
        if self.request is None or self.request.state is not State.POISONED:
            return True
        try:
            fire(self.request, "shutdown")
        except DrainFailed as failure:
            if failure.interrupt is not None:
                raise failure.interrupt from None
            return False
        return True

    def refusal(self) -> Status | None:
        """Say why nothing is admitted now; `None` where nothing here forbids it.

        Raises:
            ContractError: the coordinator was shut down in health.
        """
        if self.poisoned:
            return Status.POISONED
        if self.shut:
            raise ContractError("the coordinator is shut down; build another one")
        return None

    def require_recoverable(self) -> None:
        """Refuse recovery without a poisoning whose quarantine `shutdown()` has ended."""
        if not (self.poisoned and self.shut):
            raise ContractError(
                f"recover() is possible after a poisoning once shutdown() has returned OK; this coordinator is "
                f"{'poisoned' if self.poisoned else 'not poisoned'} and {'shut' if self.shut else 'not shut'}"
            )

    def reopen(self) -> None:
        """Let the coordinator admit again."""
        self.poisoned = False
        self.cause = None
        self.shut = False
