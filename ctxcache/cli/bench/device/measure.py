"""`ctxcache bench device`: the device ops against the memory's rate, and against what a runtime would write instead."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from ctxcache.cli.bench.device.clock import Clock, Timing
from ctxcache.cli.bench.device.rivals import MemcpyRival, compaction_copies, copies_of, indexing_rivals
from ctxcache.cli.bench.verdicts import Verdicts
from ctxcache.cli.doctor import version_of
from ctxcache.cli.installed_driver import look_for_driver
from ctxcache.config import AttentionLayerConfig, EngineConfig, RecurrentStateConfig
from ctxcache.device.arrays import view_array
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.numba.context import SIMULATED, cuda
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.ops import SnapshotJobs
from ctxcache.device.page_sums import allocate_sums
from ctxcache.device.page_table import KVPageTable
from ctxcache.device.snapshots import HybridSnapshotStorage, recurrent_bytes_per_slot
from ctxcache.ids import LayerType

COMPACTION = (-1, 0, 1, -1, 2, 3, -1, 4)
"""Batch 8 to 5: every survivor moves."""

MOST_TIMES_THE_COPY = 1.12
LEAST_TIMES_FASTER = 18.0
MOST_TIMES_THE_COPY_COMPACTING = 1.25
MOST_UPLOAD_HOST_US = 15.0
MOST_TIMES_READING = 1.25

_SUMMED_LAYERS = 16

_PACKAGES = ("numba", "numba-cuda", "cuda-bindings", "numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "ctxcache")


@dataclass(frozen=True, slots=True)
class Geometry:
    """What is moved: `layers` recurrent layers x `batch` sequences x (`state_bytes` + `conv_bytes`)."""

    layers: int = 48
    batch: int = 8
    state_bytes: int = 1 << 20
    conv_bytes: int = 96 << 10

    def engine(self) -> EngineConfig:
        """An engine with this state: fp32 state, fp16 convolution state."""
        state = RecurrentStateConfig(1, 1, self.state_bytes // 4, self.conv_bytes // 2, 1)
        return EngineConfig((LayerType.RECURRENT,) * self.layers, (), state, max_batch_size=self.batch)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        work: what was done.
        way: by whom: `ctxcache`, or what a runtime would write instead.
        device_us, host_us, wall_us: see `Timing`.
        gigabytes_per_second: bytes read and written over the device time; 0 where bytes are not the point.
    """

    work: str
    way: str
    device_us: float
    host_us: float
    wall_us: float
    gigabytes_per_second: float = 0.0


class Report(Verdicts):
    """Rows and verdicts as they come in; every row is printed at once."""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__(show)
        self.rows: list[Row] = []

    def row(self, work: str, way: str, timing: Timing, num_bytes: int = 0) -> Timing:
        """Take a measurement; `num_bytes` are read and written."""
        rate = num_bytes / timing.device / 1e3 if num_bytes else 0.0
        row = Row(work, way, timing.device, timing.host, timing.wall, rate)
        self.rows.append(row)
        speed = f"{rate:8.0f} GB/s" if rate else ""
        times = f"device {row.device_us:9.1f} us   host {row.host_us:8.1f} us   wall {row.wall_us:9.1f} us"
        self._show(f"{work:<28} {way:<34} {times} {speed}")
        return timing


def environment() -> dict[str, Any]:
    """Machine and versions."""
    driver = look_for_driver()
    return {
        "gpu": "Numba's simulator" if SIMULATED else ", ".join(gpu.name for gpu in driver.gpus),
        "driver_cuda": f"{driver.major}.{driver.minor}",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name))},
    }


def run(geometry: Geometry, repeats: int, show: Callable[[str], object]) -> dict[str, Any]:
    """Measure everything on a stream of its own; returns the report as plain values.

    Args:
        geometry: of the state that is moved.
        repeats: of each measurement.
        show: takes a line at a time.

    Raises:
        DeploymentError: there is neither a GPU nor the simulator.
    """
    ops = NumbaDeviceOps()
    stream = _make_stream()
    report, clock = Report(show), Clock(stream, repeats)
    where = environment()
    show(f"{where['gpu']}, CUDA {where['driver_cuda']}, Python {where['python']}, {where['packages']}")
    show(
        f"{geometry}, {recurrent_bytes_per_slot(geometry.engine()) * geometry.batch / 1e6:.0f} MB; medians of {repeats}"
    )
    _measure_state(ops, geometry, stream, clock, report)
    _measure_decode_step(ops, stream, clock, report)
    return {
        "environment": where,
        "geometry": asdict(geometry),
        "repeats": repeats,
        "rows": [asdict(row) for row in report.rows],
        "verdicts": [asdict(verdict) for verdict in report.verdicts],
    }


def _make_stream() -> Any:
    """A stream that does not order with the default stream."""
    if SIMULATED:
        return cuda.stream()
    from cuda.bindings import driver  # noqa: PLC0415 - is not there under the simulator

    cuda.current_context()
    return int(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)[1])


