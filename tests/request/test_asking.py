"""What can be asked of a coordinator is answered at once, from any thread and from hooks, as of one moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import OK, Harness, T, U

from ctxcache import ContextCacheSequenceAdvance, Phase

QUICK_SECONDS = 5.0
"""An answer that waits for the device would take longer: the device here hangs until the answers are there."""


class HangingDevice:
    """A synchroniser that hangs until it is let go, and asks a question by the way."""

    def __init__(self) -> None:
        self.is_waiting, self.may_go = threading.Event(), threading.Event()
        self.question: Callable[[], Any] = lambda: None
        self.answer: Any = None

    def __call__(self, stream: Any) -> None:
        """See `StreamSynchronizer`."""
        del stream
        self.answer = self.question()
        self.is_waiting.set()
        assert self.may_go.wait(60)


def questions(h: Harness, request: Any) -> dict[str, Callable[[], Any]]:
    """Everything that can be asked without waiting."""
    return {
        "metrics": h.coordinator.metrics,
        "inspect": request.inspect,
        "phase": lambda: request.phase,
        "batch_size": lambda: request.batch_size,
        "capacities": lambda: request.capacities,
    }


def test_r06_questions_are_answered_while_a_drain_hangs() -> None:
    """R6, F5: another thread drains a device that hangs; metrics and the request's own answers come all the same."""
    device = HangingDevice()
    h = Harness(synchronizer=device, max_batch=2)
    request, _ = h.admit(T(130), U(140))
    h.coordinator.prepare_prefill(request)
    finishing = threading.Thread(target=lambda: h.coordinator.finish(request))
    finishing.start()
    try:
        assert device.is_waiting.wait(60)
        started = time.monotonic()
        answers = {name: ask() for name, ask in questions(h, request).items()}
        assert time.monotonic() - started < QUICK_SECONDS
    finally:
        device.may_go.set()
        finishing.join(60)
    assert answers["phase"] is Phase.EXECUTING
    assert answers["batch_size"] == len(answers["inspect"].sequences) == 2
    assert answers["metrics"].drains == 1
    assert request.phase is None
    assert h.coordinator.metrics().base_kv_pages.free == h.coordinator.metrics().base_kv_pages.capacity


@pytest.mark.parametrize("name", ["metrics", "inspect", "phase", "batch_size", "capacities"])
def test_questions_are_answered_inside_a_drain(name: str) -> None:
    """From the synchroniser itself, in the thread that runs the operation."""
    device = HangingDevice()
    device.may_go.set()
    h = Harness(synchronizer=device)
    request, _ = h.admit(T(130))
    h.coordinator.prepare_prefill(request)
    device.question = questions(h, request)[name]
    assert h.coordinator.finish(request) is OK
    assert device.answer is not None


def test_f05_no_answer_is_torn_by_a_compaction_beside_it() -> None:
    """F5: `inspect()` beside steps and compactions in another thread sees a batch before or after each, never between."""
    h = Harness(max_batch=4)
    request, _ = h.admit(T(130), U(140), T(150), U(160))
    h.prefill()
    stop = threading.Event()
    wrong: list[str] = []

    def look() -> None:
        while not stop.is_set():
            seen = request.inspect()
            sizes = {
                len(seen.sequences),
                *([len(seen.pending_compaction_mapping)] if seen.pending_compaction_mapping else []),
            }
            lengths = [sequence.token_ids.size - sequence.committed_state_length for sequence in seen.sequences]
            if len(sizes) > 1 or any(length != 1 for length in lengths):
                wrong.append(f"{sizes} {lengths}")
            metrics = h.coordinator.metrics()
            if metrics.publication_attempts != metrics.published_endpoints + metrics.refused_publications:
                wrong.append("metrics are torn")

    looking = [threading.Thread(target=look) for _ in range(2)]
    for thread in looking:
        thread.start()
    try:
        for size in (4, 3, 2):
            for _ in range(5):
                assert h.coordinator.prepare_decode_step(request) is OK
                committed = [sequence.committed_state_length for sequence in request.inspect().sequences]
                advances = [ContextCacheSequenceAdvance([7], length + 1) for length in committed]
                assert h.coordinator.complete_decode_step(request, advances, [0]) is OK
            mapping = np.array([-1, *range(size - 1)], np.int32)
            device_mapping = h.coordinator.device_ops.allocate((size,), "int32")
            assert h.coordinator.begin_batch_compaction(request, mapping, size - 1, device_mapping) is OK
            assert h.coordinator.compact_batch(request) is OK
    finally:
        stop.set()
        for thread in looking:
            thread.join(60)
    assert wrong == []
    assert h.coordinator.finish(request) is OK
