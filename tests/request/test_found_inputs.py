"""Inputs that once were taken for something else: each with its kin, refused with nothing changed, or taken rightly."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.harness import OK, Harness, T, small
from support.odd_values import Lying, Tensor
from support.values import Hostile

from ctxcache import (
    AdapterKey,
    BlockKeyExtras,
    ContextCacheConfig,
    ContextCacheError,
    ContractError,
    CoordinatorSession,
    DecodingKvHeadroom,
    DeploymentError,
    Hash128,
    MediaSpanKey,
)

SECRET = b"sixteen secrets!"


def refused(h: Harness, act: Callable[[], object], error: type[ContextCacheError] = ContractError) -> str:
    """What `act` says when it is refused; nothing has changed."""
    before = h.observe(h.handle)
    with pytest.raises(error) as caught:
        act()
    assert h.observe(h.handle) == before
    return str(caught.value)


def begun(h: Harness, *prompts: Sequence[int]) -> CoordinatorSession:
    """A session whose prefill has run."""
    session = h.coordinator.session(list(prompts))
    session.__enter__()
    h.handle = session.handle
    return session


NO_RUNS = [
    {0: 501, 1: 502},
    {501, 502},
    {501: None, 502: None}.keys(),
    "ab",
    b"ab",
    (each for each in (501, 502)),
    iter([501, 502]),
]


@pytest.mark.parametrize("tokens", NO_RUNS, ids=lambda value: type(value).__name__)
def test_f01_keys_of_a_mapping_are_no_tokens(tokens: Any) -> None:
    """What is no list or array is refused wherever a run of values is expected, and nothing of it is published."""
    h = small(max_batch=2)
    session = begun(h, T(20), T(30))
    refused(h, lambda: session.prefilled(tokens))
    session.prefilled([1, 2])
    refused(h, lambda: session.retire(tokens))
    session.before_decode()
    refused(h, lambda: session.decoded(tokens))
    refused(h, lambda: session.decoded([tokens, [3]]))
    refused(h, lambda: session.decoded([1, 2], finished=tokens))
    session.decoded([1, 2])
    session.__exit__(None, None, None)
    refused(h, lambda: h.coordinator.session(tokens).__enter__())
    if not isinstance(tokens, bytes):  # which are a run of small tokens, as a list of them is
        refused(h, lambda: h.coordinator.session([T(20), tokens]).__enter__())
    refused(h, lambda: h.coordinator.session([T(20), T(20)], key_extras=tokens).__enter__())
    refused(h, lambda: h.coordinator.session([T(2), T(2)], per_position_media_hash=tokens).__enter__())


@pytest.mark.parametrize(
    ("given", "meant"),
    [(np.uint32(1), 1), (np.int8(127), 127), (np.uint8(255), 255), (np.int64(3), 3), (np.int32(2**31 - 1), 2**31 - 1)],
    ids=repr,
)
def test_f02_integers_of_any_width_become_int(given: Any, meant: int) -> None:
    """The arithmetic is the plain one, whatever the scalar's own width: equal to what the `int` does, refused or not."""
    outcomes = []
    for number in (given, meant):
        h = small(max_tokens=512)
        headroom = DecodingKvHeadroom(number)
        try:
            result = h.attempt(T(100), headroom=headroom)
        except ContractError as error:
            outcomes.append(str(error))
            continue
        assert result.status is OK
        h.prefill()
        outcomes.append(h.coordinator.prepare_decode_step(h.request, headroom=headroom))
        outcomes.append(h.free)
        h.finish()
    assert outcomes[: len(outcomes) // 2] == outcomes[len(outcomes) // 2 :]


@pytest.mark.parametrize("key", [SECRET, bytearray(SECRET)], ids=["bytes", "bytearray"])
def test_f03_a_key_is_in_no_text(key: Any) -> None:
    """Not in the configuration's repr, nor in a pickle of it; copies share it."""
    config = ContextCacheConfig(hash_key=key)
    assert "secret" not in f"{config!r} {config}"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="not pickled") as caught:
            pickle.dumps(config, protocol)
        assert "secret" not in str(caught.value)
    assert copy.copy(config).hash_key == copy.deepcopy(config).hash_key == SECRET
    plain = ContextCacheConfig(max_records=3)
    assert pickle.loads(pickle.dumps(plain)) == plain  # noqa: S301 - its own


@pytest.mark.parametrize(
    "key",
    [SECRET.decode(), SECRET + b"!", b"secret", bytearray(b"secret"), [SECRET], np.frombuffer(SECRET, np.uint8), 7],
    ids=lambda value: type(value).__name__,
)
def test_f03_a_wrong_key_is_not_echoed(key: Any) -> None:
    """The refusal says type and length of what was given, and nothing of what it holds."""
    with pytest.raises(DeploymentError, match="hash_key is a ") as caught:
        ContextCacheConfig(hash_key=key)
    assert "secret" not in str(caught.value)
    assert "115" not in str(caught.value)  # an "s"


