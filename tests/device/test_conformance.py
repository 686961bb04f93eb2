"""One suite for every implementation of the device ops: each op changes the bytes it says, and not one other.

All memory of a test lies in one arena full of random bytes. The expected image is computed here, from the words of the
protocol, and compared whole: what lies around and between the arrays are the canaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.device import (
    Rig,
    build_rig,
    equal_images,
    even_engine,
    hybrid_engine,
    ints,
    jobs,
    keep_busy,
    mtp_deployment,
    raw,
)

from ctxcache.config import DeploymentConfig, EngineConfig
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.ops import HiddenRow
from ctxcache.device.page_table import KVPageTable
from ctxcache.errors import ContractError

ENGINES: dict[str, tuple[Callable[[], EngineConfig | DeploymentConfig], int]] = {
    "fp16-odd": (lambda: hybrid_engine("float16"), 0),
    "fp16-skewed": (lambda: hybrid_engine("float16"), 3),
    "bf16-odd-mtp": (lambda: mtp_deployment(hybrid_engine("bfloat16")), 1),
    "fp32-odd": (lambda: hybrid_engine("float32"), 0),
    "fp8-odd": (lambda: hybrid_engine("float8_e4m3fn", "float8_e5m2"), 5),
    "fp16-even": (even_engine, 0),
    "fp16-even-skewed-mtp": (lambda: mtp_deployment(even_engine()), 4),
}


@pytest.fixture(params=["numpy", "numba"])
def ops(request: pytest.FixtureRequest) -> Any:
    """Each implementation in turn."""
    return NumpyDeviceOps() if request.param == "numpy" else NumbaDeviceOps()


@pytest.fixture(params=ENGINES)
def rig(request: pytest.FixtureRequest, ops: Any) -> Rig:
    """Pools and snapshots of each engine in turn, in an arena."""
    build, skew = ENGINES[request.param]
    return build_rig(ops, build(), skew=skew)


def expect(rig: Rig, image: NDArray[np.uint8], act: Callable[[], None], launches: int = 1) -> None:
    """Run an op and require exactly this image afterwards, and one launch where there are launches at all."""
    before = rig.launches
    keep_busy()
    act()
    rig.synchronize()
    equal_images(rig.ops.image(), image)
    if before is not None:
        assert rig.launches == before + launches


def test_allocated_memory_is_zero_and_copies_both_ways(ops: Any) -> None:
    """`allocate` gives zeros of the asked dtype; `to_device` and `to_host` are exact, and refuse other shapes."""
    for dtype, stored in (("float16", "f2"), ("bfloat16", "u2"), ("float8_e4m3fn", "u1"), ("float32", "f4")):
        array = ops.allocate((3, 5), dtype)
        host = ops.to_host(array)
        assert host.dtype == np.dtype(stored)
        assert host.shape == (3, 5)
        assert not host.any()
        ops.to_device(array, np.arange(15).astype(stored).reshape(3, 5))
        np.testing.assert_array_equal(ops.to_host(array), np.arange(15).reshape(3, 5))
    with pytest.raises(ContractError, match="shape"):
        ops.to_device(array, np.zeros((5, 3), "f4"))
    with pytest.raises(ContractError, match="elements"):
        ops.to_device(array, np.zeros((3, 5), "f8"))


def test_upload_rows_writes_both_halves_of_the_changed_rows(ops: Any) -> None:
    """K ids and V ids (K + num_pages) of a changed row reach the view in one launch; nothing around it changes."""
    rig = build_rig(ops, hybrid_engine())
    table = KVPageTable(3, 4, 20, device_ops=rig.ops)  # type: ignore[arg-type]
    image = rig.ops.fill()
    rig.ops.to_device(table.kernel_view, np.full((3, 2, 4), -1, np.int32))
    rig.ops.of(image, table.kernel_view)[...] = [
        [[5, 6, 7, -1], [25, 26, 27, -1]],
        [[-1] * 4, [-1] * 4],
        [[0, 19, 1, 2], [20, 39, 21, 22]],
    ]
    table.set_row(0, [5, 6, 7])
    table.set_row(2, [0, 19, 1, 2])
    expect(rig, image, lambda: table.upload(rig.stream))
    expect(rig, image, lambda: table.upload(rig.stream), launches=0)
    rig.ops.of(image, table.kernel_view)[0] = [[8, -1, -1, -1], [28, -1, -1, -1]]
    table.set_row(0, [8])
    expect(rig, image, lambda: table.upload(rig.stream))


def test_reset_lengths_sets_the_batch_and_clears_the_rest(rig: Rig) -> None:
    """Lengths become the reuse boundaries, slots beyond the batch 0, in one launch."""
    rig.ops.reset_lengths(rig.base, ints(7, 8, 9), rig.stream)  # what staged values leave behind must not come back
    image = rig.ops.fill()
    rig.ops.of(image, rig.base.kv_lengths)[...] = [0, 1 << 30, 0]
    expect(rig, image, lambda: rig.ops.reset_lengths(rig.base, ints(0, 1 << 30), rig.stream))
    assert rig.base.active_batch_size == 2


def test_advance_lengths_touches_active_slots_only(rig: Rig) -> None:
    """A scalar or one increment per active slot; the lengths of other slots stay."""
    rig.base.reset_for_new_sequences([5, 6], rig.stream)
    image = rig.ops.fill()
    rig.ops.of(image, rig.base.kv_lengths)[...] = [5, 6, 9]
    rig.ops.to_device(rig.base.kv_lengths, ints(5, 6, 9))
    rig.ops.of(image, rig.base.kv_lengths)[...] = [9, 10, 9]
    expect(rig, image, lambda: rig.base.commit_sequence_length(4, rig.stream))
    increments = rig.ops.inner.allocate((2,), "int32")
    rig.ops.to_device(increments, ints(1, 3))
    rig.ops.of(image, rig.base.kv_lengths)[...] = [10, 13, 9]
    expect(rig, image, lambda: rig.base.commit_sequence_length(increments, rig.stream))
    with pytest.raises(ContractError, match="longer"):
        rig.base.commit_sequence_length(rig.ops.inner.allocate((1,), "int32"), rig.stream)


def test_zero_recurrent_clears_the_named_slots_in_every_layer(rig: Rig) -> None:
    """State and convolution state of cold slots are zero in every layer, others keep theirs; one launch."""
    image = rig.ops.fill()
    for array in rig.base.slot_arrays:
        rig.ops.of(image, array)[[2, 0]] = 0
    expect(rig, image, lambda: rig.ops.zero_recurrent(rig.base, ints(2, 0), rig.stream))
    expect(rig, image, lambda: rig.ops.zero_recurrent(rig.base, ints(), rig.stream), launches=0)


def moved(rig: Rig, image: NDArray[np.uint8], rows: list[tuple[int, ...]], *, capture: bool) -> None:
    """Apply jobs to an image, as the protocol words them."""
    for slot, recurrent, partial, base_page, draft_page, num_tokens in rows:
        pairs: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
        if recurrent >= 0:
            pairs += [
                (raw(rig.ops.of(image, state.live)[slot]), rig.ops.of(image, state.saved)[recurrent])
                for state in rig.storage.state_parts
            ]
        if partial >= 0:
            for part in rig.storage.page_parts:
                page = draft_page if part.is_draft else base_page
                for half in (0, 1):
                    live = raw(rig.ops.of(image, part.live)[half, page, :num_tokens])
                    pairs.append((live, rig.ops.of(image, part.saved)[partial, half, : live.size]))
        for live, saved in pairs:
            if capture:
                saved[...] = live
            else:
                live[...] = saved


JOBS = {
    "one": [(1, 3, 0, 5, 8, 3)],
    "whole page and single token": [(0, 0, 2, 6, 0, 7), (2, 1, 1, 0, 6, 1)],
    "state alone": [(2, 2, -1, -1, -1, 0)],
    "pages alone": [(0, -1, 2, 4, 3, 6)],
    "no valid token": [(1, 0, 1, 2, 2, 0)],
    "every slot": [(0, 2, 0, 1, 1, 2), (1, 1, -1, -1, -1, 0), (2, 3, 1, 3, 7, 5)],
}


@pytest.mark.parametrize("rows", JOBS.values(), ids=JOBS)
def test_capture_saves_exactly_what_the_jobs_name(rig: Rig, rows: list[tuple[int, ...]]) -> None:
    """Slot state and the first tokens of the page go to their snapshots, in one launch for all jobs and layers."""
    image = rig.ops.fill()
    moved(rig, image, rows, capture=True)
    expect(rig, image, lambda: rig.ops.capture(rig.storage, jobs(*rows), rig.stream))


@pytest.mark.parametrize("rows", JOBS.values(), ids=JOBS)
def test_restore_touches_only_the_valid_tokens(rig: Rig, rows: list[tuple[int, ...]]) -> None:
    """Snapshots go back to slot state and to the first tokens of the page, K and V of every layer, in one launch."""
    image = rig.ops.fill(1)
    moved(rig, image, rows, capture=False)
    expect(rig, image, lambda: rig.ops.restore(rig.storage, jobs(*rows), rig.stream))


def test_two_jobs_may_restore_from_one_snapshot(rig: Rig) -> None:
    """Two sequences that hit the same checkpoint get its bytes each."""
    rows = [(0, 1, 1, 4, 4, 3), (2, 1, 1, 5, 5, 3)]
    image = rig.ops.fill(2)
    moved(rig, image, rows, capture=False)
    expect(rig, image, lambda: rig.ops.restore(rig.storage, jobs(*rows), rig.stream))


def test_no_jobs_cost_no_launch(rig: Rig) -> None:
    """An empty list of jobs is legal and touches nothing."""
    image = rig.ops.fill()
    expect(rig, image, lambda: rig.ops.capture(rig.storage, jobs(), rig.stream), launches=0)
    expect(rig, image, lambda: rig.ops.restore(rig.storage, jobs(), rig.stream), launches=0)


def test_upload_mapping_fills_the_head_of_the_callers_array(rig: Rig) -> None:
    """The mapping's entries reach the device array; entries behind them stay."""
    device_mapping = rig.ops.allocate((5,), "int32")
    image = rig.ops.fill()
    rig.ops.of(image, device_mapping)[:3] = [-1, 0, 1]
    expect(rig, image, lambda: rig.ops.upload_mapping(ints(-1, 0, 1), device_mapping, rig.stream))
    expect(rig, image, lambda: rig.ops.upload_mapping(ints(), device_mapping, rig.stream), launches=0)


