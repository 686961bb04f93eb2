"""Device memory whose every byte a test can see, and engines with awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.config import (
    AttentionLayerConfig,
    DeploymentConfig,
    EngineConfig,
    RecurrentStateConfig,
    SpecDecodeConfig,
)
from ctxcache.device.arrays import CUDA, host_array, view_array
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.ops import SnapshotJobs, storage_dtype
from ctxcache.device.snapshots import HybridSnapshotStorage, partial_kv_bytes_per_slot, recurrent_bytes_per_slot
from ctxcache.ids import LayerType, SpecDecodeMode

A, R = LayerType.ATTENTION, LayerType.RECURRENT


@dataclass
class Run:
    """What `--gpu-stream` chose: the stream that ops work on, how to make another, and how to keep the first busy."""

    stream: Any = None
    make_stream: Callable[[], Any] = lambda: None
    occupy: Callable[[], None] = lambda: None


RUN = Run()


def stream_of_run() -> Any:
    """The stream that the ops of this run work on; `None` unless a GPU run chose one."""
    return RUN.stream


def another_stream() -> Any:
    """A new stream of the run's kind; `None` unless a GPU run chose one."""
    return RUN.make_stream()


def keep_busy() -> None:
    """On a GPU, put a spin at the head of the run's stream."""
    RUN.occupy()


