"""A runtime as careful as a real one must be, on a stream that is lazy and may fail: what sweep and simulation drive."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.manager.results import CacheRequestLease
from ctxcache.testing.deferred import DeferredDeviceOps, Use
from ctxcache.testing.faults import OUTSIDE, FaultInjector, FaultPlan
from ctxcache.testing.key_oracle import KeyOracle
from ctxcache.testing.ledger import OwnershipLedger
from ctxcache.testing.page_guard import PageGuard
from ctxcache.testing.runtime.deployments import Sizes
from ctxcache.testing.runtime.identities import Media, extras_of, media_behind
from ctxcache.testing.runtime.probes import probe_poisoned
from ctxcache.testing.runtime.steps import Runtime

USUAL_SIZES = Sizes(max_draft_tokens=26)
"""The draft's rows end before the base's, and neither ends with a page."""


class WaitFailed(Exception):  # noqa: N818 - an outcome, not an error
    """The runtime's own synchronisation failed: its model did not run to the end."""


class FakeRuntime(Runtime):
    """A `Runtime` whose stream is lazy, whose device fails as planned, and which is watched.

    Attributes:
        page_sanitizer: as asked for.
        deferred: the lazy stream.
        ops: faults around it.
        ledger: looks at every report and every change of an owner.
        guard: looks for writes where there is nothing to write.
    """

    ops: FaultInjector

    def __init__(
        self,
        kind: Kind,
        sizes: Sizes | None = None,
        *,
        seed: int = 0,
        plan: FaultPlan | None = None,
        page_sanitizer: bool = False,
    ) -> None:
        self.page_sanitizer = page_sanitizer
        self.deferred = DeferredDeviceOps(NumpyDeviceOps(), random.Random(seed))  # noqa: S311 - a schedule is no secret
        faults = FaultInjector(self.deferred, plan)
        super().__init__(kind, USUAL_SIZES if sizes is None else sizes, faults, page_sanitizer=page_sanitizer)
        self.ledger = OwnershipLedger(self.coordinator, self.deferred)
        self.guard = PageGuard(self.coordinator)
        KeyOracle(self.coordinator.manager, self._identity_of, self.violations)
        self._num_poisonings = 0

    def enqueue(self, work: Callable[[], None], uses: Sequence[Use]) -> None:
        """Let the model work, some time before the next successful wait."""
        self.deferred.enqueue(work, uses=uses)

    def wait(self) -> None:
        """Synchronise, as a runtime does before it looks at what its model computed."""
        self.ops.operation(OUTSIDE)
        self.model_failed = True
        try:
            code = self.ops.synchronize(None, self.sync)
        except Exception as error:
            raise WaitFailed(repr(error)) from error
        if code:
            raise WaitFailed(f"code {code}")
        self.model_failed = False

    def settle(self) -> bool:
        """Do what is to be done after anything went wrong; returns whether the coordinator admits again.

        Abandons what is left, and after a failed drain shuts down and recovers; every other such device has lost the work
        that had not run. May raise what the coordinator raises.
        """
        self.running = []
        if self.handle is not None and self.handle.valid:
            self.coordinator.abandon(self.handle)
        if self.coordinator.poisoned:
            probe_poisoned(self)
            self._num_poisonings += 1
            if self._num_poisonings % 2:
                self.deferred.lose_waiting()
            if self.coordinator.shutdown() is Status.OK:
                probe_poisoned(self)
                self.coordinator.recover()
        return not self.coordinator.poisoned

    def verify_pages(self) -> None:
        """Sum what is published once more, where sums are noted at all; raises where a page has changed."""
        if self.page_sanitizer and self.resources.base_page_table is not None:
            self.coordinator.verify_pages()

    def _identity_of(self, lease: CacheRequestLease) -> tuple[list[int], BlockKeyExtras, Media] | None:
        """Return whose tokens a lease holds."""
        running = next((running for running in self.running if running.lease is lease), None)
        if running is None:
            return None
        said = running.transcript
        return said.tokens, extras_of(said.identity), media_behind(running.media, len(said))
