"""Requests that together reach every transition of every deployment kind, with every device touch on the way.

Each one is a whole request on a `FakeRuntime`. A careful runtime stands behind it: whatever ends a request early, what is
left of it is abandoned, a failed drain is followed by shutdown and recovery, and the next request comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ctxcache.errors import ContextCacheError, DeviceError, InvariantError
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.request.admission import DecodingKvHeadroom
from ctxcache.testing.faults import InjectedFaultError
from ctxcache.testing.runtime.identities import MEDIA, TENANT
from ctxcache.testing.runtime.probes import probe_active, probe_lengths
from ctxcache.testing.runtime.runtime import FakeRuntime, WaitFailed
from ctxcache.testing.runtime.steps import RequestEnded

SHORT = [1, 2, 0, 1, 2, 0]
LONG = [1, 2, 0, 1, 2, 2, 0, 1, 1, 0, 2]
OTHER = [2, 2, 1, 0, 0, 1, 2, 1]
PROMPTS = (SHORT, LONG, OTHER)
ENDPOINTS = (5, 8)
TOO_MUCH = DecodingKvHeadroom(10_000)
MOST_ATTEMPTS = 4

RequestScript = Callable[[FakeRuntime], None]


class InjectedInterrupt(BaseException):
    """Stands for `KeyboardInterrupt`, without being mistaken for the user's."""


def whole_life(runtime: FakeRuntime) -> None:
    """Three sequences: prefill, steps, a capture at a sequence's end, compaction, more steps, finish in mid-step."""
    runtime.spoil_states()
    runtime.begin([SHORT, LONG, OTHER])
    probe_active(runtime)
    runtime.prefill(ENDPOINTS)
    runtime.decode([], accepted=[2, 1, 3], lags=[1, 0])
    runtime.decode([0, 1], accepted=[1, 3])
    runtime.begin_compaction([1, 2])
    runtime.compact()
    runtime.decode([0], accepted=[2])
    runtime.decode([1], accepted=[3])
    runtime.grow()
    runtime.compute_step([2])
    runtime.finish()


def hit(runtime: FakeRuntime) -> None:
    """Prompts that are there already, restored and computed on; then finished while nothing is pending."""
    runtime.spoil_states()
    runtime.begin([[*LONG, 1], [*SHORT, 2, 2], OTHER])
    runtime.prefill()
    runtime.decode([0, 1, 2], accepted=[2])
    runtime.finish()


def next_turn(runtime: FakeRuntime) -> None:
    """Conversations go on from what was generated, the draft of one having lagged behind when it ended."""
    runtime.begin([[0, 0, *SHORT], [1, 0, *OTHER]])
    runtime.prefill(ENDPOINTS)
    for lag in (0, 1, 7):
        runtime.decode([0, 1] if lag else [], accepted=[3, 2], lags=[lag])
    runtime.finish()
    runtime.begin([[*tokens, 1] for tokens in list(runtime.history)[-2:]])
    runtime.prefill()
    runtime.finish()


def finish_in_prefill(runtime: FakeRuntime) -> None:
    """Nothing of an unfinished prefill is published, captured checkpoints included."""
    runtime.begin([[*SHORT, 2, 1], [*OTHER, 1]])
    runtime.prepare()
    runtime.compute_prompts(ENDPOINTS)
    runtime.capture()
    runtime.finish()


def abandon_in_prefill(runtime: FakeRuntime) -> None:
    """The same, abandoned."""
    runtime.begin([[*SHORT, 2, 1]])
    runtime.prepare()
    runtime.compute_prompts()
    runtime.abandon()


def drop_in_prefill(runtime: FakeRuntime) -> None:
    """The handle is lost; the collector abandons."""
    runtime.begin([[*SHORT, 0], OTHER])
    runtime.prepare()
    runtime.compute_prompts()
    runtime.drop()


