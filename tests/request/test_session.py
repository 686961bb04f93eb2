"""The session layer: exceptions instead of statuses, compaction by itself."""

from __future__ import annotations

import numpy as np
import pytest
from support.harness import OK, Harness, T, U, V

from ctxcache import BlockKeyExtras, ContractError, PoisonedError, RequestFailedError, hash_opaque_identity


def small(**options: object) -> Harness:
    return Harness(**{"page": 16, "max_tokens": 64, "max_batch": 3, **options})


def test_a_batch_decodes_until_nothing_is_active() -> None:
    """Sequences leave as they end; the rest moves up with its bytes; the answers are reusable afterwards."""
    h = small()
    prompts = [T(20), U(17), V(30)]
    last_step = {0: 12, 1: 2, 2: 7}
    with h.coordinator.session(prompts) as s:
        assert s.prefill_starts == [0, 0, 0]
        assert s.active == [0, 1, 2]
        h.follow(s.handle, prompts)
        h.compute_prompts()
        s.prefill_enqueued()
        h.sample_first()
        s.prefilled([7, 7, 7])
        step = 0
        while s.active:
            s.before_decode()
            h.compute_step()
            h.check()
            step += 1
            before = s.active
            ended = [last_step[index] == step for index in before]
            moved = s.decoded(np.full(len(before), 7), finished=ended)
            if any(ended):
                assert [moved[slot] >= 0 for slot in range(len(before))] == [not end for end in ended]
                h.running = [running for running, end in zip(h.running, ended, strict=True) if not end]
            else:
                assert moved is None
            assert s.active == [index for index, end in zip(before, ended, strict=True) if not end]
        assert step == 12
    assert h.coordinator.manager.num_leases == 0
    assert h.run([*T(20), *[7] * 13]) == [32]
    assert h.sync.calls == 2, "one synchronisation for each of the two compactions"


def test_statuses_become_exceptions() -> None:
    """A busy coordinator, exhausted pages and a failed drain each raise their own error."""
    h = small(num_pages=4)
    with h.coordinator.session([T(20)]), pytest.raises(RequestFailedError):
        h.coordinator.session([T(20)]).__enter__()
    with h.coordinator.session([T(20), U(20)]) as s:
        s.prefilled([7, 7])
        for _ in range(12):
            s.before_decode()
            s.decoded([7, 7])
        assert s.can_decode().tolist() == [False, False]
        with pytest.raises(RequestFailedError):
            s.before_decode()
    assert h.coordinator.manager.num_leases == 0
    h.sync.outcomes = [3]
    with pytest.raises(PoisonedError), h.coordinator.session([T(20)]):
        pass
    with pytest.raises(PoisonedError):
        h.coordinator.session([T(20)]).__enter__()


def test_an_exception_inside_the_block_abandons() -> None:
    """The caller's exception passes through; the request is drained, released and not published."""
    h = small()
    with pytest.raises(ZeroDivisionError), h.coordinator.session([T(20)]):
        raise ZeroDivisionError
    assert h.sync.calls == 1
    assert h.records == 0
    assert h.coordinator.manager.num_leases == 0


def test_wrong_counts_are_refused_and_the_session_goes_on() -> None:
    """Another number of tokens or flags than active sequences is a ContractError with nothing changed."""
    h = small()
    with h.coordinator.session([T(20), U(20)]) as s:
        with pytest.raises(ContractError, match="2 active"):
            s.prefilled([7])
        s.prefilled([7, 7])
        s.before_decode()
        with pytest.raises(ContractError, match="2 active"):
            s.decoded([7, 7, 7])
        with pytest.raises(ContractError, match="2 active"):
            s.decoded([7, 7], finished=[True])
        assert s.decoded([[7], [7]]) is None
    with pytest.raises(ContractError, match="2 sequences"):
        h.coordinator.session([T(5), U(5)], key_extras=[BlockKeyExtras()])


@pytest.mark.parametrize("name", ["handle", "prefill_starts", "active"])
def test_there_is_no_request_before_the_block_and_its_answers_stay_behind_it(name: str) -> None:
    """What belongs to a request is refused before the block is entered, or where it was refused; later it stays readable."""
    h = small()
    session = h.coordinator.session([T(5)])
    with pytest.raises(ContractError, match="enter its with block first"):
        getattr(session, name)
    with session:
        inside = getattr(session, name)
        refused = h.coordinator.session([T(5)])
        with pytest.raises(RequestFailedError):
            refused.__enter__()
        with pytest.raises(ContractError, match="enter its with block first"):
            getattr(refused, name)
    assert getattr(session, name) == inside


