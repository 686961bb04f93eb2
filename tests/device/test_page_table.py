"""The page table: host rows are the truth, the device view follows, and only what changed moves."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.page_tables import CountingOps, agrees, view_of

from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.page_table import KVPageTable
from ctxcache.errors import ContractError, DeploymentError, InvariantError


@pytest.fixture(params=["numpy", "numba"])
def ops(request: pytest.FixtureRequest) -> Any:
    """Each implementation in turn."""
    return NumpyDeviceOps() if request.param == "numpy" else NumbaDeviceOps()


def test_a_new_table_is_empty_on_both_sides(ops: Any) -> None:
    """Every entry is -1 on the host and on the device, and nothing waits for an upload."""
    table = KVPageTable(3, 4, 10, device_ops=ops)
    agrees(table, [[], [], []])
    assert table.count_changes() == 0
    assert not table.is_identity
    assert (table.max_batch, table.max_pages_per_seq, table.num_pages, table.role) == (3, 4, 10, "base")


def test_set_row_clears_the_tail(ops: Any) -> None:
    """A shorter row leaves no page of the longer one behind, on the device neither; trailing -1 means no page."""
    table = KVPageTable(2, 4, 10, device_ops=ops)
    table.set_row(0, [1, 2, 3, 4])
    table.set_row(1, np.array([9, -1, -1, -1], np.int64))
    table.upload(None)
    agrees(table, [[1, 2, 3, 4], [9]])
    table.set_row(0, [7])
    table.upload(None)
    agrees(table, [[7], [9]])
    table.set_row(0, [])
    table.upload(None)
    agrees(table, [[], [9]])


def test_identity_gives_each_slot_its_own_run(ops: Any) -> None:
    """Row i holds the i-th run of pages; `is_identity` holds until a row is set, grown or compacted."""
    table = KVPageTable(2, 3, 6, device_ops=ops)
    table.set_identity()
    table.upload(None)
    agrees(table, [[0, 1, 2], [3, 4, 5]])
    for change in (
        lambda: table.set_row(0, [0, 1, 2]),
        lambda: table.compact_rows([0, 1], 2),
        lambda: table.extend_rows([0], [3], [0], []),
    ):
        table.set_identity()
        assert table.is_identity
        change()
        assert not table.is_identity
    small = KVPageTable(2, 3, 5, device_ops=ops)
    with pytest.raises(ContractError, match="needs 6 pages"):
        small.set_identity()
    agrees(small, [[], []])


def test_rows_are_copies(ops: Any) -> None:
    """Writing to what `host_row` and `row_lengths` return changes no row."""
    table = KVPageTable(1, 2, 4, device_ops=ops)
    table.set_row(0, [3])
    table.host_row(0)[:] = 0
    table.row_lengths()[:] = 0
    assert table.host_row(0).tolist() == [3, -1]
    assert table.row_lengths().tolist() == [1]


def test_growth_over_a_page_edge_moves_one_entry() -> None:
    """A decode step that grows one page in one row of a large table moves one entry, and one that grows none nothing."""
    ops = CountingOps()
    table = KVPageTable(256, 64, 20_000, device_ops=ops)
    for slot in range(256):
        table.set_row(slot, range(slot * 64, slot * 64 + 32))
    table.upload(None)
    table.extend_rows([17], [32], [1], [19_999])
    table.upload(None)
    table.upload(None)
    table.set_row(3, table.host_row(3))
    table.upload(None)
    assert ops.moved == [256 * 32, 1, 0, 0]
    assert view_of(table)[17, :, 32].tolist() == [19_999, 39_999]


def test_a_changed_row_moves_what_differs() -> None:
    """Of a row that is set again only the entries that differ move; a change that was taken back moves nothing."""
    ops = CountingOps()
    table = KVPageTable(2, 8, 100, device_ops=ops)
    table.set_row(0, range(8))
    table.upload(None)
    table.set_row(0, [0, 1, 2, 50, 4, 5])
    table.upload(None)
    table.set_row(0, [9])
    table.set_row(0, [0, 1, 2, 50, 4, 5])
    table.upload(None)
    assert ops.moved == [8, 3, 0]


def test_changes_between_uploads_add_up(ops: Any) -> None:
    """A row that is cleared and then set shorter, or set in its middle after its end, arrives whole."""
    table = KVPageTable(1, 5, 9, device_ops=ops)
    table.set_row(0, [1, 2, 3, 4, 5])
    table.upload(None)
    table.set_row(0, [])
    table.set_row(0, [7])
    table.upload(None)
    agrees(table, [[7]])
    table.extend_rows([0], [1], [1], [6])
    table.extend_rows([0], [2], [2], [5, 4])
    table.set_row(0, [8])
    table.extend_rows([0], [1], [1], [3])
    table.upload(None)
    agrees(table, [[8, 3]])


def test_compaction_moves_rows_and_renumbers_nothing(ops: Any) -> None:
    """Survivors' page ids stand in their new rows, rows from the new batch on are -1 on both sides."""
    table = KVPageTable(4, 3, 20, device_ops=ops)
    for slot, pages in enumerate([[1, 2], [3], [4, 5, 6], [7]]):
        table.set_row(slot, pages)
    table.upload(None)
    table.compact_rows([-1, 0, -1, 1], 2)
    table.upload(None)
    agrees(table, [[3], [7], [], []])
    table.compact_rows([-1, -1], 0)
    table.upload(None)
    agrees(table, [[], [], [], []])


