"""What a simulated runtime does, as plain data: one action is one tuple, so that a run can be kept, cut and replayed.

Every action makes sense in every state: one that does not fit is skipped. So any selection of a run's actions is a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from ctxcache.errors import ContractError
from ctxcache.fsm import State
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.request.admission import (
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from ctxcache.testing.faults import Fault, FaultMode, FaultPlan, InjectedFaultError
from ctxcache.testing.runtime.identities import ADAPTER, MEDIA, NOBODY, TENANT
from ctxcache.testing.runtime.probes import probe_active, probe_lengths, probe_sanitizer
from ctxcache.testing.runtime.runtime import FakeRuntime
from ctxcache.testing.runtime.scripts import InjectedInterrupt

Action: TypeAlias = tuple[str, Any, int]
"""A name of `ACTIONS`, its argument, and the seed of the stream's schedule from there on."""

_PATTERNS = (
    "*",
    "*.synchronize",
    "*.upload_rows*",
    "*capture*",
    "*restore*",
    "prepare_decode_step.*",
    "begin_batch_compaction.*",
    "compact_batch.*",
)
"""Where faults strike."""

_STEMS = ((0, 1, 2) * 20, (0, 1, 2, 0, 1, 1) * 10, (2,) * 60, (1, 0, 0, 2) * 15)
"""What prompts begin with: streams that part early and late, so that prefixes collide."""


def _state(runtime: FakeRuntime) -> State | None:
    handle = runtime.handle
    return handle.inspect().state if handle is not None and handle.valid else None


def _in(*states: State | None) -> Callable[[FakeRuntime], bool]:
    return lambda runtime: _state(runtime) in states


def _begin(runtime: FakeRuntime, argument: Any) -> None:
    prompts, mode, identities, bypass, prefill_only = argument
    runtime.spoil_states()
    runtime.begin(
        [list(prompt) for prompt in prompts],
        mode=None if mode is None else Mode(mode),
        identities=identities,
        bypass=bypass,
        prefill_only=prefill_only,
    )


def _prefill(runtime: FakeRuntime, argument: Any) -> None:
    endpoints, captures, waits = argument
    runtime.prepare()
    runtime.compute_prompts(endpoints)
    if captures:
        runtime.capture()
    if waits:
        runtime.wait()
        runtime.finalize()


def _decode(runtime: FakeRuntime, argument: Any) -> None:
    completed, accepted, lags, is_completed, more_tokens = argument
    runtime.grow(runtime.roomy_headroom(more_tokens) if more_tokens else None)
    runtime.compute_step(accepted, lags)
    if is_completed:
        runtime.wait()
        probe_lengths(runtime)
        runtime.complete([slot for slot in completed if slot < len(runtime.running)])


def _compact(runtime: FakeRuntime, argument: Any) -> None:
    keep, is_completed = argument
    runtime.begin_compaction(keep)
    if is_completed:
        runtime.compact()


def _fault(runtime: FakeRuntime, argument: Any) -> None:
    pattern, mode, occurrence, persistent, interrupt = argument
    error = InjectedInterrupt if interrupt else InjectedFaultError
    runtime.ops.plan = FaultPlan(Fault(pattern, FaultMode(mode), occurrence, persistent, error))


def _misuse(runtime: FakeRuntime, argument: Any) -> None:
    """Say something wrong; it must be refused."""
    if runtime.handle is not None and runtime.handle.valid:
        probe_active(runtime)
    advances = [ContextCacheSequenceAdvance([1], 10_000)] * max(1, len(runtime.running))
    whole_row = ContextCacheBatchAdmission([ContextCacheSequenceAdmission([1] * runtime.sizes.max_tokens)])
    calls: tuple[Callable[[], Any], ...] = (
        lambda: runtime.coordinator.finalize_prefill_publication(runtime.request, advances),
        lambda: runtime.coordinator.complete_decode_step(runtime.request, advances),
        lambda: runtime.coordinator.begin_batch_compaction(runtime.request, [5], 1, None),
        lambda: runtime.coordinator.begin_request(ContextCacheBatchAdmission([]), None),
        runtime.coordinator.recover,
        lambda: runtime.coordinator.begin_request(whole_row, None),
    )
    call = calls[argument % len(calls)]
    if runtime.handle is None and argument % len(calls) < 3:
        return
    try:
        call()
    except ContractError:
        return
    runtime.violations.append(f"misuse {argument % len(calls)} was not refused")


