"""A coordinator over memory of a real GPU, with kernels that write where a runtime's would: late, and to the end.

A second stream plays the next owner of a page. It does not wait for the request's stream, so a page that was handed on
before the device was proven idle would be written again, and seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.device import stream_of_run
from support.gpu import driver_stream, is_busy, spin
from support.harness import HASH_KEY, OK, T, U

from ctxcache import (
    AttentionLayerConfig,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheDeploymentKind,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DeploymentConfig,
    EngineConfig,
    HybridCacheManager,
    KVPageTable,
    LayerType,
    RecurrentStateConfig,
    partial_kv_bytes_per_slot,
    recurrent_bytes_per_slot,
)
from ctxcache.device.arrays import view_array
from ctxcache.device.numba.context import SIMULATED, cuda
from ctxcache.device.numba.launch import Launcher
from ctxcache.device.numba.loads_stores import load4, load8, store4, store16
from ctxcache.device.numba.ops import NumbaDeviceOps

pytestmark = pytest.mark.gpu

NUM_ABANDONS = 10_000
OLD, NEW = 0xAA, 0xBB


@cuda.jit
def _write_row(pool: int, row: int, num_entries: int, page_bytes: int, word: int) -> None:
    """Fill every page that a row of the device view names, of K and V."""
    for entry in range(cuda.blockIdx.x, num_entries, cuda.gridDim.x):
        page = load4(row + 4 * entry)
        if page >= 0:
            for i in range(cuda.threadIdx.x, page_bytes // 16, cuda.blockDim.x):
                store16(pool + page * page_bytes + 16 * i, (word, word))


@cuda.jit
def _write_all(pool: int, num_bytes: int, word: int) -> None:
    """Fill a pool."""
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(first, num_bytes // 16, cuda.gridDim.x * cuda.blockDim.x):
        store16(pool + 16 * i, (word, word))


@cuda.jit
def _find_other(pool: int, num_bytes: int, word: int, found: int) -> None:
    """Set a flag where any word of a pool is another one."""
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(first, num_bytes // 8, cuda.gridDim.x * cuda.blockDim.x):
        if load8(pool + 8 * i) != word:
            store4(found, 1)


def word_of(byte: int) -> int:
    """Eight times the same byte, as a signed word."""
    return int.from_bytes(bytes([byte]) * 8, "little", signed=True)


class Story:
    """A hybrid or vanilla deployment on the GPU."""

    def __init__(self, *, hybrid: bool = False, synchronizer: Any = None) -> None:
        self.ops = NumbaDeviceOps()
        self.stream = driver_stream() if stream_of_run() is None else stream_of_run()
        self.other = driver_stream()
        self.launcher = Launcher()
        layers = (LayerType.ATTENTION, LayerType.RECURRENT) if hybrid else (LayerType.ATTENTION,)
        self.engine = EngineConfig(
            layers=layers,
            attention=(AttentionLayerConfig(1, 64),),
            recurrent=RecurrentStateConfig(1, 16, 16, 16, 4) if hybrid else None,
            max_batch_size=3 if hybrid else 1,
            max_sequence_length=512,
            num_pages=16 if hybrid else 4,
            tokens_per_page=128,
        )
        self.cache = HybridCacheManager(self.engine, self.stream, device_ops=self.ops)
        self.table = KVPageTable(
            self.engine.max_batch_size,
            self.engine.pages_per_sequence,
            self.engine.num_pages,
            device_ops=self.ops,
        )
        budgets = {
            "recurrent_snapshot_pool_bytes": 4 * recurrent_bytes_per_slot(self.engine),
            "partial_kv_snapshot_pool_bytes": 4 * partial_kv_bytes_per_slot(self.engine),
        }
        self.coordinator = ContextCacheCoordinator(
            ContextCacheConfig(hash_key=HASH_KEY, **(budgets if hybrid else {})),
            DeploymentConfig(self.engine),
            ContextCacheDeploymentKind.HYBRID if hybrid else ContextCacheDeploymentKind.VANILLA,
            ContextCachePhysicalResources(self.cache, self.table),
            self.stream,
            synchronizer,
            device_ops=self.ops,
        )
        self.pool = view_array(self.cache.kv_pool(0))
        self.found = self.ops.allocate((1,), "int32")
        # A kernel's first launch loads it, and loading waits for the whole GPU: it would hide what comes too late.
        self.ops.load_kernels(self.stream)
        self.take_over(0)
        self.look_for_strays(0)
        self.launcher.launch(_write_row, (1, 1, 1), self.stream, 0, 0, 0, 0, 0)
        spin(self.stream, 0)
        assert not self.saw_strays()

    def begin(self, *sequences: list[int]) -> Any:
        """Admit a batch and bind it."""
        admissions = [ContextCacheSequenceAdmission(tokens) for tokens in sequences]
        result = self.coordinator.begin_request(ContextCacheBatchAdmission(admissions), self.stream)
        assert result.status is OK
        assert self.coordinator.prepare_prefill(result.admission.request) is OK
        return result.admission.request

    def write_late(self, byte: int, milliseconds: float) -> None:
        """On the request's stream: after a while, write into every page of its first row."""
        spin(self.stream, milliseconds)
        row, page_bytes = view_array(self.table.kernel_view).address, self.pool.nbytes // (2 * self.engine.num_pages)
        entries = 2 * self.engine.pages_per_sequence
        arguments = (self.pool.address, row, entries, page_bytes, word_of(byte))
        self.launcher.launch(_write_row, (entries, 1, 1), self.stream, *arguments)

    def take_over(self, byte: int) -> None:
        """On the other stream, at once: write every page, as whoever owns them now."""
        arguments = (self.pool.address, self.pool.nbytes, word_of(byte))
        self.launcher.launch(_write_all, (16, 1, 1), self.other, *arguments)
        self.ops.synchronize(self.other, None)

    def look_for_strays(self, byte: int) -> None:
        """Wait for everything, and remember whether any byte is another one."""
        self.ops.synchronize(self.stream, None)
        arguments = (self.pool.address, self.pool.nbytes, word_of(byte), view_array(self.found).address)
        self.launcher.launch(_find_other, (16, 1, 1), self.other, *arguments)

    def saw_strays(self) -> bool:
        """Whether any look found one."""
        self.ops.synchronize(self.other, None)
        return bool(self.ops.to_host(self.found)[0])


