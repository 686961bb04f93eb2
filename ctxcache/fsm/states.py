"""The states of a request, and what can be read off them."""

from __future__ import annotations

from enum import StrEnum

from ctxcache.ids import Phase


class State(StrEnum):
    """Where a request is. The machine is flat; the dots group states for readers and diagrams."""

    ADMITTED = "admitted"
    PREFILLING = "executing.prefilling"
    DRAFTING = "executing.drafting"
    DECODING = "executing.decoding"
    COMPACTING = "executing.compacting"
    SETTLED = "executing.settled"
    FINISHING_IN_FLIGHT = "finishing.in_flight"
    FINISHING_SETTLED = "finishing.settled"
    POISONED = "poisoned"
    RELEASED = "released"


INITIAL = State.ADMITTED

PENDING: frozenset[State] = frozenset(
    {State.PREFILLING, State.DRAFTING, State.DECODING, State.COMPACTING, State.FINISHING_IN_FLIGHT}
)
"""States in which device work was enqueued and not proven complete. There is no second flag for it."""

LIVE: tuple[State, ...] = tuple(state for state in State if state not in {State.POISONED, State.RELEASED})
"""States of a request that can still be finished or abandoned."""

PHASES: dict[State, Phase | None] = {
    State.ADMITTED: Phase.ADMITTED,
    State.PREFILLING: Phase.EXECUTING,
    State.DRAFTING: Phase.EXECUTING,
    State.DECODING: Phase.EXECUTING,
    State.COMPACTING: Phase.EXECUTING,
    State.SETTLED: Phase.EXECUTING,
    State.FINISHING_IN_FLIGHT: Phase.FINISHING,
    State.FINISHING_SETTLED: Phase.FINISHING,
    State.POISONED: Phase.POISONED,
    State.RELEASED: None,
}
"""What a caller sees of each state; a released request has no phase."""

DESCRIPTIONS: dict[State, str] = {
    State.ADMITTED: "leases are held, nothing is enqueued",
    State.PREFILLING: "prefill is enqueued, not proven complete",
    State.DRAFTING: "base prefill is complete; the draft's initialisation awaits its first verification",
    State.DECODING: "a decode step is enqueued, not proven complete",
    State.COMPACTING: "a batch mapping is uploaded; old slots still hold their state",
    State.SETTLED: "no device work is pending",
    State.FINISHING_IN_FLIGHT: "only finish or abandon is left; device work is pending",
    State.FINISHING_SETTLED: "only finish or abandon is left; no device work is pending",
    State.POISONED: "a drain failed; the leases are quarantined",
    State.RELEASED: "every lease is released; the handle is empty",
}