@pytest.mark.parametrize(
    ("mapping", "new_batch"),
    [
        ([0, 0, -1], 1),
        ([0, 2, -1], 2),
        ([0, 1], 3),
        ([0, -1, 1], 3),
        ([-2, 0, 1], 2),
        ([0, 1, 2, 3], 4),
        ([0, 1, 2], 2),
        ([0.0, 1.0], 2),
    ],
)
def test_bad_compactions_change_nothing(ops: Any, mapping: list[int], new_batch: int) -> None:
    """Every destination must be hit exactly once (H22); otherwise rows, view and pending changes are as before."""
    table = KVPageTable(3, 2, 9, device_ops=ops)
    for slot in range(3):
        table.set_row(slot, [slot])
    table.upload(None)
    with pytest.raises(ContractError):
        table.compact_rows(mapping, new_batch)
    assert table.count_changes() == 0
    agrees(table, [[0], [1], [2]])


BAD_CHANGES: dict[str, tuple[str, Any]] = {
    "slot": ("slots 0 .. 1", lambda t: t.set_row(2, [1])),
    "negative slot": ("slots 0 .. 1", lambda t: t.set_row(-1, [1])),
    "row of no slot": ("slots 0 .. 1", lambda t: t.host_row(2)),
    "page too high": ("pages 0 .. 8", lambda t: t.set_row(0, [9])),
    "hole": ("pages 0 .. 8", lambda t: t.set_row(0, [1, -1, 2])),
    "page below -1": ("pages 0 .. 8", lambda t: t.set_row(0, [-2])),
    "row too long": ("more than 3 pages", lambda t: t.set_row(0, [1, 2, 3, 4])),
    "float pages": ("integers", lambda t: t.set_row(0, [1.5])),
    "huge page": ("int32 range", lambda t: t.set_row(0, [1 << 40])),
    "second of two rows": ("pages 0 .. 8", lambda t: t.set_rows([0, 1], [1, 1], [3, 9])),
    "counts and ids": ("add up", lambda t: t.set_rows([0, 1], [1, 1], [3])),
    "negative count": ("add up", lambda t: t.set_rows([0], [-1], [])),
    "counts and slots": ("one for each", lambda t: t.set_rows([0, 1], [1], [3])),
    "growth of no slot": ("slots 0 .. 1", lambda t: t.extend_rows([0, 5], [1, 0], [1, 1], [3, 4])),
    "growth not at the end": ("does not end", lambda t: t.extend_rows([0], [2], [1], [3])),
    "growth into the row": ("does not end", lambda t: t.extend_rows([0], [0], [1], [3])),
    "growth named twice": ("named twice", lambda t: t.extend_rows([0, 0], [1, 1], [1, 1], [3, 4])),
    "growth at a negative place": ("does not end", lambda t: t.extend_rows([0, 0], [1, -2], [1, 1], [3, 4])),
    "growth over the row": ("more than 3 pages", lambda t: t.extend_rows([1, 0], [0, 1], [1, 3], [1, 2, 3, 4])),
    "growth by a bad page": ("pages 0 .. 8", lambda t: t.extend_rows([1, 0], [0, 1], [1, 1], [1, 9])),
    "growth ids missing": ("add up", lambda t: t.extend_rows([0], [1], [2], [3])),
    "growth negative": ("add up", lambda t: t.extend_rows([1, 0], [0, 1], [1, -1], [])),
}


