"""The hash table of blocks against a dictionary, also where distances do not fit and where all keys want one slot."""

from __future__ import annotations

import numpy as np
import pytest

from ctxcache.manager.block_index import find, first_slot_of, ids_in, insert, remove


def empty_table(num_ids: int, id_bits: int) -> np.ndarray:
    slots = np.full(max(8, int(num_ids * 1.6)) + 1, -1, np.int32)
    slots[-1] = id_bits
    return slots


@pytest.mark.parametrize("id_bits", [6, 29, 31], ids=["distances fit", "distances saturate", "no room for distances"])
@pytest.mark.parametrize("num_first_slots", [1, 3, 10_000], ids=["one first slot", "three first slots", "spread"])
def test_the_table_holds_what_a_dictionary_holds(id_bits, num_first_slots):
    """2,000 random insertions and removals of 50 ids: after each, exactly the present keys are found, each by its id."""
    rng = np.random.default_rng(id_bits * num_first_slots)
    num_ids = 50
    slots = empty_table(num_ids, id_bits)
    candidates = rng.integers(1, 2**63, size=4000, dtype=np.uint64)
    first_slots = np.array([first_slot_of(low, slots.size - 1) for low in candidates])
    lows = candidates[np.isin(first_slots, np.unique(first_slots)[-num_first_slots:])][:200]
    key = np.zeros((num_ids, 2), np.uint64)
    present: dict[int, np.uint64] = {}
    for _ in range(2000):
        each = int(rng.integers(num_ids))
        if each in present:
            remove(key, slots, each)
            del present[each]
        else:
            low = rng.choice(lows)
            fresh = low not in present.values()
            assert insert(key, slots, each, np.uint64(7), low) == fresh
            if fresh:
                present[each] = low
        assert sorted(ids_in(slots)) == sorted(present)
        by_key = {low: each for each, low in present.items()}
        for low in lows[:60]:
            assert find(key, slots, np.uint64(7), low) == by_key.get(low, -1)
            assert find(key, slots, np.uint64(8), low) == -1
