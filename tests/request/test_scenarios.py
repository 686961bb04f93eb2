"""Scenarios from public bug reports, in the project's own words. Page size 128, at most 512 tokens a sequence."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from support.harness import OK, Harness, T, U, V

from ctxcache import (
    AdapterKey,
    BlockKeyExtras,
    ContextCacheCoordinatorStatus,
    ContextCacheSequenceAdvance,
    ContractError,
    Phase,
    hash_opaque_identity,
)
from ctxcache.testing import Part, Transcript

FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED


def test_h01_fully_cached_prompts_leave_at_least_one_token_to_compute() -> None:
    """A page-aligned prompt that is cached whole gives one block back, and the cached page is never written."""
    h = Harness()
    assert h.run(T(257)) == [0]
    cached = h.cached_pages()
    before = h.metrics

    request, starts = h.admit(T(256))
    assert starts == [128]
    own = request.inspect().sequences[0].lease.base_pages
    assert own[1] not in cached
    assert own[0] in cached
    h.coordinator.prepare_prefill(request)
    untouched = {page: h.words(0)[:, page].copy() for page in cached}
    h.words(0)[:, own[1]] = 0xEE
    for page, words in untouched.items():
        np.testing.assert_array_equal(h.words(0)[:, page], words)
    after = h.metrics
    assert after.matched_tokens - before.matched_tokens == 256
    assert after.reused_tokens - before.reused_tokens == 128
    assert after.full_input_rewind_plans - before.full_input_rewind_plans == 1
    h.coordinator.finish(request)

    assert h.run(T(257)) == [256]
    assert h.run(T(129)) == [128]
    assert h.run(T(128)) == [0]


def test_h02_growth_over_a_page_edge_reaches_the_device_row_before_the_step() -> None:
    """The second decode of a 255-token prompt takes exactly one page, and the device row names it at once."""
    h = Harness()
    request, _ = h.admit(T(255))
    assert h.free == 2
    h.prefill()
    h.decode()
    assert h.free == 2
    first_two = h.pages_of(0)
    assert len(first_two) == 2
    assert h.coordinator.prepare_decode_step(request) is OK
    assert h.free == 1
    assert h.pages_of(0)[:2] == first_two
    assert h.pages_of(0)[2] == request.inspect().sequences[0].lease.base_pages[2]
    h.coordinator.finish(request)


def test_h02_longest_admissible_prompt() -> None:
    """511 tokens fill the row with their lookahead; the step beyond fails the request; 512 tokens are refused."""
    h = Harness()
    request, _ = h.admit(T(511))
    assert h.free == 0
    h.prefill()
    h.decode()
    assert h.coordinator.prepare_decode_step(request) is FAILED
    assert request.phase is Phase.FINISHING
    with pytest.raises(ContractError, match="finish"):
        h.coordinator.prepare_decode_step(request)
    assert h.coordinator.finish(request) is OK
    assert h.free + len(h.cached_pages()) == 4

    seen = h.observe()
    with pytest.raises(ContractError, match=r"512 tokens.*max_sequence_length of the base engine is 512"):
        h.attempt(T(512))
    assert h.observe() == seen
    assert h.run(T(10)) == [0]


def test_h03_adapter_reloaded_under_the_same_name() -> None:
    """State computed with other adapter weights, or without the adapter, is never reused."""
    h = Harness(num_pages=16)
    first = BlockKeyExtras(adapter=AdapterKey(hash_opaque_identity("adapter, weights one")))
    second = BlockKeyExtras(adapter=AdapterKey(hash_opaque_identity("adapter, weights two")))
    assert h.run(T(257), extras=first) == [0]
    h.identity = 2
    assert h.run(T(258), extras=second) == [0]
    h.identity = 0
    assert h.run(T(258), extras=first) == [256]
    h.identity = 3
    assert h.run(T(258)) == [0]
    next_generation = BlockKeyExtras(adapter=AdapterKey(first.adapter.id, 1))
    assert h.run(T(258), extras=next_generation) == [0]


def test_h04_same_second_image_after_another_first_image() -> None:
    """A block's key holds its ancestors' media: the same second image behind another first one is no hit."""

    def media(first: int) -> np.ndarray:
        hashes = np.zeros((257, 2), np.uint64)
        hashes[0:64] = first
        hashes[130:201] = 33
        return hashes

    h = Harness(num_pages=16)
    tokens = [5] * 257
    assert h.run(tokens, media=media(11)) == [0]
    h.identity = 1
    assert h.run(tokens, media=media(22)) == [0]
    h.identity = 0
    assert h.run(tokens, media=media(11)) == [256]
    assert h.metrics.media_aware_sequences == 3


def test_h06_equal_prompts_in_one_batch_keep_their_own_pages() -> None:
    """Twins do not see each other's unwritten pages; the second publication finds the first and re-points nothing."""
    h = Harness(max_batch=2, num_pages=8)
    request, starts = h.admit(T(257), T(257))
    assert starts == [0, 0]
    leases = [sequence.lease for sequence in request.inspect().sequences]
    assert len({int(page) for lease in leases for page in lease.base_pages}) == 6
    assert h.free == 2
    h.prefill()
    rows = [h.pages_of(slot) for slot in (0, 1)]
    metrics = h.metrics
    assert (metrics.committed_publications, metrics.existing_publications) == (1, 1)
    h.decode()
    assert [h.pages_of(slot) for slot in (0, 1)] == rows
    assert h.coordinator.finish(request) is OK
    assert h.free == 6
    assert len(h.cached_pages()) == 2
    assert h.coordinator.manager.num_leases == 0


