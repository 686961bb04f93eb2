"""Device ops on `numba.cuda.jit` kernels: one launch per op, whatever the number of layers and sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Int32s
from ctxcache.device.arrays import ANYWHERE, CUDA, ArrayView, Location, check_reachable, check_same_layout, view_array
from ctxcache.device.numba.descriptor_tables import (
    SLOT_FIELDS,
    DeviceTables,
    describe_moves,
    describe_pools,
    describe_slots,
)
from ctxcache.device.numba.parameter_words import INLINE_INTS, NO_WORDS, as_words
from ctxcache.device.numba.staging_ring import ChangeArena, StagingRing
from ctxcache.device.op_checks import (
    check_compaction,
    check_hidden_row,
    check_increment,
    check_jobs,
    check_lengths,
    check_mapping_upload,
    check_pages,
    check_slots,
)
from ctxcache.device.ops import (
    CacheArrays,
    HiddenRow,
    SnapshotArrays,
    SnapshotJobs,
    StreamSynchronizer,
    TableChanges,
    storage_dtype,
)
from ctxcache.device.page_sums import SUM_LANES
from ctxcache.device.streams import is_per_thread, stream_handle
from ctxcache.errors import ContractError, DeploymentError, InvariantError

if TYPE_CHECKING:
    from ctxcache.device.numba.device_memory import DeviceMemory, StagingBuffer
    from ctxcache.device.numba.launch import Launcher

NO_TARGET = (
    "NumbaDeviceOps needs a GPU or Numba's CUDA simulator, and there is neither ({why}). "
    "On a machine with an NVIDIA GPU: {remedy}. "
    "Without one, before Python starts: export NUMBA_ENABLE_CUDASIM=1. NumpyDeviceOps() needs neither."
)
_INSTALL = "pip install '.[gpu]' in ctxcache's repository"
_MEND_DRIVER = (
    "install or mend the NVIDIA driver until nvidia-smi lists the GPU, and see that neither CUDA_VISIBLE_DEVICES nor "
    "NUMBA_DISABLE_CUDA hides it (numba-cuda is installed)"
)

_MAX_ARENAS = 64
"""Streams whose arena is kept; beyond that the oldest goes. Its buffer may still be read: the ring keeps it alive, unused."""


class NumbaDeviceOps:
    """`DeviceOps` on one CUDA device, or on Numba's simulator.

    The device is the one that is current where the ops are constructed, and stays theirs: they work in its context in any
    thread, whatever is current there, and leave that as it was. A thread that had no context keeps this device's.

    Descriptor tables are built at the first use of a cache or storage and kept on the device as long as it lives. Short runs
    of job arguments travel with the launch, see `ctxcache.device.numba.parameter_words`, longer ones through pinned staging buffers, see
    `StagingRing`.

    Args:
        prepared_launches: launch kernels through their compiled handle. `False` leaves it to Numba's dispatch, which does the
            same and takes a few times the host time; so does a release of Numba that does not give the handle.

    Raises:
        DeploymentError: on construction, where there is neither a GPU nor the simulator; names what helps. Also where another context than the device's primary one is current.
    """

    def __init__(self, *, prepared_launches: bool = True) -> None:
        context, device_memory, launch, self._kernels = _load_target()
        device = context.CudaDevice()
        self._device_ordinal: int = device.ordinal
        self._location = ANYWHERE if context.SIMULATED else Location(CUDA, device.ordinal)
        self._blocks_for = launch.blocks_for
        self._kernels_of = launch.kernels_of
        self._blocks_for_runs = launch.blocks_for_runs
        self._memory: DeviceMemory = device_memory.DeviceMemory(device)
        self._launcher: Launcher = launch.Launcher(device, prepared=prepared_launches)
        self._ring = StagingRing(partial(device_memory.StagingBuffer, device=device))
        self._arenas: dict[int, ChangeArena] = {}
        self._slot_tables = DeviceTables(describe_slots, self._memory)
        self._move_tables = DeviceTables(describe_moves, self._memory)
        self._pool_tables = DeviceTables(describe_pools, self._memory)

    @property
    def device_ordinal(self) -> int:
        """The device's number among those that the process sees; 0 under the simulator."""
        return self._device_ordinal

    @property
    def num_launches(self) -> int:
        """Kernels launched so far."""
        return self._launcher.num_launches

    @property
    def num_prepared_launches(self) -> int:
        """Those among them that went through a compiled kernel's handle; see `prepared_launches`."""
        return self._launcher.num_prepared_launches

    def load_kernels(self, stream: Any) -> None:
        """Compile every kernel and load it on the device, by launching it once with nothing to do.

        A kernel's first launch compiles it, which takes a good part of a second, and loads it, which may wait for everything
        that the GPU is doing. A runtime that calls this while it starts has both behind it before the first request.
        """
        for kernel, num_integers, words in self._kernels_of(self._kernels):
            self._launcher.launch(kernel, self._blocks_for(1), stream, *(0,) * num_integers, words=words)

    def operation(self, name: str) -> None:
        """Do nothing; see `DeviceOps.operation`."""

    def allocate(self, shape: tuple[int, ...], dtype: str | np.dtype[Any]) -> Any:
        """Return a zero-filled Numba device array."""
        return self._memory.allocate(shape, storage_dtype(dtype))

    def to_host(self, array: Any) -> NDArray[Any]:
        """See `DeviceOps.to_host`; `ContractError` for an array with gaps."""
        return self._memory.read(_contiguous(view_array(array)))

    def to_device(self, array: Any, host: NDArray[Any]) -> None:
        """See `DeviceOps.to_device`; `ContractError` for another shape or element size, or an array with gaps."""
        view = _contiguous(view_array(array))
        source = np.ascontiguousarray(host).reshape(np.shape(host))
        check_same_layout(view, source)
        self._memory.write(view, source)

    def upload_rows(self, table: TableChanges, stream: Any) -> None:
        """See `DeviceOps.upload_rows`. The changes lie in mapped host memory; one launch reads and scatters them."""
        if not table.has_changes:
            return
        handle = stream_handle(stream)
        # Taken, not shared: another upload meanwhile, in another thread or a finaliser, finds none and makes its own.
        arena = self._arenas.pop(handle, None) or ChangeArena(self._ring)
        try:
            self._upload(table, arena, handle)
            self._keep_arena(arena, handle)
        except InvariantError:  # found before anything was taken
            self._keep_arena(arena, handle)
            raise
        except BaseException:
            table.forget_device_rows()
            raise

    def reset_lengths(self, cache: CacheArrays, reuse_lengths: Int32s, stream: Any) -> None:
        """See `DeviceOps.reset_lengths`."""
        lengths = check_lengths(cache, reuse_lengths)
        self._write_ints(cache.lengths_view.address, lengths, cache.max_batch, stream)
        cache.active_batch_size = len(lengths)

    def advance_lengths(self, cache: CacheArrays, increment: Any, stream: Any) -> None:
        """See `RuntimeDeviceOps.advance_lengths`."""
        checked, active = check_increment(cache, increment, self._location), cache.active_batch_size
        scalar, address = (checked, 0) if isinstance(checked, int) else (0, checked.address)
        if active:
            lengths = cache.lengths_view.address
            self._launcher.launch(
                self._kernels.add_ints, self._blocks_for(active), stream, lengths, address, scalar, active
            )

    def zero_recurrent(self, cache: CacheArrays, slots: Int32s, stream: Any) -> None:
        """See `DeviceOps.zero_recurrent`."""
        cold = check_slots(cache, slots)
        table = self._slot_tables.of(cache)
        num_rows = table.num_rows - 1  # the first row, the lengths, is no state
        if not len(cold) or not num_rows:
            return
        blocks = self._blocks_for_runs(table.longest_run, num_rows, len(cold))
        state_rows = table.address + 8 * SLOT_FIELDS
        self._launch_with(cold, self._kernels.zero_slots, blocks, stream, state_rows, num_rows, len(cold))

    def restore(self, storage: SnapshotArrays, jobs: SnapshotJobs, stream: Any) -> None:
        """See `DeviceOps.restore`."""
        self._move(storage, check_jobs(storage, jobs, to_snapshots=False), stream, restoring=True)

    def capture(self, storage: SnapshotArrays, jobs: SnapshotJobs, stream: Any) -> None:
        """See `DeviceOps.capture`."""
        self._move(storage, check_jobs(storage, jobs, to_snapshots=True), stream, restoring=False)

    def upload_mapping(self, mapping: Int32s, device_mapping: Any, stream: Any) -> None:
        """See `DeviceOps.upload_mapping`."""
        entries, view = check_mapping_upload(mapping, device_mapping, self._location)
        self._write_ints(view.address, entries, len(entries), stream)

    def compact_slot_state(self, cache: CacheArrays, mapping: Any, old_batch: int, new_batch: int, stream: Any) -> None:
        """See `DeviceOps.compact_slot_state`. Where every slot survives, or none, nothing has to move."""
        old_batch, new_batch, view = check_compaction(cache, mapping, old_batch, new_batch, self._location)
        if 0 < new_batch < old_batch:
            table = self._slot_tables.of(cache)
            blocks = self._blocks_for(-(-table.longest_run // 16), table.num_rows)
            arguments = (table.address, table.num_rows, view.address, old_batch)
            self._launcher.launch(self._kernels.compact_slots, blocks, stream, *arguments)
        cache.active_batch_size = new_batch

    def capture_boundary_hidden(
        self, storage: SnapshotArrays, snapshot_slot: int, source: HiddenRow, stream: Any
    ) -> None:
        """See `DeviceOps.capture_boundary_hidden`."""
        live, saved, num_bytes = self._hidden_run(storage, snapshot_slot, source)
        self._copy_run(saved, live, num_bytes, stream)

    def restore_boundary_hidden(
        self, storage: SnapshotArrays, snapshot_slot: int, destination: HiddenRow, stream: Any
    ) -> None:
        """See `DeviceOps.restore_boundary_hidden`."""
        live, saved, num_bytes = self._hidden_run(storage, snapshot_slot, destination, is_written=True)
        self._copy_run(live, saved, num_bytes, stream)

    def sum_pages(self, cache: CacheArrays, page_ids: Int32s, sums: Any, stream: Any) -> None:
        """See `DeviceOps.sum_pages`."""
        pages, view = check_pages(cache, page_ids, sums)
        check_reachable("sums", sums, view, self._location)
        if not len(pages) or not cache.kv_pools:
            return
        table = self._pool_tables.of(cache)
        blocks = self._blocks_for(SUM_LANES, table.num_rows, len(pages))
        arguments = (table.address, table.num_rows, view.address, len(pages))
        self._launch_with(pages, self._kernels.sum_pages, blocks, stream, *arguments)

    def synchronize(self, stream: Any, synchronizer: StreamSynchronizer | None) -> int | None:
        """See `DeviceOps.synchronize`. A synchroniser finds the ops' device current."""
        return self._launcher.synchronize(stream, synchronizer)

    def _upload(self, table: TableChanges, arena: ChangeArena, handle: int) -> None:
        pairs = arena.room(handle)
        count = table.take_changes(pairs)
        if count > len(pairs):
            table.write_changes(arena.room(handle, count))
        if count == 0:
            return
        self._launcher.launch(
            self._kernels.scatter_page_ids,
            self._blocks_for(count),
            handle,
            table.view_address,
            arena.address(),
            count,
            table.max_pages_per_seq,
            table.num_pages,
        )
        arena.use(count)

    def _move(self, storage: SnapshotArrays, jobs: Int32s, stream: Any, *, restoring: bool) -> None:
        num_jobs = jobs.shape[1]
        if not num_jobs:
            return
        table = self._move_tables.of(storage)
        blocks = self._blocks_for_runs(table.longest_run, table.num_rows, num_jobs)
        arguments = (table.address, table.num_rows, int(restoring), num_jobs)
        self._launch_with(jobs, self._kernels.move_snapshots, blocks, stream, *arguments)

    def _write_ints(self, target: int, values: Int32s, num_targets: int, stream: Any) -> None:
        if num_targets:
            arguments = (target, num_targets, len(values))
            blocks = self._blocks_for(num_targets)
            self._launch_with(values, self._kernels.write_ints, blocks, stream, *arguments, read_once=True)

    def _launch_with(
        self,
        values: Int32s,
        kernel: Any,
        blocks: tuple[int, int, int],
        stream: Any,
        *arguments: int,
        read_once: bool = False,
    ) -> None:
        """Launch a kernel that takes a run of int32 values: with the launch while they are few, else through a buffer.

        Args:
            values: C-contiguous; read before this returns.
            kernel: its last two parameters are the values' address and the words.
            blocks: the grid.
            stream: where to enqueue.
            arguments: the parameters before.
            read_once: whether only one thread reads each value. Otherwise every block reads some: from memory of the device, for
                mapped host memory would be read once a block.
        """
        if values.size <= INLINE_INTS:
            self._launcher.launch(kernel, blocks, stream, *arguments, 0, words=as_words(values))
            return
        with self._staged(values, stream) as buffer:
            address = buffer.address if read_once else buffer.copy_to_device(values.nbytes, stream)
            self._launcher.launch(kernel, blocks, stream, *arguments, address, words=NO_WORDS)

    def _copy_run(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        blocks = self._blocks_for_runs(num_bytes, 1)
        self._launcher.launch(self._kernels.copy_run, blocks, stream, target, source, num_bytes)

    def _hidden_run(
        self, storage: SnapshotArrays, snapshot_slot: int, row: HiddenRow, *, is_written: bool = False
    ) -> tuple[int, int, int]:
        """Check a hidden row; return where it lies live and saved, and its bytes."""
        view = check_hidden_row(storage, snapshot_slot, row, is_written=is_written)
        check_reachable("hidden states", row.hidden_states, view, self._location)
        # NumPy's integers would wrap at their own width.
        live = view.address + int(row.slot) * view.strides[0] + int(row.row) * view.strides[1]
        saved = storage.hidden_rows_view
        return live, saved.address + int(snapshot_slot) * saved.strides[0], saved.strides[0]

    @contextmanager
    def _staged(self, values: NDArray[Any], stream: Any) -> Iterator[StagingBuffer]:
        """Put values into a staging buffer for the launch inside the block, which reads it."""
        buffer = self._ring.take(values.nbytes)
        buffer.host[: values.nbytes] = values.reshape(-1).view(np.uint8)
        yield buffer
        self._ring.give_back(buffer, stream)

    def _keep_arena(self, arena: ChangeArena, handle: int) -> None:
        """Keep the arena for the stream's next upload, or mark its buffer and give it back where it has no next."""
        # The per-thread default stream is another stream in every thread, so that uploads on it cannot share a buffer.
        if is_per_thread(handle) or self._arenas.setdefault(handle, arena) is not arena:
            arena.retire(handle)
        excess = len(self._arenas) - _MAX_ARENAS
        for oldest in list(self._arenas)[: max(excess, 0)]:
            self._arenas.pop(oldest, None)


def _load_target() -> tuple[ModuleType, ModuleType, ModuleType, ModuleType]:
    """Import the modules that need a CUDA target: only when ops are constructed, so that the package imports anywhere."""
    try:
        from ctxcache.device.numba import context  # noqa: PLC0415 - see the docstring
    except ImportError as error:
        raise DeploymentError(NO_TARGET.format(why=error, remedy=_INSTALL)) from error
    why = context.missing_target()
    if why is not None:
        remedy = _INSTALL if find_spec("numba_cuda") is None else _MEND_DRIVER
        raise DeploymentError(NO_TARGET.format(why=why.rstrip("."), remedy=remedy))
    from ctxcache.device.numba import device_memory, kernels, launch  # noqa: PLC0415 - see the docstring

    return context, device_memory, launch, kernels


def _contiguous(view: ArrayView) -> ArrayView:
    if not view.is_contiguous:
        raise ContractError(f"the array has strides {view.strides}; pass a C-contiguous one")
    return view