def test_f10_masks_are_not_ignored() -> None:
    """A masked array is refused as tokens, lengths, flags and media: nobody knows what a masked value is."""
    h = small(max_batch=2)

    def masked(*values: int) -> Any:
        return np.ma.MaskedArray(values, mask=[False] * (len(values) - 1) + [True])

    refused(h, lambda: h.attempt(masked(*T(20))))
    refused(h, lambda: h.attempt(np.ma.MaskedArray(T(20))))  # also one that masks nothing
    refused(h, lambda: h.attempt(T(20), media=np.ma.MaskedArray(np.zeros((20, 2), np.uint64))))
    session = begun(h, T(20), T(30))
    refused(h, lambda: session.prefilled(masked(1, 2)))
    refused(h, lambda: session.prefilled([masked(1), masked(2)]))
    session.prefilled([1, 2])
    refused(h, lambda: session.retire(np.ma.MaskedArray([True, False], mask=[False, True])))
    session.before_decode()
    refused(h, lambda: session.decoded([1, 2], finished=np.ma.MaskedArray([True, False], mask=[False, True])))
    session.decoded([1, 2])
    session.__exit__(None, None, None)


@pytest.mark.parametrize("said", [0, 1, 3, 1000])
def test_f10_a_length_that_lies_is_not_believed(said: int) -> None:
    """What a sequence yields counts, everywhere: no more slots than the batch has, no token that was not there."""
    h = small(max_batch=2)
    refused(h, lambda: h.coordinator.session(Lying([T(9), T(9), T(9)], said)).__enter__())
    session = begun(h, Lying(T(20), said), Lying(T(30), said))
    assert [len(state.token_ids) for state in session.handle.inspect().sequences] == [20, 30]
    refused(h, lambda: session.prefilled(Lying([1, 2, 3], said)))
    refused(h, lambda: session.prefilled([Lying([1, 2], said), [3]]))
    session.prefilled(Lying([1, Lying([2], said)], said))
    session.before_decode()
    session.decoded([Lying([5], said), 6], finished=Lying([False, True], 2))
    assert session.active == [0]
    session.__exit__(None, None, None)


@pytest.mark.parametrize(
    "make",
    [Tensor, np.asarray, lambda v: np.asarray(v, ">i4"), lambda v: np.asarray(v, np.uint8)],
    ids=["tensor", "array", "big-endian", "uint8"],
)
def test_n01_arrays_of_any_library_are_tokens(make: Callable[[Any], Any]) -> None:
    """As prompts, as what was sampled, in rows and in runs: what a list of the same numbers is."""
    h = small(max_batch=2)
    session = begun(h, make(T(20)), make(T(30)))
    session.prefilled(make([3, 4]))
    session.before_decode()
    session.decoded(make([5, 6]))
    session.before_decode()
    session.decoded([make([7]), make(8)])
    session.before_decode()
    session.decoded(make([[9], [10]]))
    tails = [state.token_ids.tolist()[-4:] for state in session.handle.inspect().sequences]
    assert tails == [[3, 5, 7, 9], [4, 6, 8, 10]]
    session.__exit__(None, None, None)


@pytest.mark.parametrize(
    "wrong", [Tensor([1.5, 2.5]), Tensor([True, False]), Tensor([[1, 2], [3, 4]]), Tensor([1])], ids=repr
)
def test_n01_floats_flags_and_other_shapes_stay_refused(wrong: Any) -> None:
    """An array of another library is held to what a list is held to."""
    h = small(max_batch=2)
    session = begun(h, T(20), T(30))
    refused(h, lambda: session.prefilled(wrong))
    session.__exit__(None, None, None)


D = Hash128(1, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdapterKey("sql-lora"),
        lambda: AdapterKey(D, "1"),
        lambda: AdapterKey(D, -1),
        lambda: BlockKeyExtras(adapter="sql-lora"),
        lambda: BlockKeyExtras(isolation_digest=b"0123456789abcdef"),
        lambda: BlockKeyExtras(position_digest=Hostile()),
        lambda: BlockKeyExtras(media=[D]),
        lambda: BlockKeyExtras(media=7),
        lambda: MediaSpanKey(D, "grid", 0, 0, "image"),
        lambda: MediaSpanKey(D, D, 0, 0, 1.5),
        lambda: Hash128(-1, 0),
        lambda: Hash128(1 << 64, 0),
        lambda: Hash128("1", 0),
    ],
)
def test_n03_identities_check_themselves_where_they_are_built(make: Callable[[], object]) -> None:
    """A wrong field is a `ContractError` there, not where it is used."""
    with pytest.raises(ContractError):
        make()


def test_n03_numbers_of_identities_become_int() -> None:
    """Equal identities are equal and hash alike, whatever the width of the numbers they were built from."""
    assert AdapterKey(D, np.uint8(3)) == AdapterKey(D, 3)
    assert hash(MediaSpanKey(D, D, np.int64(1), np.int8(2), np.uint64(2**64 - 1))) == hash(
        MediaSpanKey(D, D, 1, 2, 2**64 - 1)
    )
    assert type(Hash128(np.uint64(5), np.int8(1)).hi) is int
    assert BlockKeyExtras(media=[MediaSpanKey(D, D, 0, 0, "image")]).media == (MediaSpanKey(D, D, 0, 0, "image"),)
