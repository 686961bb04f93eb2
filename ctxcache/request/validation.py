"""Reading what a caller says: every argument is checked, and turned into arrays, before anything changes.

Each function returns the checked value or raises `ContractError` with the value, the limit and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import as_plain
from ctxcache.device.arrays import Home, check_int32_target, check_writable, view_array
from ctxcache.errors import ContractError
from ctxcache.ids import ContextCacheCommitPolicy, ContextCacheExecutionMode, ContextCacheLookupPolicy
from ctxcache.jit import njit_in_place
from ctxcache.keys.chain import check_extras
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.keys.tokens import as_media_array, as_token_array
from ctxcache.manager.layout import Flags
from ctxcache.request.admission import (
    ContextCacheBatchAdmission,
    ContextCacheBatchAdvance,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from ctxcache.request.execution_modes import CommonLengths

Int32s = NDArray[np.int32]
_Choice = TypeVar("_Choice")

RETIRED = -1
"""The new slot, in a compaction mapping, of a sequence that leaves the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceIntake:
    """One checked sequence: its tokens `int32[n]`, extras, and media digests `uint64[n, 2]` or `None`."""

    tokens: Int32s
    extras: BlockKeyExtras
    media: NDArray[np.uint64] | None

    @property
    def has_media(self) -> bool:
        """Whether some position holds media instead of a token."""
        return bool(self.extras.media) or (self.media is not None and bool(self.media.any()))


@dataclass(frozen=True, slots=True, eq=False)
class Advances:
    """The checked advances of a batch: tokens `int32[batch, k]`, counts and committed lengths `int32[batch]`."""

    tokens: Int32s
    counts: Int32s
    committed: Int32s


def read_admission(
    admission: ContextCacheBatchAdmission, max_batch_size: int, modes: tuple[ContextCacheExecutionMode, ...]
) -> list[SequenceIntake]:
    """Check a whole batch admission against the engine's batch and the deployment's modes."""
    if not isinstance(admission, ContextCacheBatchAdmission):
        raise ContractError(f"admission is a {type(admission).__name__}; pass a ContextCacheBatchAdmission")
    _require_member("execution_mode", admission.execution_mode, ContextCacheExecutionMode)
    _require_member("lookup_policy", admission.lookup_policy, ContextCacheLookupPolicy)
    _require_member("commit_policy", admission.commit_policy, ContextCacheCommitPolicy)
    if admission.execution_mode not in modes:
        raise ContractError(
            f"execution_mode is {admission.execution_mode.name}; this deployment has "
            f"{', '.join(mode.name for mode in modes)}"
        )
    sequences = _require_sequence("sequences", admission.sequences)
    if not 1 <= len(sequences) <= max_batch_size:
        raise ContractError(f"the batch has {len(sequences)} sequences; admit 1 to {max_batch_size}")
    return [_read_sequence(index, sequence) for index, sequence in enumerate(sequences)]


def _read_sequence(index: int, sequence: ContextCacheSequenceAdmission) -> SequenceIntake:
    if not isinstance(sequence, ContextCacheSequenceAdmission):
        raise ContractError(f"sequence {index} is a {type(sequence).__name__}; pass a ContextCacheSequenceAdmission")
    if not isinstance(sequence.key_extras, BlockKeyExtras):
        raise ContractError(
            f"key_extras of sequence {index} is a {type(sequence.key_extras).__name__}; pass a BlockKeyExtras"
        )
    check_extras(sequence.key_extras)
    tokens = as_token_array(sequence.token_ids)
    if tokens.size == 0:
        raise ContractError(f"sequence {index} has no token; a prompt has at least one")
    media = sequence.per_position_media_hash
    return SequenceIntake(tokens, sequence.key_extras, None if media is None else as_media_array(media, tokens.size))


def read_headroom(headroom: DecodingKvHeadroom | None, default: DecodingKvHeadroom) -> DecodingKvHeadroom:
    """Return the headroom given, checked, or the deployment's own."""
    if headroom is None:
        return default
    if not isinstance(headroom, DecodingKvHeadroom):
        raise ContractError(f"headroom is a {type(headroom).__name__}; pass a DecodingKvHeadroom")
    for name in ("base_extra_tokens", "draft_extra_tokens"):
        value = getattr(headroom, name)
        if not _is_integer(value) or not 0 <= value <= np.iinfo(np.int32).max:
            raise ContractError(f"DecodingKvHeadroom.{name} is {value!r}; pass a non-negative number of tokens")
    return headroom


def read_advances(
    advances: Sequence[ContextCacheSequenceAdvance] | ContextCacheBatchAdvance, batch_size: int
) -> Advances:
    """Check the form of a batch's advances; what the numbers mean is checked against the batch later."""
    if isinstance(advances, ContextCacheBatchAdvance):
        return _read_batch_advance(advances, batch_size)
    items = _require_sequence("advances", advances)
    if len(items) != batch_size:
        raise ContractError(f"there are {len(items)} advances for {batch_size} sequences; give one a sequence")
    runs = [_read_advance(slot, item) for slot, item in enumerate(items)]
    counts = np.array([run.size for run in runs], np.int32)
    tokens = np.zeros((batch_size, max(1, int(counts.max()))), np.int32)
    for slot, run in enumerate(runs):
        tokens[slot, : run.size] = run
    committed = read_lengths("committed_state_length", [item.committed_state_length for item in items], batch_size)
    return Advances(tokens, counts, committed)


