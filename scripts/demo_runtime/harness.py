"""Holds a conversation with the cache and without, and compares every token and every bit of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from ctxcache import ContextCacheLookupPolicy
from demo_runtime.conversation import (
    Answer,
    StopRule,
    answer_batch,
    answer_batch_in_session,
    answer_without_ctxcache,
)
from demo_runtime.report import Report, TurnResult, duration, yes_or_no
from demo_runtime.runtime import Memory, Model, Runtime


class Chat(Protocol):
    """How messages become token ids. A talk is a prompt with its answer, as ids."""

    @property
    def end_of_message(self) -> int:
        """The token that ends an answer."""

    def open(self, first_message: str) -> list[int]:
        """Return the prompt of a first turn."""

    def extend(self, talk: Sequence[int], next_message: str) -> list[int]:
        """Return the prompt of a later turn: the ids of the talk so far, unchanged, and the new message."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return an answer's text."""


@dataclass(frozen=True, slots=True)
class Script:
    """What the user says.

    Attributes:
        messages: one per turn, two at least; the first one brings the document.
        last_messages: two more, said at once at the end: one to the whole talk, one to the talk before its last turn.
        answer_tokens: tokens of an answer at most.
        last_answer_tokens: the same for the answers to the last messages.
    """

    messages: Sequence[str]
    last_messages: tuple[str, str]
    answer_tokens: int
    last_answer_tokens: tuple[int, int]


class Harness(Generic[Memory]):
    """One model with a context cache and without.

    Args:
        report: hears everything.
        chat: the model's way of writing a talk.
        model: the forward pass that both sides use.
        runtime: the side with the cache.
        own_memory: makes the cold memory of the side without; called before each of its answers.
        least_reuse: how many tokens a later turn must reuse, given the tokens of the talk before it and of its prompt.
        past_equal: for models that keep more than pages: whether both sides are left with the same state, bit for bit.
        between_turns: called before each turn, for a runtime that wants to show what a request may not depend on.
    """

    def __init__(
        self,
        report: Report,
        chat: Chat,
        model: Model[Memory],
        runtime: Runtime[Memory],
        own_memory: Callable[[], Memory],
        least_reuse: Callable[[int, int], int],
        past_equal: Callable[[Memory, Memory], bool] | None = None,
        between_turns: Callable[[], None] = lambda: None,
    ) -> None:
        self._report = report
        self._chat = chat
        self._model = model
        self._runtime = runtime
        self._own_memory = own_memory
        self._least_reuse = least_reuse
        self._past_equal = past_equal
        self._between_turns = between_turns

    def run(self, script: Script) -> None:
        """Hold the conversation, then two at once, and print what came of it."""
        talks, results = self._converse(script)
        self._converse_at_once(script, talks)
        self._report.summary(results)
        coordinator = self._runtime.coordinator
        coordinator.manager.check_invariants()
        self._report.metrics(coordinator.metrics())
        coordinator.shutdown().raise_for_status()

    def _converse(self, script: Script) -> tuple[list[list[int]], list[TurnResult]]:
        """Answer every message twice, with the cache and without; return the talk after each turn."""
        report = self._report
        talks: list[list[int]] = []
        results: list[TurnResult] = []
        stop = StopRule(self._chat.end_of_message, script.answer_tokens)
        for turn, message in enumerate(script.messages, start=1):
            report.step(f"Turn {turn} of {len(script.messages)}: {message.splitlines()[-1]}")
            prompt = self._chat.extend(talks[-1], message) if talks else self._chat.open(message)
            self._between_turns()
            (answer,) = answer_batch(self._runtime, [prompt], [stop])
            report.line(f"answer: {self._chat.decode(answer.tokens)}")
            report.line(
                f"with the cache: {len(prompt)} tokens in the prompt, {answer.reused_tokens} reused, "
                f"prefill {duration(answer.prefill_seconds)}"
            )
            memory = self._own_memory()
            cold = answer_without_ctxcache(self._model, memory, prompt, stop, cut_at=answer.reused_tokens)
            least = self._least_reuse(len(talks[-1]), len(prompt)) if talks else 0
            results.append(self._compare(turn, len(prompt), answer, cold, memory, least))
            talks.append([*prompt, *answer.tokens])
        return talks, results

    def _compare(
        self, turn: int, prompt_tokens: int, answer: Answer, cold: Answer, cold_memory: Memory, least_reuse: int
    ) -> TurnResult:
        result = TurnResult(
            turn=turn,
            prompt_tokens=prompt_tokens,
            reused_tokens=answer.reused_tokens,
            seconds_with_cache=answer.prefill_seconds,
            seconds_without=cold.prefill_seconds,
            tokens_equal=answer.has_same_tokens(cold),
            logits_equal=answer.has_same_logits(cold),
            states_equal=self._past_equal(self._runtime.memory, cold_memory) if self._past_equal else None,
        )
        check = self._report.check
        check(f"turn {turn}: the tokens with and without the cache are equal", holds=result.tokens_equal)
        check(f"turn {turn}: the logits with and without the cache are bit-equal", holds=result.logits_equal)
        check(f"turn {turn}: the states after the answer are bit-equal", holds=result.states_equal is not False)
        check(f"turn {turn}: at least {least_reuse} tokens are reused", holds=answer.reused_tokens >= least_reuse)
        self._report.turn(result)
        return result

    def _converse_at_once(self, script: Script, talks: Sequence[list[int]]) -> None:
        """Answer two messages in one batch that shares its past; the answer that ends first leaves the batch."""
        report, runtime = self._report, self._runtime
        talk_of_each = (talks[-1], talks[-2])
        prompts = [self._chat.extend(talk, text) for talk, text in zip(talk_of_each, script.last_messages, strict=True)]
        stops = [StopRule(self._chat.end_of_message, limit) for limit in script.last_answer_tokens]
        report.step(f"Two at once, the second a turn back: {' / '.join(script.last_messages)}")
        together = answer_batch(runtime, prompts, stops)
        for answer in together:
            text = self._chat.decode(answer.tokens)
            report.line(f"{answer.reused_tokens} tokens reused, {len(answer.tokens)} answered: {text}")
        report.step("The same two in a session")
        in_session = answer_batch_in_session(runtime, prompts, stops)
        report.step("Each of them alone, the cache bypassed")
        bypass = ContextCacheLookupPolicy.BYPASS
        alone: list[Answer] = []
        for prompt, stop, answer in zip(prompts, stops, together, strict=True):
            alone += answer_batch(runtime, [prompt], [stop], lookup_policy=bypass, cut_at=answer.reused_tokens)
        for answer, talk, prompt in zip(together, talk_of_each, prompts, strict=True):
            least = self._least_reuse(len(talk), len(prompt))
            report.check(f"at once: at least {least} tokens are reused", holds=answer.reused_tokens >= least)
        lengths = {len(answer.tokens) for answer in together}
        report.check(
            "at once: one answer ends before the other, so that the batch is compacted", holds=len(lengths) > 1
        )
        for name, batch in (("at once", together), ("in a session", in_session)):
            pairs = list(zip(batch, alone, strict=True))
            tokens = all(mine.has_same_tokens(other) for mine, other in pairs)
            logits = all(mine.has_same_logits(other) for mine, other in pairs)
            report.check(f"{name}: the tokens equal those of each prompt alone", holds=tokens)
            report.check(f"{name}: the logits are bit-equal to those of each prompt alone", holds=logits)
            report.line(f"{name} and alone: tokens equal: {yes_or_no(tokens)}; logits bit-equal: {yes_or_no(logits)}")
