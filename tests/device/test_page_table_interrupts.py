"""A Ctrl-C at any line of a page table's changes and uploads: the next upload makes the device agree."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.page_tables import agrees

from ctxcache.device import numpy_ops, page_table
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.page_table import KVPageTable
from ctxcache.errors import ContractError


@pytest.fixture(params=["numpy", "numba"])
def ops(request: pytest.FixtureRequest) -> Any:
    """Each implementation in turn."""
    return NumpyDeviceOps() if request.param == "numpy" else NumbaDeviceOps()


CHANGES: dict[str, Any] = {
    "identity": lambda t: t.set_identity(),
    "compaction": lambda t: t.compact_rows([-1, 0], 1),
    "a row": lambda t: t.set_row(0, [7]),
    "rows": lambda t: t.set_rows([1, 0], [1, 2], [3, 1, 2]),
    "growth": lambda t: t.extend_rows([0, 1], [2, 3], [1, 0], [1]),
    "distrust": lambda t: t.forget_device_rows(),
}


def interrupted_at(step: int, act: Any) -> bool:
    """Do something, with a Ctrl-C at its `step`-th line in the page table's modules; returns whether it came that far."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal seen
        if frame.f_globals["__name__"] not in {page_table.__name__, numpy_ops.__name__}:
            return None
        if event == "line":
            seen += 1
            if seen == step:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def interrupt_everywhere(least: int, live: Callable[[Callable[[Callable[[], object]], None]], None]) -> None:
    """Live once for every line that a Ctrl-C can come at, and once without one.

    Args:
        least: lines there are more of, at the least.
        live: sets up, has the function that it is given do what is interrupted, and looks at the outcome.
    """
    for step in count(1):
        reached: list[bool] = []
        live(lambda act, step=step, reached=reached: reached.append(interrupted_at(step, act)))
        if not reached[0]:
            break
    assert step > least


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_interrupted_change_is_uploaded_all_the_same(ops: Any, change: Any) -> None:
    """Ctrl-C at any line of any change, and of the upload behind it: the next upload makes the view equal the rows."""

    def live(interrupted: Any) -> None:
        table = KVPageTable(2, 4, 8, device_ops=ops)
        table.set_identity()
        table.set_rows([0, 1], [2, 3], [4, 5, 6, 7, 1])
        table.upload(None)

        def act() -> None:
            change(table)
            table.upload(None)

        interrupted(act)
        table.upload(None)
        rows = [table.host_row(slot)[: table.row_lengths()[slot]].tolist() for slot in range(2)]
        agrees(table, rows)
        assert not table.is_identity or rows == [[0, 1, 2, 3], [4, 5, 6, 7]]
        table.set_rows([0, 1], [1, 1], [2, 3])
        table.upload(None)
        agrees(table, [[2], [3]])

    interrupt_everywhere(10, live)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_interrupted_change_leaves_an_identity_that_is_none(change: Any) -> None:
    """A table says that it is the identity only while it is."""

    def live(interrupted: Any) -> None:
        table = KVPageTable(2, 4, 8, device_ops=NumpyDeviceOps())
        table.set_identity()

        def act() -> None:
            with suppress(ContractError):  # full rows do not grow
                change(table)

        interrupted(act)
        if table.is_identity:
            assert [table.host_row(slot).tolist() for slot in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    interrupt_everywhere(1, live)


def test_a_view_that_is_distrusted_stays_so_through_an_interrupt() -> None:
    """Ctrl-C while everything is marked for the next upload: what is written over meanwhile is still made good."""

    def live(interrupted: Any) -> None:
        table = KVPageTable(2, 4, 8, device_ops=NumpyDeviceOps())
        table.set_rows([0, 1], [2, 3], [4, 5, 6, 7, 1])
        table.upload(None)
        table.device_ops.to_device(table.kernel_view, np.full((2, 2, 4), 77, np.int32))
        table.forget_device_rows()
        assert table.has_changes
        interrupted(lambda: table.upload(None))
        table.upload(None)
        agrees(table, [[4, 5], [6, 7, 1]])

    interrupt_everywhere(10, live)


def test_an_interrupted_freeze_takes_nothing() -> None:
    """Ctrl-C before anybody holds what was taken out of the table: the next upload moves it."""

    def live(interrupted: Any) -> None:
        table = KVPageTable(2, 4, 8, device_ops=NumpyDeviceOps())
        table.set_row(0, [1, 2])
        frozen: list[Any] = []
        interrupted(lambda: frozen.append(table.freeze_upload()))
        for upload in frozen:
            table.device_ops.upload_rows(upload, None)
        table.upload(None)
        agrees(table, [[1, 2], []])

    interrupt_everywhere(10, live)