def test_compaction_moves_lengths_and_state_but_no_page(rig: Rig) -> None:
    """Survivors' lengths, state and convolution state stand in the new slots; pools and snapshots keep their bytes."""
    device_mapping = rig.ops.inner.allocate((3,), "int32")
    rig.ops.upload_mapping(ints(-1, 0, 1), device_mapping, rig.stream)
    image = rig.ops.fill()
    for array in (rig.base.kv_lengths, *rig.base.slot_arrays):
        part = rig.ops.of(image, array)
        part[0], part[1] = part[1].copy(), part[2].copy()
    expect(rig, image, lambda: rig.ops.compact_slot_state(rig.base, device_mapping, 3, 2, rig.stream))
    assert rig.base.active_batch_size == 2
    rig.ops.upload_mapping(ints(-1, -1), device_mapping, rig.stream)
    expect(rig, image, lambda: rig.ops.compact_slot_state(rig.base, device_mapping, 2, 0, rig.stream), launches=0)


@pytest.mark.parametrize("name", ["bf16-odd-mtp", "fp16-even-skewed-mtp"])
def test_boundary_hidden_rows_are_saved_and_put_back(ops: Any, name: str) -> None:
    """One hidden row moves to the snapshot and from there to another row, one launch each; nothing else moves."""
    build, skew = ENGINES[name]
    rig = build_rig(ops, build(), skew=skew)
    width, _itemsize = rig.storage.hidden_shape
    hidden = rig.ops.allocate((3, 4, width), "float16")
    image = rig.ops.fill()
    saved = rig.ops.of(image, rig.storage.hidden_rows)
    saved[2] = raw(rig.ops.of(image, hidden)[1, 3])
    expect(rig, image, lambda: rig.ops.capture_boundary_hidden(rig.storage, 2, HiddenRow(hidden, 1, 3), rig.stream))
    raw(rig.ops.of(image, hidden)[2, 0])[...] = saved[2]
    expect(rig, image, lambda: rig.ops.restore_boundary_hidden(rig.storage, 2, HiddenRow(hidden, 2, 0), rig.stream))


