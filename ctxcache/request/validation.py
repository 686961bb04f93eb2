"""Reading what a caller says: every argument is checked, and turned into arrays, before anything changes.

Each function returns the checked value or raises `ContractError` with the value, the limit and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ctxcache.arguments import (
    Int32s,
    Words,
    as_int32s,
    as_integer,
    as_lengths,
    as_list,
    as_plain,
    as_token_rows,
    check_mapping,
    check_member,
)
from ctxcache.config import EXECUTION_MODES, DeploymentConfig, EngineConfig
from ctxcache.device.compiled_checks import are_distinct_slots, are_within
from ctxcache.errors import ContractError
from ctxcache.ids import (
    ContextCacheCommitPolicy,
    ContextCacheDeploymentKind,
    ContextCacheExecutionMode,
    ContextCacheLookupPolicy,
)
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.keys.tokens import as_media_array, as_token_array
from ctxcache.request.admission import (
    ContextCacheBatchAdmission,
    ContextCacheBatchAdvance,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from ctxcache.request.execution_modes import STEP_RULES, CommonLengths, default_headroom, runs_cold
from ctxcache.request.room import Headroom


@dataclass(frozen=True, slots=True, eq=False)
class CheckedSequence:
    """One checked sequence: its tokens `int32[n]`, extras, and media digests `uint64[n, 2]` or `None`."""

    tokens: Int32s
    extras: BlockKeyExtras
    media: Words | None

    @property
    def has_media(self) -> bool:
        """Whether some position holds media instead of a token."""
        return bool(self.extras.media) or (self.media is not None and bool(self.media.any()))


@dataclass(frozen=True, slots=True, eq=False)
class CheckedAdmission:
    """A checked admission.

    Attributes:
        sequences: one a slot.
        execution_mode, commit_policy: as asked for.
        lookup_policy: what is done, which is a bypass too where the mode has to run cold.
        headroom: tokens beyond each prompt that the first working set covers.
    """

    sequences: list[CheckedSequence]
    execution_mode: ContextCacheExecutionMode
    lookup_policy: ContextCacheLookupPolicy
    commit_policy: ContextCacheCommitPolicy
    headroom: Headroom

    @property
    def bypass(self) -> bool:
        """Whether nothing is looked up and nothing published."""
        return self.lookup_policy is ContextCacheLookupPolicy.BYPASS


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """What a caller reports of a prefill or a step, as arrays; what the numbers mean is checked against the batch.

    Attributes:
        tokens: accepted ones, `int32[batch, k]`; row `i` has `counts[i]`.
        counts, committed: accepted tokens and committed lengths, `int32[batch]`.
        common: how far base and draft state agree, `int32[batch]`, or `None` where the mode has no draft.
        kept: slots whose generated state is to be kept, unique.
    """

    tokens: Int32s
    counts: Int32s
    committed: Int32s
    common: Int32s | None
    kept: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class AdmissionRules:
    """What one coordinator admits.

    Attributes:
        deployment, kind: what is deployed.
        enabled: whether anything is cached at all.
    """

    deployment: DeploymentConfig
    kind: ContextCacheDeploymentKind
    enabled: bool

    def read_admission(
        self, admission: ContextCacheBatchAdmission, headroom: DecodingKvHeadroom | None = None
    ) -> CheckedAdmission:
        """Check a whole batch admission; `ContractError` for what could never be admitted."""
        if not isinstance(admission, ContextCacheBatchAdmission):
            raise ContractError(f"admission is a {type(admission).__name__}; pass a ContextCacheBatchAdmission")
        check_member("execution_mode", admission.execution_mode, ContextCacheExecutionMode)
        check_member("lookup_policy", admission.lookup_policy, ContextCacheLookupPolicy)
        check_member("commit_policy", admission.commit_policy, ContextCacheCommitPolicy)
        modes = EXECUTION_MODES[self.kind]
        if admission.execution_mode not in modes:
            raise ContractError(
                f"execution_mode is {admission.execution_mode.name}; this deployment has "
                f"{', '.join(mode.name for mode in modes)}"
            )
        said = as_list("sequences", admission.sequences)
        largest = min(engine.max_batch_size for engine in self._engines(admission.execution_mode))
        if not 1 <= len(said) <= largest:
            raise ContractError(f"the batch has {len(said)} sequences; admit 1 to {largest}")
        sequences = [_read_sequence(index, sequence) for index, sequence in enumerate(said)]
        checked = CheckedAdmission(
            sequences,
            admission.execution_mode,
            self._lookup_policy(admission, sequences),
            admission.commit_policy,
            self.read_headroom(headroom, admission.execution_mode),
        )
        for index, sequence in enumerate(sequences):
            self._check_length(index, sequence.tokens.size, checked)
        return checked

    def read_headroom(self, headroom: DecodingKvHeadroom | None, mode: ContextCacheExecutionMode) -> Headroom:
        """Return the headroom given, checked, or the mode's own."""
        if headroom is None:
            default = default_headroom(self.deployment, mode)
            return Headroom(default.base_extra_tokens, default.draft_extra_tokens, shrinks=True)
        if not isinstance(headroom, DecodingKvHeadroom):
            raise ContractError(f"headroom is a {type(headroom).__name__}; pass a DecodingKvHeadroom")
        return Headroom(
            as_integer("DecodingKvHeadroom.base_extra_tokens", headroom.base_extra_tokens),
            as_integer("DecodingKvHeadroom.draft_extra_tokens", headroom.draft_extra_tokens),
            shrinks=False,
        )

    def _engines(self, mode: ContextCacheExecutionMode) -> list[EngineConfig]:
        """Return the engines that a mode runs with pages of their own: the base, and a paired draft."""
        draft = self.deployment.draft
        return [self.deployment.base, *([draft] if draft is not None and STEP_RULES[mode].paired else [])]

    def _lookup_policy(
        self, admission: ContextCacheBatchAdmission, sequences: list[CheckedSequence]
    ) -> ContextCacheLookupPolicy:
        """Say whether a batch looks anything up: not when it drafts over media, nor in a mode that always runs cold."""
        mode = admission.execution_mode
        drafts_over_media = STEP_RULES[mode].speculative and any(sequence.has_media for sequence in sequences)
        if not self.enabled or drafts_over_media or runs_cold(self.kind, mode):
            return ContextCacheLookupPolicy.BYPASS
        return admission.lookup_policy

    def _check_length(self, index: int, num_tokens: int, admission: CheckedAdmission) -> None:
        """Refuse a prompt that leaves no room for one more token, or too little for an explicit headroom."""
        headroom = admission.headroom
        extras = (1, 0) if headroom.shrinks else (max(1, headroom.base), headroom.draft)
        for engine, extra, side in zip(
            self._engines(admission.execution_mode), extras, ("base", "draft"), strict=False
        ):
            if num_tokens + extra > engine.max_sequence_length:
                raise ContractError(
                    f"sequence {index} has {num_tokens} tokens and needs room for {extra} more; max_sequence_length of the "
                    f"{side} engine is {engine.max_sequence_length}: shorten the sequence, or build an engine for longer ones"
                )


