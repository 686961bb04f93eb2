"""Why an input would reuse what it would: the answer to "why is this slow?", without touching anything."""

from __future__ import annotations

from dataclasses import dataclass

from ctxcache.ids import MissReason, ReusePlanKind
from ctxcache.outcomes import MatchResult


@dataclass(frozen=True, slots=True)
class MatchExplanation:
    """What one sequence of an admission would reuse now, and what stopped the match.

    Attributes:
        sequence: index of the sequence in the admission.
        input_tokens: tokens of the input.
        matched_tokens: tokens that match.
        reused_tokens: tokens that would not be computed.
        plan_kind: kind of the plan.
        diverged_at_token: first token of the first full block that is not cached; `None` when every full block is.
        reason: why not more is reused.
    """

    sequence: int
    input_tokens: int
    matched_tokens: int
    reused_tokens: int
    plan_kind: ReusePlanKind
    diverged_at_token: int | None
    reason: MissReason


def explain_match(sequence: int, input_tokens: int, match: MatchResult, tokens_per_page: int) -> MatchExplanation:
    """Put the manager's view of one sequence into the caller's words."""
    all_blocks = match.matched_full_blocks == input_tokens // tokens_per_page
    return MatchExplanation(
        sequence=sequence,
        input_tokens=input_tokens,
        matched_tokens=match.matched_token_length,
        reused_tokens=match.reused_token_length,
        plan_kind=match.kind,
        diverged_at_token=None if all_blocks else match.matched_full_blocks * tokens_per_page,
        reason=match.reason,
    )
