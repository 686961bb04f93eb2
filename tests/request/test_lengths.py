"""How far sequences may be computed: no token at or beyond the longest, whatever the page, and all of them up to there."""

from __future__ import annotations

import numpy as np
import pytest
from support.harness import OK, Harness, T, U

from ctxcache import (
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentKind,
    ContextCacheSequenceAdvance,
    ContractError,
    DecodingKvHeadroom,
    RequestFailedError,
)
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.testing.runtime.deployments import STEP_TOKENS

FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED
Kind = ContextCacheDeploymentKind
KINDS = pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.value)
PAGED = pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.PURE_RECURRENT])
SPECULATIVE = pytest.mark.parametrize(
    "kind", [Kind.EAGLE, Kind.HYBRID_MTP, Kind.SHARED_KV], ids=lambda kind: kind.value
)
DRAFTED = pytest.mark.parametrize("kind", [Kind.EAGLE, Kind.HYBRID_MTP], ids=lambda kind: kind.value)


def deployed(kind: Kind, **sizes: int) -> Harness:
    """A harness of a kind, with rows of 20 tokens in pages of 16 unless other sizes are given."""
    made = type("_", (Harness,), {"kind": kind})
    return made(**{"page": 16, "max_tokens": 20, "num_pages": 16, "snapshots": 4, **sizes})


def decode_to_the_end(h: Harness, accepted: int = 2) -> list[int]:
    """Step until no step fits; returns the committed lengths then."""
    while h.coordinator.can_prepare_decode_step(h.request).all():
        h.decode(accepted=[accepted])
    return [running.committed for running in h.running]


@KINDS
@pytest.mark.parametrize("length", [20, 21, 31, 32])
def test_a_prompt_without_room_for_one_token_more_is_refused(kind: Kind, length: int) -> None:
    """Also one whose last page would have room: 32 tokens' worth of pages make no row of 32. Nothing has changed."""
    h = deployed(kind)
    before = h.observe()
    with pytest.raises(ContractError, match=f"has {length} tokens.*max_sequence_length of the base engine is 20"):
        h.attempt(T(length))
    assert h.observe() == before


@KINDS
@pytest.mark.parametrize("length", [1, 15, 16, 17, 19])
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_no_token_is_computed_at_or_beyond_the_longest(kind: Kind, length: int, accepted: int) -> None:
    """Each prompt that is admitted decodes to exactly 20 tokens with state, its lookahead being the 21st, and no further."""
    h = deployed(kind)
    request, _ = h.admit(T(length))
    h.prefill()
    assert decode_to_the_end(h, accepted) == [20]
    (state,) = request.inspect().sequences
    assert (state.committed_state_length, state.token_ids.size, state.capacity) == (20, 21, 20)
    assert h.coordinator.can_prepare_decode_step(request).tolist() == [False]
    assert h.coordinator.prepare_decode_step(request) is FAILED
    assert "max_sequence_length 20" in h.coordinator.failure
    assert h.coordinator.finish(request) is OK
    assert h.violations == []
    assert h.run(T(length)) in ([0], [16], [length - 1])


@SPECULATIVE
@pytest.mark.parametrize("max_tokens", [32, 30, 29])
def test_a_session_near_the_end_of_its_row_ends_at_the_longest(kind: Kind, max_tokens: int) -> None:
    """Headroom shrinks: the batch does not end where the drafts would not fit any more, but at the row's last token."""
    h = deployed(kind, max_tokens=max_tokens, max_batch=2)
    base, _ = STEP_TOKENS[h.native_mode]
    request, _ = h.admit(T(max_tokens - 2), U(max_tokens - base))
    h.prefill()
    assert request.capacities.tolist() == [max_tokens, max_tokens]
    while len(h.running):
        fits = h.coordinator.can_prepare_decode_step(request)
        longest = [running.committed < max_tokens for running in h.running]
        assert fits.tolist() == longest, "a row of which the last token is not there can be stepped"
        if fits.all():
            h.decode(accepted=[1])
        else:
            h.keep(*np.flatnonzero(fits).tolist())
    assert h.coordinator.finish(request) is OK
    assert h.violations == []


@SPECULATIVE
def test_a_session_decodes_to_the_longest(kind: Kind) -> None:
    """With a `with` block: drafts until the row is full, then what is left to say is that it is."""
    h = deployed(kind, max_tokens=32)
    has_common = kind is Kind.EAGLE
    with h.coordinator.session([T(28)], execution_mode=h.native_mode) as session:
        session.prefilled([7], common_lengths=[28] if has_common else None)
        length = 28
        while session.can_decode().all():
            session.before_decode()
            assert session.capacities.tolist() == [32]
            count = min(3, 32 - length)
            length += count
            session.decoded([[7] * count], common_lengths=[length] if has_common else None)
        assert length == 32
        with pytest.raises(RequestFailedError, match="32 tokens with state"):
            session.before_decode()


