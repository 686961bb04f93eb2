"""A batch pins what all its sequences reuse before it evicts for any: their order changes no start (R4)."""

from __future__ import annotations

from itertools import permutations

import pytest
from support.harness import Harness, T, U, V

from ctxcache import ContextCacheCoordinatorStatus as Status


def full_cache(max_batch: int, num_pages: int) -> Harness:
    """A cache of pages of 16 tokens that is full: two blocks of T first, and then others of V."""
    h = Harness(page=16, max_tokens=64, max_batch=max_batch, num_pages=num_pages)
    h.run(T(33))
    for start in range(0, 16 * (num_pages - 2), 32):
        h.run([start + token for token in V(33)])
    assert h.coordinator.metrics().base_kv_pages.free == 0
    h.run(T(33))  # the pages of T are used once more, and the oldest are V's
    return h


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["hit last", "hit first"])
def test_r04_a_cold_prompt_does_not_evict_what_its_neighbour_reuses(order: tuple[int, int]) -> None:
    """R4: a cold prompt and a hit in a full cache: both orders reuse the two blocks."""
    h = Harness(page=16, max_tokens=64, max_batch=2, num_pages=8)
    h.run(T(33))
    h.run(V(33))
    prompts = [T(34), U(60)]
    _, starts = h.admit(*(prompts[index] for index in order))
    assert starts[order.index(0)] == 32
    h.finish()


def test_the_order_of_three_changes_no_start() -> None:
    """Two hits and a cold one, in all six orders."""
    found = set()
    for order in permutations(range(3)):
        h = Harness(page=16, max_tokens=64, max_batch=3, num_pages=12)
        h.run(T(33))
        h.run(V(33))
        prompts = [T(34), V(34), U(60)]
        _, starts = h.admit(*(prompts[index] for index in order))
        found.add(tuple(starts[order.index(index)] for index in range(3)))
        h.finish()
    assert found == {(32, 32, 0)}


def test_sequences_go_cold_from_the_last_one_back() -> None:
    """Where hits pin what the batch needs, the last goes cold first; the first keeps what it reuses, and the count says it."""
    h = Harness(page=16, max_tokens=64, max_batch=2, num_pages=8)
    h.run(T(49))
    h.run(V(49))
    assert h.coordinator.metrics().base_kv_pages.free == 2
    before = h.coordinator.metrics()
    _, starts = h.admit(T(62), [token + 1 for token in U(62)])
    assert starts == [48, 0]
    assert h.coordinator.metrics().forced_cold_sequences == before.forced_cold_sequences
    h.finish()


def test_a_batch_that_never_fits_says_which_sequence_lacks_pages_and_changes_nothing() -> None:
    """The failure names sequence, pages and remedy; free pages, records and leases are as before."""
    h = Harness(page=16, max_tokens=64, max_batch=3, num_pages=8)
    h.run(T(33))
    before = h.coordinator.metrics()
    result = h.attempt(T(62), U(62), V(62))
    assert result.status is Status.REQUEST_FAILED
    assert "sequence 2" in h.coordinator.failure
    assert "raise num_pages" in h.coordinator.failure
    after = h.coordinator.metrics()
    assert (after.base_kv_pages, after.current_records) == (before.base_kv_pages, before.current_records)
    assert h.coordinator.manager.num_leases == 0
