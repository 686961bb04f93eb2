"""Random lives of runtimes, seeded: every kind, every failure, against the plain manager and the content oracle.

A run is a row of episodes. Each has a deployment of its own, of a kind and size that its seed chooses, and a few hundred
actions. What fails is cut down to the actions that it takes, and printed as a script that replays it.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxcache.errors import ContextCacheError, ContractError, DeviceError, InvariantError
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ResourceType
from ctxcache.testing.actions import ACTIONS, Action, draw, simplifications
from ctxcache.testing.faults import FaultPlan, InjectedFaultError
from ctxcache.testing.kind_sweep import check_balance
from ctxcache.testing.reference.manager import ReferenceManager
from ctxcache.testing.runtime.deployments import Sizes
from ctxcache.testing.runtime.runtime import FakeRuntime, WaitFailed
from ctxcache.testing.runtime.scripts import InjectedInterrupt, quiet_log
from ctxcache.testing.runtime.steps import RequestEnded
from ctxcache.testing.shadow import ShadowManager

EPISODE_STEPS = 200
_COMPARE_EVERY = 8
_MOST_ATTEMPTS = 6
_MOST_REPLAYS = 400

_EXPECTED = (RequestEnded, WaitFailed, InjectedFaultError, InjectedInterrupt, ContextCacheError)


@dataclass(frozen=True, slots=True)
class Episode:
    """One deployment and what happens to it.

    Attributes:
        kind: the deployment's kind.
        sizes: its sizes.
        seed: of the stream's schedule, and of what is drawn.
        page_sanitizer: whether shared pages are summed.
    """

    kind: Kind
    sizes: Sizes
    seed: int
    page_sanitizer: bool = False


@dataclass(slots=True)
class SimulationResult:
    """What a simulation came to.

    Attributes:
        seed, steps: as asked.
        episodes: deployments that lived.
        actions: how often each action was done.
        faults: points that failed.
        quarantines: drains that failed and were recovered from.
        comparisons: calls that both managers answered.
        log_digest: digest of the event log; equal for equal seeds, on every machine.
        violations: what was wrong; the run stops at the first.
        script: a program that replays the failure with as few actions as it takes; empty without one.
        seconds: wall time.
    """

    seed: int
    steps: int
    episodes: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    faults: int = 0
    quarantines: int = 0
    comparisons: int = 0
    log_digest: str = ""
    violations: list[str] = field(default_factory=list)
    script: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """Return it as plain values."""
        return {
            "seed": self.seed,
            "steps": self.steps,
            "episodes": self.episodes,
            "actions": dict(sorted(self.actions.items())),
            "faults": self.faults,
            "quarantines": self.quarantines,
            "comparisons": self.comparisons,
            "log_digest": self.log_digest,
            "violations": list(self.violations),
            "script": self.script,
            "seconds": round(self.seconds, 2),
        }


class World:
    """One episode's deployment under watch.

    Attributes:
        runtime: the runtime.
        log: one line an action: what was done and what became of it.
    """

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.runtime = FakeRuntime(
            episode.kind, episode.sizes, seed=episode.seed, page_sanitizer=episode.page_sanitizer
        )
        manager = self.runtime.coordinator.manager
        self.shadow = ShadowManager(manager, _make_reference(episode.kind, episode.sizes, manager))
        self.log: list[str] = []

    @property
    def violations(self) -> list[str]:
        """Everything that was wrong so far."""
        return [
            *self.runtime.violations,
            *self.runtime.ledger.violations,
            *self.runtime.guard.violations,
            *self.shadow.violations,
        ]

    def do(self, action: Action, number: int) -> None:
        """Do one action, and look over what it left."""
        name, argument, schedule = action
        runtime = self.runtime
        runtime.deferred.reschedule(random.Random(schedule))  # noqa: S311 - a schedule is no secret
        fits, run = ACTIONS[name]
        if not fits(runtime):
            return
        outcome = "ok"
        try:
            run(runtime, argument)
        except InvariantError:
            raise  # never a device's fault
        except _EXPECTED as failure:
            outcome = f"{type(failure).__name__}: {failure}"
            runtime.device_failed |= isinstance(failure, (DeviceError, InjectedInterrupt))
            if isinstance(failure, ContractError):
                runtime.violations.append(f"a legal {name} was refused: {failure}")
        if runtime.coordinator.poisoned or runtime.model_failed:
            self._settle()
        if number % _COMPARE_EVERY == 0:
            self.shadow.compare()
            runtime.coordinator.manager.check_invariants()
        self.log.append(f"{name} {argument!r} -> {outcome}; {self._seen()}")

    def end(self) -> None:
        """End the episode on a healthy device, and check that nothing is lost.

        In half of the episodes the coordinator itself ends what is active, by its own way out.
        """
        self.runtime.ops.plan = FaultPlan()
        if self.episode.seed % 2:
            self.runtime.running = []
            self.runtime.coordinator.__exit__(None, None, None)
        else:
            self._settle()
            self.runtime.verify_pages()
            self.runtime.coordinator.shutdown()
        self.shadow.compare()
        check_balance(self.runtime.coordinator.manager, self.runtime.violations)

    def _settle(self) -> None:
        """Clean up behind a failed drain or a failed model; in the end the device gets well."""
        for attempt in range(_MOST_ATTEMPTS):
            try:
                if self.runtime.settle():
                    return
            except _EXPECTED:
                pass
            if attempt >= _MOST_ATTEMPTS // 2:
                self.runtime.ops.plan = FaultPlan()
        self.runtime.violations.append("a healthy device did not end the poisoning")

    def _seen(self) -> str:
        manager = self.runtime.coordinator.manager
        starts = [running.reused for running in self.runtime.running]
        return f"records {[record.serial for record in manager.records]} leases {manager.num_leases} starts {starts}"


def simulate(
    seed: int,
    steps: int,
    *,
    kinds: Sequence[Kind] = tuple(Kind),
    cut: bool = True,
    progress: Callable[[int], None] = lambda _: None,
) -> SimulationResult:
    """Live random lives for so many actions; stop at the first violation, and cut it down.

    Args:
        seed: everything follows from it.
        steps: actions in all.
        kinds: deployment kinds to choose from, in turn.
        cut: cut a failure down, which takes as long as hundreds of episodes.
        progress: called with the actions done so far.

    Raises:
        ContractError: a seed or a number of steps that is no whole number, no step, or no deployment kind.
    """
    if type(seed) is not int or type(steps) is not int or steps < 1:
        raise ContractError(f"seed is {seed!r} and steps {steps!r}; pass whole numbers, and one step at least")
    if not kinds or not all(isinstance(kind, Kind) for kind in kinds):
        raise ContractError(f"kinds are {kinds!r}; pass ContextCacheDeploymentKind members, one at least")
    started = time.perf_counter()
    result = SimulationResult(seed, steps)
    digest = hashlib.blake2b(digest_size=16)
    done = 0
    while done < steps and not result.violations:
        episode = draw_episode(seed, result.episodes, kinds)
        result.episodes += 1
        world = World(episode)
        actions: list[Action] = []
        number = min(EPISODE_STEPS, steps - done)
        violations = _live(world, actions, _drawing(world, number))
        done += number
        for line in world.log:
            digest.update(line.encode())
            result.actions[line.split(" ", 1)[0]] += 1
        result.faults += len(world.runtime.ops.fired)
        result.comparisons += world.shadow.num_calls
        result.quarantines += world.runtime.coordinator.metrics().quarantines
        if violations:
            shortest = minimise(episode, actions) if cut else actions
            result.violations = violations
            result.script = as_script(episode, shortest, replay(episode, shortest) if cut else violations)
        progress(done)
    result.log_digest = digest.hexdigest()
    result.seconds = time.perf_counter() - started
    return result


def draw_episode(seed: int, number: int, kinds: Sequence[Kind] = tuple(Kind)) -> Episode:
    """Choose the deployment of one episode."""
    rng = random.Random(f"{seed} {number}")  # noqa: S311 - a simulation is no secret
    tokens_per_page = rng.choice((1, 2, 3, 4, 4, 5))
    max_tokens = max(tokens_per_page * rng.randint(6, 9) - rng.randrange(tokens_per_page), 12)
    max_batch = rng.randint(1, 4)
    row = -(-max_tokens // tokens_per_page)
    sizes = Sizes(
        tokens_per_page=tokens_per_page,
        max_tokens=max_tokens,
        max_draft_tokens=max_tokens - rng.choice((0, 1, 3, tokens_per_page + 1)),
        max_batch=max_batch,
        num_pages=0 if rng.random() < 0.3 else rng.randint(max(row, 12), 3 * max(row, 12)),
        num_draft_pages=0 if rng.random() < 0.3 else rng.randint(max(row, 12), 3 * max(row, 12)),
        snapshots=rng.randint(1, 8),
        max_records=rng.choice((1, 3, 6, 1024, 1024)),
    )
    return Episode(kinds[number % len(kinds)], sizes, rng.randrange(1 << 30), page_sanitizer=rng.random() < 0.15)


def replay(episode: Episode, actions: Sequence[Action]) -> list[str]:
    """Live one episode by given actions; returns its violations."""
    remaining = iter(actions)
    return _live(World(episode), [], lambda _: next(remaining, None))


def minimise(episode: Episode, actions: Sequence[Action]) -> list[Action]:
    """Leave out whatever a failing run can do without, and make what is left simpler, until neither goes any further."""
    left, replays = list(actions), _MOST_REPLAYS
    while True:
        before = left
        left, replays = _without_needless(episode, left, replays)
        left, replays = _with_simpler(episode, left, replays)
        if left == before or replays <= 0:
            return left


def _without_needless(episode: Episode, actions: list[Action], replays: int) -> tuple[list[Action], int]:
    """Leave out ever smaller runs of actions, down to single ones; returns also the replays that are left."""
    left, size = actions, max(1, len(actions) // 2)
    while True:
        start, shrank = 0, False
        while start < len(left) and replays > 0:
            shorter = left[:start] + left[start + size :]
            replays -= 1
            if shorter and replay(episode, shorter):
                left, shrank = shorter, True
            else:
                start += size
        if replays <= 0 or (size == 1 and not shrank):
            return left, replays
        size = max(1, size // 2)


def _with_simpler(episode: Episode, actions: list[Action], replays: int) -> tuple[list[Action], int]:
    """Put simpler actions in the place of others, one at a time."""
    left = actions
    for index in range(len(left)):
        for simpler in simplifications(left[index]):
            if replays <= 0:
                return left, replays
            changed = [*left[:index], simpler, *left[index + 1 :]]
            replays -= 1
            if replay(episode, changed):
                left = changed
                break
    return left, replays


def as_script(episode: Episode, actions: Sequence[Action], violations: Sequence[str]) -> str:
    """Return a program that replays an episode by given actions, and what it finds."""
    lines = [
        "from ctxcache.ids import ContextCacheDeploymentKind",
        "from ctxcache.testing.runtime.deployments import Sizes",
        "from ctxcache.testing.simulate import Episode, replay",
        "",
        f"sizes = {episode.sizes!r}",
        f"kind = ContextCacheDeploymentKind.{episode.kind.name}",
        f"episode = Episode(kind, sizes, {episode.seed}, page_sanitizer={episode.page_sanitizer})",
        "actions = [",
        *(f"    {action!r}," for action in actions),
        "]",
        "for violation in replay(episode, actions):",
        "    print(violation)",
        *(f"# {violation}" for violation in violations),
    ]
    return "\n".join(lines) + "\n"


def _live(world: World, done: list[Action], choose: Callable[[int], Action | None]) -> list[str]:
    """Do actions until there is none or something is wrong, and end the episode; what escapes is wrong too."""
    try:
        with quiet_log():
            while (action := choose(len(done))) is not None:
                done.append(action)
                world.do(action, len(done))
                if world.violations:
                    return world.violations
            world.end()
    except Exception as error:  # noqa: BLE001 - whatever escapes is a finding
        return [*world.violations, f"{type(error).__name__} escaped: {error}"]
    return world.violations


def _drawing(world: World, number: int) -> Callable[[int], Action | None]:
    """Choose so many actions at random, each when its turn comes."""
    rng = random.Random(f"{world.episode.seed} actions")  # noqa: S311 - a simulation is no secret
    return lambda index: draw(rng, world.runtime) if index < number else None


def _make_reference(kind: Kind, sizes: Sizes, manager: Any) -> ReferenceManager:
    return ReferenceManager(
        tokens_per_page=sizes.tokens_per_page,
        num_base_pages=manager.pool(ResourceType.BASE_KV_PAGE).capacity,
        num_draft_pages=manager.pool(ResourceType.DRAFT_KV_PAGE).capacity,
        num_recurrent_snapshots=manager.pool(ResourceType.RECURRENT_SNAPSHOT).capacity,
        num_partial_kv_snapshots=manager.pool(ResourceType.PARTIAL_KV_SNAPSHOT).capacity,
        max_records=sizes.max_records,
        kind=kind,
    )
