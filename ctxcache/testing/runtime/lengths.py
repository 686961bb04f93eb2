"""How far sequences may write, said a second time and in plain Python: what the runtime holds the library against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.ids import ResourceType
from ctxcache.manager.results import CacheRequestLease
from ctxcache.request.admission import DecodingKvHeadroom
from ctxcache.request.execution_modes import STEP_RULES
from ctxcache.testing.runtime.deployments import STEP_TOKENS, Sizes

Targets = Sequence[tuple[int, int]]
"""Up to where a step of each sequence may write, in tokens of the base and of the draft."""


@dataclass(frozen=True, slots=True)
class LengthRules:
    """The rules of one deployment.

    Attributes:
        sizes: its sizes.
        has_pages: whether the base has attention layers.
    """

    sizes: Sizes
    has_pages: bool

    def targets(self, mode: Mode, lengths: Sequence[int], headroom: DecodingKvHeadroom | None) -> Targets | None:
        """Say how far a step behind so many tokens may write; `None` where a row has no room for it.

        The mode's own headroom shrinks near the end of a row, to one token of the base and to nothing of the draft.
        """
        base, draft = STEP_TOKENS[mode]
        if headroom is not None:
            base, draft = headroom.base_extra_tokens, headroom.draft_extra_tokens
        longest = self.sizes.max_tokens
        if any(length >= longest or (headroom is not None and length + base > longest) for length in lengths):
            return None
        return [(min(length + base, longest), min(length + draft, self.sizes.longest_draft)) for length in lengths]

    def has_pages_for(self, manager: Any, mode: Mode, leases: Sequence[CacheRequestLease], targets: Targets) -> bool:
        """Whether free pages alone are enough; without them something may still be evicted."""
        size = self.sizes.tokens_per_page
        base = sum(
            max(0, -(-target // size) - lease.base_pages.size)
            for lease, (target, _) in zip(leases, targets, strict=True)
        )
        draft = sum(
            max(0, -(-target // size) - lease.draft_pages.size)
            for lease, (_, target) in zip(leases, targets, strict=True)
        )
        free = manager.pool(ResourceType.BASE_KV_PAGE).free, manager.pool(ResourceType.DRAFT_KV_PAGE).free
        return (base <= free[0] or not self.has_pages) and (draft <= free[1] or not STEP_RULES[mode].paired)

    def wrong_capacities(
        self, mode: Mode, lease: CacheRequestLease, found: tuple[int, int], target: tuple[int, int] | None
    ) -> str:
        """Say what is wrong with how far a sequence may write; empty where nothing is."""
        size, sizes = self.sizes.tokens_per_page, self.sizes
        base = min(lease.base_pages.size * size, sizes.max_tokens) if self.has_pages else found[0]
        draft = min(lease.draft_pages.size * size, sizes.longest_draft) if STEP_RULES[mode].paired else base
        if found != (base, draft) or found[0] > sizes.max_tokens:
            return f"the capacities are {found} tokens, and the pages reach {(base, draft)}"
        if target is not None and (base < target[0] or (STEP_RULES[mode].paired and draft < target[1])):
            return f"a step needs {target} tokens, and the capacities are {found}"
        return ""