def test_h07_a_wrong_progress_report_changes_nothing() -> None:
    """Each malformed advance is refused with nothing changed; then the right one publishes."""
    h = Harness(max_batch=2)
    advance = ContextCacheSequenceAdvance
    request, _ = h.admit(T(129), T(130))
    h.coordinator.prepare_prefill(request)
    seen = h.observe(request)
    wrong = {
        "one entry only": [advance([7], 129)],
        "second too short": [advance([7], 129), advance([7], 129)],
        "second too long": [advance([7], 129), advance([7], 131)],
        "no accepted token": [advance([], 129), advance([], 130)],
        "no token given": [advance(None, 129), advance(None, 130)],
        "two accepted": [advance([7, 8], 129), advance([7, 8], 130)],
        "float tokens": [advance([7.0], 129), advance([7], 130)],
        "no advance": [None, None],
    }
    for what, advances in wrong.items():
        with pytest.raises(ContractError):
            h.coordinator.finalize_prefill_publication(request, advances)
        assert h.observe(request) == seen, what
    h.compute_prompts()
    right = [advance([7], 129), advance([7], 130)]
    assert h.coordinator.finalize_prefill_publication(request, right) is OK
    metrics = h.metrics
    assert (metrics.committed_publications, metrics.existing_publications, h.records) == (1, 1, 1)
    h.coordinator.finish(request)


def test_h09_no_index_entry_outlives_its_page() -> None:
    """What was evicted of an old prefix is a miss, what was not is found, and the index is as large as the cached pages at every step."""

    def index_size_is_cached_pages() -> bool:
        return h.coordinator.manager.num_indexed_blocks == len(h.cached_pages())

    h = Harness()
    assert h.run(T(257)) == [0]
    assert h.free == 2
    assert index_size_is_cached_pages()
    assert h.run(U(385)) == [0]
    assert h.free == 1
    assert index_size_is_cached_pages()
    assert h.run(T(258)) == [0]
    assert index_size_is_cached_pages()
    assert h.run(U(386)) == [128]
    assert index_size_is_cached_pages()


def test_h11_evicting_one_branch_keeps_the_shared_stem() -> None:
    """A record that goes takes only what no other record needs."""
    h = Harness(num_pages=8, max_records=2)
    branch = T(256) + U(129)
    assert h.run(T(385)) == [0]
    assert h.run(branch) == [256]
    assert h.free == 4
    assert h.run(V(129)) == [0]
    assert h.free == 4
    assert h.run(T(386)) == [256]
    h2 = Harness(num_pages=8, max_records=2)
    h2.run(T(385))
    h2.run(branch)
    h2.run(V(129))
    assert h2.run([*branch, 9]) == [384]


BAD_MAPPINGS = [
    ([1, 0, -1], 2),
    ([0, 0, -1], 1),
    ([-1, 1, 0], 2),
    ([0, 2, -1], 2),
    ([0, 1], 2),
    ([0, 1, 2], 2),
    ([0, -1, 1], 3),
    ([-2, 0, 1], 2),
    ([0, 1, 2, 3], 4),
    ([0.0, 1.0, -1.0], 2),
    ([True, False, -1], 2),
    (None, 0),
    ([0, 1, -1], True),
    ([0, 1, -1], "2"),
]


@pytest.mark.parametrize(("mapping", "new_batch"), BAD_MAPPINGS)
def test_h22_bad_compaction_maps_are_refused_before_anything_moves(mapping: object, new_batch: object) -> None:
    """No upload, no change of phase; the right mapping still works."""
    h = Harness(max_batch=3)
    request, _ = h.admit(T(10), U(10), V(10))
    h.prefill()
    device_before = np.array(h.mapping)
    seen = h.observe(request)
    with pytest.raises(ContractError):
        h.coordinator.begin_batch_compaction(request, mapping, new_batch, h.mapping)
    assert h.observe(request) == seen
    np.testing.assert_array_equal(h.mapping, device_before)
    h.keep()
    assert request.phase is Phase.FINISHING
    with pytest.raises(ContractError):
        h.coordinator.prepare_decode_step(request)
    assert h.coordinator.finish(request) is OK
    assert h.free == 12


def test_h23_the_mapping_is_the_callers_again_after_begin() -> None:
    """The result follows the mapping as it was handed over, whatever became of the caller's objects."""
    h = Harness(max_batch=3)
    request, _ = h.admit(T(10), U(10), V(10))
    h.prefill()
    pages = [h.pages_of(slot) for slot in range(3)]
    mapping = np.array([0, -1, 1], np.int32)
    device_mapping = h.ops.allocate((3,), "int32")
    assert h.coordinator.begin_batch_compaction(request, mapping, 2, device_mapping) is OK
    mapping[:] = [-1, -1, 0]
    del device_mapping
    gc.collect()
    assert h.coordinator.compact_batch(request) is OK
    assert request.batch_size == 2
    assert [h.pages_of(slot) for slot in range(3)] == [pages[0], pages[2], []]
    h.running = [h.running[0], h.running[2]]
    h.decode()
    h.coordinator.finish(request)


def test_the_content_oracle_can_fail() -> None:
    """The harness's check finds a single wrong byte, so that its silence means something."""
    h = Harness()
    request, _ = h.admit(T(200))
    h.prefill()
    page = h.pages_of(0)[1]
    h.words(1)[1, page, 3] ^= np.uint64(1)
    with pytest.raises(AssertionError, match=r"layer 1, VALUE: page \d+ holds wrong bytes at position 131"):
        h.check()
    assert Transcript(T(5)).words(Part.KEY, 0, 4, 5) != Transcript(U(5)).words(Part.KEY, 0, 4, 5)
    h.coordinator.finish(request)
