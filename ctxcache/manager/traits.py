"""What a kind of deployment means to the manager: stated once, asked everywhere."""

from __future__ import annotations

from typing import NamedTuple, Self

from ctxcache.config import EXECUTION_MODES
from ctxcache.ids import PAIRED_KINDS, RECURRENT_KINDS, ContextCacheDeploymentKind, ContextCacheExecutionMode

PAIRED_MODES = (ContextCacheExecutionMode.EAGLE, ContextCacheExecutionMode.MTP)
"""Modes that run a draft with pages of its own. A tuple: members are hashed by Python code, two comparisons are faster."""


class DeploymentTraits(NamedTuple):
    """What follows from the kind of a deployment, and how many tokens its pages hold.

    Attributes:
        kind: the deployment.
        tokens_per_page: tokens in a page, P.
        modes: execution modes that it serves.
        checkpoint_modes: those whose leases may make checkpoints. The plain mode of MTP writes no draft state for one.
        has_pages: it has attention layers, so base pages.
        has_checkpoints: it has recurrent layers: what it publishes is state at exact lengths.
        has_pairs: it has draft pages beside base pages.
        is_mtp: hybrid with MTP: a checkpoint's boundary token always lies in a private page.
    """

    kind: ContextCacheDeploymentKind
    tokens_per_page: int
    modes: tuple[ContextCacheExecutionMode, ...]
    checkpoint_modes: tuple[ContextCacheExecutionMode, ...]
    has_pages: bool
    has_checkpoints: bool
    has_pairs: bool
    is_mtp: bool

    @classmethod
    def of(cls, kind: ContextCacheDeploymentKind, tokens_per_page: int) -> Self:
        """Return the traits of a kind."""
        modes, has_checkpoints = EXECUTION_MODES[kind], kind in RECURRENT_KINDS
        is_mtp = kind is ContextCacheDeploymentKind.HYBRID_MTP
        return cls(
            kind=kind,
            tokens_per_page=tokens_per_page,
            modes=modes,
            checkpoint_modes=tuple(mode for mode in modes if has_checkpoints and (mode in PAIRED_MODES or not is_mtp)),
            has_pages=kind is not ContextCacheDeploymentKind.PURE_RECURRENT,
            has_checkpoints=has_checkpoints,
            has_pairs=kind in PAIRED_KINDS,
            is_mtp=is_mtp,
        )
