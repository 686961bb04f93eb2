"""Reading what a caller says: every argument is checked, and turned into arrays, before anything changes.

Each function returns the checked value or raises `ContractError` with the value, the limit and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import (
    Int32s,
    as_int32s,
    as_integer,
    as_plain,
    check_mapping,
    check_member,
    check_sequence,
)
from ctxcache.device.arrays import Location, check_int32_target, check_writable, view_array
from ctxcache.device.compiled_checks import are_distinct_slots, are_within
from ctxcache.errors import ContractError
from ctxcache.ids import ContextCacheCommitPolicy, ContextCacheExecutionMode, ContextCacheLookupPolicy
from ctxcache.keys.chain import check_extras
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.keys.tokens import as_media_array, as_token_array
from ctxcache.request.admission import (
    ContextCacheBatchAdmission,
    ContextCacheBatchAdvance,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from ctxcache.request.execution_modes import CommonLengths


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
    check_member("execution_mode", admission.execution_mode, ContextCacheExecutionMode)
    check_member("lookup_policy", admission.lookup_policy, ContextCacheLookupPolicy)
    check_member("commit_policy", admission.commit_policy, ContextCacheCommitPolicy)
    if admission.execution_mode not in modes:
        raise ContractError(
            f"execution_mode is {admission.execution_mode.name}; this deployment has "
            f"{', '.join(mode.name for mode in modes)}"
        )
    sequences = admission.sequences
    check_sequence("sequences", sequences)
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
    return DecodingKvHeadroom(
        as_integer("DecodingKvHeadroom.base_extra_tokens", headroom.base_extra_tokens),
        as_integer("DecodingKvHeadroom.draft_extra_tokens", headroom.draft_extra_tokens),
    )


def read_advances(
    advances: Sequence[ContextCacheSequenceAdvance] | ContextCacheBatchAdvance, batch_size: int
) -> Advances:
    """Check the form of a batch's advances; what the numbers mean is checked against the batch later."""
    if isinstance(advances, ContextCacheBatchAdvance):
        return _read_batch_advance(advances, batch_size)
    items = advances
    check_sequence("advances", items)
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
    if not are_within(counts, tokens.shape[1] + 1):
        raise ContractError(
            f"accepted_token_counts holds {counts.min()} .. {counts.max()}; the rows have 0 .. {tokens.shape[1]} tokens"
        )
    committed = read_lengths("committed_state_lengths", advance.committed_state_lengths, batch_size)
    return Advances(tokens, counts, committed)


def read_lengths(name: str, values: Any, batch_size: int) -> Int32s:
    """Check one integer a sequence; a plain int32 array is returned as it is."""
    values = as_int32s(name, values)
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


def check_device_mapping(device_mapping: Any, batch_size: int, location: Location) -> None:
    """Check the device array that a mapping is uploaded to as the ops that work there will, before anything changes."""
    check_int32_target("device_batch_mapping", device_mapping, batch_size, location)


def require_writable(name: str, array: Any) -> None:
    """Refuse an array that says that it must not be written, as the ops will."""
    check_writable(name, view_array(array))
