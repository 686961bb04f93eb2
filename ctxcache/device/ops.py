"""The seam between the coordinator and the device: the `DeviceOps` protocol and what its ops are told.

Every touch of the device is one of these ops, so the whole device can be replaced, wrapped, delayed or made to fail.
Implementations are duck-typed and never `isinstance`-checked.

Four rules hold for every op that takes a stream:

- It *enqueues*. When it returns, the work is in stream order but not proven complete; `synchronize` proves it.
- Its host arguments (arrays, jobs, the table's changed rows) are read before it returns. The caller may change or free
  them at once, whatever the stream is still doing.
- Its device arguments must live until a later `synchronize` on that stream has succeeded.
- Arguments are checked before anything is enqueued: a `ContractError` has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Int32s
from ctxcache.config import DTYPE_BYTES
from ctxcache.device.arrays import ArrayView, Location, device_of

StreamSynchronizer: TypeAlias = Callable[[Any], int | None]
"""Waits for a stream. `None` or `0` says that it is idle; any other value, or an exception, is a failed drain."""

ABSENT = -1
"""Stands in `SnapshotJobs` for a snapshot slot or a page that the job does not have."""

JOB_SLOT, JOB_RECURRENT, JOB_PARTIAL, JOB_BASE_PAGE, JOB_DRAFT_PAGE, JOB_TOKENS, JOB_FIELDS = range(7)
"""Rows of packed jobs, `int32[JOB_FIELDS, n]`: the fields of `SnapshotJobs` in order."""


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotJobs:
    """What `restore` and `capture` move, one entry per sequence. Every field is `int32[n]`; `-1` where absent.

    Job `i` moves the recurrent and convolution state of slot `slots[i]` to or from recurrent snapshot
    `recurrent_snapshot_slots[i]`, and the first `num_tokens[i]` tokens of page `base_pages[i]` (and of `draft_pages[i]`
    in a deployment whose snapshots hold draft pages) to or from partial-KV snapshot `partial_kv_snapshot_slots[i]`, in K
    and V of every attention layer. Either half is left out where its snapshot slot is -1.

    Attributes:
        slots: the sequence's row in the batch.
        recurrent_snapshot_slots: the snapshot of its recurrent state.
        partial_kv_snapshot_slots: the snapshot of its partly filled page.
        base_pages: the private base page at the boundary.
        draft_pages: the private draft page at the boundary (MTP).
        num_tokens: tokens of the boundary page that are valid, `0 .. tokens_per_page`.
    """

    slots: Int32s
    recurrent_snapshot_slots: Int32s
    partial_kv_snapshot_slots: Int32s
    base_pages: Int32s
    draft_pages: Int32s
    num_tokens: Int32s

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class HiddenRow:
    """One row of the base's hidden states: `hidden_states[slot, row]`.

    Attributes:
        hidden_states: device array `[batch, rows, hidden_size]`, of the base's `hidden_dtype` in size; each row is
            contiguous. Borrowed.
        slot: index of axis 0.
        row: index of axis 1.
    """

    hidden_states: Any
    slot: int
    row: int


@dataclass(frozen=True, slots=True)
class StatePart:
    """State of one recurrent layer, live and saved.

    Attributes:
        live: array of the cache, addressed by slot.
        saved: device `uint8[num_recurrent_slots, slot_bytes]`.
        slot_bytes: bytes of one slot, the same on both sides.
    """

    live: Any
    saved: Any
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class PagePart:
    """Pages of one attention layer, live and saved.

    Attributes:
        live: pool of the cache, `[2, num_pages, P, heads, dim]`.
        saved: device `uint8[num_partial_kv_slots, 2, page_bytes]`.
        num_pages: pages of the pool.
        page_bytes: bytes of K (and as many of V) of one page.
        token_bytes: bytes of K (and as many of V) of one token.
        is_draft: whether the pool is the draft's.
    """

    live: Any
    saved: Any
    num_pages: int
    page_bytes: int
    token_bytes: int
    is_draft: bool


class CacheArrays(Protocol):
    """What an op may look at in the pools of a model: `HybridCacheManager`, which says what each is."""

    kv_lengths: Any
    active_batch_size: int
    kv_pools: tuple[Any, ...]
    num_pages: int
    max_batch: int

    @property
    def lengths_view(self) -> ArrayView:
        """Where `kv_lengths` lies."""

    @property
    def slot_arrays(self) -> tuple[Any, ...]:
        """What the recurrent layers keep per slot."""


class TableChanges(Protocol):
    """What an op may ask of a page table: `KVPageTable`, which says what each does, or its `PageTableUpload`."""

    kernel_view: Any
    view_address: int
    max_pages_per_seq: int
    num_pages: int

    @property
    def has_changes(self) -> bool:
        """Whether there may be an entry to move."""

    def count_changes(self) -> int:
        """Return how many entries an upload has to move."""

    def take_changes(self, out: Int32s) -> int:
        """Return their number, and write them to `out int32[m, 2]` if all of them fit there."""

    def write_changes(self, out: Int32s) -> None:
        """Write them, `(row * max_pages_per_seq + column, page id)`."""

    def forget_device_rows(self) -> None:
        """Hear that the upload failed: the next one moves everything."""


class SnapshotArrays(Protocol):
    """What an op may look at in snapshot slots: `HybridSnapshotStorage`, which says what each is."""

    num_recurrent_slots: int
    tokens_per_page: int
    state_parts: tuple[StatePart, ...]
    page_parts: tuple[PagePart, ...]
    job_limits: tuple[int, int, int, int, int, int]
    hidden_rows: Any
    hidden_shape: tuple[int, int]

    @property
    def hidden_rows_view(self) -> ArrayView:
        """Where `hidden_rows` lie."""

    @property
    def location(self) -> Location:
        """Where the ops that allocated the slots work."""


class DeviceOps(Protocol):
    """All device work of the coordinator. See the module's docstring for what every op promises.

    Ops may have an attribute `device_ordinal`, the device that they work on: pools that are lent and resources of a coordinator
    that lie on another one are refused then; see `device_ordinal_of`.
    """

    def operation(self, name: str) -> None:
        """Hear which coordinator operation the following calls belong to.

        Plain implementations do nothing. Wrappers name fault points with it: `<operation>.<op>[.<n>]`.
        """

    def allocate(self, shape: tuple[int, ...], dtype: str | np.dtype[Any]) -> Any:
        """Return a new C-contiguous device array, zero-filled.

        Args:
            shape: elements along each axis.
            dtype: a NumPy dtype or one of the names in `DTYPE_BYTES`; bfloat16 is kept as uint16 and fp8 as uint8.
        """

    def to_host(self, array: Any) -> NDArray[Any]:
        """Return a host copy of a device array. The caller has synchronised the stream that wrote it."""

    def to_device(self, array: Any, host: NDArray[Any]) -> None:
        """Overwrite a device array with a host array of the same shape and dtype, and wait for it."""

    def upload_rows(self, table: TableChanges, stream: Any) -> None:
        """Bring the device view of a page table up to date with its host rows; only changed entries move.

        A table without changes costs no device call. `InvariantError` when a changed row holds an id out of range
        or a live id after a -1; the device view is then as before.
        """

    def reset_lengths(self, cache: CacheArrays, reuse_lengths: Int32s, stream: Any) -> None:
        """Set `kv_lengths[i]` to `reuse_lengths[i]` for each of the `n` new sequences; the rest become 0.

        Also sets `cache.active_batch_size` to `n`.
        """

    def zero_recurrent(self, cache: CacheArrays, slots: Int32s, stream: Any) -> None:
        """Fill recurrent and convolution state of the given (unique) slots with zero bytes, in every layer."""

    def restore(self, storage: SnapshotArrays, jobs: SnapshotJobs, stream: Any) -> None:
        """Copy snapshots to slot state and private pages, all jobs and layers together."""

    def capture(self, storage: SnapshotArrays, jobs: SnapshotJobs, stream: Any) -> None:
        """Copy slot state and private pages to snapshots, all jobs and layers together."""

    def upload_mapping(self, mapping: Int32s, device_mapping: Any, stream: Any) -> None:
        """Copy `int32[n]` old-to-new slots into the first `n` entries of a device int32 array of the caller's."""

    def compact_slot_state(self, cache: CacheArrays, mapping: Any, old_batch: int, new_batch: int, stream: Any) -> None:
        """Move lengths, recurrent and convolution state of slot `i` to slot `mapping[i]`, in place. No page moves.

        Also sets `cache.active_batch_size` to `new_batch`. Slots from `new_batch` on are undefined afterwards.

        Args:
            cache: the pools whose slots move.
            mapping: device int32 array of at least `old_batch` entries, as `upload_mapping` left it: -1 retires a
                slot, survivors keep their order and fill `0 .. new_batch-1`. Its content is on the device and is not
                checked here.
            old_batch: slots before.
            new_batch: slots after.
            stream: where to enqueue.
        """

    def capture_boundary_hidden(
        self, storage: SnapshotArrays, snapshot_slot: int, source: HiddenRow, stream: Any
    ) -> None:
        """Copy one hidden row of the base into the recurrent snapshot `snapshot_slot` (MTP)."""

    def restore_boundary_hidden(
        self, storage: SnapshotArrays, snapshot_slot: int, destination: HiddenRow, stream: Any
    ) -> None:
        """Copy the hidden row of the recurrent snapshot `snapshot_slot` to where the runtime wants it (MTP)."""

    def sum_pages(self, cache: CacheArrays, page_ids: Int32s, sums: Any, stream: Any) -> None:
        """Sum every byte of pages, each attention layer by itself. For the page sanitizer; see `ctxcache.device.page_sums`.

        Args:
            cache: whose pages.
            page_ids: `int32[n]`.
            sums: device array as `ctxcache.device.page_sums.allocate_sums` makes it, for at least `n` pages; the first `n`
                entries are overwritten.
            stream: where to enqueue.
        """

    def synchronize(self, stream: Any, synchronizer: StreamSynchronizer | None) -> int | None:
        """Drain once: call the synchroniser with the stream, or wait for the stream when there is none.

        Returns:
            What the synchroniser returned; `None` after a plain wait. The caller judges it; nothing is raised here
            but what the synchroniser or the wait raises.
        """


