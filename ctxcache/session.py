"""One request without bookkeeping: exceptions instead of statuses, and compaction by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import RETIRED, Int32s, as_numpy, as_rows_of, is_integer
from ctxcache.errors import ContractError, RequestFailedError
from ctxcache.fsm import State
from ctxcache.ids import (
    ContextCacheCommitPolicy,
    ContextCacheCoordinatorStatus,
    ContextCacheExecutionMode,
    ContextCacheLookupPolicy,
)
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.keys.tokens import as_token_array
from ctxcache.request.admission import (
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from ctxcache.request.handle import RequestHandle
from ctxcache.request.operations import RequestOperations

Accepted = Sequence[int] | Sequence[Sequence[int]] | NDArray[Any]
"""One accepted token a sequence, or (speculative) one run of accepted tokens a sequence; in slot order."""


class CoordinatorSession:
    """A `with` block around one request: prefill, decode until nothing is active, and leave.

    Entering admits the batch and prepares its prefill. Leaving normally finishes, by an exception abandons. What the
    coordinator answers with a status is raised here as `RequestFailedError` or `PoisonedError`.

    Args:
        coordinator: the coordinator.
        token_lists: one run of token ids a sequence.
        execution_mode, lookup_policy, commit_policy: as in `ContextCacheBatchAdmission`.
        key_extras: identity of the blocks: one for all sequences, or one a sequence.
        per_position_media_hash: `None`, or per sequence `None` or one digest a token.
        headroom: tokens beyond the committed ones for every step; the default is the mode's.
    """

    def __init__(
        self,
        coordinator: RequestOperations,
        token_lists: Sequence[Any],
        *,
        execution_mode: ContextCacheExecutionMode = ContextCacheExecutionMode.VANILLA,
        lookup_policy: ContextCacheLookupPolicy = ContextCacheLookupPolicy.USE_CACHE,
        commit_policy: ContextCacheCommitPolicy = ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS,
        key_extras: BlockKeyExtras | Sequence[BlockKeyExtras] | None = None,
        per_position_media_hash: Sequence[Any] | None = None,
        headroom: DecodingKvHeadroom | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._headroom = headroom
        prompts = as_rows_of("token_lists", token_lists, "a list, one run of tokens a sequence")
        if prompts and is_integer(prompts[0]):
            raise ContractError(
                f"token_lists begins with the token {prompts[0]}; pass a list of prompts, as in [tokens]"
            )
        count = len(prompts)
        extras = _per_sequence("key_extras", key_extras, BlockKeyExtras(), count)
        media = _per_sequence("per_position_media_hash", per_position_media_hash, None, count)
        self._admission = ContextCacheBatchAdmission(
            [
                ContextCacheSequenceAdmission(as_token_array(tokens), extra, hashes)
                for tokens, extra, hashes in zip(prompts, extras, media, strict=True)
            ],
            execution_mode,
            lookup_policy,
            commit_policy,
        )
        self._handle: RequestHandle | None = None
        self._device_mapping: Any = None
        self._lengths: list[int] = []
        self._active: list[int] = []
        self._prefill_starts: list[int] = []

    @property
    def handle(self) -> RequestHandle:
        """The handle of the request.

        Raises:
            ContractError: the `with` block was not entered, or the request was refused there.
        """
        return self._require_begun()

    @property
    def stream(self) -> Any:
        """The coordinator's stream: everything the runtime computes for this request goes there."""
        return self._coordinator.stream

    @property
    def prefill_starts(self) -> list[int]:
        """For each sequence the token offset at which prefill begins; `ContractError` as for `handle`."""
        self._require_begun()
        return list(self._prefill_starts)

    @property
    def active(self) -> list[int]:
        """Original indices of the sequences that still decode, in slot order; `ContractError` as for `handle`."""
        self._require_begun()
        return list(self._active)

    @property
    def capacities(self) -> Int32s:
        """How far the prepared pages of each active sequence reach, in tokens: do not write at or beyond; `int32[active]`."""
        return self.handle.capacities

    def _require_begun(self) -> RequestHandle:
        if self._handle is None:
            raise ContractError("the session has no request yet; enter its with block first")
        return self._handle

    def __enter__(self) -> Self:
        coordinator = self._coordinator
        begun = coordinator.begin_request(self._admission, coordinator.stream, headroom=self._headroom)
        if begun.status is ContextCacheCoordinatorStatus.REQUEST_FAILED:
            raise RequestFailedError(coordinator.failure)
        begun.status.raise_for_status()
        assert begun.admission is not None  # noqa: S101 - the status was OK
        self._handle = begun.admission.request
        self._prefill_starts = begun.admission.prefill_starts
        self._lengths = [len(sequence.token_ids) for sequence in self._admission.sequences]
        self._active = list(range(len(self._lengths)))
        try:
            coordinator.prepare_prefill(self._handle).raise_for_status()
        except BaseException:
            self._handle.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._coordinator.in_forked_child:
            return
        if kind is None:
            self._coordinator.finish(self.handle).raise_for_status()
        else:
            self._coordinator.abandon(self.handle)

    def prefill_enqueued(self) -> None:
        """Say that the whole prefill is enqueued, before the runtime synchronises: checkpoints are captured here.

        Without recurrent layers this does nothing. Where it is left out, prompts get no checkpoint, and nothing says so.
        """
        self._coordinator.enqueue_prefill_captures(self.handle).raise_for_status()

    def prefilled(self, next_tokens: Accepted, *, common_lengths: Sequence[int] | None = None) -> None:
        """Say that the prefill is complete and synchronised, and which token each sequence samples first.

        Args:
            next_tokens: one token a sequence (or runs of exactly one).
            common_lengths: as in `finalize_prefill_publication`.
        """
        handle, runs = self.handle, _runs(next_tokens)
        _same_count(runs, self._active)
        advances = [ContextCacheSequenceAdvance(run, length) for run, length in zip(runs, self._lengths, strict=True)]
        self._in_turn(
            lambda: self._coordinator.finalize_prefill_publication(handle, advances, common_lengths),
            "prefilled() comes once, before all steps",
            State.PREFILLING,
        ).raise_for_status()

    def before_decode(self) -> None:
        """Make room for the next step of every active sequence.

        Raises:
            RequestFailedError: out of pages, or a sequence is at its longest; the message says which. Nothing but leaving the
                block is possible then; ask `can_decode()` beforehand, and `retire()` single sequences instead.
            ContractError: no sequence is active, or not between two steps.
        """
        self._require_active()
        status = self._in_turn(
            lambda: self._coordinator.prepare_decode_step(self.handle, headroom=self._headroom),
            "before_decode() comes after prefilled() or decoded(), while a sequence is active",
            State.SETTLED,
            State.DRAFTING,
        )
        if status is ContextCacheCoordinatorStatus.REQUEST_FAILED:
            raise RequestFailedError(
                f"{self._coordinator.failure}. Leave the block; before a step, can_decode() tells which sequences can go on, "
                "and retire() ends those that cannot"
            )
        status.raise_for_status()

    def can_decode(self) -> NDArray[np.bool_]:
        """Tell which active sequences could grow for the next step, `bool[active]`, without any effect.

        Pages that a sequence would give back by leaving are not counted: `retire()` one, then ask again.
        """
        if not self.active:
            return np.zeros(0, np.bool_)
        return self._coordinator.can_prepare_decode_step(self.handle, headroom=self._headroom)

    def _require_active(self) -> None:
        if not self.active:
            raise ContractError("no sequence of the session is active any more; leave its block")

    def decoded(
        self,
        next_tokens: Accepted,
        *,
        finished: Sequence[bool] | NDArray[np.bool_] | None = None,
        common_lengths: Sequence[int] | None = None,
    ) -> list[int] | None:
        """Say what a step accepted, in slot order, and which sequences have ended with it; those leave the batch.

        Args:
            next_tokens: one token, or one run of tokens, for each active sequence.
            finished: one flag for each active sequence; `None`: none has ended.
            common_lengths: as in `complete_decode_step`.

        Returns:
            `None` when the slots stayed as they were; else the new slot of each old one, -1 for those that left. When the
            last one has left, the request is finished: its pages are free, and nothing moves on the device.
        """
        self._require_active()
        handle, runs = self.handle, _runs(next_tokens)
        _same_count(runs, self._active)
        ended = _flags(finished, len(runs))
        _same_count(ended, self._active)
        lengths = [self._lengths[index] + len(run) for index, run in zip(self._active, runs, strict=True)]
        advances = [ContextCacheSequenceAdvance(run, length) for run, length in zip(runs, lengths, strict=True)]
        self._in_turn(
            lambda: self._coordinator.complete_decode_step(
                handle, advances, np.flatnonzero(ended).astype(np.int32), common_lengths
            ),
            "decoded() comes after before_decode()",
            State.DECODING,
        ).raise_for_status()
        for index, length in zip(self._active, lengths, strict=True):
            self._lengths[index] = length
        return self._compact(ended) if ended.any() else None

    def retire(self, leaving: Sequence[bool] | NDArray[np.bool_]) -> list[int] | None:
        """End sequences between two steps: cancelled ones, or those for which there is no page.

        Their pages are free afterwards, apart from what is published: of these sequences, the prompts.

        Args:
            leaving: one flag for each active sequence, in slot order.

        Returns:
            As `decoded`.

        Raises:
            ContractError: not between two steps, or a flag too few or too many. Nothing has changed.
        """
        self.can_decode()  # refuses in every other phase
        gone = _flags(leaving, len(self._active), "leaving")
        _same_count(gone, self._active)
        return self._compact(gone) if gone.any() else None

    def _in_turn(
        self, operation: Callable[[], ContextCacheCoordinatorStatus], order: str, *states: State
    ) -> ContextCacheCoordinatorStatus:
        """Do it; a refusal for the request's state begins with the order in which a session is called."""
        try:
            return operation()
        except ContractError as error:
            if self.handle.inspect().state in states:
                raise
            raise ContractError(f"{order}; {error}") from None

    def _compact(self, ended: NDArray[np.bool_]) -> list[int]:
        mapping = np.where(ended, RETIRED, np.cumsum(~ended) - 1).astype(np.int32)
        survivors = int((~ended).sum())
        coordinator = self._coordinator
        if not survivors:
            coordinator.finish(self.handle).raise_for_status()
        else:
            if self._device_mapping is None:
                self._device_mapping = coordinator.device_ops.allocate((len(ended),), "int32")
            coordinator.begin_batch_compaction(self.handle, mapping, survivors, self._device_mapping).raise_for_status()
            coordinator.compact_batch(self.handle).raise_for_status()
        self._active = [index for index, gone in zip(self._active, ended, strict=True) if not gone]
        return list(mapping.tolist())


