"""A context cache coordinator for LLM runtimes, on Numba-CUDA.

State that prompts have already cost (paged keys and values, recurrent state, draft state) stays on the device and is
reused by later requests that start with the same tokens. `ContextCacheCoordinator` is where to begin reading.
"""

from typing import TYPE_CHECKING, NoReturn

try:
    from ctxcache.config import (
        AttentionLayerConfig,
        ContextCacheConfig,
        DeploymentConfig,
        EngineConfig,
        RecurrentStateConfig,
        SpecDecodeConfig,
        validate_context_cache_deployment,
    )
    from ctxcache.coordinator import ContextCacheCoordinator
    from ctxcache.device.kv_pools import HybridCacheManager
    from ctxcache.device.numba.ops import NumbaDeviceOps
    from ctxcache.device.numpy_ops import NumpyDeviceOps
    from ctxcache.device.ops import DeviceOps, StreamSynchronizer
    from ctxcache.device.page_table import KVPageTable
    from ctxcache.device.resources import ContextCachePhysicalResources
    from ctxcache.device.snapshots import (
        HybridSnapshotStorage,
        checkpoint_slots,
        partial_kv_bytes_per_slot,
        recurrent_bytes_per_slot,
        snapshot_pool_bytes,
    )
    from ctxcache.errors import (
        ContextCacheError,
        ContractError,
        DeploymentError,
        DeviceError,
        InvariantError,
        PageCorruptionError,
        PoisonedError,
        RequestFailedError,
    )
    from ctxcache.ids import (
        AcquireStatus,
        ContextCacheCommitPolicy,
        ContextCacheCoordinatorStatus,
        ContextCacheDeploymentKind,
        ContextCacheExecutionMode,
        ContextCacheLookupPolicy,
        Hash128,
        LayerType,
        MissReason,
        Phase,
        PublicationPoint,
        PublishStatus,
        ResourceType,
        ReusePlanKind,
        SpecDecodeMode,
        SpecReplayMode,
    )
    from ctxcache.keys.chain import hash_exact_prefix, hash_full_blocks
    from ctxcache.keys.identity import AdapterKey, BlockKeyExtras, MediaSpanKey, hash_opaque_identity
    from ctxcache.manager.manager import ContextCacheManager
    from ctxcache.manager.results import (
        AcquireResult,
        CacheRecord,
        CacheRequestLease,
        HybridCheckpointKey,
        HybridSnapshotReservation,
        PublishResult,
        ReusePlan,
    )
    from ctxcache.metrics import ContextCacheMetrics, PoolOccupancy
    from ctxcache.request.admission import (
        ContextCacheBatchAdmission,
        ContextCacheBatchAdvance,
        ContextCacheSequenceAdmission,
        ContextCacheSequenceAdvance,
        DecodingKvHeadroom,
    )
    from ctxcache.request.batch import AcquireSequenceResult, StagedHybridPublication
    from ctxcache.request.explain import MatchExplanation
    from ctxcache.request.handle import (
        AdmissionResult,
        BeginRequestResult,
        RequestHandle,
        RequestSlotToken,
        RequestState,
        SequenceState,
    )
    from ctxcache.session import CoordinatorSession
    from ctxcache.warmup import WarmupReport, warmup
except ImportError as cause:
    # Numba is absent, or refuses its NumPy. `ctxcache doctor` must still run, to say so.
    _CAUSE = cause
    if not TYPE_CHECKING:  # pragma: no branch

        def __getattr__(name: str) -> NoReturn:
            if name not in __all__:
                raise AttributeError(f"module 'ctxcache' has no attribute {name!r}")
            raise ImportError(
                f"ctxcache.{name} cannot be imported ({_CAUSE}); `python -m ctxcache doctor` says what to mend"
            ) from _CAUSE


__version__ = "0.2.0.dev0"

__all__ = [
    "AcquireResult",
    "AcquireSequenceResult",
    "AcquireStatus",
    "AdapterKey",
    "AdmissionResult",
    "AttentionLayerConfig",
    "BeginRequestResult",
    "BlockKeyExtras",
    "CacheRecord",
    "CacheRequestLease",
    "ContextCacheBatchAdmission",
    "ContextCacheBatchAdvance",
    "ContextCacheCommitPolicy",
    "ContextCacheConfig",
    "ContextCacheCoordinator",
    "ContextCacheCoordinatorStatus",
    "ContextCacheDeploymentKind",
    "ContextCacheError",
    "ContextCacheExecutionMode",
    "ContextCacheLookupPolicy",
    "ContextCacheManager",
    "ContextCacheMetrics",
    "ContextCachePhysicalResources",
    "ContextCacheSequenceAdmission",
    "ContextCacheSequenceAdvance",
    "ContractError",
    "CoordinatorSession",
    "DecodingKvHeadroom",
    "DeploymentConfig",
    "DeploymentError",
    "DeviceError",
    "DeviceOps",
    "EngineConfig",
    "Hash128",
    "HybridCacheManager",
    "HybridCheckpointKey",
    "HybridSnapshotReservation",
    "HybridSnapshotStorage",
    "InvariantError",
    "KVPageTable",
    "LayerType",
    "MatchExplanation",
    "MediaSpanKey",
    "MissReason",
    "NumbaDeviceOps",
    "NumpyDeviceOps",
    "PageCorruptionError",
    "Phase",
    "PoisonedError",
    "PoolOccupancy",
    "PublicationPoint",
    "PublishResult",
    "PublishStatus",
    "RecurrentStateConfig",
    "RequestFailedError",
    "RequestHandle",
    "RequestSlotToken",
    "RequestState",
    "ResourceType",
    "ReusePlan",
    "ReusePlanKind",
    "SequenceState",
    "SpecDecodeConfig",
    "SpecDecodeMode",
    "SpecReplayMode",
    "StagedHybridPublication",
    "StreamSynchronizer",
    "WarmupReport",
    "checkpoint_slots",
    "hash_exact_prefix",
    "hash_full_blocks",
    "hash_opaque_identity",
    "partial_kv_bytes_per_slot",
    "recurrent_bytes_per_slot",
    "snapshot_pool_bytes",
    "validate_context_cache_deployment",
    "warmup",
]