def never_started(runtime: FakeRuntime) -> None:
    """Finish and abandon with nothing enqueued."""
    runtime.begin([SHORT])
    runtime.finish()
    runtime.begin([SHORT])
    runtime.abandon()


def finish_after_prefill(runtime: FakeRuntime) -> None:
    """What a prefill froze is published by the drain of the finish."""
    runtime.begin([[1, 1, *LONG], OTHER])
    runtime.prefill(ENDPOINTS)
    runtime.finish()


def abandon_after_prefill(runtime: FakeRuntime) -> None:
    """What a prefill froze is not published."""
    runtime.begin([[2, 1, *LONG]])
    runtime.prefill()
    runtime.abandon()


def grow_after_prefill(runtime: FakeRuntime) -> None:
    """A step that needs more pages at once, base and draft, while the draft's initialisation is not proven.

    Where it fails the request is finished, not abandoned: what was frozen has become worthless.
    """
    runtime.begin([[2, 2, *LONG], OTHER])
    runtime.prefill()
    try:
        runtime.grow(runtime.roomy_headroom(2 * runtime.sizes.tokens_per_page))
    except DeviceError:
        runtime.device_failed = True
        runtime.finish()
        raise
    runtime.compute_step([3, 1], lags=[7])
    runtime.wait()
    runtime.complete([0, 1])
    runtime.finish()


def compact_after_prefill(runtime: FakeRuntime) -> None:
    """A compaction settles a pending draft initialisation first."""
    runtime.begin([[0, 1, *LONG], [0, 2, *SHORT], OTHER])
    runtime.prefill()
    runtime.begin_compaction([0, 2])
    runtime.compact()
    runtime.decode([1])
    runtime.abandon()


def picture_moves(runtime: FakeRuntime) -> None:
    """A prompt of media moves into the slot of one without, and its last page is filled with generated tokens."""
    runtime.begin([OTHER, LONG], identities=(TENANT, MEDIA))
    runtime.prefill()
    runtime.decode([0])
    runtime.begin_compaction([1])
    runtime.compact()
    runtime.decode([0], accepted=[3])
    runtime.finish()


def compact_to_none(runtime: FakeRuntime) -> None:
    """No sequence survives: the request is finishing, nothing pending."""
    for leave in (runtime.finish, runtime.abandon):
        runtime.begin([SHORT, OTHER])
        runtime.prefill()
        runtime.decode()
        runtime.begin_compaction([])
        runtime.compact()
        leave()


def leave_in_compaction(runtime: FakeRuntime) -> None:
    """Finish and abandon between the halves of a compaction."""
    for leave in (runtime.finish, runtime.abandon):
        runtime.begin([SHORT, OTHER])
        runtime.prefill()
        runtime.decode()
        runtime.begin_compaction([1])
        leave()


def abandon_in_step(runtime: FakeRuntime) -> None:
    """Abandon while a step is in flight."""
    runtime.begin([LONG])
    runtime.prefill()
    runtime.grow()
    runtime.compute_step([2])
    runtime.abandon()


def out_of_room(runtime: FakeRuntime) -> None:
    """A step that cannot be prepared ends the request, right after the prefill and later."""
    for steps, leave in ((0, runtime.finish), (0, runtime.abandon), (1, runtime.finish), (1, runtime.abandon)):
        runtime.begin([LONG, SHORT])
        runtime.prefill()
        for _ in range(steps):
            runtime.decode()
        try:
            runtime.grow(TOO_MUCH)
        except RequestEnded:
            leave()


