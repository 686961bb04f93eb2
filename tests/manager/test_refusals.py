"""What a manager refuses: arguments of the wrong kind, in words and before anything changes; and plans stay as made."""

import numpy as np
import pytest
from support.manager import Runtime, keys_of, run_of

from ctxcache.errors import ContractError
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.ids import Hash128, ReusePlanKind
from ctxcache.manager import acquire as acquire_module
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.manager.results import HybridCheckpointKey, HybridSnapshotReservation

TOKENS = run_of("a", 18)
KEYS = keys_of(TOKENS)
ODD_ARRAYS = [np.zeros((1, 2)), np.zeros(3)]  # neither hashes, and no comparison with one is true or false


@pytest.fixture
def cached():
    """A runtime with a record of `TOKENS`."""
    runtime = Runtime(16)
    runtime.run(TOKENS)
    return runtime


@pytest.mark.parametrize("kind", [None, "vanilla", 5, [], *ODD_ARRAYS], ids=repr)
def test_a_deployment_kind_is_a_member(kind):
    """A manager of a kind that nobody knows would plan like some kind."""
    with pytest.raises(ContractError, match=r"kind is .*; pass a member of ContextCacheDeploymentKind"):
        ContextCacheManager(tokens_per_page=4, num_base_pages=4, kind=kind)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"mode": mode}, "mode is .*ContextCacheExecutionMode") for mode in (None, "vanilla", [], *ODD_ARRAYS)),
        *(({"bypass": flag}, "bypass is .*; pass True or False") for flag in (None, "x", 0, 1.5, [], *ODD_ARRAYS)),
        *(({"exact_keys": keys}, "exact_keys is .*; pass a run") for keys in (None, 5, 1.5, np.zeros(()))),
        *(({"exact_keys": keys}, "exact_keys holds") for keys in ("x", [None], ODD_ARRAYS)),
    ],
    ids=repr,
)
def test_options_of_the_wrong_type_are_refused(cached, options, said):
    """`plan` and `match` name the value and what to pass instead."""
    before = cached.everything()
    for call in (cached.manager.plan, cached.manager.match):
        with pytest.raises(ContractError, match=said):
            call(KEYS, len(TOKENS), **options)
    assert cached.everything() == before


def test_numpys_own_truth_values_are_truth_values(cached):
    """`np.True_` bypasses as `True` does, and the plan says so with a bool."""
    plan = cached.manager.plan(KEYS, len(TOKENS), bypass=np.True_)
    assert plan.bypass is True
    assert plan.kind is ReusePlanKind.NO_REUSABLE_PREFIX


@pytest.mark.parametrize("resource", [None, "base_kv_page", 0, [], *ODD_ARRAYS], ids=repr)
def test_a_pool_is_named_by_a_member(cached, resource):
    """Values, numbers and arrays name no pool."""
    with pytest.raises(ContractError, match=r"resource_type is .*; pass a member of ResourceType"):
        cached.manager.pool(resource)