def _measure_state(ops: NumbaDeviceOps, geometry: Geometry, stream: Any, clock: Clock, report: Report) -> None:
    config, batch = geometry.engine(), geometry.batch
    num_bytes = batch * recurrent_bytes_per_slot(config)
    cache = HybridCacheManager(config, stream, device_ops=ops)
    storage = HybridSnapshotStorage(config, cache, recurrent_snapshot_pool_bytes=num_bytes)
    for array in cache.slot_arrays:  # no zeros: memory can be faster with them
        view = view_array(array)
        noise = np.random.default_rng(view.address % 1000).integers(0, 256, view.nbytes, dtype=np.uint8)
        ops.to_device(array, noise.view(view.dtype).reshape(view.shape))
    absent, zero = np.full(batch, -1, np.int32), np.zeros(batch, np.int32)
    saved_slots = np.arange(batch, dtype=np.int32)[::-1].copy()
    jobs = SnapshotJobs(np.arange(batch, dtype=np.int32), saved_slots, absent, absent, absent, zero)
    pairs = [(part.live, part.saved) for part in storage.state_parts]
    slots = list(enumerate(saved_slots.tolist()))

    copy = _contiguous_copy(ops, num_bytes, stream, clock, report)
    for name, op, restoring in (("capture", ops.capture, False), ("restore", ops.restore, True)):
        ours = report.row(name, "ctxcache", clock.time(partial(op, storage, jobs, stream)), 2 * num_bytes)
        if copy is None:
            continue
        memcpy, copies = MemcpyRival(stream), copies_of(pairs, slots, restoring=restoring)
        each = clock.time(memcpy.copy_all_by_runtime(copies))
        report.row(name, "cudaMemcpyAsync per array, sequence", each, 2 * num_bytes)
        bare = clock.time(memcpy.copy_all(copies))
        report.row(name, "cuMemcpyDtoDAsync, the same", bare, 2 * num_bytes)
        for indexing in indexing_rivals(stream):
            work = indexing.move(pairs, slots, restoring=restoring)
            report.row(name, f"{indexing.name} indexing per array", clock.time(work), 2 * num_bytes)
        ratio = ours.device / copy.device
        bound = f"at most {MOST_TIMES_THE_COPY}"
        report.verdict(f"{name} / contiguous copy", bound, f"{ratio:.3f}", met=ratio <= MOST_TIMES_THE_COPY)
        _judge_speedup(report, name, ours, each, copy)
    _measure_compaction(ops, cache, stream, clock, report, copy, num_bytes)
    _measure_sums(ops, geometry, stream, clock, report, copy)
    every_slot = np.arange(batch, dtype=np.int32)
    report.row("zero", "ctxcache", clock.time(lambda: ops.zero_recurrent(cache, every_slot, stream)), num_bytes)


def _judge_speedup(report: Report, name: str, ours: Timing, each: Timing, copy: Timing) -> None:
    """Per-layer copies from Python are bound by the host, so the wall's clock is what a runtime sees."""
    faster = each.wall / ours.wall
    measured = (
        f"{faster:.1f} by the wall's clock, {each.device / ours.device:.1f} with the host's time hidden; "
        f"one contiguous copy: {each.wall / copy.wall:.1f} and {each.device / copy.device:.1f}"
    )
    bound = f"at least {LEAST_TIMES_FASTER:.0f}"
    report.verdict(f"cudaMemcpyAsync per array, sequence / {name}", bound, measured, met=faster >= LEAST_TIMES_FASTER)


def _contiguous_copy(ops: NumbaDeviceOps, num_bytes: int, stream: Any, clock: Clock, report: Report) -> Timing | None:
    """What the memory can do: one copy, and one fill, of as many bytes."""
    if SIMULATED:
        return None
    source, target = (ops.allocate((num_bytes,), "uint8") for _ in range(2))
    noise = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    ops.to_device(source, noise)
    memcpy = MemcpyRival(stream)
    addresses = [view_array(array).address for array in (target, source)]
    fill = clock.time(memcpy.fill(addresses[0], num_bytes))
    report.row("fill, contiguous", "cuMemsetD32Async", fill, num_bytes)
    timing = clock.time(memcpy.copy_all([(addresses[0], addresses[1], num_bytes)]))
    return report.row("copy, contiguous", "cuMemcpyDtoDAsync", timing, 2 * num_bytes)


def _measure_compaction(
    ops: NumbaDeviceOps,
    cache: HybridCacheManager,
    stream: Any,
    clock: Clock,
    report: Report,
    copy: Timing | None,
    num_bytes: int,
) -> None:
    mapping = [new for new in COMPACTION if len(COMPACTION) == cache.max_batch] or [-1, *range(cache.max_batch - 1)]
    moved = [old for old, new in enumerate(mapping) if 0 <= new < old]
    survivors = sum(new >= 0 for new in mapping)
    moved_bytes = num_bytes // cache.max_batch * len(moved)
    on_device = ops.allocate((cache.max_batch,), "int32")
    ops.upload_mapping(np.array(mapping, np.int32), on_device, stream)
    clock.wait()
    name = f"compaction {len(mapping)} to {survivors}"
    work = clock.time(lambda: ops.compact_slot_state(cache, on_device, len(mapping), survivors, stream))
    ours = report.row(name, "ctxcache", work, 2 * moved_bytes)
    if copy is None:
        return
    rival = MemcpyRival(stream).copy_all(compaction_copies(cache.slot_arrays, mapping))
    report.row(name, "cuMemcpyAsync per array, slot", clock.time(rival), 2 * moved_bytes)
    for indexing in indexing_rivals(stream):
        timing = clock.time(indexing.compact(cache.slot_arrays, mapping))
        report.row(name, f"{indexing.name} indexing per array", timing, 2 * moved_bytes)
    ratio = ours.device / (copy.device * moved_bytes / num_bytes)
    bound = f"at most {MOST_TIMES_THE_COPY_COMPACTING}"
    met = ratio <= MOST_TIMES_THE_COPY_COMPACTING
    report.verdict(f"{name} / copy of the bytes moved", bound, f"{ratio:.3f}", met=met)


