"""Faults that were met once, each as the whole kind that it belonged to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.harness import OK, EagleHarness, Harness, HybridHarness, MtpHarness, T, U, V, shown

from ctxcache import (
    AdapterKey,
    AttentionLayerConfig,
    BlockKeyExtras,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheCoordinatorStatus,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractError,
    DecodingKvHeadroom,
    DeploymentConfig,
    DeploymentError,
    DeviceError,
    EngineConfig,
    Hash128,
    LayerType,
    NumpyDeviceOps,
    RecurrentStateConfig,
    SpecDecodeConfig,
    hash_exact_prefix,
    hash_full_blocks,
    hash_opaque_identity,
    validate_context_cache_deployment,
)

ATTENTION_LAYER = AttentionLayerConfig(1, 4)
ENGINE = EngineConfig((LayerType.ATTENTION,), (ATTENTION_LAYER,))


class Fickle(Sequence):
    """A sequence that counts how often it is read, and hands out something else the second time."""

    def __init__(self, first: list[Any], second: list[Any]) -> None:
        self.runs = [first, second]
        self.length = len(first)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        run = self.runs[0]
        if index == self.length:
            self.runs.reverse()
        return run[index]


class Unreadable:
    """An array of another library whose conversion fails."""

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise ValueError("this tensor has no host copy")


@pytest.mark.parametrize(
    "kind", [bytes, bytearray, lambda ids: memoryview(bytes(ids)), lambda ids: np.array(ids, "u1")]
)
@pytest.mark.parametrize("length", [3, 4, 5])
def test_bytes_are_a_run_of_small_token_ids(kind, length):
    """A byte-level tokenizer's ids are read one a byte, whatever the length; four of them are not one int32."""
    tokens = list(range(250, 250 + length)) if length < 5 else [1, 2, 3, 4, 5]
    tokens = [token % 256 for token in tokens]
    expected = hash_full_blocks(tokens, 2)
    assert expected.shape == (length // 2, 2)
    assert (hash_full_blocks(kind(tokens), 2) == expected).all()
    assert hash_exact_prefix(kind(tokens), 2) == hash_exact_prefix(tokens, 2)


def test_a_sequence_is_read_once():
    """What was checked is what is hashed: a sequence that answers otherwise the second time is not read a second time."""
    expected = hash_full_blocks([1, 2, 3, 4], 2)
    assert (hash_full_blocks(Fickle([1, 2, 3, 4], [1.5, "x", None, 2**40]), 2) == expected).all()


def test_an_array_whose_conversion_fails_is_refused():
    """An exception of another library's conversion is the caller's mistake in words, with the cause kept."""
    with pytest.raises(ContractError, match="Unreadable that NumPy cannot read") as caught:
        hash_full_blocks(Unreadable(), 2)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("size", [2**31, 2**64, 2**70])
def test_a_page_size_beyond_any_page_is_refused(size):
    """A page holds fewer than 2**31 tokens; more is refused in words instead of overflowing somewhere below."""
    for function in (hash_full_blocks, hash_exact_prefix):
        with pytest.raises(ContractError, match="below 2\\*\\*31"):
            function([1, 2], size)


def test_a_row_of_keys_is_a_digest():
    """`Hash128(*row)` of a key array is the digest that `hash_exact_prefix` returns: equal, same hash, same bytes."""
    row = hash_full_blocks([1, 2], 2)[0]
    digest = Hash128(*row)
    exact = hash_exact_prefix([1, 2], 2)
    assert (digest, hash(digest), digest.to_bytes(), str(digest)) == (exact, hash(exact), exact.to_bytes(), str(exact))
    assert type(digest.hi) is int
    assert hash_full_blocks([1, 2], 2, BlockKeyExtras(isolation_digest=digest)).shape == (1, 2)


@pytest.mark.parametrize("word", [None, "x", b"x", 1.0, True, np.float64(1), np.bool_(1), np.int64(-1), [1], -1, 2**64])
def test_a_digest_is_made_of_integers(word):
    """Anything but an integer of 64 bits is refused where the digest is made, not where it is used."""
    for arguments in ((word, 0), (0, word)):
        with pytest.raises(ContractError, match="Hash128"):
            Hash128(*arguments)


@pytest.mark.parametrize("data", [None, 7, 0, 1.5, True, [1, 2], {}, np.zeros(2), object()], ids=shown)
def test_an_identity_is_bytes_or_text(data):
    """A number is no identity: as bytes it would be that many zeros, and tenants 0 and [] would share their state."""
    with pytest.raises(ContractError, match="pass bytes or text"):
        hash_opaque_identity(data)
    with pytest.raises(ContractError, match="16"):
        Hash128.from_bytes(data)


class Hostile:
    """A value that raises when it is compared."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")


@pytest.mark.parametrize(
    "extras",
    [
        BlockKeyExtras(adapter="lora"),
        BlockKeyExtras(adapter=AdapterKey("lora")),
        BlockKeyExtras(isolation_digest=b"0123456789abcdef"),
        BlockKeyExtras(position_digest=Hostile()),
        BlockKeyExtras(media=("image",)),
    ],
    ids=["adapter", "adapter id", "tenant", "hostile", "media"],
)
def test_extras_are_checked_before_anything_happens(extras):
    """Bad extras of the last sequence are an argument's fault: nothing is evicted, also while a request is active."""
    harness = Harness(max_batch=2, num_pages=8, max_tokens=64, page=8)
    harness.run(T(63))
    before = harness.observe()
    admission = ContextCacheBatchAdmission(
        [ContextCacheSequenceAdmission(U(40)), ContextCacheSequenceAdmission(V(5), extras)]
    )
    with pytest.raises(ContractError, match="pass"):
        harness.coordinator.begin_request(admission, None)
    assert harness.observe() == before
    request, _ = harness.admit(T(5))
    with pytest.raises(ContractError, match="pass"):
        harness.coordinator.begin_request(admission, None)
    harness.coordinator.finish(request)


def test_media_that_is_no_run_of_spans_is_refused():
    """`None` in place of no media is the caller's mistake, in words."""
    with pytest.raises(ContractError, match="pass a tuple of MediaSpanKey"):
        BlockKeyExtras(media=None)


def raising_at(names: set[str], error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let each of these names of the coordinator's module raise instead of being called."""
    import ctxcache.coordinator as module

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    for name in names:
        monkeypatch.setattr(module, name, fail)
    return monkeypatch


@pytest.mark.parametrize("name", ["Batch", "choose_publication", "Request", "RequestHandle", "AdmissionResult"])
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=["memory", "interrupt"])
def test_an_admission_that_breaks_off_holds_nothing(name, error, monkeypatch):
    """Whatever raises between the leases and the handle: no lease is left, and the next admission works."""
    harness = Harness(max_batch=2, max_tokens=64, page=8)
    harness.run(T(20))
    free, manager = harness.free, harness.coordinator.manager
    with monkeypatch.context() as patch:
        raising_at({name}, error, patch)
        with pytest.raises(type(error)):
            harness.attempt(T(20), V(9))
    assert (manager.num_leases, harness.free) == (0, free)
    manager.check_invariants()
    harness.coordinator.clear()
    harness.run(T(21), V(9))


def test_a_second_acquisition_that_raises_gives_back_the_first(monkeypatch):
    """The same where the second sequence's acquisition raises: the first sequence's lease is not lost."""
    harness = Harness(max_batch=2, max_tokens=64, page=8)
    manager = harness.coordinator.manager
    acquire, calls = manager.acquire, []

    def interrupted(plan: Any) -> Any:
        calls.append(plan)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return acquire(plan)

    with monkeypatch.context() as patch:
        patch.setattr(manager, "acquire", interrupted)
        with pytest.raises(KeyboardInterrupt):
            harness.attempt(T(20), V(9))
    assert manager.num_leases == 0
    harness.run(T(21), V(9))


def test_a_common_length_beyond_the_draft_pages_is_refused():
    """A caller who prepared too few draft pages for what it reports is told so; nothing has changed."""
    harness = EagleHarness(max_tokens=64, page=4)
    request, _ = harness.admit(T(12))
    harness.prefill()
    coordinator = harness.coordinator
    assert coordinator.prepare_decode_step(request, headroom=DecodingKvHeadroom(8, 0)) is OK
    assert len(request.inspect().sequences[0].lease.draft_pages) == 4  # 12 and the default headroom of 4
    before = harness.observe(request)
    advances = [ContextCacheSequenceAdvance([7] * 8, 20)]
    for common in (17, 20):
        with pytest.raises(ContractError, match="larger draft headroom"):
            coordinator.complete_decode_step(request, advances, [0], [common])
        assert harness.observe(request) == before
    assert coordinator.complete_decode_step(request, advances, [0], [16]) is OK
    assert coordinator.finish(request) is OK
    assert harness.metrics.refused_publications == 0
    coordinator.manager.check_invariants()


WRONG = [None, "x", b"x", 1.5, float("nan"), [], {}, object(), np.zeros(2), [1.0], Hostile()]


@pytest.mark.parametrize(
    "make",
    [
        lambda value: EngineConfig(value, (ATTENTION_LAYER,)),
        lambda value: EngineConfig((LayerType.ATTENTION,), value),
        lambda value: EngineConfig((LayerType.ATTENTION,), (value,)),
        lambda value: EngineConfig((LayerType.RECURRENT,), (), value),
        lambda value: EngineConfig((LayerType.ATTENTION,), (ATTENTION_LAYER,), kv_dtype=value),
        lambda value: EngineConfig((LayerType.ATTENTION,), (ATTENTION_LAYER,), hidden_dtype=value),
        lambda value: RecurrentStateConfig(1, 1, 1, 1, 1, dtype=value),
        SpecDecodeConfig,
        DeploymentConfig,
        lambda value: DeploymentConfig(ENGINE, "draft" if value is None else value),
        lambda value: DeploymentConfig(ENGINE, None, "spec" if value is None else value),
        lambda value: ContextCacheConfig(enabled=value),
        lambda value: ContextCacheConfig(page_sanitizer=value),
        lambda value: ContextCacheConfig(hash_key="16 bytes of text" if value is None else value),
        lambda value: ContextCacheConfig(max_records=value),
        validate_context_cache_deployment,
    ],
)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_configuration_checks_itself(make, value):
    """A value of another type is a `DeploymentError` where the configuration is made, not something else later."""
    with pytest.raises(DeploymentError):
        make(value)


def test_a_hash_key_is_kept_as_it_was():
    """A key given as a bytearray is copied: overwriting the secret afterwards does not change what the config says."""
    secret = bytearray(range(16))
    config = ContextCacheConfig(hash_key=secret)
    secret[:] = bytes(16)
    assert config.hash_key == bytes(range(16))
    assert hash(config) == hash(ContextCacheConfig(hash_key=bytes(range(16))))


@pytest.mark.parametrize(
    "row", [None, "1", b"1", 1.0, True, float("nan"), [1], np.float32(1), Hostile(), 2**70], ids=shown
)
def test_a_hidden_row_is_an_integer(row):
    """An index of another kind is refused before anything is enqueued: the request lives on, nothing has changed."""
    harness = MtpHarness(max_tokens=64, page=8)
    harness.endpoints = (9,)
    harness.run(T(12))
    request, starts = harness.admit(T(20))
    assert starts == [9]
    coordinator = harness.coordinator
    assert coordinator.prepare_prefill(request) is OK
    before = harness.observe(request)
    with pytest.raises(ContractError, match="hidden row"):
        coordinator.publish_hybrid_mtp_endpoint(request, 0, 12, harness.hidden, row)
    with pytest.raises(ContractError, match="hidden row"):
        coordinator.restore_hybrid_mtp_boundary_hidden(request, 0, harness.hidden, row)
    assert harness.observe(request) == before
    assert coordinator.restore_hybrid_mtp_boundary_hidden(request, 0, harness.hidden, np.int64(1)) is OK
    assert coordinator.abandon(request) is OK


def test_what_is_written_must_be_writable():
    """A read-only mapping or hidden array is the caller's mistake, not a device failure that ends the request."""
    harness = MtpHarness(max_batch=2, max_tokens=64, page=8)
    harness.endpoints = (9,)
    harness.run(T(12))
    request, _ = harness.admit(T(20), V(5))
    coordinator = harness.coordinator
    assert coordinator.prepare_prefill(request) is OK
    frozen = harness.hidden.copy()
    frozen.flags.writeable = False
    with pytest.raises(ContractError, match="read-only"):
        coordinator.restore_hybrid_mtp_boundary_hidden(request, 0, frozen, 1)
    harness.compute_prompts()
    harness.finalize()
    mapping = np.zeros(2, np.int32)
    mapping.flags.writeable = False
    before = harness.observe(request)
    with pytest.raises(ContractError, match="read-only"):
        coordinator.begin_batch_compaction(request, [0, -1], 1, mapping)
    assert harness.observe(request) == before
    harness.keep(0)
    assert coordinator.finish(request) is OK


class BareOps:
    """Ops with exactly the methods that the device page names, and nothing else."""

    def __init__(self, inner: Any) -> None:
        for name in (
            "allocate",
            "to_host",
            "to_device",
            "upload_rows",
            "reset_lengths",
            "zero_recurrent",
            "restore",
            "capture",
            "upload_mapping",
            "compact_slot_state",
            "capture_boundary_hidden",
            "restore_boundary_hidden",
            "synchronize",
        ):
            setattr(self, name, getattr(inner, name))


@pytest.mark.parametrize("harness_type", [Harness, HybridHarness, EagleHarness, MtpHarness])
def test_ops_of_the_caller_need_the_ops_and_nothing_else(harness_type):
    """Duck-typed ops work through every operation without the hook by which wrappers name fault points."""
    harness = harness_type(max_batch=2, max_tokens=64, page=8, ops=BareOps(NumpyDeviceOps()))
    request, _ = harness.admit(T(20), V(9))
    harness.prefill()
    harness.decode()
    harness.keep(1)
    harness.decode(completed=[0])
    assert harness.coordinator.finish(request) is OK
    assert harness.coordinator.shutdown() is OK


class Unequal:
    """A code that cannot be compared."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")


@pytest.mark.parametrize(
    "code",
    [719, True, "", "ok", [], np.array([0, 0]), np.array([]), Unequal(), (0,), MemoryError(), StopIteration()],
    ids=shown,
)
def test_a_synchroniser_that_answers_oddly_is_one_failed_drain(code):
    """Anything but `None` and 0 fails the drain, counts once, and quarantines; also what cannot be compared with 0."""
    harness = Harness(max_tokens=64, page=8)
    outcomes = [code]

    def synchronise(stream: Any) -> Any:
        del stream
        outcome = outcomes.pop() if outcomes else 0
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    harness = Harness(max_tokens=64, page=8, synchronizer=synchronise)
    coordinator = harness.coordinator
    request, _ = harness.admit(T(20))
    assert coordinator.prepare_prefill(request) is OK
    assert coordinator.abandon(request) is ContextCacheCoordinatorStatus.POISONED
    metrics = coordinator.metrics()
    assert (metrics.drains, metrics.failed_drains, metrics.quarantines) == (1, 1, 1)
    assert coordinator.manager.num_leases == 1
    assert coordinator.shutdown() is OK
    coordinator.recover()
    assert coordinator.manager.num_leases == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"token_lists": None},
        {"token_lists": 5},
        {"token_lists": "text"},
        {"token_lists": ([token] for token in (1, 2))},
        {"token_lists": []},
        {"key_extras": 5},
        {"key_extras": "x"},
        {"key_extras": ["x"]},
        {"key_extras": iter([])},
        {"per_position_media_hash": 5},
        {"per_position_media_hash": [5]},
        {"headroom": 5},
        {"execution_mode": "vanilla"},
    ],
    ids=shown,
)
def test_a_session_refuses_what_the_coordinator_would(arguments):
    """Bad arguments of a session are `ContractError` too, and hold nothing."""
    harness = Harness(max_batch=2, max_tokens=64, page=8)
    before = harness.observe()
    with pytest.raises(ContractError), harness.coordinator.session(**{"token_lists": [[1, 2]], **arguments}):
        pass
    assert harness.observe() == before


@pytest.mark.parametrize("tokens", [None, 5, [None], ["x"], [1.5], [True], [[1, 2]], [], [1, 2]], ids=shown)
def test_a_session_refuses_bad_progress_and_lives_on(tokens):
    """Bad tokens and flags change nothing; the right ones work afterwards."""
    harness = Harness(max_tokens=64, page=8)
    with harness.coordinator.session([T(5)]) as session:
        with pytest.raises(ContractError):
            session.prefilled(tokens)
        session.prefilled([7])
        session.before_decode()
        with pytest.raises(ContractError):
            session.decoded(tokens)
        for finished in (5, "x", ["no"], [0.5], [None], [[True]], [[True], [True, False]], [True, False], []):
            with pytest.raises(ContractError, match=r"finished|entries"):
                session.decoded([7], finished=finished)
        assert session.active == [0]
        assert session.decoded([7], finished=[True]) == [-1]
        assert session.active == []


@pytest.mark.parametrize("value", [None, "x", 5, [], np.zeros(2), object()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("place", ["config", "deployment", "kind", "resources", "base_cache", "base_page_table"])
def test_a_coordinator_checks_what_it_is_built_from(place, value):
    """Each argument of another type is a `DeploymentError` at construction, and the resources stay free for another."""
    harness = Harness(max_tokens=64, page=8)
    assert harness.coordinator.shutdown() is OK
    resources = {"base_cache": harness.resources.base_cache, "base_page_table": harness.resources.base_page_table}
    arguments = {
        "config": harness.config,
        "deployment": harness.deployment,
        "kind": harness.kind,
        "resources": ContextCachePhysicalResources(**resources),
    }
    if place in resources:
        arguments["resources"] = ContextCachePhysicalResources(**{**resources, place: value})
    else:
        arguments[place] = value
    with pytest.raises(DeploymentError):
        ContextCacheCoordinator(*arguments.values(), None)
    with pytest.raises(DeploymentError, match="synchronizer"):
        ContextCacheCoordinator(harness.config, harness.deployment, harness.kind, harness.resources, None, 5)
    harness.coordinator = harness.build()
    harness.run(T(20))


class HalfwayOps:
    """Ops whose uploads do, when told to, all the host's work and then fail before the device has anything."""

    def __init__(self, error: BaseException) -> None:
        self.inner = NumpyDeviceOps()
        self.error = error
        self.countdown = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def upload_rows(self, table: Any, stream: Any) -> None:
        """Fail at the upload that the countdown reaches: the table believes that its rows have left."""
        self.countdown -= 1
        before = self.inner.to_host(table.kernel_view)
        self.inner.upload_rows(table, stream)
        if self.countdown == 0:
            self.inner.to_device(table.kernel_view, before)
            raise self.error


@pytest.mark.parametrize("harness_type", [Harness, HybridHarness, EagleHarness, MtpHarness])
@pytest.mark.parametrize(
    "error", [RuntimeError("out of staging memory"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
@pytest.mark.parametrize("upload", [1, 2, 3, 4])
def test_rows_of_an_upload_that_broke_off_are_uploaded_again(harness_type, error, upload):
    """After an upload that failed halfway the next request's device rows are its own, whichever upload it was."""
    ops = HalfwayOps(error)
    harness = harness_type(max_batch=2, max_tokens=64, page=8, ops=ops)
    harness.run(V(9))
    ops.countdown = upload
    request, _ = harness.admit(T(20))
    failed = False
    try:
        assert harness.coordinator.prepare_prefill(request) is OK
        advances = [ContextCacheSequenceAdvance([7], 20)]
        common = [20] if harness_type is EagleHarness else None
        assert harness.coordinator.finalize_prefill_publication(request, advances, common) is OK
        assert harness.coordinator.prepare_decode_step(request, headroom=DecodingKvHeadroom(12, 12)) is OK
    except (DeviceError, KeyboardInterrupt):
        failed = True
    assert failed or ops.countdown > 0
    pages = request.inspect().sequences[0].lease.base_pages.tolist()
    assert harness.coordinator.abandon(request) is OK
    ops.countdown = -1
    # The same leases as the failed request had: only what is noted as uploaded tells the two apart.
    request, _ = harness.admit(T(20))
    assert harness.coordinator.prepare_prefill(request) is OK
    lease = request.inspect().sequences[0].lease
    assert lease.base_pages.tolist() == pages[: len(lease.base_pages)]
    assert harness.pages_of(0) == lease.base_pages.tolist()
    if harness.deployment.draft is not None:
        assert harness.pages_of(0, harness.resources.draft_page_table) == lease.draft_pages.tolist()
    assert harness.coordinator.abandon(request) is OK
