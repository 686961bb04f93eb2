"""The table of docs/testing.md: each bug is planted in a small runtime, and each tool sees what the table says, and no more."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxcache import (
    AttentionLayerConfig,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheDeploymentKind,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractError,
    DeploymentConfig,
    DeviceError,
    EngineConfig,
    HybridCacheManager,
    KVPageTable,
    LayerType,
    NumpyDeviceOps,
    PageCorruptionError,
)
from ctxcache.testing import DeferredDeviceOps, FaultInjector, FaultMode, OwnershipLedger, PageGuard, sweep
from ctxcache.testing.faults import Fault, FaultPlan

PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"
P = 4
PROMPT = list(range(1, 11))
FREE = 7


class Small:
    """A runtime with one bug, or none. One word a token, which is the token; every sampled token is 7."""

    def __init__(self, bug: str = "", *, sanitizer: bool = False, checks: bool = False) -> None:
        engine = EngineConfig(
            layers=(LayerType.ATTENTION,),
            attention=(AttentionLayerConfig(num_kv_heads=1, head_dim=4),),
            max_sequence_length=30,
            tokens_per_page=P,
            num_pages=10,
        )
        ops = NumpyDeviceOps()
        self.bug, self.checks = bug, checks
        self.cache = HybridCacheManager(engine, None, device_ops=ops)
        self.table = KVPageTable(1, engine.pages_per_sequence, engine.num_pages, device_ops=ops)
        self.coordinator = ContextCacheCoordinator(
            ContextCacheConfig(page_sanitizer=sanitizer),
            DeploymentConfig(engine),
            ContextCacheDeploymentKind.VANILLA,
            ContextCachePhysicalResources(self.cache, self.table),
            None,
        )
        self.enqueue: Callable[[Callable[[], None]], None] = lambda work: work()
        self.kept: Any = None

    def lazy(self) -> DeferredDeviceOps:
        """Make the stream lazy."""
        ops = DeferredDeviceOps(self.coordinator.device_ops, random.Random(1))
        self.coordinator.replace_device_ops(ops)
        self.enqueue = ops.enqueue
        return ops

    def wait(self) -> None:
        code = self.coordinator.device_ops.synchronize(None, None)
        if code and self.bug != "does not look at what a wait returns":
            raise RuntimeError("the stream failed")

    def model(self, tokens: list[int], start: int, reused: int, *, step: bool) -> None:
        keys = np.asarray(self.cache.kv_pool(0))[0, :, :, 0, 0]
        row = np.asarray(self.table.kernel_view)[0, 0]
        if self.checks:
            for position in range(start):
                assert keys[row[position // P], position % P] == tokens[position], "wrong keys"
        for position in range(start, len(tokens)):
            wrong = step and self.bug == "computes another token than it reports"
            keys[row[position // P], position % P] = 8 if wrong else tokens[position]
        if self.bug == "writes a token behind the valid ones into its own page":
            keys[row[len(tokens) // P], len(tokens) % P] += 1
        if self.bug == "writes through an unused entry of a page table":
            keys[row[-1], 1] += 1
        if self.bug == "writes into a free page":
            keys[FREE, 2] += 1
        if self.bug == "writes into a shared page" and step and reused:
            keys[row[0], 1] += 1

    def answer(self, prompt: list[int], steps: int) -> None:
        """One request."""
        begun = self.coordinator.begin_request(
            ContextCacheBatchAdmission([ContextCacheSequenceAdmission(prompt)]), None
        )
        begun.status.raise_for_status()
        request, tokens, start = begun.admission.request, [*prompt], begun.admission.prefill_starts[0]
        self.kept = request
        try:
            self.coordinator.prepare_prefill(request).raise_for_status()
            prompt_tokens = list(tokens)
            self.enqueue(lambda: self.model(prompt_tokens, start, start, step=False))
            self.wait()
            advances = [ContextCacheSequenceAdvance([7], len(tokens))]
            self.coordinator.finalize_prefill_publication(request, advances).raise_for_status()
            for step in range(steps):
                self.coordinator.prepare_decode_step(request).raise_for_status()
                tokens.append(7)
                now = list(tokens)
                self.enqueue(lambda now=now: self.model(now, len(now) - 1, start, step=True))
                if not (self.bug == "reports a step without waiting for it" and step == 0):
                    self.wait()
                advances = [ContextCacheSequenceAdvance([7], len(tokens))]
                ended = [0] if step == steps - 1 else []
                self.coordinator.complete_decode_step(request, advances, ended).raise_for_status()
            self.coordinator.finish(request).raise_for_status()
        except BaseException:
            if self.bug != "leaves its request when something fails":
                self.coordinator.abandon(request)
            raise


def workload(runtime: Small, turns: int = 3) -> None:
    """A prompt, and conversations that go on from it."""
    for prompt, steps in ((PROMPT, 3), ([*PROMPT, 7, 7, 7, 1], 2), ([*PROMPT, 7, 7, 7, 2], 1))[:turns]:
        runtime.answer(prompt, steps)


def watch(bug: str) -> bool:
    runtime = Small(bug)
    ledger = OwnershipLedger(runtime.coordinator, runtime.lazy(), strict=True)
    try:
        workload(runtime)
    except AssertionError:
        return True
    return bool(ledger.violations)


def guard(bug: str) -> bool:
    runtime = Small(bug)
    pages = PageGuard(runtime.coordinator, strict=True)
    try:
        workload(runtime)
        pages.check()
    except AssertionError:
        return True
    assert pages.blind == []
    return False


def sanitizer(bug: str) -> bool:
    try:
        workload(Small(bug, sanitizer=True))
    except PageCorruptionError:
        return True
    return False


def verify(bug: str) -> bool:
    runtime = Small(bug, sanitizer=True)
    workload(runtime, turns=2)
    try:
        cached = {page for record in runtime.coordinator.manager.records for page in record.base_page_path.tolist()}
        assert runtime.coordinator.verify_pages() == len(cached) >= 3
    except PageCorruptionError:
        return True
    return False


def swept(bug: str) -> bool:
    def make() -> Small:
        runtime = Small(bug)
        runtime.lazy()
        return runtime

    return bool(sweep(make, lambda runtime: workload(runtime, turns=2)).violations)


def words(bug: str) -> bool:
    try:
        workload(Small(bug, checks=True))
    except AssertionError:
        return True
    return False


TOOLS = {
    "`ctxcache_watch`": watch,
    "`ctxcache_guard`": guard,
    "`page_sanitizer`": sanitizer,
    "`verify_pages()`": verify,
    "`sweep`": swept,
    "its model's own words": words,
}


def table() -> dict[tuple[str, str], bool]:
    """What the page says: (bug, tool) -> whether it is seen."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    head = next(number for number, line in enumerate(rows) if line.startswith("| a runtime that |"))
    tools = [cell.strip() for cell in rows[head].strip("|").split("|")][1:]
    said = {}
    for line in rows[head + 2 :]:
        bug, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != len(tools):
            break
        said.update({(bug, tool): cell == "seen" for tool, cell in zip(tools, cells, strict=True)})
    return said


