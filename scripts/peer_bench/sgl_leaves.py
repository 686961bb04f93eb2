"""SGLang's Rust tree, full of one-page leaves, evicts 64 of them: what the peers' own script does not time.

Runs in the peers' environment, beside their scripts: `python sgl_leaves.py`, with the peers' folder on PYTHONPATH.
"""

from __future__ import annotations

import sys
import time

sys.argv = ["bench_sgl.py", "rust", "nothing"]  # its module level runs the letters named; none is

import bench_sgl  # type: ignore[import-not-found]  # noqa: E402
from benchlib import show, toks  # type: ignore[import-not-found]  # noqa: E402

_LEAVES, _EVICTED, _REPEATS = 100_000, 64, 20

for page in (16, 128):
    cache, allocator, _ = bench_sgl.mk("rust", _LEAVES * page, page)
    for _ in range(_LEAVES):
        key = bench_sgl.RadixKey(bench_sgl.array("q", toks(page)), None)
        cache.insert(bench_sgl.InsertParams(key=key, value=allocator.alloc(page)))
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        cache.evict(bench_sgl.EvictParams(num_tokens=_EVICTED * page))
        times.append(time.perf_counter() - started)
    show(f"(e) rust evict {_EVICTED} one-page leaves of 100k page{page}", times)