def _read_sequence(index: int, sequence: ContextCacheSequenceAdmission) -> CheckedSequence:
    if not isinstance(sequence, ContextCacheSequenceAdmission):
        raise ContractError(f"sequence {index} is a {type(sequence).__name__}; pass a ContextCacheSequenceAdmission")
    if not isinstance(sequence.key_extras, BlockKeyExtras):
        raise ContractError(
            f"key_extras of sequence {index} is a {type(sequence.key_extras).__name__}; pass a BlockKeyExtras"
        )
    tokens = as_token_array(sequence.token_ids)
    if tokens.size == 0:
        raise ContractError(f"sequence {index} has no token; a prompt has at least one")
    media = sequence.per_position_media_hash
    return CheckedSequence(tokens, sequence.key_extras, None if media is None else as_media_array(media, tokens.size))


def read_report(
    advances: Sequence[ContextCacheSequenceAdvance] | ContextCacheBatchAdvance,
    completed: Any,
    common_lengths: Any,
    rule: CommonLengths,
    batch_size: int,
) -> StepReport:
    """Check the form of a report."""
    if isinstance(advances, ContextCacheBatchAdvance):
        tokens, counts, committed = _read_batch_advance(advances, batch_size)
    else:
        tokens, counts, committed = _read_advances(advances, batch_size)
    common = _read_common_lengths(common_lengths, rule, committed)
    return StepReport(tokens, counts, committed, common, read_slots(completed, batch_size))