@pytest.mark.parametrize(
    "reservation",
    [
        None,
        (0, 0),
        *ODD_ARRAYS,
        HybridSnapshotReservation(np.zeros(3), None),
        HybridSnapshotReservation(0, np.zeros(3)),
        HybridSnapshotReservation(False, 0),
        HybridSnapshotReservation(0, 1),
    ],
    ids=repr,
)
def test_a_reservation_is_what_was_handed_out(reservation):
    """Anything but the lease's own reservation is refused, and the lease keeps its slots."""
    runtime = Runtime(8, kind=Kind.HYBRID, num_recurrent_snapshots=2, num_partial_kv_snapshots=2)
    lease = runtime.begin(TOKENS)
    own = runtime.manager.reserve_snapshots(lease, len(TOKENS))
    assert own == HybridSnapshotReservation(0, 0)
    before = runtime.everything()
    checkpoint = HybridCheckpointKey(Hash128(1, 2), len(TOKENS))
    for call in (
        lambda: runtime.manager.retire_snapshots(lease, reservation),
        lambda: runtime.manager.publish_checkpoint(lease, KEYS, checkpoint, reservation),
    ):
        with pytest.raises(ContractError):
            call()
    assert runtime.everything() == before
    runtime.manager.retire_snapshots(lease, own)


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        (Kind.VANILLA, Mode.VANILLA, {}),
        (Kind.EAGLE, Mode.EAGLE, {"num_draft_pages": 16}),
        (Kind.HYBRID, Mode.VANILLA, {"num_recurrent_snapshots": 2, "num_partial_kv_snapshots": 2}),
    ],
)
def test_a_plan_cannot_be_written(kind, mode, options):
    """Every array of a plan is read-only, of a hit as of a cold start, and what `acquire` uses is what was planned."""
    runtime = Runtime(16, kind=kind, mode=mode, **options)
    cold = runtime.plan([*TOKENS, 7])
    runtime.run(TOKENS)
    warm = runtime.plan([*TOKENS, 7])
    assert warm.reused_token_length > 0
    for plan in (cold, warm):
        for pages in (plan.matched_base_pages, plan.reused_base_pages, plan.reused_draft_pages):
            with pytest.raises(ValueError, match="read-only"):
                pages[:] = 10**6
    lease = runtime.manager.acquire(warm).lease
    assert lease.base_pages[: warm.reused_base_pages.size].tolist() == warm.reused_base_pages.tolist()
    assert lease.draft_pages[: warm.reused_draft_pages.size].tolist() == warm.reused_draft_pages.tolist()


@pytest.mark.parametrize("interrupted", ["acquire_lease", "AcquireResult"])
def test_an_interrupt_loses_no_lease(cached, monkeypatch, interrupted):
    """Whoever is interrupted before `acquire` returns holds nothing: every page is where it was, and the next row too."""
    before = cached.everything()
    plan = cached.plan(TOKENS)
    original = getattr(acquire_module, interrupted)

    def interrupt(*arguments):
        original(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(acquire_module, interrupted, interrupt)
        with pytest.raises(KeyboardInterrupt):
            cached.manager.acquire(plan)
    cached.manager.check_invariants()
    assert cached.everything() == before
    lease = cached.begin(TOKENS)
    assert not lease.released
    cached.release(lease)


def test_an_interrupt_before_anything_is_held_releases_nothing(cached, monkeypatch):
    """The row that would have been given out next stays free."""
    before = cached.everything()

    def interrupt(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(acquire_module, "acquire_lease", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cached.manager.acquire(cached.plan(TOKENS))
    assert cached.everything() == before


def test_numpys_own_integers_are_counts(cached):
    """Lengths and page counts that come out of arrays serve as Python's do."""
    plan = cached.manager.plan(KEYS, np.int64(len(TOKENS)), base_extra_tokens=np.uint8(3))
    assert plan.base_page_demand == cached.manager.plan(KEYS, len(TOKENS), base_extra_tokens=3).base_page_demand
    assert type(plan.matched_token_length) is int
    lease = cached.manager.acquire(plan).lease
    assert cached.manager.grow(lease, base_pages=np.int32(lease.base_pages.size + 1))
    cached.release(lease)


@pytest.mark.parametrize("layout", ["strided", "read-only", "transposed"])
def test_keys_may_lie_in_memory_in_any_way(cached, layout):
    """A view of a larger array, or one that nobody may write, is copied; what it says is what counts."""
    keys = np.zeros((2 * len(KEYS), 2), np.uint64)[::2] if layout == "strided" else KEYS.copy()
    keys[:] = KEYS
    if layout == "transposed":
        keys = np.asfortranarray(keys)
    keys.flags.writeable = layout != "read-only"
    plan = cached.manager.plan(keys, len(TOKENS))
    assert plan.matched_token_length == cached.manager.plan(KEYS, len(TOKENS)).matched_token_length > 0