TABLE = table()
BUGS = tuple(dict.fromkeys(bug for bug, _ in TABLE))


def test_the_table_has_every_bug_and_every_tool() -> None:
    """Each bug of the table is one that the runtime here knows, and is seen by something; each tool sees something."""
    source = Path(__file__).read_text(encoding="utf-8")
    assert len(BUGS) == 8
    assert set(re.findall(r'self\.bug [!=]= "(.+?)"', source)) == set(BUGS)
    assert {tool for _, tool in TABLE} == set(TOOLS)
    assert {bug for (bug, _), seen in TABLE.items() if seen} == set(BUGS)
    assert {tool for (_, tool), seen in TABLE.items() if seen} == set(TOOLS)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_right_runtime_is_left_in_peace(tool: str) -> None:
    """Without a bug no tool sees anything."""
    assert not TOOLS[tool]("")


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(("bug", "tool"), TABLE)
def test_each_tool_sees_what_the_page_says(bug: str, tool: str) -> None:
    """Planted, and run under that tool alone."""
    assert TOOLS[tool](bug) is TABLE[bug, tool]


# What they say


BEHIND = (
    r"base page 2, keys of token 2, attention layer 0: written after begin_request of request 1 and before "
    r"finalize_prefill_publication of request 1; it is a page of slot 0, which has nothing to write at position 10"
)


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("writes a token behind the valid ones into its own page", BEHIND),
        ("writes through an unused entry of a page table", r"base page 9, keys of token 1.*the guard page"),
        ("writes into a free page", rf"base page {FREE}, keys of token 2.*it is a free page"),
        ("writes into a shared page", r"base page 0, keys of token 1.*a shared page, of record \d+"),
    ],
)
def test_the_guard_names_page_token_and_operations(bug: str, said: str) -> None:
    """At the report behind the write; without `strict` in `violations`, and in `check()`."""
    runtime = Small(bug)
    pages = PageGuard(runtime.coordinator)
    workload(runtime)
    assert re.search(said, pages.violations[0])
    with pytest.raises(AssertionError, match=said):
        pages.check()


def test_a_guard_page_that_a_sequence_holds_is_told() -> None:
    """Where the pool is as small as its sequences a write through -1 may look right."""
    runtime = Small()
    pages = PageGuard(runtime.coordinator)
    for base in (100, 200, 300, 400):
        runtime.answer([base + i for i in range(13)], 1)
    assert pages.violations == []
    assert pages.blind == ["base page 9, the guard page, is held by a sequence: give the pool a page more"]


