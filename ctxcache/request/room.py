"""How far sequences may write: the headroom of a step, the longest sequence, and the pages that both take.

[0, length) has state | [length, length + headroom) a step may write | [capacity, max) later, with more pages | max: never
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ctxcache.arguments import Flags, Int32s
from ctxcache.jit import njit_in_place


@dataclass(frozen=True, slots=True)
class Headroom:
    """Tokens beyond those with state that a step may write, in base pages and in draft pages.

    Attributes:
        base, draft: tokens.
        shrinks: near its longest a sequence gets the room that there is, never less than one token: the mode's own headroom
            does so. An explicit one fits, or the step does not.
    """

    base: int
    draft: int
    shrinks: bool


@dataclass(frozen=True, slots=True, eq=False)
class PageTargets:
    """What each sequence must hold for the next step.

    Attributes:
        base_pages: `int32[n]`, as `grow_leases` takes them; 0 where the sequence cannot be stepped.
        draft_pages: the same, or `None` where the mode has no draft pages.
        fit: whether the sequence may be stepped at all, `bool[n]`.
        all_fit: whether every one may.
        capacity: tokens that the base pages then cover, `int32[n]`.
        draft_capacity: tokens that the draft pages then cover, `int32[n]`; `capacity` where there are none.
    """

    base_pages: Int32s
    draft_pages: Int32s | None
    fit: Flags
    all_fit: bool
    capacity: Int32s
    draft_capacity: Int32s


@dataclass(frozen=True, slots=True)
class Room:
    """The longest sequences of a deployment, in tokens with state.

    Attributes:
        tokens_per_page: P.
        max_tokens: of the base engine.
        max_draft_tokens: of the draft engine, which may end earlier: sequences then go on without drafts.
        has_pages: whether the base has attention layers.
    """

    tokens_per_page: int
    max_tokens: int
    max_draft_tokens: int
    has_pages: bool

    def aim(self, lengths: Int32s, headroom: Headroom, *, paired: bool) -> PageTargets:
        """Say what sequences that have state of so many tokens must hold for a step; `int32[n]`."""
        size = lengths.size
        base, capacity, fit = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.bool_)
        draft = np.empty(size if paired else 0, np.int32)
        draft_capacity = np.empty(size, np.int32) if paired else capacity
        all_fit = _aim(
            lengths,
            self.tokens_per_page,
            (headroom.base, headroom.draft),
            (self.max_tokens, self.max_draft_tokens),
            headroom.shrinks,
            self.has_pages,
            base,
            draft,
            capacity,
            draft_capacity,
            fit,
        )
        return PageTargets(base, draft if paired else None, fit, all_fit, capacity, draft_capacity)

    def extra_tokens(self, num_tokens: int, headroom: Headroom) -> tuple[int, int]:
        """Return the base and draft headroom of a prompt of so many tokens, which fits."""
        if not headroom.shrinks:
            return headroom.base, headroom.draft
        base, draft = self.max_tokens - num_tokens, self.max_draft_tokens - num_tokens
        return min(headroom.base, base), min(headroom.draft, draft)


@njit_in_place
def _aim(
    lengths: Int32s,
    tokens_per_page: int,
    extra: tuple[int, int],
    longest: tuple[int, int],
    shrinks: bool,  # noqa: FBT001 - compiled code takes no keywords
    has_pages: bool,  # noqa: FBT001
    base: Int32s,
    draft: Int32s,
    capacity: Int32s,
    draft_capacity: Int32s,
    fit: Flags,
) -> bool:
    """Fill what `PageTargets` holds, whether all fit being the answer; `draft` is empty where unpaired."""
    all_fit = True
    for slot in range(lengths.size):
        length = lengths[slot]
        target = length + extra[0]
        # The token that a step computes at least is the one that was sampled last.
        fits = length < longest[0] and (shrinks or target <= longest[0])
        pages = -(-min(target, longest[0]) // tokens_per_page)
        base[slot] = pages if fits and has_pages else 0
        capacity[slot] = min(pages * tokens_per_page, longest[0])
        if draft.size > 0:
            draft_pages = -(-min(length + extra[1], longest[1]) // tokens_per_page)
            draft[slot] = draft_pages if fits else 0
            draft_capacity[slot] = min(draft_pages * tokens_per_page, longest[1])
        fit[slot] = fits
        all_fit &= fits
    return all_fit