@pytest.mark.parametrize("case", BAD_CHANGES.values(), ids=BAD_CHANGES)
def test_a_refused_change_changes_nothing(case: tuple[str, Any]) -> None:
    """Wrong rows or ids are a `ContractError` that names value and limit; all rows, also of the same call, stay."""
    pattern, act = case
    table = KVPageTable(2, 3, 9, device_ops=NumpyDeviceOps())
    table.set_row(0, [5])
    table.upload(None)
    with pytest.raises(ContractError, match=pattern):
        act(table)
    assert not table.has_changes
    assert table.count_changes() == 0
    agrees(table, [[5], []])
    table.extend_rows([0, 1], [1, 0], [1, 2], [6, 7, 8])
    table.upload(None)
    agrees(table, [[5, 6], [7, 8]])


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1 << 16, 1 << 16, 1), (1, 1, (1 << 30) + 1)])
def test_impossible_tables_are_refused(sizes: tuple[int, int, int]) -> None:
    """Sizes that are not positive, or whose entries or V ids would not fit int32, are a `DeploymentError`."""
    with pytest.raises(DeploymentError):
        KVPageTable(*sizes, device_ops=NumpyDeviceOps())


@pytest.mark.parametrize(("column", "page", "pattern"), [(0, 9, "holds page 9"), (0, -3, "page -3"), (2, 4, "behind")])
def test_a_broken_row_is_never_uploaded(ops: Any, column: int, page: int, pattern: str) -> None:
    """An id out of range or a live id behind a -1 is found before anything moves, by the upload and by the check."""
    table = KVPageTable(2, 3, 9, device_ops=ops)
    table.set_row(0, [1])
    table.upload(None)
    before = view_of(table)
    table.set_row(0, [2])
    table._rows[0, column] = page
    table._dirty[0] = (0, column + 1)
    for act in (lambda: table.upload(None), table.check_invariants, table.freeze_upload):
        with pytest.raises(InvariantError, match=pattern):
            act()
    np.testing.assert_array_equal(view_of(table), before)


def test_a_wrong_length_is_found() -> None:
    """The full check compares the recorded lengths with the rows."""
    table = KVPageTable(1, 3, 9, device_ops=NumpyDeviceOps())
    table._lengths[0] = 2
    with pytest.raises(InvariantError, match="length"):
        table.check_invariants()


def test_after_a_failed_launch_the_next_upload_moves_everything() -> None:
    """A launch that raises leaves the device view unknown, so nothing is taken for uploaded."""
    ops = NumbaDeviceOps()
    table = KVPageTable(2, 3, 9, device_ops=ops)
    table.set_row(0, [1, 2])
    table.upload(None)
    table.set_row(1, [3])
    launch = ops._launcher.launch

    def fail(*_arguments: Any) -> None:
        raise RuntimeError("launch failed")

    ops._launcher.launch = fail
    with pytest.raises(RuntimeError, match="launch failed"):
        table.upload(None)
    ops._launcher.launch = launch
    assert table.count_changes() == 6
    table.upload(None)
    agrees(table, [[1, 2], [3]])
    assert table.count_changes() == 0


def test_a_frozen_upload_carries_the_rows_of_its_moment(ops: Any) -> None:
    """What ops that run late upload is the state at the enqueue, whatever the host rows became since; once."""
    table = KVPageTable(2, 3, 9, device_ops=ops)
    table.set_row(0, [1, 2])
    first = table.freeze_upload()
    table.set_row(0, [3])
    second = table.freeze_upload()
    assert table.count_changes() == 0
    ops.upload_rows(first, None)
    assert view_of(table)[0, 0].tolist() == [1, 2, -1]
    ops.upload_rows(second, None)
    ops.upload_rows(first, None)
    agrees(table, [[3], []])
    third = table.freeze_upload()
    third.forget_device_rows()
    assert table.count_changes() == 6


