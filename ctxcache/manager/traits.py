"""What a kind of deployment means to the manager: stated once, asked everywhere."""

from __future__ import annotations

from typing import NamedTuple, Self

from ctxcache.config import EXECUTION_MODES
from ctxcache.ids import PAIRED_KINDS, RECURRENT_KINDS, ContextCacheDeploymentKind, ContextCacheExecutionMode

_PAIRED_MODES = (ContextCacheExecutionMode.EAGLE, ContextCacheExecutionMode.MTP)
"""A tuple: members are hashed by Python code, and two comparisons are faster."""


class DeploymentTraits(NamedTuple):
    """What follows from the kind of a deployment, and how many tokens its pages hold.

    Attributes:
        kind: the deployment.
        tokens_per_page: tokens in a page, P.
        modes: execution modes that it serves.
        has_pages: it has attention layers, so base pages.
        has_checkpoints: it has recurrent layers: what it publishes is state at exact lengths.
        has_pairs: it has draft pages beside base pages.
        is_mtp: hybrid with MTP: a checkpoint's boundary token always lies in a private page.
    """

    kind: ContextCacheDeploymentKind
    tokens_per_page: int
    modes: tuple[ContextCacheExecutionMode, ...]
    has_pages: bool
    has_checkpoints: bool
    has_pairs: bool
    is_mtp: bool

    @classmethod
    def of(cls, kind: ContextCacheDeploymentKind, tokens_per_page: int) -> Self:
        """Return the traits of a kind."""
        return cls(
            kind=kind,
            tokens_per_page=tokens_per_page,
            modes=EXECUTION_MODES[kind],
            has_pages=kind is not ContextCacheDeploymentKind.PURE_RECURRENT,
            has_checkpoints=kind in RECURRENT_KINDS,
            has_pairs=kind in PAIRED_KINDS,
            is_mtp=kind is ContextCacheDeploymentKind.HYBRID_MTP,
        )

    def may_make_checkpoints(self, mode: ContextCacheExecutionMode) -> bool:
        """Whether a lease in this mode can: the plain mode of an MTP deployment writes no draft state for one."""
        return self.has_checkpoints and (runs_paired_draft(mode) or not self.is_mtp)


def runs_paired_draft(mode: ContextCacheExecutionMode) -> bool:
    """Whether the mode runs a draft with pages of its own."""
    return mode in _PAIRED_MODES