def test_options_reach_the_admission() -> None:
    """Extras given once hold for every sequence; given one a sequence they stay apart."""
    h = small()
    a = BlockKeyExtras(isolation_digest=hash_opaque_identity("a"))
    b = BlockKeyExtras(isolation_digest=hash_opaque_identity("b"))
    with h.coordinator.session([T(40)], key_extras=a) as s:
        s.prefilled([7])
    with h.coordinator.session([T(40), T(40), T(40)], key_extras=[a, b, BlockKeyExtras()]) as s:
        assert s.prefill_starts == [32, 0, 0]
        assert s.stream is h.stream
    assert h.coordinator.shutdown() is OK


def test_retire_ends_sequences_between_steps() -> None:
    """A cancelled sequence leaves without a step, its pages are free, the others go on; a wrong call changes nothing."""
    h = small(num_pages=4)
    with h.coordinator.session([T(20), U(20)]) as s:
        with pytest.raises(ContractError, match="is not possible in state"):
            s.retire([True, True])
        s.prefilled([7, 7])
        for _ in range(12):
            s.before_decode()
            with pytest.raises(ContractError, match="is not possible in state"):
                s.retire([True, True])
            s.decoded([7, 7])
        for leaving in (True, [True], [2, 0], [[True, False]]):
            with pytest.raises(ContractError, match=r"leaving|entries"):
                s.retire(leaving)
        assert s.retire([False, False]) is None
        assert s.active == [0, 1]
        assert not s.can_decode().any()
        assert s.retire([True, False]) == [-1, 0]
        assert s.active == [1]
        assert s.can_decode().tolist() == [True]
        s.before_decode()
        s.decoded([7])
        assert s.retire([True]) == [-1]
        assert s.active == []
    assert h.coordinator.manager.num_leases == 0


def test_a_session_says_why_it_was_refused() -> None:
    """Another request, and too few pages, are told apart; a session outside its block names the block."""
    h = small(num_pages=4)
    with h.coordinator.session([T(20)]), pytest.raises(RequestFailedError, match="another request is active"):
        h.coordinator.session([T(20)]).__enter__()
    with pytest.raises(RequestFailedError, match=r"sequence 1 .* 40 tokens, needs 3 base pages .* free.*num_pages"):
        h.coordinator.session([T(40), U(40)]).__enter__()
    with pytest.raises(ContractError, match="enter its with block"):
        h.coordinator.session([T(20)]).prefilled([7])
    with pytest.raises(ContractError, match=r"begins with the token \d+; pass a list of prompts"):
        h.coordinator.session(T(20))


def test_calls_out_of_turn_name_the_order_in_the_sessions_own_words() -> None:
    """Each is refused with what comes before it, and the session goes on."""
    h = small()
    with h.coordinator.session([T(20)]) as s:
        with pytest.raises(
            ContractError, match=r"^before_decode\(\) comes after prefilled\(\).*'executing.prefilling'"
        ):
            s.before_decode()
        with pytest.raises(ContractError, match=r"^decoded\(\) comes after before_decode\(\); complete_decode_step"):
            s.decoded([7])
        s.prefilled([7])
        with pytest.raises(ContractError, match=r"^prefilled\(\) comes once"):
            s.prefilled([7])
        s.before_decode()
        with pytest.raises(ContractError) as caught:
            s.decoded([[7, 7]])
        assert not str(caught.value).startswith("decoded() comes"), "it was its turn: the tokens are wrong"
        assert s.decoded([7], finished=[True]) == [-1]


def test_a_sequence_at_its_limit_is_told_with_what_to_do() -> None:
    """Nothing but leaving is possible then; what could have been asked before is said."""
    h = small()
    with h.coordinator.session([T(63)]) as s:
        s.prefilled([7])
        s.before_decode()
        s.decoded([7])
        with pytest.raises(
            RequestFailedError, match=r"sequence 0 .* has 64 tokens.*max_sequence_length 64.*can_decode\(\).*retire\(\)"
        ):
            s.before_decode()
    assert h.coordinator.manager.num_leases == 0
