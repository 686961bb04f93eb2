"""Leases that grow, one at a time and a whole batch at once, all or none."""

from __future__ import annotations

import numpy as np
import pytest
from support.manager import Runtime, run_of

from ctxcache.errors import ContractError


def rows_of(*leases):
    return np.array([lease.row for lease in leases], np.int32)


def targets(*values):
    return np.array(values, np.int32)


def test_growth_appends_and_never_moves():
    """New pages come behind the old ones, evicting a block when the pool is empty."""
    runtime = Runtime(5)
    runtime.run(run_of("T", 8), base_extra_tokens=0)
    lease = runtime.begin(run_of("U", 9), base_extra_tokens=0)
    pages = lease.base_pages.tolist()
    assert runtime.manager.grow(lease, 1)
    runtime.manager.check_invariants()
    assert lease.base_pages.tolist()[:3] == pages
    assert len(lease.base_pages) == 4
    assert runtime.paths() == [[0]]


def test_growth_that_cannot_be_changes_nothing():
    """More pages than could ever be free: False, nothing evicted."""
    runtime = Runtime(5)
    runtime.run(run_of("T", 8), base_extra_tokens=0)
    lease = runtime.begin(run_of("U", 9), base_extra_tokens=0)
    before = runtime.everything()
    assert not runtime.manager.grow(lease, 3)
    assert not runtime.manager.grow(lease, 2**31 - 1)
    assert runtime.everything() == before
    with pytest.raises(ContractError, match="base_pages"):
        runtime.manager.grow(lease, -1)
    with pytest.raises(ContractError, match="paired draft"):
        runtime.manager.grow(lease, 0, 1)


def test_a_batch_grows_together():
    """Only leases below their target grow; what each got is told in the call's order."""
    runtime = Runtime(12)
    a, b, c = (runtime.begin(run_of(letter, 3)) for letter in "ABC")
    growth = runtime.manager.grow_leases(rows_of(c, a, b), targets(2, 1, 4))
    runtime.manager.check_invariants()
    assert growth
    assert growth.base.indices.tolist() == [0, 2]
    assert growth.base.first_page_indices.tolist() == [1, 1]
    assert growth.base.page_counts.tolist() == [1, 3]
    assert growth.base.page_ids.tolist() == [3, 4, 5, 6]
    assert growth.draft.indices.size == 0
    assert [lease.base_pages.tolist() for lease in (a, b, c)] == [[0], [1, 4, 5, 6], [2, 3]]


def test_a_batch_that_needs_nothing_grows_nothing():
    """Targets at or below the present pages: an empty, false result, and the same object every time."""
    runtime = Runtime()
    lease = runtime.begin(run_of("A", 5))
    growth = runtime.manager.grow_leases(rows_of(lease), targets(1))
    assert not growth
    assert growth is runtime.manager.grow_leases(rows_of(), targets())
    assert lease.base_pages.size == 2


def test_a_batch_grows_whole_or_not_at_all():
    """When the pages do not suffice for all, none grows and nothing is evicted; can_grow tells who could."""
    runtime = Runtime(6)
    runtime.run(run_of("T", 4), base_extra_tokens=0)
    a, b, c = (runtime.begin(run_of(letter, 3)) for letter in "ABC")
    before = runtime.everything()
    wanted = targets(2, 3, 2)
    assert runtime.manager.grow_leases(rows_of(a, b, c), wanted) is None
    assert runtime.manager.can_grow_leases(rows_of(a, b, c), wanted).tolist() == [True, True, False]
    assert runtime.manager.can_grow_leases(rows_of(c, b, a), wanted).tolist() == [True, True, False]
    assert runtime.manager.can_grow_leases(rows_of(a, b, c), targets(9, 2, 1)).tolist() == [False, True, True]
    assert runtime.manager.grow_leases(rows_of(a), targets(2**31 - 1)) is None
    assert runtime.everything() == before
    assert runtime.manager.grow_leases(rows_of(a, b), wanted[:2])
    assert len(runtime.manager.records) == 0
    runtime.manager.check_invariants()


@pytest.mark.parametrize(
    ("rows", "wanted", "message"),
    [
        (targets(0, 0), targets(1, 1), "named before"),
        (targets(7), targets(1), "no live lease"),
        (targets(-1), targets(1), "no live lease"),
        (targets(1), targets(1), "no live lease"),
        (targets(99), targets(1), "no live lease"),
        (targets(0), targets(1, 1), "entries"),
        (np.zeros(1, np.int64), targets(1), "lease_rows"),
        (targets(0), np.zeros((1, 1), np.int32), "base_page_targets"),
        ([0], targets(1), "lease_rows"),
    ],
)
def test_a_batch_of_wrong_rows_is_refused(rows, wanted, message):
    """Rows that are no live leases', twice the same, arrays of another shape or dtype: refused, nothing changes."""
    runtime = Runtime()
    runtime.begin(run_of("A", 5))
    runtime.release(runtime.begin(run_of("B", 1)))
    before = runtime.everything()
    for call in (runtime.manager.grow_leases, runtime.manager.can_grow_leases):
        with pytest.raises(ContractError, match=message):
            call(rows, wanted)
    with pytest.raises(ContractError, match="paired draft"):
        runtime.manager.grow_leases(targets(0), targets(1), targets(1))
    assert runtime.everything() == before


def test_read_only_and_strided_arrays_are_taken():
    """What callers pass need not be writable or contiguous."""
    runtime = Runtime()
    a, b = runtime.begin(run_of("A", 3)), runtime.begin(run_of("B", 3))
    rows = np.array([a.row, 9, b.row, 9], np.int32)[::2]
    wanted = targets(2, 2)
    wanted.setflags(write=False)
    assert runtime.manager.grow_leases(rows, wanted).base.page_ids.tolist() == [2, 3]
