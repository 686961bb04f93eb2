"""Who proposes the next tokens: an EAGLE draft model with pages of its own, or the text itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from demo_runtime.eagle import EagleDraft
from demo_runtime.engine import Engine
from demo_runtime.tiles import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Drafted tokens, and the bits that they came from.

    Attributes:
        tokens: a guess at the tokens that follow.
        estimates: float32 `[width]` for each of them, where a model drafted: two runs that share every bit of these
            share every bit of the draft's state that mattered.
    """

    tokens: list[int]
    estimates: list[Floats] = field(default_factory=list)

    def is_same(self, other: Proposal) -> bool:
        """Whether tokens and bits are equal."""
        return self.tokens == other.tokens and [row.tobytes() for row in self.estimates] == [
            row.tobytes() for row in other.estimates
        ]


class Drafter(Protocol):
    """What the loop needs of a drafter."""

    @property
    def engine(self) -> Engine | None:
        """The draft engine; `None` when the draft keeps no state of its own."""

    def follow(self, residuals: Floats, successors: Sequence[int]) -> None:
        """Take in committed positions: the base's last residual stream `[n, width]`, and the token behind each."""

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """Guess `count` tokens that follow `tokens`, the last of which is the lookahead; perhaps fewer."""


class EagleDrafter:
    """Drafts a chain with an EAGLE model.

    Args:
        draft: the model.
        engine: its pages; positions below `engine.length` were computed from true states of the base.
    """

    def __init__(self, draft: EagleDraft, engine: Engine) -> None:
        self._draft = draft
        self._engine = engine
        self._estimate: Floats | None = None

    @property
    def engine(self) -> Engine | None:
        """The draft engine."""
        return self._engine

    def follow(self, residuals: Floats, successors: Sequence[int]) -> None:
        """Compute the draft's state of the committed positions; guesses that were written there are overwritten."""
        start = self._engine.length
        self._estimate = self._draft.forward(start, residuals, successors, self._engine.memory)[-1]
        self._engine.commit(len(successors))

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """Draft one token after another, each from an estimate that stands in for the base's state.

        What the draft keeps of them lies behind its length: nobody may take it for committed.
        """
        del tokens
        assert self._estimate is not None  # noqa: S101 - the prompt was followed
        proposal = Proposal([], [self._estimate])
        for step in range(count):
            proposal.tokens.append(self._draft.most_likely(proposal.estimates[-1]))
            if step < count - 1:
                position, last = self._engine.length + step, proposal.estimates[-1]
                guess = self._draft.forward(position, last[None], proposal.tokens[-1:], self._engine.memory)
                proposal.estimates.append(guess[0])
        return proposal


class NgramDrafter:
    """Drafts what followed the last time: the text is searched for its own last tokens, the longest run first.

    It keeps nothing. What it drafts costs no more than a search, and the base's pages are all the pages there are.

    Args:
        longest: tokens of the longest run that is searched for.
    """

    engine: Engine | None = None

    def __init__(self, longest: int = 3) -> None:
        self._longest = longest

    def follow(self, residuals: Floats, successors: Sequence[int]) -> None:
        """Do nothing: there is no state."""

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """Return what follows the latest earlier occurrence; nothing when even the last token is new."""
        text = list(tokens)
        for length in range(min(self._longest, len(text) - 1), 0, -1):
            tail = text[-length:]
            for start in range(len(text) - length - 1, -1, -1):
                if text[start : start + length] == tail:
                    return Proposal(text[start + length :][:count])
        return Proposal([])