@SPECULATIVE
def test_a_commit_beyond_the_capacity_is_refused(kind: Kind) -> None:
    """Also where the last page would have room for it: nothing has changed, and the step goes on."""
    h = deployed(kind, max_tokens=29)
    request, _ = h.admit(T(28))
    h.prefill()
    h.grow()
    assert request.capacities.tolist() == [29]
    common = h.common_lengths([28])
    for count in (2, 3, 4):
        with pytest.raises(ContractError, match=f"committed {28 + count}, beyond the 29 tokens"):
            h.coordinator.complete_decode_step(
                request, [ContextCacheSequenceAdvance([7] * count, 28 + count)], (), common
            )
    h.compute_step([3])
    h.complete()
    assert h.running[0].committed == 29
    h.coordinator.finish(request)


@DRAFTED
@pytest.mark.parametrize("draft", [18, 20, 26])
def test_a_shorter_draft_does_not_end_a_request(kind: Kind, draft: int) -> None:
    """Behind the draft's end its pages stay as they are, common lengths too, and the base goes on to its own end."""
    h = deployed(kind, max_tokens=30, max_draft_tokens=draft)
    request, _ = h.admit(T(draft - 1))
    h.prefill()
    ended = 0
    while h.coordinator.can_prepare_decode_step(request).all():
        before = request.inspect().sequences[0]
        h.decode(accepted=[2])
        (state,) = request.inspect().sequences
        assert state.draft_capacity <= draft
        assert state.common_state_length <= (draft if kind is Kind.EAGLE else 0)
        if before.committed_state_length >= draft:
            assert state.lease.draft_pages.size == before.lease.draft_pages.size
            assert state.committed_state_length == before.committed_state_length + 1, "without drafts"
            assert state.common_state_length == before.common_state_length
            ended += 1
    assert ended >= 3
    assert h.running[0].committed == 30
    assert h.coordinator.finish(request) is OK
    assert h.violations == []


@DRAFTED
def test_a_prompt_that_the_drafts_row_cannot_hold_is_refused(kind: Kind) -> None:
    """In the paired mode; a vanilla request of the same deployment has no draft."""
    h = deployed(kind, max_tokens=30, max_draft_tokens=18)
    with pytest.raises(ContractError, match="max_sequence_length of the draft engine is 18"):
        h.attempt(T(19))
    assert h.run(T(18)) == [0]
    assert h.run(T(29), execution_mode=Mode.VANILLA)[0] in (0, 16)


@PAGED
def test_an_explicit_headroom_that_does_not_fit_fails_the_request(kind: Kind) -> None:
    """As before: at admission it is an argument's fault, in a step the request is out of room."""
    h = deployed(kind)
    for length, extra in ((19, 2), (10, 11), (1, 20)):
        with pytest.raises(ContractError, match=f"needs room for {extra} more"):
            h.attempt(T(length), headroom=DecodingKvHeadroom(extra))
    request, _ = h.admit(T(16), headroom=DecodingKvHeadroom(4))
    h.prefill()
    assert not h.coordinator.can_prepare_decode_step(request, headroom=DecodingKvHeadroom(5)).any()
    assert h.coordinator.can_prepare_decode_step(request, headroom=DecodingKvHeadroom(4)).all()
    assert h.coordinator.prepare_decode_step(request, headroom=DecodingKvHeadroom(5)) is FAILED
    assert h.coordinator.finish(request) is OK


@PAGED
def test_capacities_say_how_far_the_prepared_pages_reach(kind: Kind) -> None:
    """`min(pages * P, max_sequence_length)`, of the base and of the draft, at admission and after each growth."""
    h = deployed(kind, page=4, max_tokens=18, max_batch=2)
    request, _ = h.admit(T(3), U(15))
    seen = []
    h.prefill()
    while h.coordinator.can_prepare_decode_step(request).all():
        h.grow()
        states = request.inspect().sequences
        assert request.capacities.tolist() == [min(4 * s.lease.base_pages.size, 18) for s in states]
        assert [state.capacity for state in states] == request.capacities.tolist()
        for state in states:
            draft = 4 * state.lease.draft_pages.size if h.paired else state.capacity
            assert state.draft_capacity == min(draft, 18)
        seen.append(request.capacities.tolist())
        h.compute_step([1])
        h.complete()
    assert seen[-1][1] == 18
    assert [running.committed for running in h.running] == [6, 18]
    h.keep(0)
    assert request.capacities.tolist() == [seen[-1][0]]
    h.coordinator.finish(request)


def test_can_prepare_tells_the_rows_that_are_full() -> None:
    """One of three is at its longest: it is told apart, and the others go on behind a compaction."""
    h = deployed(Kind.VANILLA, max_batch=3)
    request, _ = h.admit(T(19), U(18), T(5))
    h.prefill()
    h.decode()
    assert h.coordinator.can_prepare_decode_step(request).tolist() == [False, True, True]
    h.keep(1, 2)
    h.decode()
    assert h.coordinator.can_prepare_decode_step(request).tolist() == [False, True]
    assert h.coordinator.prepare_decode_step(request) is FAILED
    assert h.coordinator.failure.startswith("sequence 0 ")
    h.coordinator.finish(request)