def _stray(runtime: FakeRuntime, argument: Any) -> None:
    """Go on with what ended lately, and let a wrong kernel write into a page of it."""
    which, at = argument
    if not (runtime.page_sanitizer and runtime.history):
        return
    runtime.spoil_states()
    runtime.begin([said[: runtime.sizes.longest_prompt] for said in runtime.history][: runtime.sizes.max_batch])
    probe_sanitizer(runtime, which, at)
    runtime.abandon()


def _explain(runtime: FakeRuntime, argument: Any) -> None:
    admission = ContextCacheBatchAdmission([ContextCacheSequenceAdmission(list(argument))], runtime.native_mode)
    before = [record.serial for record in runtime.coordinator.manager.records]
    runtime.coordinator.explain(admission)
    if [record.serial for record in runtime.coordinator.manager.records] != before:
        runtime.violations.append("explain changed the cache")


_RUNNING = _in(State.SETTLED, State.DRAFTING)
_LIVE = _in(*(state for state in State if state not in (State.RELEASED, State.POISONED)))
_IDLE = _in(None)


def _always(runtime: FakeRuntime) -> bool:
    del runtime
    return True


ACTIONS: dict[str, tuple[Callable[[FakeRuntime], bool], Callable[[FakeRuntime, Any], None]]] = {
    "begin": (_IDLE, _begin),
    "prefill": (_in(State.ADMITTED), _prefill),
    "decode": (_RUNNING, _decode),
    "compact": (_RUNNING, _compact),
    "starve": (_RUNNING, lambda runtime, _: runtime.grow(DecodingKvHeadroom(10_000))),
    "finish": (_LIVE, lambda runtime, _: runtime.finish()),
    "abandon": (_LIVE, lambda runtime, _: runtime.abandon()),
    "drop": (_LIVE, lambda runtime, _: runtime.drop()),
    "clear": (_IDLE, lambda runtime, _: runtime.coordinator.clear()),
    "explain": (_always, _explain),
    "misuse": (_always, _misuse),
    "stray": (_IDLE, _stray),
    "fault": (_always, _fault),
}
"""Every action: when it fits, and what it does with its argument."""

_LIKELY: dict[State | None, tuple[tuple[str, int], ...]] = {
    None: (("begin", 30), ("explain", 2), ("clear", 1), ("misuse", 1), ("fault", 2), ("stray", 4)),
    State.ADMITTED: (("prefill", 20), ("finish", 1), ("abandon", 1), ("drop", 1), ("misuse", 1), ("fault", 4)),
    State.SETTLED: (
        ("decode", 24), ("compact", 5), ("finish", 4), ("abandon", 1), ("drop", 1), ("starve", 1), ("misuse", 1),
        ("fault", 2),
    ),
}  # fmt: skip
_LIKELY[State.DRAFTING] = _LIKELY[State.SETTLED]
_OTHERWISE = (("finish", 4), ("abandon", 2), ("drop", 1), ("misuse", 1), ("fault", 1))


def draw(rng: random.Random, runtime: FakeRuntime) -> Action:
    """Choose what to do next."""
    choices = _LIKELY.get(_state(runtime), _OTHERWISE)
    name = rng.choices([name for name, _ in choices], [weight for _, weight in choices])[0]
    argument = _ARGUMENTS[name](rng, runtime) if name in _ARGUMENTS else None
    return name, argument, rng.randrange(1 << 16)


