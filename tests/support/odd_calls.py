"""Every public operation with right arguments, in the stages in which it is legal: what the odd values are tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import ctxcache
from ctxcache import (
    AttentionLayerConfig,
    BlockKeyExtras,
    ContextCacheBatchAdmission,
    ContextCacheBatchAdvance,
    ContextCacheCommitPolicy,
    ContextCacheExecutionMode,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    EngineConfig,
    Hash128,
    HybridCacheManager,
    KVPageTable,
    LayerType,
    NumpyDeviceOps,
    RecurrentStateConfig,
    ResourceType,
    hash_exact_prefix,
    hash_full_blocks,
)
from ctxcache.testing import Fault, FaultMode, fault_points
from support.harness import EagleHarness, Harness, HybridHarness, MtpHarness, SharedKvHarness, T, U

PAGE = 8
KEY = bytes(16)
D = Hash128(1, 2)
HARNESSES = (Harness, HybridHarness, EagleHarness, MtpHarness, SharedKvHarness)


class World:
    """A coordinator with a cached prompt, in one stage of a request, and the parts that stand beside it."""

    def __init__(self, harness: type[Harness], stage: str) -> None:
        self.h = h = harness(max_batch=2, max_tokens=64, page=PAGE, snapshots=6)
        if harness is MtpHarness:
            h.endpoints = (9,)
        h.run(T(20))
        self.coordinator, self.manager = h.coordinator, h.coordinator.manager
        self.mode = h.native_mode
        self.request: Any = None
        self.session: Any = None
        self.hidden = np.zeros((2, 2, 4), np.float16)
        if stage in ("opened", "rested", "stepped"):
            self.session = self.coordinator.session([T(24), U(5)])
            self.session.__enter__()
            self.request = self.session.handle
            if stage != "opened":
                self.session.prefilled([7, 7])
            if stage == "stepped":
                self.session.before_decode()
        elif stage != "idle":
            self.request, _ = h.admit(T(24), U(5))
            if stage != "admitted":
                self.coordinator.prepare_prefill(self.request)
            if stage in ("settled", "decoding"):
                h.compute_prompts()
                h.finalize()
            if stage == "decoding":
                self.coordinator.prepare_decode_step(self.request)
        self.table = KVPageTable(2, 4, 8, device_ops=NumpyDeviceOps())
        self.table.set_rows([0, 1], [2, 1], [0, 1, 2])
        self.cache = HybridCacheManager(ENGINE, None, device_ops=NumpyDeviceOps())
        self.lease = None
        if stage == "idle" and harness in (Harness, HybridHarness):
            keys = hash_full_blocks(T(20), PAGE, key=KEY)
            self.lease = self.manager.acquire(self.manager.plan(keys, 20, mode=self.mode)).lease

    def seen(self) -> list[Any]:
        """Everything observable."""
        seen = self.h.observe(self.request)
        counters = self.manager.counters()
        seen[2] = replace(counters, refused_publications=0, publication_attempts=0)
        seen[3] = replace(seen[3], refused_publications=0, publication_attempts=0)
        return [
            *seen,
            None if self.session is None else self.session.active,
            self.manager.num_leases,
            [self.table.host_row(slot).tolist() for slot in range(2)],
            self.cache.kv_lengths.tolist(),
            self.cache.active_batch_size,
            self.hidden.tolist(),
            self.h.mapping.tolist(),
        ]


ENGINE = EngineConfig(
    layers=(LayerType.ATTENTION, LayerType.RECURRENT),
    attention=(AttentionLayerConfig(1, 4),),
    recurrent=RecurrentStateConfig(1, 2, 3, 2, 2),
    max_batch_size=2,
    max_sequence_length=32,
    num_pages=8,
    tokens_per_page=PAGE,
)


@dataclass(frozen=True)
class Call:
    """One public operation: right arguments, how they are passed, in which stages it is legal, what may be anything."""

    name: str
    right: Callable[[World], dict[str, Any]]
    do: Callable[..., Any]
    stages: tuple[str, ...] = ("idle",)
    free: frozenset[str] = field(default_factory=frozenset)
    harnesses: tuple[type[Harness], ...] = HARNESSES


def admission(
    w: World,
    tokens: Any,
    more: Any,
    extras: Any,
    media: Any,
    mode: Any,
    lookup: Any,
    commit: Any,
) -> ContextCacheBatchAdmission:
    first = ContextCacheSequenceAdmission(tokens, extras, media)
    return ContextCacheBatchAdmission([first, *([] if more is None else [more])], mode, lookup, commit)


def admitted(w: World) -> dict[str, Any]:
    return {
        "tokens": [1, 2, 3],
        "more": None,
        "extras": BlockKeyExtras(),
        "media": None,
        "mode": w.mode,
        "lookup": ContextCacheLookupPolicy.USE_CACHE,
        "commit": ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS,
    }


def advances(w: World, tokens: Any, lengths: Any) -> Any:
    pairs = [(of[slot] if type(of) is list and len(of) == 2 else of for of in (tokens, lengths)) for slot in range(2)]
    return [ContextCacheSequenceAdvance(*pair) for pair in pairs]


def common_of(w: World, lengths: list[int]) -> list[int] | None:
    return lengths if w.mode is ContextCacheExecutionMode.EAGLE else None


def keys_for(num_tokens: int) -> np.ndarray:
    return hash_full_blocks(T(num_tokens), PAGE, key=KEY)


PLAIN = (Harness, HybridHarness)

CALL_TABLE = (
    Call(
        "begin_request",
        lambda w: {**admitted(w), "base": 3, "draft": 0},
        lambda w, base, draft, **said: w.coordinator.begin_request(
            admission(w, **said), None, headroom=DecodingKvHeadroom(base, draft)
        ),
    ),
    Call("begin_request whole", lambda w: {"it": 1, "headroom": 1}, lambda w, it, headroom: w.coordinator.begin_request(
        ContextCacheBatchAdmission([]) if type(it) is int else it, None, headroom=headroom)),
    Call("begin_request list", lambda w: {"sequences": [ContextCacheSequenceAdmission([1])]}, lambda w, sequences:
        w.coordinator.begin_request(ContextCacheBatchAdmission(sequences, w.mode), None)),
    Call("explain", admitted, lambda w, **said: w.coordinator.explain(admission(w, **said)), ("idle", "settled")),
    Call("session", lambda w: {"tokens": [[1, 2], [3]], "extras": None, "media": None, "base": 3}, lambda w, tokens,
        extras, media, base: enter(w, w.coordinator.session(
            tokens, key_extras=extras, per_position_media_hash=media, execution_mode=w.mode,
            headroom=DecodingKvHeadroom(base, 8)))),
    *(
        Call(name, lambda w: {"request": w.request}, lambda w, request, name=name: getattr(w.coordinator, name)(request),
            ("admitted", "decoding"))
        for name in ("prepare_prefill", "enqueue_prefill_captures", "compact_batch", "finish", "abandon")
    ),
    Call("finalize", lambda w: {"tokens": [[7], [7]], "lengths": [24, 5], "common": common_of(w, [24, 5])}, lambda w,
        tokens, lengths, common: w.coordinator.finalize_prefill_publication(
            w.request, advances(w, tokens, lengths), common), ("prefilling",)),
    Call("finalize whole", lambda w: {"advances": 1}, lambda w, advances: w.coordinator.finalize_prefill_publication(
        w.request, advances, common_of(w, [24, 5])), ("prefilling",)),
    Call("finalize arrays", lambda w: {"tokens": np.full((2, 1), 7, np.int32), "counts": [1, 1], "lengths": [24, 5],
        "common": common_of(w, [24, 5])}, lambda w, tokens, counts, lengths, common:
        w.coordinator.finalize_prefill_publication(
            w.request, ContextCacheBatchAdvance(tokens, counts, lengths), common), ("prefilling",)),
    *(
        Call(name, lambda w: {"base": 3, "draft": 4}, lambda w, base, draft, name=name: getattr(w.coordinator, name)(
            w.request, headroom=DecodingKvHeadroom(base, draft)), ("settled",))
        for name in ("prepare_decode_step", "can_prepare_decode_step")
    ),
    Call("complete", lambda w: {"tokens": [[7], [7]], "lengths": [25, 6], "slots": [0], "common": common_of(w, [25, 6])},
        lambda w, tokens, lengths, slots, common: w.coordinator.complete_decode_step(
            w.request, advances(w, tokens, lengths), slots, common), ("decoding",)),
    Call("complete arrays", lambda w: {"tokens": np.full((2, 1), 7, np.int32), "counts": [1, 1], "lengths": [25, 6],
        "slots": [], "common": common_of(w, [25, 6])}, lambda w, tokens, counts, lengths, slots, common:
        w.coordinator.complete_decode_step(
            w.request, ContextCacheBatchAdvance(tokens, counts, lengths), slots, common), ("decoding",)),
    Call("begin_batch_compaction", lambda w: {"mapping": [-1, 0], "size": 1, "device": w.h.mapping}, lambda w, mapping, size,
        device: w.coordinator.begin_batch_compaction(w.request, mapping, size, device), ("settled",), frozenset({"device"})),
    Call("publish endpoint", lambda w: {"slot": 0, "length": 10, "hidden": w.hidden, "row": 0}, lambda w, slot, length, hidden,
        row: w.coordinator.publish_hybrid_mtp_endpoint(w.request, slot, length, hidden, row), ("prefilling",),
        frozenset({"hidden"})),
    Call("restore boundary", lambda w: {"slot": 0, "hidden": w.hidden, "row": 1}, lambda w, slot, hidden, row:
        w.coordinator.restore_hybrid_mtp_boundary_hidden(w.request, slot, hidden, row), ("prefilling",),
        frozenset({"hidden"})),
    Call("replace_device_ops", lambda w: {"ops": 1}, lambda w, ops: w.coordinator.replace_device_ops(ops)),
    Call("session.prefilled", lambda w: {"tokens": [7, 7], "common": common_of(w, [24, 5])}, lambda w, tokens, common:
        w.session.prefilled(tokens, common_lengths=common), ("opened",), harnesses=PLAIN),
    Call("session.decoded", lambda w: {"tokens": [7, 7], "finished": None, "common": None}, lambda w, tokens, finished,
        common: w.session.decoded(tokens, finished=finished, common_lengths=common), ("stepped",), frozenset({"finished"}), PLAIN),
    Call("session.retire", lambda w: {"leaving": [False, False]}, lambda w, leaving: w.session.retire(leaving), ("rested",),
        frozenset({"leaving"}), PLAIN),
    Call("plan", lambda w: {"keys": keys_for(20), "tokens": 20, "base": 1, "draft": 0, "exact": (), "mode": w.mode}, lambda w,
        keys, tokens, base, draft, exact, mode: w.manager.plan(keys, tokens, mode=mode, base_extra_tokens=base,
        draft_extra_tokens=draft, exact_keys=exact), ("idle", "settled"), frozenset({"exact"})),
    Call("match", lambda w: {"keys": keys_for(20), "tokens": 20, "exact": (), "mode": w.mode}, lambda w, keys, tokens, exact,
        mode: w.manager.match(keys, tokens, mode=mode, exact_keys=exact), ("idle", "settled"), frozenset({"exact"})),
    Call("candidates", lambda w: {"keys": keys_for(20), "tokens": 20}, lambda w, keys, tokens:
        w.manager.candidate_checkpoint_lengths(keys, tokens)),
    Call("acquire", lambda w: {"plan": 1}, lambda w, plan: w.manager.acquire(plan)),
    Call("release", lambda w: {"lease": 1}, lambda w, lease: w.manager.release(lease)),
    Call("grow", lambda w: {"base": 1, "draft": 0}, lambda w, base, draft: w.manager.grow(w.lease, base, draft),
        harnesses=PLAIN),
    Call("grow_leases", lambda w: {"rows": np.array([w.lease.row], np.int32), "base": np.array([4], np.int32), "draft": None},
        lambda w, rows, base, draft: w.manager.grow_leases(rows, base, draft), harnesses=PLAIN),
    Call("can_grow_leases", lambda w: {"rows": np.array([w.lease.row], np.int32), "base": np.array([4], np.int32),
        "draft": None}, lambda w, rows, base, draft: w.manager.can_grow_leases(rows, base, draft), harnesses=PLAIN),
    Call("publish", lambda w: {"keys": keys_for(20), "length": 16, "draft": 0}, lambda w, keys, length, draft:
        w.manager.publish(w.lease, keys, length, draft_state_length=draft), harnesses=(Harness,)),
    Call("reserve_snapshots", lambda w: {"length": 12}, lambda w, length: w.manager.reserve_snapshots(w.lease, length),
        harnesses=(HybridHarness,)),
    Call("pool", lambda w: {"resource": ResourceType.BASE_KV_PAGE}, lambda w, resource: w.manager.pool(resource)),
    Call("num_available", lambda w: {"resource": ResourceType.BASE_KV_PAGE}, lambda w, resource:
        w.manager.num_available(resource)),
    Call("KVPageTable", lambda w: {"batch": 2, "pages": 2, "num": 3}, lambda w, batch, pages, num: KVPageTable(
        batch, pages, num, device_ops=NumpyDeviceOps()).num_pages),
    Call("set_row", lambda w: {"slot": 0, "pages": [3, 4]}, lambda w, slot, pages: w.table.set_row(slot, pages)),
    Call("set_rows", lambda w: {"slots": [0, 1], "counts": [1, 1], "pages": [3, 4]}, lambda w, slots, counts, pages:
        w.table.set_rows(slots, counts, pages)),
    Call("extend_rows", lambda w: {"slots": [0], "first": [2], "counts": [1], "pages": [5]}, lambda w, slots, first, counts,
        pages: w.table.extend_rows(slots, first, counts, pages)),
    Call("compact_rows", lambda w: {"mapping": [-1, 0], "size": 1}, lambda w, mapping, size:
        w.table.compact_rows(mapping, size)),
    Call("host_row", lambda w: {"slot": 0}, lambda w, slot: w.table.host_row(slot)),
    *(
        Call(name, lambda w, name=name: {"layer": int(name != "kv_pool")}, lambda w, layer, name=name:
            getattr(w.cache, name)(layer).shape)
        for name in ("kv_pool", "recurrent_state", "conv_state")
    ),
    Call("reset_for_new_sequences", lambda w: {"lengths": [1, 0]}, lambda w, lengths:
        w.cache.reset_for_new_sequences(lengths, None)),
    Call("commit_sequence_length", lambda w: {"increment": 1}, lambda w, increment:
        w.cache.commit_sequence_length(increment, None), free=frozenset({"increment"})),  # an array is the device's
    Call("compact_batch_slot_state", lambda w: {"mapping": [], "old": 0, "new": 0}, lambda w, mapping, old, new:
        w.cache.compact_batch_slot_state(mapping, old, new, None), free=frozenset({"mapping"})),  # an array may be longer
    Call("from_arrays", lambda w: {"pools": [1], "states": [1], "convs": [1]}, lambda w, pools, states, convs:
        HybridCacheManager.from_arrays(ENGINE, kv_pools=pools, recurrent=states, conv=convs, device_ops=NumpyDeviceOps())),
    *(
        Call(function.__name__, lambda w: {"tokens": [1, 2, 3], "page": 2, "extras": BlockKeyExtras(), "media": None,
            "key": KEY}, lambda w, tokens, page, extras, media, key, function=function:
            function(tokens, page, extras, media, key=key), free=frozenset({"key"}))
        for function in (hash_full_blocks, hash_exact_prefix)
    ),
    Call("Hash128", lambda w: {"hi": 1, "lo": 1}, lambda w, hi, lo: Hash128(hi, lo)),
    Call("from_bytes", lambda w: {"data": bytes(16)}, lambda w, data: Hash128.from_bytes(data)),
    Call("hash_opaque_identity", lambda w: {"data": "x"}, lambda w, data: ctxcache.hash_opaque_identity(data),
        free=frozenset({"data"})),
    Call("AdapterKey", lambda w: {"id": D, "generation": 1}, lambda w, **said: ctxcache.AdapterKey(**said)),
    Call("MediaSpanKey", lambda w: {"content_digest": D, "placement_digest": D, "offset_within_block": 1, "item_order": 1,
        "modality": 1}, lambda w, **said: ctxcache.MediaSpanKey(**said), free=frozenset({"modality"})),
    Call("BlockKeyExtras", lambda w: {"media": 1, "adapter": 1, "position_digest": D, "isolation_digest": D},
        lambda w, **said: BlockKeyExtras(**said), free=frozenset({"media", "adapter", "position_digest", "isolation_digest"})),
    Call("AttentionLayerConfig", lambda w: {"num_kv_heads": 1, "head_dim": 1}, lambda w, **said: AttentionLayerConfig(**said)),
    Call("RecurrentStateConfig", lambda w: {"num_heads": 1, "head_dim": 1, "state_size": 1, "conv_dim": 1, "conv_kernel": 1,
        "dtype": "float32"}, lambda w, **said: RecurrentStateConfig(**said)),
    Call("EngineConfig", lambda w: {"layers": (LayerType.ATTENTION,), "attention": (AttentionLayerConfig(1, 1),),
        "kv_dtype": "float16", "max_batch_size": 1, "max_sequence_length": 8, "num_pages": 1, "tokens_per_page": 8,
        "hidden_size": 1}, lambda w, **said: EngineConfig(**said)),
    Call("SpecDecodeConfig", lambda w: {"mode": ctxcache.SpecDecodeMode.EAGLE, "drafting_top_k": 1, "drafting_step": 1,
        "verify_size": 1}, lambda w, **said: ctxcache.SpecDecodeConfig(**said)),
    Call("DeploymentConfig", lambda w: {"base": ENGINE, "draft": None, "spec": None}, lambda w, **said:
        ctxcache.DeploymentConfig(**said)),
    Call("validate", lambda w: {"deployment": 1}, lambda w, deployment:
        ctxcache.validate_context_cache_deployment(deployment)),
    Call("ContextCacheConfig", lambda w: {"enabled": True, "max_records": 1, "recurrent_snapshot_pool_bytes": 1,
        "partial_kv_snapshot_pool_bytes": 1, "hash_key": KEY, "page_sanitizer": False}, lambda w, **said:
        ctxcache.ContextCacheConfig(**said), free=frozenset({"enabled", "page_sanitizer", "hash_key"})),
    Call("bytes per slot", lambda w: {"engine": 1, "slots": 1}, lambda w, engine, slots: ctxcache.snapshot_pool_bytes(
        ENGINE if type(engine) is int else engine, slots)),
    Call("build", lambda w: {"engine": 1, "pools": None, "snapshots": 2, "records": 1}, lambda w, engine, pools, snapshots,
        records: ctxcache.ContextCacheCoordinator.build(ENGINE if type(engine) is int else engine, kv_pools=pools,
        snapshots=snapshots, max_records=records, device_ops=NumpyDeviceOps()).manager.pool(ResourceType.RECURRENT_SNAPSHOT)),
    Call("Fault", lambda w: {"point": "finish.synchronize", "mode": FaultMode.RAISE_BEFORE, "occurrence": 1, "persistent": False,
        "code": 7}, lambda w, **said: Fault(**said), free=frozenset({"point", "persistent"})),
    Call("fault_points", lambda w: {"kind": ctxcache.ContextCacheDeploymentKind.EAGLE}, lambda w, kind: fault_points(kind)),
)  # fmt: skip


def enter(w: World, session: Any) -> Any:
    session.__enter__()
    w.request, w.session = session.handle, session
    return session.prefill_starts