@pytest.mark.alone
def test_abandons_under_load_leave_no_stray_byte() -> None:
    """10,000 requests abandoned while a kernel is about to write their pages: the next owner's bytes stay."""
    story = Story()
    num_late = 0
    for turn in range(NUM_ABANDONS):
        request = story.begin(T(300) if turn % 2 else U(400))
        story.write_late(OLD, 0.1)
        num_late += is_busy(story.stream)
        assert story.coordinator.abandon(request) is OK
        story.take_over(NEW)
        story.look_for_strays(NEW)
    assert not story.saw_strays()
    assert num_late > 0.99 * NUM_ABANDONS
    metrics = story.coordinator.metrics()
    assert (metrics.admitted_sequences, metrics.drains, metrics.quarantines) == (NUM_ABANDONS, NUM_ABANDONS, 0)
    assert metrics.base_kv_pages.free == metrics.base_kv_pages.capacity


def test_a_drain_that_does_not_wait_is_seen() -> None:
    """The same with a synchroniser that lies: the test above can fail."""
    story = Story(synchronizer=lambda _stream: 0)
    for turn in range(2):  # the first time, compiling what abandons takes longer than the spin
        request = story.begin(T(300))
        story.write_late(OLD, 50)
        assert story.coordinator.abandon(request) is OK
        story.take_over(NEW)
        assert turn == 0 or is_busy(story.stream)
        story.look_for_strays(NEW)
    assert story.saw_strays()