def test_a_frozen_upload_that_does_not_fit_is_kept(ops: Any) -> None:
    """More entries than there is room for: none is taken, and the count says how much room is needed."""
    table = KVPageTable(2, 3, 9, device_ops=ops)
    table.set_row(0, [1, 2])
    frozen = table.freeze_upload()
    small, large = np.zeros((1, 2), np.int32), np.zeros((9, 2), np.int32)
    assert frozen.take_changes(small) == 2
    assert not small.any()
    assert frozen.has_changes
    assert frozen.take_changes(large) == 2
    assert not frozen.has_changes


def test_a_row_that_is_what_it_was_needs_no_upload(ops: Any) -> None:
    """Written and written back: nothing is moved, and the table has no changes then."""
    table = KVPageTable(2, 3, 9, device_ops=ops)
    table.set_row(0, [1, 2])
    table.upload(None)
    out = np.full((9, 2), 77, np.int32)
    for count in (table.count_changes, lambda: table.take_changes(out)):
        table.set_row(0, [3])
        table.set_row(0, [1, 2])
        assert table.has_changes
        assert count() == 0
        assert not table.has_changes
        assert count() == 0
    assert (out == 77).all()


def test_a_table_belongs_to_one_live_owner() -> None:
    """Binding to a second live owner is refused; an owner that unbound itself, or is gone, frees the table."""

    class Owner:
        pass

    table, first, second = KVPageTable(1, 1, 1, device_ops=NumpyDeviceOps()), Owner(), Owner()
    table.bind(first)
    table.bind(first)
    with pytest.raises(ContractError, match="one live coordinator"):
        table.bind(second)
    assert table.owner is first
    table.unbind(second)
    assert table.owner is first
    table.unbind(first)
    table.bind(second)
    del second
    table.bind(first)
    assert table.owner is first


BATCH, WIDTH, PAGES = 4, 5, 30


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, Any]:
    """One change of a table, or an upload."""
    kind = draw(st.sampled_from(["set", "extend", "compact", "upload", "identity"]))
    if kind == "set":
        pages = draw(st.lists(st.integers(0, PAGES - 1), max_size=WIDTH))
        return kind, (draw(st.integers(0, BATCH - 1)), pages)
    if kind == "extend":
        return kind, draw(st.lists(st.integers(0, 3), min_size=BATCH, max_size=BATCH))
    if kind == "compact":
        return kind, draw(st.permutations(range(BATCH))), draw(st.integers(0, BATCH))  # type: ignore[return-value]
    return kind, None


@settings(max_examples=150, deadline=None)
@given(st.lists(changes(), max_size=12))
def test_after_any_changes_an_upload_makes_the_view_equal_the_rows(steps: list[Any]) -> None:
    """Whatever the order of changes and uploads, host rows follow a plain model and the view follows the rows.

    The number of entries moved never exceeds the entries that the model sees differ.
    """
    ops = CountingOps()
    table = KVPageTable(BATCH, WIDTH, PAGES, device_ops=ops)
    model: list[list[int]] = [[] for _ in range(BATCH)]
    uploaded = [row + [-1] * WIDTH for row in model]
    for kind, *arguments in steps:
        if kind == "set":
            slot, pages = arguments[0]
            table.set_row(slot, pages)
            model[slot] = list(pages)
        elif kind == "identity":
            table.set_identity()
            model = [list(range(i * WIDTH, (i + 1) * WIDTH)) for i in range(BATCH)]
        elif kind == "extend":
            grown = [(s, min(n, WIDTH - len(model[s]))) for s, n in enumerate(arguments[0])]
            new = [list(range(s, s + n)) for s, n in grown]
            table.extend_rows([s for s, _ in grown], [len(r) for r in model], [n for _, n in grown], [*chain(*new)])
            model = [old + added for old, added in zip(model, new, strict=True)]
        elif kind == "compact":
            order, survivors = arguments
            mapping = [slot if slot < survivors else -1 for slot in order]
            table.compact_rows(mapping, survivors)
            kept = {new: model[old] for old, new in enumerate(mapping) if new >= 0}
            model = [kept.get(slot, []) for slot in range(BATCH)]
        else:
            table.upload(None)
            padded = [(row + [-1] * WIDTH)[:WIDTH] for row in model]
            differing = sum(
                a != b for row, old in zip(padded, uploaded, strict=True) for a, b in zip(row, old, strict=False)
            )
            assert ops.moved[-1] == differing
            uploaded = padded
            agrees(table, model)
    table.upload(None)
    agrees(table, model)