def test_verify_pages_names_every_page_and_says_when_it_cannot() -> None:
    """Two pages are spoiled: both are told. Without the sanitizer, and after a failed drain, it is refused."""
    runtime = Small(sanitizer=True)
    assert runtime.coordinator.verify_pages() == 0
    workload(runtime, turns=1)
    assert runtime.coordinator.verify_pages() == 3
    keys = np.asarray(runtime.cache.kv_pool(0))[0, :, :, 0, 0]
    keys[[0, 2], 1] += 1
    with pytest.raises(PageCorruptionError) as caught:
        runtime.coordinator.verify_pages()
    first, second = str(caught.value).splitlines()
    assert first.startswith("base page 0, layer 0, of record ")
    assert "written after verify_pages() after request 1 and before verify_pages() after request 1" in first
    assert second.startswith("base page 2, layer 0, of record ")
    keys[[0, 2], 1] -= 1
    assert runtime.coordinator.verify_pages() == 3
    with pytest.raises(ContractError, match="page_sanitizer=True"):
        Small().coordinator.verify_pages()


@pytest.mark.parametrize("mode", list(FaultMode))
@pytest.mark.parametrize("point", ["verify_pages.sum_pages", "verify_pages.synchronize"])
@pytest.mark.parametrize("active", [False, True])
def test_a_device_that_fails_while_pages_are_verified(point: str, mode: FaultMode, active: bool) -> None:
    """It is a `DeviceError`; an active request can only be ended, and what is cached stays."""
    runtime = Small(sanitizer=True)
    faults = FaultInjector(runtime.coordinator.device_ops)
    runtime.coordinator.replace_device_ops(faults)
    workload(runtime, turns=1)
    begun = None
    if active:
        admission = ContextCacheBatchAdmission([ContextCacheSequenceAdmission(PROMPT)])
        begun = runtime.coordinator.begin_request(admission, None)
    faults.plan = FaultPlan(Fault(point, mode))
    with pytest.raises(DeviceError, match="page sums"):
        runtime.coordinator.verify_pages()
    assert faults.fired[0] == point
    faults.plan = FaultPlan()
    if begun is not None:
        with pytest.raises(ContractError):
            runtime.coordinator.prepare_prefill(begun.admission.request)
        begun.admission.request.close().raise_for_status()
    assert runtime.coordinator.idle
    assert runtime.coordinator.verify_pages() == 3
    workload(runtime)


# The sweep of a workload


def test_the_sweep_lists_the_points_that_the_workload_never_reached() -> None:
    """By name, and what it did beside them; they are no violation."""
    result = sweep(Small, lambda runtime: workload(runtime, turns=1))
    assert result.violations == result.unfired == []
    assert set(result.occurrences) == {
        "outside.synchronize",
        "prepare_decode_step.upload_rows",
        "prepare_prefill.reset_lengths",
        "prepare_prefill.upload_rows",
    }
    assert "compact_batch.synchronize" in result.unreached
    assert "abandon.synchronize" in result.unreached
    assert "never reached: compact_batch.synchronize" in str(result)
    assert result.runs == 14 * sum(result.occurrences.values())
    result.check()


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("does not look at what a wait returns", "outside.synchronize error_code: a device failure reached nobody"),
        ("leaves its request when something fails", "the workload left its request active"),
        ("reports a step without waiting for it", "no fault: complete_decode_step of request 1 reported as complete"),
    ],
)
def test_the_sweep_says_after_which_fault_what_was_wrong(bug: str, said: str) -> None:
    """The point, the way it failed, and the finding."""

    def make() -> Small:
        runtime = Small(bug)
        runtime.lazy()
        return runtime

    result = sweep(make, lambda runtime: workload(runtime, turns=1))
    assert any(said in violation for violation in result.violations)
    with pytest.raises(AssertionError, match=re.escape(said)):
        result.check()


def test_the_sweep_looks_with_the_users_own_eyes_too() -> None:
    """A check of the user's is asked after each run; what is no runtime, and a workload that fails by itself, is told."""
    seen: list[Small] = []
    assert sweep(Small, lambda runtime: workload(runtime, 1), check=seen.append).violations == []
    assert len(seen) > 100
    (violation,) = sweep(Small, lambda runtime: "no luck").violations
    assert violation == "no fault: without a fault the workload told of 'no luck'"
    (violation,) = sweep(Small, lambda runtime: 1 / 0).violations
    assert "ZeroDivisionError" in violation
    (violation,) = sweep(Small, lambda runtime: None, check=lambda runtime: 1 / 0).violations
    assert "ZeroDivisionError" in violation
    with pytest.raises(ContractError, match="make_runtime returned a int"):
        sweep(lambda: 7, workload)
