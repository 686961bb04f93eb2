"""Whatever is passed wherever: a right result, or one of the library's own errors with nothing changed.

Every public operation is called with right arguments of which one or two, or entries of theirs, are replaced by odd values. A
call that goes through has done what it does for the plain value that is meant. The seed is printed when one did not.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
from support.harness import Harness
from support.odd_calls import CALL_TABLE, Call, World
from support.odd_values import MEANINGLESS, draw_odd
from support.sampling import extent_of

import ctxcache
from ctxcache import (
    ContextCacheError,
    HybridCacheManager,
)

CALLS = {"quick": 2_000, "default": 6_000, "thorough": 100_000}
ENOUGH_CALLS = 1_000
"""Of so many calls in one block some go through; of a few, drawn by a seed of the day, perhaps none does."""

BLOCKS = 40
"""Each a test of its own, with worlds of its own."""


def said_by(result: Any) -> Any:
    """What a result says, to be compared."""
    if isinstance(result, ctxcache.BeginRequestResult):
        return (result.status, result.admission and result.admission.prefill_starts)
    if isinstance(result, np.ndarray):
        return result.tolist()
    if isinstance(result, (ctxcache.ReusePlan, ctxcache.AcquireResult, HybridCacheManager)):
        return type(result)
    return repr(result)


def outcome_of(w: World, call: Call, arguments: dict[str, Any]) -> Any:
    """What a call says, or which of the library's own errors it raises; any other one is raised.

    Whoever builds with snapshots for more memory than there is, is told that there is not.
    """
    try:
        return said_by(call.do(w, **arguments))
    except ContextCacheError as error:
        return type(error)
    except MemoryError:
        if call.name != "build":
            raise
        return ContextCacheError


class Fuzz:
    """Draws calls, keeps worlds as long as nothing has changed in them, and gathers what is wrong."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.worlds: dict[tuple[type[Harness], str], World] = {}
        self.went_through = 0

    def world(self, where: tuple[type[Harness], str]) -> World:
        if where not in self.worlds:
            self.worlds[where] = World(*where)
        return self.worlds[where]

    def one(self) -> str | None:
        """One call; what is wrong with it, if anything."""
        rng = self.rng
        call = rng.choice(CALL_TABLE)
        where = (rng.choice(call.harnesses), rng.choice(call.stages))
        w = self.world(where)
        right = call.right(w)
        name = rng.choice(list(right))
        make = draw_odd(rng)
        value, meant = make()
        told = f"{call.name}({name}={value!r}) in {where[1]} of {where[0].__name__}, seed {self.seed}"
        before = w.seen()
        entry = (
            rng.randrange(len(right[name]))
            if isinstance(right[name], list) and right[name] and rng.random() < 0.4
            else -1
        )
        outcome = outcome_of(w, call, {**right, name: within(right[name], entry, value)})
        if isinstance(outcome, type) and issubclass(outcome, ContextCacheError):
            if outcome is ctxcache.InvariantError:
                return f"{told}: InvariantError"
            return None if w.seen() == before else f"{told}: refused, and something has changed"
        self.went_through += 1
        after = w.seen()
        if after != before:
            del self.worlds[where]
        w.manager.check_invariants()
        if name in call.free or (value is None and right[name] is None):
            return None
        if meant is MEANINGLESS:
            return None if said_by(value) == said_by(right[name]) else f"{told}: taken, entry {entry}"
        twin = World(*where)
        right = call.right(twin)
        expected = outcome_of(
            twin, call, {**right, name: within(right[name], entry, as_plain_like(right[name], meant))}
        )
        if outcome != expected:
            return f"{told}: {outcome}, and for {meant!r} {expected}"
        return None if twin.seen() == after else f"{told}: another effect than for {meant!r}"


def within(right: Any, entry: int, value: Any) -> Any:
    """Replace one entry of a right list, or all of it."""
    return value if entry < 0 else [*right[:entry], value, *right[entry + 1 :]]


def as_plain_like(right: Any, meant: Any) -> Any:
    """What is meant, as an array where only arrays of one kind are right."""
    return np.array(meant, right.dtype) if isinstance(right, np.ndarray) and isinstance(meant, list) else meant


@pytest.mark.parametrize("block", range(BLOCKS))
def test_odd_values_are_understood_or_refused(block: int, sample_seed: int, pytestconfig: pytest.Config) -> None:
    """No foreign exception, no change after a refusal, no other result than for what is meant."""
    thorough = pytestconfig.getoption("--thorough")
    count = CALLS["thorough" if thorough else min(extent_of(pytestconfig), "default", key=CALLS.__getitem__)] // BLOCKS
    fuzz = Fuzz(f"{sample_seed} {block}")
    wrong: list[str] = []
    for _ in range(count):
        state = fuzz.rng.getstate()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                found = fuzz.one()
        except Exception as error:  # noqa: BLE001 - the fault that is looked for
            fuzz.rng.setstate(state)
            found = f"{describe_draw(fuzz)}: {type(error).__name__}: {error}"
            fuzz.worlds.clear()
        if found is not None:
            wrong.append(found)
    assert wrong == [], "\n".join(wrong)
    if count >= ENOUGH_CALLS:
        assert fuzz.went_through > 0


def describe_draw(fuzz: Fuzz) -> str:
    """Say which call a generator's state leads to, and let it go on behind it."""
    rng = fuzz.rng
    call = rng.choice(CALL_TABLE)
    where = (rng.choice(call.harnesses), rng.choice(call.stages))
    name = rng.choice(list(call.right(World(*where))))
    value, _meant = draw_odd(rng)()
    return f"{call.name}({name}={value!r}) in {where[1]} of {where[0].__name__}, seed {fuzz.seed}"