def _runs(accepted: Accepted) -> list[Any]:
    """Return one run of tokens a sequence, whether single tokens or runs were given, in arrays of whatever library."""
    wanted = "a list or an array with one token, or one run of tokens, a sequence"
    return [[one] if is_integer(one) else _run(one) for one in as_rows_of("the tokens", accepted, wanted)]


def _run(tokens: Any) -> Int32s:
    """Return a run of tokens; a single one may be an array without an axis."""
    if hasattr(tokens, "__array__"):
        tokens = as_numpy("the tokens", tokens)
        tokens = tokens[None] if tokens.ndim == 0 else tokens
    return as_token_array(tokens)


def _flags(finished: Any, count: int, name: str = "finished") -> NDArray[np.bool_]:
    """Return one flag a sequence; whole numbers pass for flags where they are 0 or 1."""
    if finished is None:
        return np.zeros(count, bool)
    flags = as_rows_of(name, finished, "one bool a sequence")
    if any(isinstance(flag, np.ma.MaskedArray) for flag in flags):  # NumPy would make NaN of it, and warn
        raise ContractError(f"{name} is {finished!r}, masked in part; pass one bool a sequence")
    given = as_numpy(name, flags)
    if given.ndim != 1 or (given.size and (given.dtype.kind not in "biu" or not np.isin(given, (0, 1)).all())):
        raise ContractError(f"{name} is {finished!r}; pass one bool a sequence")
    return given.astype(bool)


def _same_count(values: Any, active: list[int]) -> None:
    if len(values) != len(active):
        raise ContractError(f"there are {len(values)} entries for {len(active)} active sequences; give one a sequence")


def _per_sequence(name: str, value: Any, default: Any, count: int) -> list[Any]:
    """Spread one value over all sequences, or check that there is one a sequence."""
    if value is None:
        return [default] * count
    if isinstance(value, BlockKeyExtras):
        return [value] * count
    one = "one BlockKeyExtras for all, or " if name == "key_extras" else ""
    values = as_rows_of(name, value, f"{one}a list with one entry a sequence")
    if len(values) != count:
        raise ContractError(f"{name} has {len(values)} entries for {count} sequences; give one a sequence")
    return values
