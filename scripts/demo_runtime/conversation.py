"""How a runtime uses the coordinator, from the prompt to the last token.

`answer_batch` is the whole story: every operation in the order in which a runtime calls it. `answer_batch_in_session`
is the same through the session layer, which raises instead of returning a status and keeps the books.
`answer_without_ctxcache` does the same work with a model and its own pages and nothing else: the truth that the others
are compared with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ctxcache import (
    ContextCacheBatchAdmission,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    RequestHandle,
)
from demo_runtime.runtime import Memory, Model, Runtime, one_token, prefill
from demo_runtime.tiles import Floats


@dataclass(frozen=True, slots=True)
class StopRule:
    """When an answer ends: after `end_token`, or when it has `max_tokens` tokens."""

    end_token: int
    max_tokens: int


@dataclass(slots=True, eq=False)
class Answer:
    """What a model said, and how.

    Attributes:
        stop: when it ends.
        reused_tokens: leading tokens of the prompt that were not computed.
        prefill_seconds: from the request's begin to the first logits; of the whole batch, where there is one.
        tokens: the answer.
        logits: float32 `[vocabulary]` for each of its tokens.
    """

    stop: StopRule
    reused_tokens: int = 0
    prefill_seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logits: list[Floats] = field(default_factory=list)

    def take(self, logits: Floats) -> None:
        """Append the most likely token."""
        self.tokens.append(int(np.argmax(logits)))
        self.logits.append(logits)

    @property
    def ended(self) -> bool:
        """Whether the last token ended the answer."""
        return self.tokens[-1] == self.stop.end_token or len(self.tokens) == self.stop.max_tokens

    def has_same_tokens(self, other: Answer) -> bool:
        """Whether both answers say the same."""
        return self.tokens == other.tokens

    def has_same_logits(self, other: Answer) -> bool:
        """Whether the logits of every token, the first one included, are equal bit for bit."""
        return len(self.logits) == len(other.logits) and all(
            mine.tobytes() == theirs.tobytes() for mine, theirs in zip(self.logits, other.logits, strict=True)
        )


def answer_batch(
    runtime: Runtime[Any],
    prompts: Sequence[Sequence[int]],
    stops: Sequence[StopRule],
    *,
    lookup_policy: ContextCacheLookupPolicy = ContextCacheLookupPolicy.USE_CACHE,
    cut_at: int = 0,
) -> list[Answer]:
    """Answer several prompts in one request, greedily; a sequence that ends leaves the batch.

    Args:
        runtime: the model and its context cache.
        prompts: token ids, one prompt per sequence.
        stops: when each answer ends.
        lookup_policy: `BYPASS` computes everything and keeps nothing.
        cut_at: position at which a prefill from further left is cut into two chunks.
    """
    coordinator, stream = runtime.coordinator, runtime.stream
    answers = [Answer(stop) for stop in stops]
    started = time.perf_counter()

    # What is known of these prompts already? The coordinator looks, and takes the pages for all of it.
    sequences = [ContextCacheSequenceAdmission(prompt) for prompt in prompts]
    begun = coordinator.begin_request(ContextCacheBatchAdmission(sequences, lookup_policy=lookup_policy), stream)
    begun.status.raise_for_status()
    assert begun.admission is not None  # noqa: S101 - the status is OK
    with begun.admission.request as request:  # an exception abandons the request; nothing of it is published then
        # Bind: rows of the page table and device lengths now say where each sequence continues.
        coordinator.prepare_prefill(request).raise_for_status()
        logits = runtime.prefill(prompts, cut_at=cut_at)
        # A model with recurrent layers has its state copied here, behind the prefill on the stream; others need nothing.
        coordinator.enqueue_prefill_captures(request).raise_for_status()
        # Here a GPU runtime waits for its prefill. NumPy has finished when it returns.
        for answer, row, start in zip(answers, logits, begun.admission.prefill_starts, strict=True):
            answer.take(row)
            answer.reused_tokens = start
            answer.prefill_seconds = time.perf_counter() - started
        # The state of the whole prompt is there: publish it. The sampled token is the lookahead.
        committed = [len(prompt) for prompt in prompts]
        advances = [ContextCacheSequenceAdvance(a.tokens, c) for a, c in zip(answers, committed, strict=True)]
        coordinator.finalize_prefill_publication(request, advances).raise_for_status()

        slots = list(range(len(prompts)))  # which answer each slot of the batch works on
        slots = _retire(runtime, request, slots, answers)
        while slots:
            # Room for the lookahead's state: a page more for those that stand at a page's end.
            coordinator.prepare_decode_step(request).raise_for_status()
            logits = runtime.decode([answers[index].tokens[-1] for index in slots])
            for index, row in zip(slots, logits, strict=True):
                answers[index].take(row)
                committed[index] += 1
            advances = [ContextCacheSequenceAdvance(answers[index].tokens[-1:], committed[index]) for index in slots]
            ended = [slot for slot, index in enumerate(slots) if answers[index].ended]
            # An answer that ended is published too: the next turn of its conversation starts behind it.
            coordinator.complete_decode_step(request, advances, publishable_completed_slots=ended).raise_for_status()
            slots = _retire(runtime, request, slots, answers)
        coordinator.finish(request).raise_for_status()
    return answers


def _retire(runtime: Runtime[Any], request: RequestHandle, slots: list[int], answers: Sequence[Answer]) -> list[int]:
    """Take ended answers out of the batch; return which answer each remaining slot works on.

    When all have ended there is nothing to move: the caller finishes the request.
    """
    survivors = [index for index in slots if not answers[index].ended]
    if survivors and len(survivors) < len(slots):
        old_to_new = [survivors.index(index) if index in survivors else -1 for index in slots]
        on_device = runtime.new_slot_mapping()
        coordinator = runtime.coordinator
        coordinator.begin_batch_compaction(request, old_to_new, len(survivors), on_device).raise_for_status()
        # Here a runtime moves what it keeps per slot itself (sampler state ...); this one keeps nothing.
        coordinator.compact_batch(request).raise_for_status()
    return survivors


def answer_batch_in_session(
    runtime: Runtime[Any], prompts: Sequence[Sequence[int]], stops: Sequence[StopRule]
) -> list[Answer]:
    """Do what `answer_batch` does through the session layer: it compacts by itself, and what fails raises."""
    answers = [Answer(stop) for stop in stops]
    started = time.perf_counter()
    with runtime.coordinator.session(prompts) as session:
        logits = runtime.prefill(prompts)
        for answer, row, start in zip(answers, logits, session.prefill_starts, strict=True):
            answer.take(row)
            answer.reused_tokens = start
            answer.prefill_seconds = time.perf_counter() - started
        session.prefill_enqueued()
        session.prefilled([answer.tokens[-1] for answer in answers])
        while session.active:
            working = [answers[index] for index in session.active]
            session.before_decode()
            logits = runtime.decode([answer.tokens[-1] for answer in working])
            for answer, row in zip(working, logits, strict=True):
                if not answer.ended:  # a session retires after a decode step only, also what ended with its first token
                    answer.take(row)
            session.decoded(logits.argmax(axis=1), finished=[answer.ended for answer in working])
    return answers


def answer_without_ctxcache(
    model: Model[Memory], memory: Memory, prompt: Sequence[int], stop: StopRule, *, cut_at: int = 0
) -> Answer:
    """Answer one prompt with memory of its own and no cache, its prefill cut into two chunks at `cut_at`."""
    answer = Answer(stop)
    started = time.perf_counter()
    answer.take(prefill(model, memory, [prompt], [0], cut_at)[0])
    answer.prefill_seconds = time.perf_counter() - started
    position = len(prompt)
    while not answer.ended:
        answer.take(model.forward([one_token(0, position, answer.tokens[-1])], memory)[0])
        position += 1
    return answer