def _read_advance(slot: int, advance: ContextCacheSequenceAdvance) -> Int32s:
    if not isinstance(advance, ContextCacheSequenceAdvance):
        raise ContractError(
            f"advance {slot} is a {type(advance).__name__}; pass a ContextCacheSequenceAdvance, "
            "or one ContextCacheBatchAdvance for the whole batch"
        )
    return as_token_array(advance.accepted_token_ids)


def _read_batch_advance(advance: ContextCacheBatchAdvance, batch_size: int) -> Advances:
    tokens = as_plain(np.asarray(advance.accepted_token_ids))
    if tokens.ndim != 2 or tokens.shape[0] != batch_size or tokens.dtype != np.int32:
        raise ContractError(f"accepted_token_ids is {tokens.dtype}{list(tokens.shape)}; pass int32[{batch_size}, k]")
    counts = read_lengths("accepted_token_counts", advance.accepted_token_counts, batch_size)
    if not _all_within(counts, tokens.shape[1] + 1):
        raise ContractError(
            f"accepted_token_counts holds {counts.min()} .. {counts.max()}; the rows have 0 .. {tokens.shape[1]} tokens"
        )
    committed = read_lengths("committed_state_lengths", advance.committed_state_lengths, batch_size)
    return Advances(tokens, counts, committed)


def read_lengths(name: str, values: Any, batch_size: int) -> Int32s:
    """Check one integer a sequence; a plain int32 array is returned as it is."""
    if not (isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1):
        values = _integers(name, values)
    if len(values) != batch_size:
        raise ContractError(f"{name} has {len(values)} entries for {batch_size} sequences; give one a sequence")
    checked: Int32s = as_plain(values)
    return checked


def read_common_lengths(values: Any, rule: CommonLengths, committed: Int32s) -> Int32s | None:
    """Check that common state lengths are given where the mode has them; the default is the committed lengths."""
    if rule is CommonLengths.REFUSED:
        if values is not None:
            raise ContractError("common_state_lengths is given and this mode has none; leave it at None")
        return None
    if values is None:
        if rule is CommonLengths.REQUIRED:
            raise ContractError("common_state_lengths is None and this mode needs them; give one length a sequence")
        return committed
    return read_lengths("common_state_lengths", values, committed.size)


def read_slots(name: str, slots: Any, batch_size: int) -> Int32s:
    """Check a run of unique slots of the batch."""
    if isinstance(slots, tuple) and not slots:
        return _NO_SLOTS
    checked: Int32s = as_plain(_integers(name, slots))
    if not _all_within(checked, batch_size):
        raise ContractError(
            f"{name} holds slots {checked.min()} .. {checked.max()}; the batch has 0 .. {batch_size - 1}"
        )
    if _has_repeats(checked, np.zeros(batch_size, np.bool_)):
        raise ContractError(f"{name} is {checked.tolist()}; name every slot once")
    return checked


def read_mapping(old_to_new: Any, new_batch_size: int, batch_size: int) -> Int32s:
    """Check an old-to-new mapping and return a copy: survivors keep their order and fill the new batch exactly."""
    mapping = _integers("old_to_new", old_to_new).copy()
    if mapping.size != batch_size:
        raise ContractError(f"old_to_new has {mapping.size} entries for {batch_size} slots; give one a slot")
    survivors = mapping[mapping != RETIRED]
    if not _is_integer(new_batch_size) or new_batch_size != survivors.size:
        raise ContractError(
            f"new_batch_size is {new_batch_size!r} and {survivors.size} sequences survive; they must be equal"
        )
    if not np.array_equal(survivors, np.arange(survivors.size)):
        raise ContractError(
            f"old_to_new is {mapping.tolist()}; survivors keep their order and fill 0 .. {survivors.size - 1}, "
            f"a sequence that leaves is {RETIRED}"
        )
    return mapping


def check_device_mapping(device_mapping: Any, batch_size: int, home: Home) -> None:
    """Check the device array that a mapping is uploaded to as the ops that work at `home` will, before anything changes."""
    check_int32_target("device_batch_mapping", device_mapping, batch_size, home)


def require_writable(name: str, array: Any) -> None:
    """Refuse an array that says that it must not be written, as the ops will."""
    check_writable(name, view_array(array))


def read_index(name: str, value: Any, low: int, high: int) -> int:
    """Check an integer in `[low, high)`."""
    if not _is_integer(value) or not low <= value < high:
        raise ContractError(f"{name} is {value!r}; pass an integer in [{low}, {high})")
    return int(value)


def _integers(name: str, values: Any) -> Int32s:
    try:
        return as_token_array(values)
    except ContractError as error:
        raise ContractError(f"{name} must be a one-dimensional run of integers: {error}") from None


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _require_member(name: str, value: Any, choices: type[_Choice]) -> None:
    if not isinstance(value, choices):
        raise ContractError(f"{name} is {value!r}; pass a {choices.__name__} member")


def _require_sequence(name: str, values: Any) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ContractError(f"{name} is a {type(values).__name__}; pass a list or a tuple")
    return values


_NO_SLOTS: Int32s = np.empty(0, np.int32)
_NO_SLOTS.flags.writeable = False


@njit_in_place
def _all_within(values: Int32s, end: int) -> bool:
    """Whether all values lie in `[0, end)`."""
    for value in values:  # noqa: SIM110 - compiled code has no generators
        if value < 0 or value >= end:
            return False
    return True


@njit_in_place
def _has_repeats(slots: Int32s, seen: Flags) -> bool:
    for slot in slots:
        if seen[slot]:
            return True
        seen[slot] = True
    return False
