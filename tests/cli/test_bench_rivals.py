"""What the benchmark compares the ops with does the same work, and the report weighs every one of them."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.device import ints, jobs
from support.fake_cuda import FakeCuda, FakeDriver, FakeStream, fake_array_library

from ctxcache import HybridCacheManager, HybridSnapshotStorage, NumpyDeviceOps
from ctxcache.cli import main
from ctxcache.cli.bench.device import clock as bench_clock
from ctxcache.cli.bench.device import measure as bench_device
from ctxcache.cli.bench.device import rivals as bench_rivals
from ctxcache.cli.bench.device.clock import Clock
from ctxcache.cli.bench.device.measure import COMPACTION, Geometry
from ctxcache.cli.bench.device.rivals import IndexingRival, MemcpyRival, compaction_copies, copies_of
from ctxcache.device.snapshots import recurrent_bytes_per_slot
from ctxcache.errors import DeviceError

SLOTS = [(0, 3), (2, 7), (5, 0), (7, 1)]
"""Live and saved slots."""

SMALL = ["--repeats", "1", "--layers", "2", "--batch", "8", "--state-kib", "1", "--conv-kib", "1"]


class State:
    """Recurrent state of three layers and eight slots, live and saved, full of noise."""

    def __init__(self) -> None:
        config = Geometry(layers=3, batch=8, state_bytes=64, conv_bytes=16).engine()
        self.ops = NumpyDeviceOps()
        self.cache = HybridCacheManager(config, None, device_ops=self.ops)
        self.storage = HybridSnapshotStorage(
            config, self.cache, recurrent_snapshot_pool_bytes=8 * recurrent_bytes_per_slot(config)
        )
        self.pairs = [(part.live, part.saved) for part in self.storage.state_parts]
        rng = np.random.default_rng(3)
        for pair in self.pairs:
            for array in pair:
                raw = array.view(np.uint8)
                raw[...] = rng.integers(0, 256, raw.shape, np.uint8)
        self.cache.active_batch_size = 8

    def image(self) -> list[bytes]:
        """Every byte of state."""
        return [array.tobytes() for pair in self.pairs for array in pair]

    def slots_below(self, count: int) -> list[bytes]:
        """Every byte of the first live slots."""
        return [live[:count].tobytes() for live, _ in self.pairs]

    def moved_by_ops(self, *, restoring: bool) -> list[bytes]:
        """What the library's own op makes of it."""
        op = self.ops.restore if restoring else self.ops.capture
        op(self.storage, jobs(*((live, saved, -1, -1, -1, 0) for live, saved in SLOTS)), None)
        return self.image()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The driver's and the runtime's calls, on host memory."""
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=fake, runtime=fake))
    return fake


@pytest.mark.parametrize("restoring", [False, True])
@pytest.mark.parametrize("way", ["copy_all", "copy_all_by_runtime"])
def test_one_copy_per_array_and_sequence_moves_what_the_op_moves(driver: FakeDriver, way: str, restoring: bool) -> None:
    """The driver's and the runtime's copies leave the bytes that `capture` and `restore` leave."""
    state = State()
    work = getattr(MemcpyRival(None), way)(copies_of(state.pairs, SLOTS, restoring=restoring))
    assert driver.num_calls == 0
    work()
    driver.run()
    assert driver.num_calls == len(SLOTS) * len(state.pairs)
    assert state.image() == State().moved_by_ops(restoring=restoring) != State().image()


@pytest.mark.parametrize("restoring", [False, True])
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_indexing_moves_what_the_op_moves(library: str, restoring: bool) -> None:
    """One statement per array of either library leaves the bytes that `capture` and `restore` leave."""
    state = State()
    rival = IndexingRival(library, fake_array_library(library), None)
    rival.move(state.pairs, SLOTS, restoring=restoring)()
    assert state.image() == State().moved_by_ops(restoring=restoring) != State().image()


@pytest.mark.parametrize("library", ["torch", "cupy", None])
def test_every_way_of_compacting_leaves_the_survivors_where_the_op_does(
    driver: FakeDriver, library: str | None
) -> None:
    """Batch 8 to 5, by indexing and by one copy per slot that moves."""
    by_op, state = State(), State()
    by_op.ops.compact_slot_state(by_op.cache, ints(*COMPACTION), 8, 5, None)
    arrays = [live for live, _ in state.pairs]
    if library is None:
        MemcpyRival(None).copy_all(compaction_copies(arrays, COMPACTION))()
        driver.run()
    else:
        IndexingRival(library, fake_array_library(library), None).compact(arrays, COMPACTION)()
    assert state.slots_below(5) == by_op.slots_below(5) != State().slots_below(5)


def test_the_fill_fills(driver: FakeDriver) -> None:
    """What shows the memory's rate of writing writes every byte."""
    target = np.full(64, 0xFF, np.uint8)
    MemcpyRival(None).fill(target.ctypes.data, 64)()
    driver.run()
    assert not target.any()


