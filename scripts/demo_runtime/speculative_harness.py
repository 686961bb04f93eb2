"""Holds a conversation with drafts, the past reused and not, and compares both with what the base says alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ctxcache import ContextCacheLookupPolicy
from demo_runtime.conversation import Answer, StopRule
from demo_runtime.harness import Chat
from demo_runtime.report import Report, yes_or_no
from demo_runtime.speculative import SpeculativeAnswer, SpeculativeRuntime, answer_speculatively


@dataclass(frozen=True, slots=True)
class Exchange:
    """One message, and what it continues.

    Attributes:
        message: what the user says.
        behind: index of the exchange whose talk goes on; the default is the one before.
        at_page_edge: the talk is first cut at the edge of the last page that was published of it. The old text and the
            new then part right behind a page: the base's page serves both, the draft's would not.
    """

    message: str
    behind: int = -1
    at_page_edge: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SpeculativeTurn:
    """One exchange, answered three times."""

    turn: int
    prompt_tokens: int
    with_reuse: SpeculativeAnswer
    without: SpeculativeAnswer
    greedy: Answer
    """What the base says without drafts and without ctxcache."""

    @property
    def tokens_equal(self) -> bool:
        """Whether all three say the same."""
        return all(answer.has_same_tokens(self.greedy) for answer in (self.with_reuse, self.without))

    @property
    def logits_equal(self) -> bool:
        """Whether the logits of all three are equal bit for bit."""
        return all(answer.has_same_logits(self.greedy) for answer in (self.with_reuse, self.without))

    @property
    def drafts_equal(self) -> bool:
        """Whether reuse changed no draft, nor a bit of what the drafts were read from."""
        return self.with_reuse.has_same_drafts(self.without)


COLUMNS: Final[dict[str, Callable[[SpeculativeTurn], str]]] = {
    "turn": lambda t: str(t.turn),
    "prompt": lambda t: str(t.prompt_tokens),
    "reused": lambda t: str(t.with_reuse.reused_tokens),
    "answer": lambda t: str(len(t.greedy.tokens)),
    "a step with": lambda t: f"{t.with_reuse.tokens_per_step:.2f}",
    "a step without": lambda t: f"{t.without.tokens_per_step:.2f}",
    "accepted with": lambda t: f"{t.with_reuse.acceptance:.0%}",
    "accepted without": lambda t: f"{t.without.acceptance:.0%}",
    "tokens equal": lambda t: yes_or_no(t.tokens_equal),
    "logits bit-equal": lambda t: yes_or_no(t.logits_equal),
    "drafts bit-equal": lambda t: yes_or_no(t.drafts_equal),
}


class SpeculativeHarness:
    """One drafter, with reuse and without.

    Args:
        report: hears everything.
        chat: the model's way of writing a talk.
        runtime: base, drafter, and their context cache.
        tokens_per_page: as in the runtime.
        greedy: answers a prompt with the base alone, without drafts and without ctxcache.
    """

    def __init__(
        self,
        report: Report,
        chat: Chat,
        runtime: SpeculativeRuntime,
        tokens_per_page: int,
        greedy: Callable[[Sequence[int], StopRule], Answer],
    ) -> None:
        self._report = report
        self._chat = chat
        self._runtime = runtime
        self._page = tokens_per_page
        self._greedy = greedy

    def run(self, name: str, exchanges: Sequence[Exchange], answer_tokens: int) -> list[SpeculativeTurn]:
        """Hold the conversation and print what came of it."""
        report = self._report
        stop = StopRule(self._chat.end_of_message, answer_tokens)
        talks: list[list[int]] = []
        turns: list[SpeculativeTurn] = []
        for turn, exchange in enumerate(exchanges, start=1):
            prompt, shared = self._prompt(exchange, talks)
            parting = f", another text behind token {shared}, the edge of a page" if exchange.at_page_edge else ""
            report.step(f"{name}, turn {turn} of {len(exchanges)}{parting}: {exchange.message.splitlines()[-1]}")
            result = SpeculativeTurn(
                turn,
                len(prompt),
                answer_speculatively(self._runtime, prompt, stop),
                answer_speculatively(self._runtime, prompt, stop, lookup_policy=ContextCacheLookupPolicy.BYPASS),
                self._greedy(prompt, stop),
            )
            # A hit gives its last page back.
            self._check(name, result, expected_reuse=max(shared // self._page - 1, 0) * self._page)
            turns.append(result)
            talks.append([*prompt, *result.with_reuse.tokens])
        self._summary(name, turns)
        coordinator = self._runtime.coordinator
        coordinator.manager.check_invariants()
        report.metrics(coordinator.metrics())
        coordinator.shutdown().raise_for_status()
        return turns

    def _prompt(self, exchange: Exchange, talks: Sequence[list[int]]) -> tuple[list[int], int]:
        """Return a prompt, and how many of its leading tokens have had their state computed and may be published."""
        if not talks:
            return self._chat.open(exchange.message), 0
        talk = talks[exchange.behind]
        shared = len(talk) - 1  # the last token is a lookahead
        if exchange.at_page_edge:
            shared -= shared % self._page
            talk = talk[:shared]
        return self._chat.extend(talk, exchange.message), shared

    def _check(self, name: str, turn: SpeculativeTurn, expected_reuse: int) -> None:
        report, reuse, cold = self._report, turn.with_reuse, turn.without
        report.line(f"answer: {self._chat.decode(reuse.tokens)}")
        report.line(f"{turn.prompt_tokens} tokens in the prompt, {reuse.reused_tokens} reused")
        for label, answer in (("with reuse:", reuse), ("without:", cold)):
            report.line(
                f"{label:<11} {answer.tokens_per_step:.2f} tokens a step in {len(answer.proposals)} steps; "
                f"{answer.num_accepted_drafts} of {answer.num_drafted} drafts accepted ({answer.acceptance:.0%})"
            )
        report.line(
            f"equal to the base alone, with reuse and without: tokens {yes_or_no(turn.tokens_equal)}, "
            f"logits bit by bit {yes_or_no(turn.logits_equal)}; drafts bit-equal: {yes_or_no(turn.drafts_equal)}"
        )
        claims = {
            "the tokens equal the base's own, with reuse and without": turn.tokens_equal,
            "the logits are bit-equal to the base's own": turn.logits_equal,
            "acceptance with reuse is no worse than without": reuse.acceptance >= cold.acceptance,
            "the drafts with and without reuse are bit-equal": turn.drafts_equal,
            f"{expected_reuse} tokens are reused": reuse.reused_tokens == expected_reuse,
        }
        for claim, holds in claims.items():
            report.check(f"{name}, turn {turn.turn}: {claim}", holds=holds)

    def _summary(self, name: str, turns: Sequence[SpeculativeTurn]) -> None:
        cells = [[cell(turn) for cell in COLUMNS.values()] for turn in turns]
        self._report.table(f"{name} (prompt, reused, answer and step in tokens)", list(COLUMNS), cells)
        for label, answers in (("with reuse", [t.with_reuse for t in turns]), ("without", [t.without for t in turns])):
            drafted = sum(answer.num_drafted for answer in answers)
            accepted = sum(answer.num_accepted_drafts for answer in answers)
            steps = sum(len(answer.proposals) for answer in answers)
            tokens = sum(len(answer.tokens) - 1 for answer in answers)
            print(
                f"  {label}: {tokens / max(steps, 1):.2f} tokens a step, {accepted / max(drafted, 1):.0%} of {drafted} "
                "drafts accepted"
            )
