"""Why an input would reuse what it would: the answer to "why is this slow?", without touching anything."""

from __future__ import annotations

from dataclasses import dataclass

from ctxcache.ids import MissReason, ReusePlanKind
from ctxcache.manager.results import MatchResult


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


_NOTHING_MATCHED = frozenset({MissReason.NO_MATCH, MissReason.NO_CHECKPOINT, MissReason.EVICTED})


def explain_match(
    sequence: int, input_tokens: int, match: MatchResult, tokens_per_page: int, *, other_identity: bool
) -> MatchExplanation:
    """Put the manager's view of one sequence into the caller's words.

    Args:
        sequence: index in the admission.
        input_tokens: tokens of the input.
        match: what the manager says.
        tokens_per_page: P.
        other_identity: the same beginning was published under other extras, and not under these.
    """
    all_blocks = match.matched_full_blocks == input_tokens // tokens_per_page
    hidden = other_identity and match.matched_full_blocks == 0 and match.reason in _NOTHING_MATCHED
    return MatchExplanation(
        sequence=sequence,
        input_tokens=input_tokens,
        matched_tokens=match.matched_token_length,
        reused_tokens=match.reused_token_length,
        plan_kind=match.kind,
        diverged_at_token=None if all_blocks else match.matched_full_blocks * tokens_per_page,
        reason=MissReason.OTHER_IDENTITY if hidden else match.reason,
    )