def test_host_arguments_are_read_before_an_op_returns(rig: Rig) -> None:
    """A caller who overwrites its arrays at once changes nothing (H23)."""
    lengths, mapping = ints(3, 4), ints(0, -1, 1)
    device_mapping = rig.ops.inner.allocate((3,), "int32")
    rig.ops.reset_lengths(rig.base, lengths, rig.stream)
    rig.ops.upload_mapping(mapping, device_mapping, rig.stream)
    lengths[:], mapping[:] = 99, 99
    rig.synchronize()
    assert rig.ops.to_host(rig.base.kv_lengths).tolist() == [3, 4, 0]
    assert rig.ops.to_host(device_mapping).tolist() == [0, -1, 1]


def test_synchronize_passes_the_synchronizers_answer_on(ops: Any) -> None:
    """The injected synchroniser is called once with the stream and its answer comes back; its exception too."""
    seen: list[Any] = []

    def answer(stream: Any) -> int:
        seen.append(stream)
        return 719

    def fail(stream: Any) -> int:
        raise RuntimeError("sticky")

    assert ops.synchronize(7, answer) == 719
    assert seen == [7]
    with pytest.raises(RuntimeError, match="sticky"):
        ops.synchronize(None, fail)
    assert ops.synchronize(None, None) in (None, 0)


