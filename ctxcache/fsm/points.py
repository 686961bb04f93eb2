"""The fault points of the lifecycles: every device touch by name, and where a request goes when it fails.

Derived from the tables alone. A hook that enqueues fails through the lifecycle's `enqueue_failed`; one that proves, through
its `drain_failed` where the table has it, and otherwise the state stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ctxcache.errors import ContractError
from ctxcache.fsm.declaration import Hook, HookKind, Lifecycle, LifecycleState, Transition
from ctxcache.fsm.table import LIFECYCLES
from ctxcache.ids import ContextCacheDeploymentKind


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """One hook of one transition, as something that can fail.

    Attributes:
        name: `<operation>.<op>[.<role>]`; the same name may stand on several transitions.
        transition: the row it stands on.
        hook: the hook that fails.
        kinds: deployments in which it exists.
        fires: the trigger that accounts for the failure; empty where none is declared.
        leads_to: the state of the request afterwards.
    """

    name: str
    transition: Transition
    hook: Hook
    kinds: frozenset[ContextCacheDeploymentKind]
    fires: str
    leads_to: LifecycleState


def faults_of(lifecycle: Lifecycle, rows: Iterable[Transition]) -> tuple[FaultPoint, ...]:
    """Every hook of some rows of a lifecycle, in their order, as what can fail."""
    entered = {(row.trigger, row.source): row.target for row in lifecycle.transitions}
    found = []
    for row in rows:
        state = row.source if row.proves else row.target
        for hook in row.hooks:
            trigger = lifecycle.drain_failed if hook.kind is HookKind.PROVE else lifecycle.enqueue_failed
            target = entered.get((trigger, state))
            fires, leads_to = ("", state) if target is None else (trigger, target)
            name = hook.fault_point(row.operation)
            found.append(FaultPoint(name, row, hook, row.kinds & hook.kinds, fires, leads_to))
    return tuple(found)


FAULTS: tuple[FaultPoint, ...] = tuple(
    fault for lifecycle in LIFECYCLES.values() for fault in faults_of(lifecycle, lifecycle.transitions)
)
"""Every hook of every transition, in the order of the tables."""


SANITIZER_FAULTS: tuple[FaultPoint, ...] = tuple(
    fault for lifecycle in LIFECYCLES.values() for fault in faults_of(lifecycle, lifecycle.added)
)
"""The same of what the page sanitizer adds."""


@dataclass(frozen=True, slots=True)
class FaultGroup:
    """Fault points that are listed and swept together: those of a deployment kind, or what the page sanitizer adds.

    Attributes:
        kind: the deployment kind.
        page_sanitizer: whether these are the page sanitizer's own; a drain of its own may be named as one of the kind's.
    """

    kind: ContextCacheDeploymentKind
    page_sanitizer: bool = False

    @property
    def name(self) -> str:
        """The kind's name, with `+page_sanitizer` behind it where these are the sanitizer's."""
        return f"{self.kind.value}+page_sanitizer" if self.page_sanitizer else self.kind.value

    @property
    def faults(self) -> tuple[FaultPoint, ...]:
        """Its fault points, in the order of a request's life; the same name may come more than once."""
        declared = SANITIZER_FAULTS if self.page_sanitizer else FAULTS
        return tuple(fault for fault in declared if self.kind in fault.kinds)

    @property
    def points(self) -> tuple[str, ...]:
        """Their names, each once."""
        return tuple(dict.fromkeys(fault.name for fault in self.faults))


def fault_groups(kinds: Iterable[ContextCacheDeploymentKind]) -> tuple[FaultGroup, ...]:
    """Return the groups of these kinds that have a point: each kind's own, then the page sanitizer's under it."""
    groups = (FaultGroup(kind, page_sanitizer) for kind in kinds for page_sanitizer in (False, True))
    return tuple(group for group in groups if group.faults)


def fault_points(kind: ContextCacheDeploymentKind, *, page_sanitizer: bool = False) -> tuple[str, ...]:
    """Names of the device touches that a deployment of this kind can make, in the order of a request's life.

    A name says `<operation>.<op>`, followed by `.draft` where the draft's resources are touched. With `page_sanitizer`
    also those that the page sanitizer adds.

    Raises:
        ContractError: `kind` is no deployment kind.
    """
    if not isinstance(kind, ContextCacheDeploymentKind):
        raise ContractError(f"fault_points got {kind!r}; pass a ContextCacheDeploymentKind member")
    added = FaultGroup(kind, page_sanitizer=True).points if page_sanitizer else ()
    return tuple(dict.fromkeys((*FaultGroup(kind).points, *added)))