class RuntimeDeviceOps(DeviceOps, Protocol):
    """`DeviceOps` and what the conveniences of caches need on top. The coordinator never calls the addition."""

    def advance_lengths(self, cache: CacheArrays, increment: Any, stream: Any) -> None:
        """Add to the lengths of the active slots: one integer for all, or a device int32 array with one each."""


REQUIRED_OPS = tuple(
    name for name in vars(DeviceOps) if not name.startswith("_") and name not in ("operation", "sum_pages")
)
"""What any ops have; names of operations are for wrappers, and sums for the page sanitizer."""


def device_ordinal_of(ops: Any) -> int | None:
    """Return the device that ops work on, `None` where they do not say."""
    device: int | None = getattr(ops, "device_ordinal", None)
    return device


def location_of(ops: Any, cache: CacheArrays) -> Location:
    """Say where ops work: where the lengths of a cache of theirs lie, on the device that they name, or that the lengths do."""
    view, ordinal = cache.lengths_view, device_ordinal_of(ops)
    return Location(view.place, device_of(cache.kv_lengths, view) if ordinal is None else ordinal)


def storage_dtype(dtype: str | np.dtype[Any]) -> np.dtype[Any]:
    """Return the NumPy dtype that stores a dtype: bfloat16 as uint16, fp8 as uint8, NumPy's own as themselves."""
    if not isinstance(dtype, str):
        return np.dtype(dtype)
    if dtype.startswith(("bfloat", "float8")):
        return np.dtype({1: np.uint8, 2: np.uint16}[DTYPE_BYTES[dtype]])
    return np.dtype(dtype)
