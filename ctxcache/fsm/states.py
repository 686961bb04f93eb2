"""The states of a request, one row each, and what follows from them."""

from __future__ import annotations

from ctxcache.fsm.declaration import LifecycleState
from ctxcache.ids import Phase

_IDLE = False
_BUSY = True  # device work was enqueued and not proven complete; there is no second flag for it


# fmt: off
class State(LifecycleState):
    """Where a request is. The machine is flat; the dots group states for readers and diagrams."""

    ADMITTED            = "admitted",             Phase.ADMITTED,  _IDLE, "leases are held, nothing is enqueued"
    PREFILLING          = "executing.prefilling", Phase.EXECUTING, _BUSY, "prefill is enqueued, not proven complete"
    DRAFTING            = "executing.drafting",   Phase.EXECUTING, _BUSY, "base prefill is complete; the draft's initialisation awaits its first verification"
    DECODING            = "executing.decoding",   Phase.EXECUTING, _BUSY, "a decode step is enqueued, not proven complete"
    COMPACTING          = "executing.compacting", Phase.EXECUTING, _BUSY, "a batch mapping is uploaded; old slots still hold their state"
    SETTLED             = "executing.settled",    Phase.EXECUTING, _IDLE, "no device work is pending"
    FINISHING_IN_FLIGHT = "finishing.in_flight",  Phase.FINISHING, _BUSY, "only finish or abandon is left; device work is pending"
    FINISHING_SETTLED   = "finishing.settled",    Phase.FINISHING, _IDLE, "only finish or abandon is left; no device work is pending"
    POISONED            = "poisoned",             Phase.POISONED,  _IDLE, "a drain failed; the leases are quarantined"
    RELEASED            = "released",             None,            _IDLE, "every lease is released; the handle is empty"
# fmt: on


INITIAL = State.ADMITTED

PENDING: frozenset[State] = frozenset(state for state in State if state.pending)
"""States in which device work was enqueued and not proven complete."""

LIVE: tuple[State, ...] = tuple(state for state in State if state not in {State.POISONED, State.RELEASED})
"""States of a request that can still be finished or abandoned."""

PHASES: dict[State, Phase | None] = {state: state.phase for state in State}
"""What a caller sees of each state; a released request has no phase."""

DESCRIPTIONS: dict[State, str] = {state: state.description for state in State}
"""What is true in each state."""
