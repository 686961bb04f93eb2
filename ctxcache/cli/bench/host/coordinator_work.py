"""What `ctxcache bench host` times through the coordinator: decode steps and one lifecycle trigger, on a device of no cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from ctxcache.cli.bench.host.manager_work import Sizes, Work, random_tokens
from ctxcache.config import (
    AttentionLayerConfig,
    ContextCacheConfig,
    DeploymentConfig,
    EngineConfig,
    validate_context_cache_deployment,
)
from ctxcache.coordinator import ContextCacheCoordinator
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.page_table import KVPageTable
from ctxcache.device.resources import ContextCachePhysicalResources
from ctxcache.errors import InvariantError
from ctxcache.fsm import fire
from ctxcache.fsm.states import State
from ctxcache.ids import LayerType
from ctxcache.request.admission import (
    ContextCacheBatchAdmission,
    ContextCacheBatchAdvance,
    ContextCacheSequenceAdmission,
)
from ctxcache.request.handle import RequestHandle

_SEED = 1
_WARM_STEPS = 16


class IdleDeviceOps(NumpyDeviceOps):
    """Device ops that do nothing: what is left is the host's work."""

    def upload_rows(self, table: Any, stream: Any) -> None:
        """Do nothing."""

    def reset_lengths(self, cache: Any, reuse_lengths: Any, stream: Any) -> None:
        """Do nothing."""


def make_coordinator(block: int, batch: int, tokens_each: int) -> ContextCacheCoordinator:
    """Return a coordinator of one attention layer, with pages for so many sequences of so many tokens, and as many again."""
    engine = EngineConfig(
        layers=(LayerType.ATTENTION,),
        attention=(AttentionLayerConfig(num_kv_heads=1, head_dim=4),),
        max_batch_size=batch,
        max_sequence_length=-(-tokens_each // block) * block,
        num_pages=2 * batch * -(-tokens_each // block),
        tokens_per_page=block,
    )
    deployment, ops = DeploymentConfig(engine), IdleDeviceOps()
    cache = HybridCacheManager(engine, None, device_ops=ops)
    table = KVPageTable(batch, engine.pages_per_sequence, engine.num_pages, device_ops=ops)
    kind, resources = validate_context_cache_deployment(deployment), ContextCachePhysicalResources(cache, table)
    return ContextCacheCoordinator(ContextCacheConfig(), deployment, kind, resources, None, device_ops=ops)


class Decoding:
    """A request that decodes; its sequences' lengths are spread over a block, so that each step some of them grow.

    Each step one sequence, another every time, is reported as complete: its generated tokens are published. As when
    sequences end after as many steps as there are sequences.
    """

    def __init__(self, block: int, batch: int, sizes: Sizes) -> None:
        rng = np.random.default_rng(_SEED)
        self._coordinator = make_coordinator(block, batch, sizes.context_tokens + block + sizes.steps + _WARM_STEPS + 2)
        prompts = [random_tokens(rng, sizes.context_tokens + slot % block) for slot in range(batch)]
        self._lengths = np.array([prompt.size for prompt in prompts], np.int32)
        self._tokens = random_tokens(rng, batch).reshape(batch, 1)
        self._counts = np.ones(batch, np.int32)
        self._steps = 0
        begun = self._coordinator.begin_request(
            ContextCacheBatchAdmission([ContextCacheSequenceAdmission(prompt) for prompt in prompts]), None
        )
        if begun.admission is None:
            raise InvariantError(f"a benchmark's batch was not admitted: {begun.status.name}; please report this")
        self._request: RequestHandle = begun.admission.request
        self._coordinator.prepare_prefill(self._request).raise_for_status()
        self._coordinator.finalize_prefill_publication(self._request, self._advance()).raise_for_status()

    def _advance(self) -> ContextCacheBatchAdvance:
        return ContextCacheBatchAdvance(self._tokens, self._counts, self._lengths)

    def step(self, _: None) -> None:
        """Prepare and complete one step."""
        self._coordinator.prepare_decode_step(self._request).raise_for_status()
        self._lengths = self._lengths + 1
        completed = np.array([self._steps % self._lengths.size], np.int32)
        self._coordinator.complete_decode_step(self._request, self._advance(), completed).raise_for_status()
        self._steps += 1


def decode_step(block: int, batch: int, sizes: Sizes) -> Work:
    """One decode step: validation, growth, lifecycle, and publication of one sequence's generated tokens."""
    return Work(Decoding(block, batch, sizes).step)


class _Subject:
    """What the lifecycle moves, with nothing behind its hooks."""

    def __init__(self) -> None:
        self._state: str = State.SETTLED.value

    def touch_device(self, hook: str) -> None:
        """Do nothing."""


def lifecycle_trigger() -> Work:
    """The transition that prepares a decode step, with hooks that do nothing."""
    return Work(lambda subject: fire(subject, "prepare_decode"), _Subject)