def _measure_sums(
    ops: NumbaDeviceOps, geometry: Geometry, stream: Any, clock: Clock, report: Report, copy: Timing | None
) -> None:
    """The page sanitizer's sums, over about as many bytes of pages; they are read once and not written."""
    num_bytes = geometry.batch * recurrent_bytes_per_slot(geometry.engine())
    half_bytes = 4 * max(geometry.state_bytes // 16, 1)  # of K, and as many of V: 512 KiB a page and layer by default
    num_pages = max(num_bytes // (2 * half_bytes * _SUMMED_LAYERS), 1)
    config = EngineConfig(
        layers=(LayerType.ATTENTION,) * _SUMMED_LAYERS,
        attention=(AttentionLayerConfig(1, half_bytes // 2 // 2),) * _SUMMED_LAYERS,
        max_sequence_length=2 * num_pages,
        num_pages=num_pages,
        tokens_per_page=2,
    )
    cache = HybridCacheManager(config, stream, device_ops=ops)
    for pool in cache.kv_pools:
        view = view_array(pool)
        noise = np.random.default_rng(view.address % 1000).integers(0, 256, view.nbytes, dtype=np.uint8)
        ops.to_device(pool, noise.view(view.dtype).reshape(view.shape))
    summed_bytes = 2 * half_bytes * num_pages * _SUMMED_LAYERS
    pages, sums = np.arange(num_pages, dtype=np.int32), allocate_sums(ops, cache, num_pages)
    work = clock.time(lambda: ops.sum_pages(cache, pages, sums, stream))
    ours = report.row(f"sum {num_pages} pages", "ctxcache", work, summed_bytes)
    if copy is None:
        return
    ratio = ours.device / (copy.device / 2 * summed_bytes / num_bytes)
    claim = "page sums / reading as fast as a copy reads and writes"
    report.verdict(claim, f"at most {MOST_TIMES_READING}", f"{ratio:.2f}", met=ratio <= MOST_TIMES_READING)


class _GrowingTable:
    """A page table of 256 rows of which every fourth grows by a page a step."""

    def __init__(self, ops: NumbaDeviceOps, stream: Any, most_steps: int) -> None:
        self.table = KVPageTable(256, most_steps, 1 << 20, device_ops=ops)
        self.steps = 0
        self._ops = ops
        self._stream = stream
        self._rows = np.arange(0, 256, 4, dtype=np.int32)
        self._counts = np.ones(64, np.int32)
        self._pages = np.arange(64, dtype=np.int32) * 1000

    def grow(self) -> None:
        """Grow the host's rows."""
        self.table.extend_rows(self._rows, self._counts * self.steps, self._counts, self._pages)
        self.steps += 1

    def grow_and_upload(self) -> None:
        """Grow the host's rows, and the device's."""
        self.grow()
        self._ops.upload_rows(self.table, self._stream)


def _measure_decode_step(ops: NumbaDeviceOps, stream: Any, clock: Clock, report: Report) -> None:
    """A step that grows 64 of 256 rows by a page, with and without prepared launches, and one that grows none."""
    name = "grow 64 of 256 rows"
    plain = NumbaDeviceOps(prepared_launches=False)
    for way, some_ops in (("ctxcache", ops), ("ctxcache, Numba's dispatch", plain)):
        growing = _GrowingTable(some_ops, stream, 4 * clock.repeats + 16)
        launches = some_ops.num_launches
        both = report.row(name, way, clock.time(growing.grow_and_upload))
        calls = (some_ops.num_launches - launches) / growing.steps
        upload = both.host - clock.time(growing.grow).host
        if some_ops is ops:
            measured = f"{upload:.1f} us, {both.host:.1f} us with the host's rows; {calls:.2f} launches, no copy"
            met = upload <= MOST_UPLOAD_HOST_US and calls <= 1
            report.verdict(f"{name}: host time of the op", f"at most {MOST_UPLOAD_HOST_US:.0f} us", measured, met=met)
    launches = ops.num_launches
    still = KVPageTable(256, 2048, 1 << 20, device_ops=ops)
    report.row("grow nothing", "ctxcache", clock.time(lambda: ops.upload_rows(still, stream)))
    calls = ops.num_launches - launches
    report.verdict("grow nothing: device calls", "0", str(calls), met=calls == 0)
