"""A checkpoint that every request uses outlives each of its users: R2 of the field reports, and its kin."""

from __future__ import annotations

import pytest
from support.harness import HybridHarness, PureRecurrentHarness, T, U

KINDS = pytest.mark.parametrize("harness", [HybridHarness, PureRecurrentHarness], ids=["hybrid", "recurrent"])


def user(number: int) -> list[int]:
    """A user's own tokens behind the system prompt."""
    return [1000 * (number + 1) + i for i in range(9)]


@KINDS
@pytest.mark.parametrize("slots", [3, 4, 5])
@pytest.mark.parametrize("length", [24, 32], ids=["unaligned", "aligned"])
def test_a_shared_checkpoint_survives_its_users(harness: type[HybridHarness], slots: int, length: int) -> None:
    """Thirty users of one system prompt in batches of two, with a slot more than the batch or more: all start at its end."""
    h = harness(page=16, max_tokens=64, max_batch=2, snapshots=slots)
    h.run(T(length))
    for number in range(0, 30, 2):
        starts = h.run([*T(length), *user(number)], [*T(length), *user(number + 1)])
        assert starts == [length, length], number
    assert h.metrics.hybrid_snapshot_pressure_skips == 0


@KINDS
def test_a_shared_checkpoint_survives_users_that_decode(harness: type[HybridHarness]) -> None:
    """Also where each user's state is captured twice, at the end of its prompt and of its answer."""
    h = harness(page=16, max_tokens=64, max_batch=2, snapshots=3)
    h.run(T(24))
    for number in range(0, 20, 2):
        starts = h.run([*T(24), *user(number)], [*T(24), *user(number + 1)], decode=2)
        assert starts == [24, 24], number


@KINDS
def test_what_nobody_uses_goes_before_what_is_stood_on(harness: type[HybridHarness]) -> None:
    """Of a shared checkpoint, one used later and a user's own one, the one that nobody comes back to is lost first."""
    h = harness(page=16, max_tokens=64, max_batch=1, snapshots=3, num_pages=32)
    h.run(T(24))
    h.run(U(24))
    assert h.run([*T(24), *user(0)]) == [24]
    assert h.run([*T(24), *user(1)]) == [24]
    assert h.begin_only([*U(24), 5]) == [0]
    assert h.begin_only([*T(24), *user(0), 5]) == [33]
