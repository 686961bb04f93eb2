"""What a lifecycle is declared with: states with what can be read off them, rows, hooks, guards. Plain data, no behaviour.

The machine, the fault points and the exports take a `Lifecycle` and ask nothing else. Another one is another table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Self

from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import Phase

ALL_KINDS = frozenset(Kind)


class LifecycleState(StrEnum):
    """States of one lifecycle, each declared with what can be read off it. A dotted name puts it in a group.

    Attributes:
        phase: what a caller sees; `None` once nothing is left to see.
        pending: whether device work was enqueued and not proven complete. There is no second flag for it.
        description: what is true in it.
    """

    phase: Phase | None
    pending: bool
    description: str

    def __new__(  # Python looks a member up by its name alone, so that the rest has defaults here
        cls,
        name: str,
        phase: Phase | None = None,
        pending: bool = False,  # noqa: FBT001, FBT002 - a column
        description: str = "",
    ) -> Self:
        """Make a member from its row."""
        state = str.__new__(cls, name)
        state._value_ = name
        state.phase = phase
        state.pending = pending
        state.description = description
        return state

    @property
    def group(self) -> str:
        """The group that the dotted name puts it in; empty for a state on its own."""
        return self.value.rpartition(".")[0]

    @property
    def short_name(self) -> str:
        """The name within the group."""
        return self.value.rpartition(".")[2]


class HookKind(Enum):
    """What a hook does to the stream."""

    ENQUEUE = "enqueue"
    PROVE = "prove"


@dataclass(frozen=True, slots=True)
class Hook:
    """One device touch of a transition.

    Attributes:
        name: the model's method that runs it.
        kind: whether it enqueues work or proves enqueued work complete.
        op: the device op it calls, and so its fault point; `role` follows where the draft's resources are touched.
        kinds: deployments in which it can touch the device.
        role: "" for the base's resources, "draft" for the draft's.
    """

    name: str
    kind: HookKind
    op: str
    kinds: frozenset[Kind]
    role: str = ""

    def fault_point(self, operation: str) -> str:
        """Name of this hook's fault point within a coordinator operation: `<operation>.<op>[.<role>]`."""
        return ".".join(part for part in (operation, self.op, self.role) if part)


@dataclass(frozen=True, slots=True)
class Guard:
    """A question about a transition: the model's method that answers it, and what to tell a refused caller.

    Attributes:
        name: the method.
        refusal: what is wrong where it has to hold and does not.
        refusal_unless: what is wrong where it must not hold and does; empty where no row asks it so.
    """

    name: str
    refusal: str
    refusal_unless: str = ""


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of a lifecycle.

    Attributes:
        trigger: the event.
        operation: what a caller calls to fire it; empty where the one door does.
        source: the state it leaves.
        target: the state it enters.
        hooks: device touches in order.
        guards: all must hold; of several rows with one trigger and source the first that is not refused is taken.
        unless: none of these may hold.
        kinds: deployments in which it can happen.
    """

    trigger: str
    operation: str
    source: LifecycleState
    target: LifecycleState
    hooks: tuple[Hook, ...] = ()
    guards: tuple[Guard, ...] = ()
    unless: tuple[Guard, ...] = ()
    kinds: frozenset[Kind] = ALL_KINDS

    @property
    def proves(self) -> bool:
        """Whether a hook proves the enqueued work complete.

        A transition that proves runs all its hooks before it enters its target, because the target claims completion.
        One that only enqueues runs them after, so that what was enqueued before a failure is accounted as pending.
        """
        return any(hook.kind is HookKind.PROVE for hook in self.hooks)


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """A state machine as data.

    Attributes:
        name: what `export` calls it.
        states: in the order of a life; the first is where it begins.
        transitions: every row that changes a state.
        added: rows that a debugging mode adds; they stay within a state.
        enqueue_failed: the trigger that accounts for a failed enqueue, and for an exception of host code.
        drain_failed: the trigger that accounts for a failed drain. In a state without it, the state stays.
        kinds: deployments that it is for.
    """

    name: str
    states: tuple[LifecycleState, ...]
    transitions: tuple[Transition, ...]
    added: tuple[Transition, ...] = ()
    enqueue_failed: str = "device_failed"
    drain_failed: str = "drain_failed"
    kinds: frozenset[Kind] = ALL_KINDS

    @property
    def initial(self) -> LifecycleState:
        """Where it begins."""
        return self.states[0]

    @property
    def groups(self) -> dict[str, tuple[LifecycleState, ...]]:
        """The states of each group, in order."""
        names = dict.fromkeys(state.group for state in self.states if state.group)
        return {name: tuple(state for state in self.states if state.group == name) for name in names}

    def of_kind(self, kind: Kind) -> Lifecycle:
        """What a deployment of one kind can do: its rows with its hooks, and the states that they touch."""

        def kept(rows: tuple[Transition, ...]) -> tuple[Transition, ...]:
            return tuple(
                replace(
                    row, kinds=only, hooks=tuple(replace(hook, kinds=only) for hook in row.hooks if kind in hook.kinds)
                )
                for row in rows
                if kind in row.kinds
            )

        only = frozenset({kind})
        rows = kept(self.transitions)
        touched = {self.initial} | {state for row in rows for state in (row.source, row.target)}
        states = tuple(state for state in self.states if state in touched)
        return replace(self, states=states, transitions=rows, added=kept(self.added), kinds=only)