def simplifications(action: Action) -> Iterator[Action]:
    """Name simpler actions that may do in the place of one: a fault that strikes at once, fewer prompts, plain steps."""
    name, argument, schedule = action
    if name == "fault" and argument[2] > 1:
        yield name, (*argument[:2], 1, *argument[3:]), schedule
    if name == "begin" and len(argument[0]) > 1:
        yield name, (argument[0][:1], *argument[1:]), schedule
        yield name, (argument[0][1:], *argument[1:]), schedule
    if name == "decode" and argument[:3] != ((), (1,), (0,)):
        yield name, ((), (1,), (0,), *argument[3:]), schedule


def _draw_prompt(rng: random.Random, runtime: FakeRuntime) -> tuple[int, ...]:
    sizes = runtime.sizes
    longest = sizes.longest_prompt
    length = rng.randint(1, longest)
    if rng.random() < 0.2:  # near the end of the row
        length = max(1, longest - rng.randrange(4))
    if rng.random() < 0.3:
        length = max(1, min(longest, length // sizes.tokens_per_page * sizes.tokens_per_page + rng.choice((0, 1))))
    if runtime.history and rng.random() < 0.4:  # a conversation goes on from what was generated
        said = rng.choice(runtime.history)
        return (*said[: longest - 1], *(rng.randrange(3) for _ in range(rng.randint(0, 3))))[:longest]
    prompt = list(rng.choice(_STEMS)[:length])
    if rng.random() < 0.4:
        for _ in range(rng.randint(1, 3)):
            prompt[rng.randrange(length)] = rng.randrange(3)
    return tuple(prompt)


def _draw_begin(rng: random.Random, runtime: FakeRuntime) -> Any:
    prompts = tuple(_draw_prompt(rng, runtime) for _ in range(rng.randint(1, runtime.sizes.max_batch)))
    if rng.random() < 0.15:
        prompts = prompts[:1] * len(prompts)
    mode = Mode.VANILLA.value if rng.random() < 0.15 else None
    identities = tuple(rng.choice((TENANT, ADAPTER, MEDIA)) if rng.random() < 0.15 else NOBODY for _ in prompts)
    return prompts, mode, identities, rng.random() < 0.07, rng.random() < 0.15


def _draw_prefill(rng: random.Random, runtime: FakeRuntime) -> Any:
    endpoints = tuple(sorted(rng.sample(range(1, runtime.sizes.max_tokens), 5)))
    lengths = [len(running.transcript) for running in runtime.running]
    if rng.random() < 0.5:
        endpoints = tuple(sorted({*endpoints, rng.choice(lengths)}))
    return endpoints, rng.random() < 0.9, rng.random() < 0.9


def _draw_decode(rng: random.Random, runtime: FakeRuntime) -> Any:
    batch = len(runtime.running)
    completed = tuple(slot for slot in range(batch) if rng.random() < 0.3)
    accepted = tuple(rng.randint(1, 3) for _ in range(batch))
    lags = tuple(rng.choice((0, 0, 1, 2, 7)) for _ in range(batch))
    return completed, accepted, lags, rng.random() < 0.95, rng.choice((0, 0, 0, runtime.sizes.tokens_per_page))


def _draw_fault(rng: random.Random, runtime: FakeRuntime) -> Any:
    del runtime
    pattern = rng.choice(_PATTERNS)
    mode = rng.choice(tuple(FaultMode)).value
    return pattern, mode, rng.randint(1, 5), rng.random() < 0.1, rng.random() < 0.3


_ARGUMENTS: dict[str, Callable[[random.Random, FakeRuntime], Any]] = {
    "begin": _draw_begin,
    "prefill": _draw_prefill,
    "decode": _draw_decode,
    "compact": lambda rng, runtime: (
        tuple(slot for slot in range(len(runtime.running)) if rng.random() < 0.6),
        rng.random() < 0.9,
    ),
    "explain": _draw_prompt,
    "misuse": lambda rng, _: rng.randrange(6),
    "stray": lambda rng, _: (rng.randrange(64), rng.randrange(1 << 16)),
    "fault": _draw_fault,
}
