"""Which record goes: the oldest that frees something lacking, also where a lease holds the last page of its path.

A lease that computed a prefix again publishes behind pages of others: it holds the end of the path, not its beginning.
"""

from __future__ import annotations

import pytest
from support.manager_views import keys_of

from ctxcache.ids import AcquireStatus
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.testing import ReferenceManager

BOTH = pytest.mark.parametrize("make", [ContextCacheManager, ReferenceManager], ids=["fast", "twin"])


def begin(manager, *tokens, mode=Mode.VANILLA, bypass=False):
    """Lease one page a token, and publish all of them."""
    plan = manager.plan(keys_of(tokens, 1), len(tokens), mode=mode, base_extra_tokens=0, bypass=bypass)
    result = manager.acquire(plan)
    assert result.status is AcquireStatus.ACQUIRED
    paired = {"draft_state_length": len(tokens)} if mode is Mode.EAGLE else {}
    record = manager.publish(result.lease, keys_of(tokens, 1), len(tokens), **paired).record
    return result.lease, record


def lives_of(manager, mode):
    """Publish `1 2 3`, then `1 2 4` cold (still leased), then `5`; the first record goes when `5` begins."""
    first, first_record = begin(manager, 1, 2, 3, mode=mode)
    _, straddling = begin(manager, 1, 2, 4, mode=mode, bypass=True)
    manager.release(first)
    newest, newest_record = begin(manager, 5, mode=mode)
    manager.release(newest)
    assert not first_record.cached
    assert straddling.cached
    assert newest_record.cached
    manager.check_invariants()
    return straddling, newest_record


@BOTH
def test_a_base_page_before_a_leased_end_goes_first(make):
    """The older record's last page is leased, its first two are not: it goes before the newer one that is all idle."""
    manager = make(tokens_per_page=1, num_base_pages=6, max_records=2)
    straddling, newest = lives_of(manager, Mode.VANILLA)
    begin(manager, 6)
    assert not straddling.cached
    assert newest.cached
    manager.check_invariants()


@BOTH
def test_a_draft_page_before_a_leased_end_goes_first(make):
    """The same of draft pages, with base pages to spare."""
    manager = make(tokens_per_page=1, num_base_pages=20, num_draft_pages=6, max_records=3, kind=Kind.EAGLE)
    straddling, newest = lives_of(manager, Mode.EAGLE)
    begin(manager, 6, 7, mode=Mode.EAGLE)
    assert not straddling.cached
    assert newest.cached
    manager.check_invariants()


@BOTH
def test_a_leased_end_with_nothing_idle_before_it_stays(make):
    """Where the pages before it are leased too, evicting the older record frees nothing, and it is passed over."""
    manager = make(tokens_per_page=1, num_base_pages=4, max_records=2)
    lease, record = begin(manager, 1, 2, 3)
    other, idle = begin(manager, 5)
    manager.release(other)
    begin(manager, 6)
    assert record.cached
    assert not idle.cached
    manager.release(lease)
    manager.check_invariants()
