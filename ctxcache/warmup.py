"""Compiling everything before the first request, by doing everything once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.page_table import KVPageTable
from ctxcache.ids import PAIRED_KINDS, ContextCacheDeploymentKind
from ctxcache.jit import machine_code
from ctxcache.keys.chain import hash_exact_prefix, hash_full_blocks
from ctxcache.manager.manager import ContextCacheManager

if TYPE_CHECKING:
    from ctxcache.device.numba.ops import NumbaDeviceOps

_BLOCK = 4


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What a warm-up took.

    Attributes:
        seconds: wall time.
        compiled: functions compiled, each once for every kind of arguments.
        loaded: functions read from the cache on disk instead.
    """

    seconds: float
    compiled: int
    loaded: int

    def __str__(self) -> str:
        ready = ", all ready before" if not self.compiled else ""
        return f"{self.loaded} functions loaded from the cache on disk{ready}, {self.compiled} compiled, {self.seconds:.1f} s"


def warmup(
    device_ops: NumbaDeviceOps | None = None,
    stream: Any = None,
    *,
    progress: Callable[[str, int, int], object] = lambda _part, _done, _total: None,
) -> WarmupReport:
    """Compile, or load from the cache on disk, all code of the host that the library can call.

    Small coordinators of every deployment kind live through every transition, in memory of the host. Without it the first
    requests do the same, each as far as it gets. What is compiled is kept on disk where the package's folder,
    `NUMBA_CACHE_DIR` or the home folder can be written, and in this process alone where none can.

    Args:
        device_ops: compile and load these ops' kernels too; see `NumbaDeviceOps.load_kernels`.
        stream: where to launch them, with nothing to do.
        progress: called before each part with its name, how many parts are done, and how many there are.

    Returns:
        How long it took, and how much was compiled. A second call finds nothing to do.
    """
    started, before = time.perf_counter(), machine_code()
    parts: list[tuple[str, Callable[[], object]]] = [("keys", _hash_all_forms), ("page tables", _upload_rows)]
    parts += [(f"requests of {kind.name}", partial(_live_a_life, kind)) for kind in ContextCacheDeploymentKind]
    if device_ops is not None:
        parts.append(("kernels", partial(device_ops.load_kernels, stream)))
    for done, (name, work) in enumerate(parts):
        progress(name, done, len(parts))
        work()
    after = machine_code()
    return WarmupReport(time.perf_counter() - started, after.compiled - before.compiled, after.loaded - before.loaded)


def _hash_all_forms() -> None:
    """Tokens that may be written and that may not are two kinds of arguments to compiled code."""
    for writeable in (True, False):
        tokens = np.arange(2 * _BLOCK + 1, dtype=np.int32)
        tokens.flags.writeable = writeable
        for media in (None, np.ones((tokens.size, 2), np.uint64)):
            hash_full_blocks(tokens, _BLOCK, per_position_media_hash=media)
            hash_exact_prefix(tokens, _BLOCK, per_position_media_hash=media)


def _live_a_life(kind: ContextCacheDeploymentKind) -> None:
    """Let a small runtime go through every transition, and then ask what only a caller asks."""
    # Here, so that who does without a warm-up does without these.
    from ctxcache.testing.runtime.runtime import FakeRuntime  # noqa: PLC0415
    from ctxcache.testing.runtime.scripts import quiet_log, run_script  # noqa: PLC0415

    with quiet_log():
        for page_sanitizer in (False, True):
            runtime = FakeRuntime(kind, page_sanitizer=page_sanitizer)
            run_script(runtime)
        _ask_everything(runtime.coordinator.manager)


def _ask_everything(manager: ContextCacheManager) -> None:
    for record in manager.records:
        record.base_page_path, record.draft_page_path  # noqa: B018 - walked by compiled code
    rows = np.zeros(0, np.int32)
    manager.can_grow_leases(rows, rows, rows if manager.kind in PAIRED_KINDS else None)
    keys = np.zeros((1, 2), np.uint64)
    lease = manager.acquire(manager.plan(keys, 1, base_extra_tokens=0)).lease
    if lease is not None:
        manager.grow(lease)
        manager.release(lease)
    manager.clear()
    manager.check_invariants()


def _upload_rows() -> None:
    """What the ops of a GPU ask a page table, and those of the host do not."""
    table = KVPageTable(1, 1, 1, device_ops=NumpyDeviceOps())
    table.set_row(0, [0])
    table.take_changes(np.empty((1, 2), np.int32))