REFUSALS: dict[str, tuple[str, Callable[[Rig], Any]]] = {
    "slot of zero out of range": ("slots", lambda r: r.ops.zero_recurrent(r.base, ints(0, 3), None)),
    "slot of zero twice": ("once", lambda r: r.ops.zero_recurrent(r.base, ints(1, 1), None)),
    "too many lengths": ("3 slots", lambda r: r.ops.reset_lengths(r.base, ints(1, 2, 3, 4), None)),
    "negative length": ("at least 0", lambda r: r.ops.reset_lengths(r.base, ints(1, -2), None)),
    "float lengths": ("integers", lambda r: r.ops.reset_lengths(r.base, np.array([1.0]), None)),
    "job slot": ("slots", lambda r: r.ops.capture(r.storage, jobs((3, 0, -1, -1, -1, 0)), None)),
    "job recurrent slot": ("recurrent", lambda r: r.ops.restore(r.storage, jobs((0, 4, -1, -1, -1, 0)), None)),
    "job partial slot": ("partial_kv", lambda r: r.ops.restore(r.storage, jobs((0, 0, 3, 1, 1, 2)), None)),
    "job page": ("base_pages", lambda r: r.ops.restore(r.storage, jobs((0, 0, 0, 7, 1, 2)), None)),
    "job page missing": ("base_pages", lambda r: r.ops.restore(r.storage, jobs((0, 0, 0, -1, 1, 2)), None)),
    "job draft page missing": ("draft_pages", lambda r: r.ops.restore(r.storage, jobs((0, 0, 0, 1, -1, 2)), None)),
    "job tokens": ("num_tokens", lambda r: r.ops.capture(r.storage, jobs((0, 0, 0, 1, 1, 8)), None)),
    "negative tokens": ("num_tokens", lambda r: r.ops.capture(r.storage, jobs((0, 0, 0, 1, 1, -1)), None)),
    "two captures into one slot": (
        "same place",
        lambda r: r.ops.capture(r.storage, jobs((0, 1, -1, -1, -1, 0), (1, 1, -1, -1, -1, 0)), None),
    ),
    "two restores into one slot": (
        "same place",
        lambda r: r.ops.restore(r.storage, jobs((0, 1, -1, -1, -1, 0), (0, 2, -1, -1, -1, 0)), None),
    ),
    "two restores into one page": (
        "same place",
        lambda r: r.ops.restore(r.storage, jobs((0, 1, 0, 3, 3, 1), (1, 2, 1, 3, 4, 1)), None),
    ),
    "two restores into one draft page": (
        "draft_pages",
        lambda r: r.ops.restore(r.storage, jobs((0, 1, 0, 3, 3, 1), (1, 2, 1, 4, 3, 1)), None),
    ),
    "mapping too long": (
        "longer",
        lambda r: r.ops.upload_mapping(ints(0, 1, 2), r.ops.inner.allocate((2,), "int32"), None),
    ),
    "mapping of another width": (
        "int32",
        lambda r: r.ops.upload_mapping(ints(0), r.ops.inner.allocate((2,), "float16"), None),
    ),
    "growing compaction": (
        "sizes obey",
        lambda r: r.ops.compact_slot_state(r.base, r.ops.inner.allocate((3,), "int32"), 2, 3, None),
    ),
    "batch too large": (
        "sizes obey",
        lambda r: r.ops.compact_slot_state(r.base, r.ops.inner.allocate((9,), "int32"), 4, 3, None),
    ),
    "hidden slot": (
        "snapshot_slot",
        lambda r: r.ops.capture_boundary_hidden(r.storage, 4, HiddenRow(_hidden(r), 0, 0), None),
    ),
    "hidden batch index": (
        "hidden slot",
        lambda r: r.ops.capture_boundary_hidden(r.storage, 0, HiddenRow(_hidden(r), 2, 0), None),
    ),
    "hidden row index": (
        "hidden row",
        lambda r: r.ops.restore_boundary_hidden(r.storage, 0, HiddenRow(_hidden(r), 0, -1), None),
    ),
    "hidden width": (
        "hidden states",
        lambda r: r.ops.restore_boundary_hidden(
            r.storage, 0, HiddenRow(r.ops.inner.allocate((2, 2, 8), "bfloat16"), 0, 0), None
        ),
    ),
}


