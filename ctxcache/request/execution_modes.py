"""What each execution mode asks of a step, as data: the only place where modes differ in their rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ctxcache.config import DeploymentConfig
from ctxcache.ids import ContextCacheDeploymentKind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.request.admission import DecodingKvHeadroom


class CommonLengths(Enum):
    """Whether a step says how far base and draft state agree."""

    REFUSED = "refused"
    OPTIONAL = "optional"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rules of one execution mode.

    Attributes:
        single_token: every decode step accepts exactly one token; else at least one.
        common_lengths: whether common state lengths are given.
        drafts: the draft model initialises after prefill and awaits its first verification.
        paired: draft pages, rows and lengths are used beside the base's.
        speculative: the draft's state at a boundary depends on the token that follows.
    """

    single_token: bool
    common_lengths: CommonLengths
    drafts: bool
    paired: bool
    speculative: bool


STEP_RULES: dict[Mode, StepRules] = {
    Mode.VANILLA: StepRules(
        single_token=True, common_lengths=CommonLengths.REFUSED, drafts=False, paired=False, speculative=False
    ),
    Mode.EAGLE: StepRules(
        single_token=False, common_lengths=CommonLengths.REQUIRED, drafts=True, paired=True, speculative=True
    ),
    Mode.SHARED_KV: StepRules(
        single_token=False, common_lengths=CommonLengths.OPTIONAL, drafts=True, paired=False, speculative=True
    ),
    Mode.MTP: StepRules(
        single_token=False, common_lengths=CommonLengths.REFUSED, drafts=False, paired=True, speculative=True
    ),
}


def default_headroom(deployment: DeploymentConfig, mode: Mode) -> DecodingKvHeadroom:
    """Tokens that the next step of a mode may write beyond the committed ones, when the caller names none.

    Near the longest sequence there is less room than that, and a step then gets what there is.
    """
    spec = deployment.spec
    if mode is Mode.VANILLA or spec is None:
        return DecodingKvHeadroom(1, 0)
    if mode is Mode.SHARED_KV:
        return DecodingKvHeadroom(spec.drafting_step + 1, 0)
    return DecodingKvHeadroom(spec.verify_size, spec.drafting_step * spec.drafting_top_k)


def runs_cold(kind: ContextCacheDeploymentKind, mode: Mode) -> bool:
    """Say whether a mode neither looks up nor publishes on a deployment that is made for another mode."""
    return kind is ContextCacheDeploymentKind.HYBRID_MTP and mode is Mode.VANILLA
