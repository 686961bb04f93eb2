"""The model without weights finds every kind of wrong byte, row, length and state, and says where."""

from __future__ import annotations

import numpy as np
import pytest

from ctxcache.errors import InvariantError
from ctxcache.fsm import FaultGroup
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.testing.actions import ACTIONS
from ctxcache.testing.fault_runs import FaultRun
from ctxcache.testing.key_oracle import KeyOracle
from ctxcache.testing.kind_sweep import aftermath, check_balance, run_with
from ctxcache.testing.oracle import Transcript
from ctxcache.testing.runtime.model import HiddenModel
from ctxcache.testing.runtime.runtime import FakeRuntime
from ctxcache.testing.runtime.scripts import run_request

PROMPT = [1, 2, 0, 1, 2, 0, 1, 1]


def prepared(kind: Kind = Kind.VANILLA) -> FakeRuntime:
    """A runtime whose prompt lies on the device, all work done, ready for a step."""
    runtime = FakeRuntime(kind)
    runtime.begin([PROMPT])
    runtime.prefill()
    runtime.grow()
    runtime.deferred.synchronize(None, None)
    assert runtime.violations == []
    return runtime


def step(runtime: FakeRuntime) -> list[str]:
    """Run the step; what it found."""
    runtime.compute_step()
    runtime.deferred.synchronize(None, None)
    found = list(runtime.violations)
    runtime.abandon()
    return found


def test_a_wrong_word_is_named_by_slot_layer_part_page_and_position() -> None:
    """One word of one half of one layer."""
    runtime = prepared()
    page = int(np.asarray(runtime.resources.base_page_table.kernel_view)[0, 0, 1])
    np.asarray(runtime.resources.base_cache.kv_pool(1)).view(np.uint64)[1, page, 2, 0, 0] ^= np.uint64(1)
    assert step(runtime) == [f"step: slot 0, layer 1, VALUE: page {page} holds wrong bytes at position 6"]


@pytest.mark.parametrize("value", [-1, 5])
def test_a_wrong_row_is_named(value: int) -> None:
    """A page that is missing from the row, or whose V half is not beside its K half."""
    runtime = prepared()
    view = np.asarray(runtime.resources.base_page_table.kernel_view)
    view[0, 1 if value >= 0 else 0, 0] = value
    assert "the device row of slot 0 is" in step(runtime)[0]


def test_a_wrong_length_is_named() -> None:
    """The device length of the slot."""
    runtime = prepared()
    np.asarray(runtime.resources.base_cache.kv_lengths)[0] = 3
    assert step(runtime) == ["step: the device length of slot 0 is 3 and must be 8"]


def test_wrong_state_is_named() -> None:
    """State and convolution state, each by its layer."""
    runtime = prepared(Kind.PURE_RECURRENT)
    runtime.spoil_states()
    found = step(runtime)
    assert found[0] == "step: slot 0, layer 0: STATE is not that of 8 tokens"
    assert len(found) == 4


def test_a_wrong_hidden_row_is_named() -> None:
    """The row of another token is not the row."""
    found: list[str] = []
    model = HiddenModel(np.zeros((2, 2, 4), np.float16), found)
    transcript = Transcript([1, 2, 3])
    model.write(1, 0, transcript, 2)
    model.check(1, 0, transcript, 2, "fold")
    assert found == []
    model.check(1, 0, transcript, 3, "fold")
    assert found == ["fold: slot 1: the hidden row is not that of token 2"]


def test_publications_of_strangers_and_under_other_keys_are_named() -> None:
    """A lease that does not run, blocks and checkpoints of other tokens."""
    runtime = FakeRuntime(Kind.HYBRID)
    found: list[str] = []
    answers: list[object] = []
    KeyOracle(runtime.coordinator.manager, lambda lease: answers[0], found)
    extras = None
    for answer, expected in (
        (None, "no running sequence"),
        (([2] * 8, extras), "keys of other tokens"),
    ):
        answers[:] = [answer if answer is None else (answer[0], runtime_extras(), None)]
        runtime.begin([PROMPT])
        runtime.prefill()
        runtime.finish()
        runtime.coordinator.clear()
        assert any(expected in violation for violation in found)
    assert any("under another key" in violation for violation in found)


def runtime_extras():
    """An identity without anything special."""
    from ctxcache import BlockKeyExtras

    return BlockKeyExtras()


def test_an_explanation_that_changes_the_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An `explain` that evicts."""
    runtime = FakeRuntime(Kind.VANILLA)
    runtime.begin([PROMPT])
    runtime.prefill()
    runtime.finish()
    monkeypatch.setattr(runtime.coordinator, "explain", lambda admission: runtime.coordinator.clear())
    ACTIONS["explain"][1](runtime, (1, 2))
    assert runtime.violations == ["explain changed the cache"]


def test_our_own_faults_are_never_taken_for_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invariant error ends the run as a finding; a damaged manager and a stuck device are violations."""

    def broken(runtime: FakeRuntime) -> None:
        raise InvariantError("broken")

    with pytest.raises(InvariantError):
        run_request(FakeRuntime(Kind.VANILLA), broken, [])
    monkeypatch.setattr(FakeRuntime, "prepare", broken)
    assert "InvariantError escaped: broken" in run_with(FaultGroup(Kind.VANILLA), FaultRun(())).violations[0]
    runtime = FakeRuntime(Kind.VANILLA)
    monkeypatch.setattr(runtime.coordinator.manager, "check_invariants", lambda: broken(runtime))
    found: list[str] = []
    check_balance(runtime.coordinator.manager, found)
    assert found == ["check_invariants: broken"]
    monkeypatch.undo()
    runtime.begin([PROMPT])
    runtime.settle = lambda: True  # type: ignore[method-assign]
    assert any("and yet" in violation for violation in aftermath(runtime))
    runtime.request.close()