def in_another_thread(work: Callable[[], Any]) -> Any:
    """Do something in a new thread; returns or raises what that returned or raised."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


class Carved:
    """A part of a device array on a real GPU: an address with a shape, and what keeps it alive."""

    def __init__(self, owner: Any, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CarvingOps:
    """Ops whose allocations all lie in one arena, with strangers' bytes before, between and behind them.

    `skew` shifts every allocation by that many elements from a 256-byte border. Everything else is the inner ops'.
    """

    def __init__(self, inner: Any, *, num_bytes: int = 1 << 18, skew: int = 0) -> None:
        self.inner = inner
        self.skew = skew
        self.arena = inner.allocate((num_bytes,), "uint8")
        self._end = 64
        self._places: dict[int, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Carve the next array out of the arena. It is zero only until the arena is filled."""
        kind = storage_dtype(dtype)
        offset = -(-self._end // 256) * 256 + self.skew * kind.itemsize
        num_bytes = prod(shape) * kind.itemsize
        self._end = offset + num_bytes + 37
        view = view_array(self.arena)
        assert self._end <= view.nbytes, f"arena too small: {self._end} bytes needed"
        array: Any
        if view.place == CUDA:
            array = Carved(self.arena, view.address + offset, shape, kind)
        else:
            array = host_array(self.arena)[offset : offset + num_bytes].view(kind).reshape(shape)
        self._places[view_array(array).address] = (offset, shape, kind)
        return array

    def fill(self, seed: int = 0) -> NDArray[np.uint8]:
        """Fill the whole arena with random bytes and return an image of it."""
        self.inner.synchronize(stream_of_run(), None)  # what was enqueued before must not land in the filled arena
        image = np.random.default_rng(seed).integers(0, 256, view_array(self.arena).nbytes, dtype=np.uint8)
        self.inner.to_device(self.arena, image)
        return image

    def image(self) -> NDArray[np.uint8]:
        """Return every byte of the arena."""
        return self.inner.to_host(self.arena)

    def of(self, image: NDArray[np.uint8], array: Any) -> NDArray[Any]:
        """Return the part of an image that an allocated array covers, as a writable view with its shape."""
        offset, shape, kind = self._places[view_array(array).address]
        return image[offset : offset + prod(shape) * kind.itemsize].view(kind).reshape(shape)


@dataclass
class Rig:
    """A cache, its snapshots and the arena that they lie in."""

    ops: CarvingOps
    config: EngineConfig | DeploymentConfig
    base: HybridCacheManager
    draft: HybridCacheManager | None
    storage: HybridSnapshotStorage
    stream: Any = field(default_factory=stream_of_run)

    @property
    def launches(self) -> int | None:
        """Kernels launched so far; `None` for ops that launch none."""
        return getattr(self.ops.inner, "num_launches", None)

    def synchronize(self) -> None:
        """Wait, so that the arena can be read."""
        assert self.ops.synchronize(self.stream, None) in (None, 0)


def hybrid_engine(kv_dtype: str = "float16", state_dtype: str = "float32", **changes: Any) -> EngineConfig:
    """Three recurrent and two attention layers, of different heads and head sizes; all sizes odd."""
    settings: dict[str, Any] = {
        "layers": (R, A, R, R, A),
        "attention": (AttentionLayerConfig(1, 5), AttentionLayerConfig(3, 7)),
        "recurrent": RecurrentStateConfig(1, 3, 5, 5, 3, dtype=state_dtype, conv_dtype=kv_dtype),
        "kv_dtype": kv_dtype,
        "max_batch_size": 3,
        "max_sequence_length": 14,
        "tokens_per_page": 7,
        "num_pages": 7,
        "hidden_size": 9,
        "hidden_dtype": kv_dtype,
    }
    return EngineConfig(**{**settings, **changes})


def attention_engine(**changes: Any) -> EngineConfig:
    """Two attention layers, 4 slots of 3 pages."""
    settings: dict[str, Any] = {
        "layers": (A, A),
        "attention": (AttentionLayerConfig(1, 4),) * 2,
        "max_batch_size": 4,
        "max_sequence_length": 24,
        "tokens_per_page": 8,
    }
    return EngineConfig(**{**settings, **changes})


def even_engine(**changes: Any) -> EngineConfig:
    """The same with sizes that are multiples of 16 bytes, so that every copy can be wide."""
    settings: dict[str, Any] = {
        "attention": (AttentionLayerConfig(1, 8), AttentionLayerConfig(2, 16)),
        "recurrent": RecurrentStateConfig(2, 4, 8, 16, 4),
        "hidden_size": 64,
    }
    return hybrid_engine(**{**settings, **changes})


def mtp_deployment(base: EngineConfig) -> DeploymentConfig:
    """The base with an attention draft of other sizes and another number of pages."""
    draft = EngineConfig(
        layers=(A,),
        attention=(AttentionLayerConfig(2, 3),),
        kv_dtype="bfloat16",
        max_batch_size=base.max_batch_size,
        max_sequence_length=base.max_sequence_length,
        tokens_per_page=base.tokens_per_page,
        num_pages=base.num_pages + 2,
    )
    return DeploymentConfig(base, draft, SpecDecodeConfig(SpecDecodeMode.MTP))


def build_rig(
    ops: Any,
    config: EngineConfig | DeploymentConfig,
    *,
    skew: int = 0,
    num_bytes: int = 1 << 17,
    num_snapshots: int = 4,
) -> Rig:
    """Allocate everything of a deployment in one arena; there is one partial-KV snapshot less than recurrent ones."""
    carving = CarvingOps(ops, num_bytes=num_bytes, skew=skew)
    base_config = config if isinstance(config, EngineConfig) else config.base
    draft_config = None if isinstance(config, EngineConfig) else config.draft
    base = HybridCacheManager(base_config, None, device_ops=carving)  # type: ignore[arg-type]
    draft = None if draft_config is None else HybridCacheManager(draft_config, None, device_ops=carving)  # type: ignore[arg-type]
    storage = HybridSnapshotStorage(
        config,
        base,
        draft,
        recurrent_snapshot_pool_bytes=num_snapshots * recurrent_bytes_per_slot(config),
        partial_kv_snapshot_pool_bytes=(num_snapshots - 1) * partial_kv_bytes_per_slot(config),
    )
    return Rig(carving, config, base, draft, storage)


def jobs(*rows: tuple[int, int, int, int, int, int]) -> SnapshotJobs:
    """Jobs from rows of `(slot, recurrent snapshot, partial snapshot, base page, draft page, tokens)`."""
    return SnapshotJobs(*np.array(rows, np.int32).reshape(-1, 6).T.copy())


def ints(*values: int) -> NDArray[np.int32]:
    """An int32 array."""
    return np.array(values, np.int32)


def equal_images(actual: NDArray[np.uint8], expected: NDArray[np.uint8], message: str = "") -> None:
    """Require equal bytes; the slow comparison that describes differences runs only where there are some."""
    if not np.array_equal(actual, expected):
        np.testing.assert_array_equal(actual, expected, err_msg=message)


def raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a contiguous array, writable."""
    return array.reshape(-1).view(np.uint8)