@pytest.fixture
def clock(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock on a GPU."""
    monkeypatch.setattr(bench_clock, "SIMULATED", False)
    monkeypatch.setattr(bench_clock, "cuda", FakeCuda(driver))
    clock = Clock(None, repeats=3)
    clock._numba_stream = FakeStream(driver, 0)
    return clock


def test_device_time_is_between_two_events_behind_a_gate(clock: Clock, driver: FakeDriver) -> None:
    """The GPU is kept busy before the first event, so that it never waits for the host; only the work counts."""

    def work() -> None:
        driver.queue.append(take_two_milliseconds)

    def take_two_milliseconds() -> None:
        driver.time += 2.0

    timing = clock.time(work)
    assert timing.device == pytest.approx(2000)
    assert timing.wall >= timing.host > 0
    assert driver.queue == []
    assert driver.time >= 3 * 12  # the gate, three times


def test_a_stream_that_fails_ends_the_measurement(clock: Clock, driver: FakeDriver) -> None:
    """The driver's code is told; nobody asks for ever."""
    driver.answer = 700
    with pytest.raises(DeviceError, match="answered 700"):
        clock.time(lambda: None)


def test_under_the_simulator_there_are_no_rivals() -> None:
    """A library of the GPU cannot work on simulated memory."""
    assert bench_rivals.library("numpy") is None
    assert list(bench_rivals.indexing_rivals(None)) == []


@pytest.fixture
def machine(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A GPU with both libraries, as far as the benchmark can see; its kernels run in the simulator."""
    monkeypatch.setattr(bench_device, "SIMULATED", False)
    monkeypatch.setattr(bench_rivals, "SIMULATED", False)
    monkeypatch.setattr(bench_device.cuda, "current_context", lambda: None)
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, fake_array_library(name))
    return driver


def measured(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The benchmark's exit status and report."""
    status = main(["bench", "device", "--json", *SMALL])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.filterwarnings("ignore")
def test_every_rival_has_a_row_and_every_bound_a_verdict(
    machine: FakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    """Capture, restore and compaction stand beside what a runtime would write, and are judged against a plain copy."""
    status, report = measured(capsys)
    ways = {(row["work"], row["way"]) for row in report["rows"]}
    copies = ("cudaMemcpyAsync per array, sequence", "cuMemcpyDtoDAsync, the same")
    indexing = ("torch indexing per array", "cupy indexing per array")
    for work in ("capture", "restore"):
        assert {(work, way) for way in ("ctxcache", *copies, *indexing)} <= ways
    compaction = ("ctxcache", "cuMemcpyAsync per array, slot", *indexing)
    assert {("compaction 8 to 5", way) for way in compaction} <= ways
    claims = {verdict["claim"]: verdict for verdict in report["verdicts"]}
    assert {
        "capture / contiguous copy",
        "restore / contiguous copy",
        "cudaMemcpyAsync per array, sequence / capture",
        "cudaMemcpyAsync per array, sequence / restore",
        "compaction 8 to 5 / copy of the bytes moved",
        "page sums / reading as fast as a copy reads and writes",
    } <= set(claims)
    # Simulated kernels are slower than a copy by orders: no such bound can be met, and the status says so.
    assert not claims["capture / contiguous copy"]["met"]
    assert status == 1


@pytest.mark.filterwarnings("ignore")
def test_without_json_the_table_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each row and verdict, and nothing on standard error."""
    status = main(["bench", "device", *SMALL])
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert any(line.startswith("capture  ") and "GB/s" in line for line in lines)
    assert any("grow nothing: device calls: 0" in line for line in lines)
    assert status == int(any("NOT MET" in line for line in lines))


@pytest.mark.filterwarnings("ignore")
def test_a_library_that_cannot_use_the_gpu_is_left_out(machine: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    """A PyTorch built without CUDA is no rival, and no error."""
    sys.modules["torch"].cuda.is_available = lambda: False  # type: ignore[attr-defined]
    ways = {row["way"] for row in measured(capsys)[1]["rows"]}
    assert "cupy indexing per array" in ways
    assert "torch indexing per array" not in ways