@pytest.mark.parametrize("way_out", ["abandon", "close", "del", "finish", "with"])
def test_h13_every_way_out_drains_once_before_it_releases(way_out: str) -> None:
    """A kernel of 50 ms still writes 0xAA when the request is dropped; the next owner's 0xBB stays everywhere."""
    story = Story()
    story.coordinator.finish(story.begin(T(300)))  # compiles what finishes
    request = story.begin(T(300))
    story.write_late(OLD, 50)
    assert is_busy(story.stream)
    drains = story.coordinator.metrics().drains
    if way_out == "del":
        with pytest.warns(ResourceWarning):
            del request
    elif way_out == "with":
        with pytest.raises(KeyError), request:
            raise KeyError
    elif way_out == "close":
        request.close()
    else:
        assert getattr(story.coordinator, way_out)(request) is OK
    assert story.coordinator.metrics().drains == drains + 1
    following = story.begin(U(300))
    story.take_over(NEW)
    story.look_for_strays(NEW)
    assert not story.saw_strays()
    assert story.coordinator.finish(following) is OK


def run_hybrid(story: Story) -> None:
    """Every device op of a hybrid deployment: two requests, with captures, growth, compaction and a restore."""
    coordinator = story.coordinator
    mapping = story.ops.allocate((3,), "int32")
    tokens = [T(130), U(255), T(20)]
    request = story.begin(*tokens)
    assert coordinator.enqueue_prefill_captures(request) is OK
    story.ops.synchronize(story.stream, None)
    advances = [ContextCacheSequenceAdvance([7], len(sequence)) for sequence in tokens]
    assert coordinator.finalize_prefill_publication(request, advances) is OK
    for step in range(3):
        assert coordinator.prepare_decode_step(request) is OK
        story.ops.synchronize(story.stream, None)
        advances = [ContextCacheSequenceAdvance([7], len(sequence) + step + 1) for sequence in tokens]
        assert coordinator.complete_decode_step(request, advances, [1] if step == 2 else []) is OK
    assert coordinator.begin_batch_compaction(request, np.array([-1, 0, 1], np.int32), 2, mapping) is OK
    assert coordinator.compact_batch(request) is OK
    assert coordinator.finish(request) is OK
    request = story.begin(T(131))
    assert request.inspect().sequences[0].reuse_token_length == 130
    assert coordinator.abandon(request) is OK


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore")
def test_h24_the_profile_shows_nothing_on_the_default_stream(tmp_path: Path) -> None:
    """All kernels and copies of two requests run on the one stream; a spin on the default stream shows where that is."""
    profiler = pytest.importorskip("torch.profiler")
    story = Story(hybrid=True)
    run_hybrid(story)  # loads kernels, makes buffers and tables
    story.coordinator.clear()
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]) as profile:
        spin(None, 1)
        cuda.default_stream().synchronize()
        run_hybrid(story)
    trace = tmp_path / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    default = {e["args"]["stream"] for e in on_device if "spin" in e["name"]}
    own = [e for e in on_device if "spin" not in e["name"] and "Memset" not in e["name"]]
    assert len(default) == 1, [e["name"] for e in on_device]
    kernels = {e["name"].split("_B")[0] for e in own if e["cat"] == "kernel"}
    for wanted in ("scatter_page_ids", "write_ints", "zero_slots", "move_snapshots", "compact_slots"):
        assert any(wanted in name for name in kernels), (wanted, kernels)
    assert {e["args"]["stream"] for e in own}.isdisjoint(default)
    assert len({e["args"]["stream"] for e in own}) == 1, {(e["name"], e["args"]["stream"]) for e in own}
    copies = {e["name"] for e in own if e["cat"] == "gpu_memcpy"}
    assert not [name for name in copies if "Pageable" in name], copies
    assert not SIMULATED