def _read_advances(advances: Sequence[ContextCacheSequenceAdvance], batch_size: int) -> tuple[Int32s, Int32s, Int32s]:
    said = as_list("advances", advances)
    if len(said) != batch_size:
        raise ContractError(f"there are {len(said)} advances for {batch_size} sequences; give one a sequence")
    runs = [_read_advance(slot, advance) for slot, advance in enumerate(said)]
    counts = np.array([run.size for run in runs], np.int32)
    tokens = np.zeros((batch_size, max(1, int(counts.max()))), np.int32)
    for slot, run in enumerate(runs):
        tokens[slot, : run.size] = run
    lengths = [advance.committed_state_length for advance in said]
    return tokens, counts, as_lengths("committed_state_length", lengths, batch_size)


def _read_advance(slot: int, advance: ContextCacheSequenceAdvance) -> Int32s:
    if not isinstance(advance, ContextCacheSequenceAdvance):
        raise ContractError(
            f"advance {slot} is a {type(advance).__name__}; pass a ContextCacheSequenceAdvance, "
            "or one ContextCacheBatchAdvance for the whole batch"
        )
    return as_token_array(advance.accepted_token_ids)


def _read_batch_advance(advance: ContextCacheBatchAdvance, batch_size: int) -> tuple[Int32s, Int32s, Int32s]:
    return (
        as_token_rows("accepted_token_ids", advance.accepted_token_ids, batch_size),
        as_lengths("accepted_token_counts", advance.accepted_token_counts, batch_size),
        as_lengths("committed_state_lengths", advance.committed_state_lengths, batch_size),
    )


def _read_common_lengths(values: Any, rule: CommonLengths, committed: Int32s) -> Int32s | None:
    """Check that common state lengths are given where the mode has them; the default is the committed lengths."""
    if rule is CommonLengths.REFUSED:
        if values is not None:
            raise ContractError("common_state_lengths is given and this mode has none; leave it at None")
        return None
    if values is None:
        if rule is CommonLengths.REQUIRED:
            raise ContractError("common_state_lengths is None and this mode needs them; give one length a sequence")
        return committed
    return as_lengths("common_state_lengths", values, committed.size)


def read_slots(slots: Any, batch_size: int) -> Int32s:
    """Check a run of unique slots of the batch."""
    name = "publishable_completed_slots"
    checked: Int32s = as_plain(as_int32s(name, slots))
    if are_distinct_slots(checked, batch_size):
        return checked
    if not are_within(checked, batch_size):
        raise ContractError(
            f"{name} holds slots {checked.min()} .. {checked.max()}; the batch has 0 .. {batch_size - 1}"
        )
    raise ContractError(f"{name} is {checked.tolist()}; name every slot once")


def read_mapping(old_to_new: Any, new_batch_size: int, batch_size: int) -> tuple[Int32s, int]:
    """Check an old-to-new mapping and return a copy, and how many survive it."""
    survivors = as_integer("new_batch_size", new_batch_size, 0, batch_size + 1)
    return check_mapping("old_to_new", old_to_new, batch_size, survivors).copy(), survivors