def to_the_end(runtime: FakeRuntime) -> None:
    """Sequences live to the end of their rows, where headroom shrinks and a shorter draft stays behind; then no step fits."""
    longest = runtime.sizes.longest_prompt
    runtime.begin([(LONG * 3)[: longest - 1], (OTHER * 4)[: longest - 4]])
    runtime.prefill(ENDPOINTS)
    while runtime.running:
        fits = runtime.coordinator.can_prepare_decode_step(runtime.request)
        if fits.all():
            runtime.grow()
            runtime.compute_step([2, 3])
            runtime.wait()
            probe_lengths(runtime)
            runtime.complete(range(len(runtime.running)))
        else:
            runtime.begin_compaction([slot for slot in range(fits.size) if fits[slot]])
            runtime.compact()
    runtime.finish()
    runtime.begin([(SHORT * 5)[: runtime.sizes.longest_prompt]])
    runtime.prefill()
    while runtime.coordinator.can_prepare_decode_step(runtime.request).all():
        runtime.decode([0], accepted=[3])
    try:
        runtime.grow()
    except RequestEnded:
        runtime.finish()


def plain_request(runtime: FakeRuntime) -> None:
    """A vanilla request, also on a speculative deployment."""
    runtime.begin([LONG, OTHER], mode=Mode.VANILLA)
    runtime.prefill()
    runtime.decode([0])
    runtime.finish()


def bypass(runtime: FakeRuntime) -> None:
    """A request that looks nothing up and publishes nothing."""
    runtime.begin([LONG, OTHER], bypass=True)
    runtime.prefill(ENDPOINTS)
    runtime.decode([0, 1], accepted=[2])
    runtime.finish()


def failed_drain(runtime: FakeRuntime) -> None:
    """The device itself fails a drain: quarantine, shutdown, recovery."""
    runtime.begin([LONG, OTHER])
    runtime.prepare()
    runtime.compute_prompts()
    runtime.sync.outcomes = [700]
    runtime.abandon()


def last_hit(runtime: FakeRuntime) -> None:
    """After all that, what was published is still right."""
    runtime.spoil_states()
    runtime.begin([[*LONG, 1, 1], [*OTHER, 0], [0, 1, *LONG, 1]])
    runtime.prefill(ENDPOINTS)
    runtime.decode(accepted=[2])
    runtime.finish()


SCRIPT: tuple[RequestScript, ...] = (
    whole_life,
    hit,
    next_turn,
    finish_in_prefill,
    abandon_in_prefill,
    drop_in_prefill,
    never_started,
    finish_after_prefill,
    abandon_after_prefill,
    grow_after_prefill,
    compact_after_prefill,
    picture_moves,
    compact_to_none,
    leave_in_compaction,
    abandon_in_step,
    out_of_room,
    to_the_end,
    plain_request,
    bypass,
    failed_drain,
    last_hit,
)
"""The requests of one run, in order; the same for every kind, since each kind reaches with them what it has."""

_EXPECTED = (RequestEnded, WaitFailed, InjectedFaultError, InjectedInterrupt)


def run_request(runtime: FakeRuntime, script: RequestScript, heard: list[str]) -> bool:
    """Run one request and clean up behind it, whatever happens.

    Args:
        runtime: who runs it.
        script: the request.
        heard: everything that told the runtime of a failure is added here.

    Returns:
        Whether another request can be admitted.
    """
    try:
        script(runtime)
    except InvariantError:
        raise  # never a device's fault
    except (*_EXPECTED, ContextCacheError) as failure:
        heard.append(f"{script.__name__}: {failure!r}")
    for _ in range(MOST_ATTEMPTS):
        try:
            if runtime.settle():
                return True
        except (*_EXPECTED, ContextCacheError) as failure:
            heard.append(f"settle: {failure!r}")
        else:
            heard.append("settle: still poisoned")
    return False


def run_script(runtime: FakeRuntime) -> list[str]:
    """Run all requests; returns everything that told the runtime of a failure."""
    heard: list[str] = []
    for script in SCRIPT:
        if not run_request(runtime, script, heard):
            break
    return heard


@contextmanager
def quiet_log() -> Iterator[None]:
    """Keep the library from logging each failed drain, while drains fail by the thousand on purpose."""
    log = logging.getLogger("ctxcache")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