def _hidden(rig: Rig) -> Any:
    return rig.ops.inner.allocate((2, 2, 9), "bfloat16")


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_op_changes_nothing(ops: Any, case: tuple[str, Callable[[Rig], Any]]) -> None:
    """Wrong arguments are a `ContractError` that names them; no byte changes and nothing is launched."""
    pattern, act = case
    rig = build_rig(ops, mtp_deployment(hybrid_engine("bfloat16")))
    rig.base.reset_for_new_sequences([1, 2], rig.stream)
    image = rig.ops.fill()

    def refused() -> None:
        with pytest.raises(ContractError, match=pattern):
            act(rig)

    expect(rig, image, refused, launches=0)
    assert rig.base.active_batch_size == 2


def test_hidden_rows_need_mtp(ops: Any) -> None:
    """A hybrid deployment without MTP saves no hidden rows and says so."""
    rig = build_rig(ops, hybrid_engine())
    with pytest.raises(ContractError, match="MTP"):
        rig.ops.capture_boundary_hidden(rig.storage, 0, HiddenRow(_hidden(rig), 0, 0), None)


def test_both_implementations_leave_the_same_bytes_after_a_long_run() -> None:
    """A seeded run of all ops over the same arena ends in equal images."""
    images = []
    for ops in (NumpyDeviceOps(), NumbaDeviceOps()):
        rig = build_rig(ops, mtp_deployment(hybrid_engine("bfloat16")), skew=1)
        mapping = rig.ops.inner.allocate((3,), "int32")
        rig.ops.fill(5)
        for seed in range(6):
            rng = np.random.default_rng(seed)
            slots, states, partials, pages, drafts = (rng.permutation(n)[:2] for n in (3, 4, 3, 7, 9))
            tokens = rng.integers(0, 8, 2)
            rows = jobs(*zip(slots, states, partials, pages, drafts, tokens, strict=True))
            (rig.ops.capture if seed % 2 else rig.ops.restore)(rig.storage, rows, rig.stream)
            rig.ops.upload_mapping(ints(*[(-1, 0, 1), (0, -1, 1), (0, 1, -1)][seed % 3]), mapping, rig.stream)
            rig.ops.compact_slot_state(rig.base, mapping, 3, 2, rig.stream)
            rig.ops.zero_recurrent(rig.base, ints(2), rig.stream)
            rig.ops.reset_lengths(rig.base, ints(*rng.integers(0, 14, 3)), rig.stream)
        rig.synchronize()
        images.append(rig.ops.image())
    np.testing.assert_array_equal(*images)
