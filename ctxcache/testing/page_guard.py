"""Who writes into the pages of a pool, and where: every byte outside of what a sequence may write now must stay as it is.

What may be written, by sequence, in tokens; everything else of both pools is held against a copy:

    prefill   [shared, tokens)                  shared: the last edge of a page below what is reused
    step      [committed, committed + headroom) of the base; the draft's begins where base and draft agree
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Int32s
from ctxcache.fsm import State
from ctxcache.request.admission import DecodingKvHeadroom
from ctxcache.request.batch import Batch
from ctxcache.request.request import Request
from ctxcache.testing.deferred import DeferredDeviceOps
from ctxcache.testing.taps import tap

_HALVES = ("keys", "values")
_MOST_TOLD = 4


@dataclass(slots=True, eq=False)
class _Pools:
    """The pools of one model.

    Attributes:
        role: `base` or `draft`.
        cache: whose pools they are.
        seen: what each layer's pool held when it was looked at last, `uint8[2, num_pages, P, bytes a token]`.
        open: which tokens of which pages may be written, `bool[num_pages, P]`.
    """

    role: str
    cache: Any
    seen: list[NDArray[np.uint8]]
    open: NDArray[np.bool_]


class PageGuard:
    """Looks at all pages of a coordinator, at each report of a prefill or step, and at each beginning and end of a request.

    It finds a write into a free page, into a shared one, behind a sequence's valid tokens in a page of its own, and one
    through an unused entry of a page table: -1 is the pool's last page, which is the *guard page*. Pages are given out from
    the first one up, so a pool that is a page larger than what a test needs leaves its guard page alone.

    It copies whole pools to the host: for tests, with pools of tests.

    Attributes:
        violations: what was written, where, and between which operations; empty while all is well.
        blind: guard pages that a sequence has held, in words: there a write through -1 may look like one of its own.
    """

    def __init__(self, coordinator: Any, *, strict: bool = False) -> None:
        """Begin to look.

        Args:
            coordinator: with no request active.
            strict: raise `AssertionError` where something is found, at once.
        """
        self.violations: list[str] = []
        self.blind: list[str] = []
        self._strict = strict
        self._coordinator = coordinator
        self._custody = coordinator._custody  # noqa: SLF001 - what a coordinator holds is nobody's but a test double's
        self._rules = coordinator._rules  # noqa: SLF001
        self._page = coordinator.manager.tokens_per_page
        self._since = "the guard was set up"
        self._num_requests = 0
        resources = coordinator._binding.link.resources  # noqa: SLF001
        caches = (("base", resources.base_cache), ("draft", resources.draft_cache))
        self._pools = [self._first_look(role, cache) for role, cache in caches if cache is not None and cache.kv_pools]
        tap(coordinator, "begin_request", after=self._begun)
        tap(coordinator, "prepare_prefill", before=self._prefills)
        tap(coordinator, "prepare_decode_step", after=self._steps)
        for name in ("finalize_prefill_publication", "complete_decode_step"):
            tap(coordinator, name, before=partial(self._look, name), after=self._reported)
        for name in ("compact_batch", "finish", "abandon"):
            tap(coordinator, name, after=partial(self._settled, name))

    def check(self) -> None:
        """Look now, and raise `AssertionError` with everything that was found so far, if there is something."""
        self._look("check")
        if self.violations:
            raise AssertionError("\n".join(self.violations))

    def _first_look(self, role: str, cache: Any) -> _Pools:
        pools = _Pools(role, cache, [], np.zeros((cache.num_pages, self._page), np.bool_))
        pools.seen = self._contents(pools)
        return pools

    def _contents(self, pools: _Pools) -> list[NDArray[np.uint8]]:
        shape = (2, pools.cache.num_pages, self._page, -1)
        to_host: Callable[[Any], NDArray[Any]] = pools.cache.device_ops.to_host
        return [
            np.ascontiguousarray(to_host(pool)).reshape(-1).view(np.uint8).reshape(shape).copy()
            for pool in pools.cache.kv_pools
        ]

    # What may be written

    def _begun(self, result: Any, *_: Any, **__: Any) -> None:
        if result.admission is not None:
            self._num_requests += 1
            self._settled("begin_request")

    def _prefills(self, *_: Any, **__: Any) -> None:
        live = self._live()
        if live is not None:
            batch = live.batch
            for slot in range(batch.size):
                first, last = self._first_private(batch, slot), int(batch.num_tokens[slot])
                self._let_write("base", batch.leases[slot].base_pages, first, last)
                self._let_write("draft", batch.leases[slot].draft_pages, first, last)

    def _steps(self, _: Any, request: Any, *, headroom: DecodingKvHeadroom | None = None) -> None:
        live = self._live()
        if live is None or not request.inspect().device_work_pending:
            return
        batch = live.batch
        said = self._rules.read_headroom(headroom, batch.execution_mode)
        for slot in range(batch.size):
            committed, capacity = int(batch.committed[slot]), int(batch.capacity[slot])
            self._let_write("base", batch.leases[slot].base_pages, committed, min(committed + said.base, capacity))
            if batch.rules.paired:
                # With MTP the draft is a token behind, which its next input folds in.
                first = int(batch.common[slot]) if batch.rules.drafts else max(0, committed - 1)
                last = min(committed + max(said.base, said.draft), int(batch.draft_capacity[slot]))
                self._let_write("draft", batch.leases[slot].draft_pages, first, last)

    def _reported(self, *_: Any, **__: Any) -> None:
        """A report was accepted: what it reports is not written any more, but by a draft that initialises behind it."""
        self._close()
        live = self._live()
        if live is not None and live.batch.rules.paired and live.state is State.DRAFTING:
            for slot, lease in enumerate(live.batch.leases):
                first = self._first_private(live.batch, slot)
                self._let_write("draft", lease.draft_pages, first, int(live.batch.common[slot]))

    def _settled(self, operation: str, *_: Any, **__: Any) -> None:
        self._look(operation)
        self._close()

    def _live(self) -> Request | None:
        live: Request | None = self._custody.active
        return live

    def _first_private(self, batch: Batch, slot: int) -> int:
        """Return where the first page begins that the sequence shares with nobody."""
        fold = int(batch.rules.paired and not batch.rules.drafts)  # MTP computes the boundary token's draft anew
        shared: int = max(0, int(batch.reuse_lengths[slot]) - fold) // self._page * self._page
        return shared

    def _let_write(self, role: str, pages: Int32s, first: int, last: int) -> None:
        for pools in self._pools:
            if pools.role == role and pages.size:
                positions = np.arange(first, max(first, min(last, pages.size * self._page)))
                pools.open[pages[positions // self._page], positions % self._page] = True

    def _close(self) -> None:
        """Let nothing be written any more, where nothing is under way."""
        ops: Any = self._coordinator.device_ops
        while not isinstance(ops, DeferredDeviceOps) and hasattr(ops, "inner"):
            ops = ops.inner
        if not (isinstance(ops, DeferredDeviceOps) and ops.unproven_work):
            for pools in self._pools:
                pools.open[:] = False

    # What was written

    def _look(self, operation: str, *_: Any, **__: Any) -> None:
        found = [violation for pools in self._pools for violation in self._strays(pools, operation)]
        self._since = f"{operation} of request {self._num_requests}"
        self.violations += found[:_MOST_TOLD]
        if found and self._strict:
            raise AssertionError("\n".join(found[:_MOST_TOLD]))

    def _strays(self, pools: _Pools, operation: str) -> Iterator[str]:
        contents = self._contents(pools)
        for layer, (now, before) in enumerate(zip(contents, pools.seen, strict=True)):
            if np.array_equal(now, before):
                continue
            written = (now != before).any(axis=3) & ~pools.open
            for half, page, token in np.argwhere(written).tolist():
                yield (
                    f"{pools.role} page {page}, {_HALVES[half]} of token {token}, attention layer {layer}: written after "
                    f"{self._since} and before {operation} of request {self._num_requests}; it is "
                    f"{self._describe(pools, page, token)}"
                )
        pools.seen = contents
        self._note_guard(pools)

    def _describe(self, pools: _Pools, page: int, token: int) -> str:
        """Say what a page is, in which nothing was to be written."""
        for record in self._coordinator.manager.records:
            path = record.base_page_path if pools.role == "base" else record.draft_page_path
            if page in path:
                return f"a shared page, of record {record.serial}"
        for slot, held in self._held(pools):
            if page in held:
                position = int(np.flatnonzero(held == page)[0]) * self._page + token
                return f"a page of slot {slot}, which has nothing to write at position {position} now"
        if page == pools.cache.num_pages - 1:
            return "the guard page: a write through an unused entry of a page table, -1, ends there"
        return "a free page"

    def _held(self, pools: _Pools) -> Iterator[tuple[int, Int32s]]:
        live = self._live()
        if live is not None:
            for slot, lease in enumerate(live.batch.leases):
                yield slot, lease.base_pages if pools.role == "base" else lease.draft_pages

    def _note_guard(self, pools: _Pools) -> None:
        last = pools.cache.num_pages - 1
        told = f"{pools.role} page {last}, the guard page, is held by a sequence: give the pool a page more"
        if told not in self.blind and any(last in held for _, held in self._held(pools)):
            self.blind.append(told)
