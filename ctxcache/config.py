"""What is deployed and how big its cache is. Frozen values that check themselves on construction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from typing import Any

from ctxcache.arguments import INT32_LIMIT, NOT_ITERABLE, as_integer
from ctxcache.errors import DeploymentError
from ctxcache.ids import ContextCacheDeploymentKind, ContextCacheExecutionMode, LayerType, SpecDecodeMode

HASH_KEY_BYTES = 16

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, for every dtype that state may have. Only the size matters: kernels move bytes."""


@dataclass(frozen=True, slots=True)
class AttentionLayerConfig:
    """Geometry of one attention layer's cache: KV heads, and elements of one head."""

    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _set_integer(self, "num_kv_heads", 1)
        _set_integer(self, "head_dim", 1)


@dataclass(frozen=True, slots=True)
class RecurrentStateConfig:
    """Geometry of the fixed-size state of every recurrent layer.

    State has shape `[num_heads, head_dim, state_size]` a sequence, convolution state `[conv_dim, conv_kernel]`.
    """

    num_heads: int
    head_dim: int
    state_size: int
    conv_dim: int
    conv_kernel: int
    dtype: str = "float32"
    conv_dtype: str = "float16"

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "state_size", "conv_dim", "conv_kernel"):
            _set_integer(self, name, 1)
        _check_dtype("RecurrentStateConfig.dtype", self.dtype)
        _check_dtype("RecurrentStateConfig.conv_dtype", self.conv_dtype)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model as the cache sees it.

    Attributes:
        layers: what each layer keeps, in model order.
        attention: one entry per attention layer, in model order.
        recurrent: the state of the recurrent layers; `None` exactly when there are none.
        kv_dtype: dtype of keys and values, a key of `DTYPE_BYTES`.
        max_batch_size: sequences in the largest batch.
        max_sequence_length: tokens of the longest sequence that have state: nothing is ever computed at or beyond this
            position, whatever the page size. The token that is only sampled behind the last one is not counted.
        num_pages: physical pages of the pool. 0 takes one full row of pages per sequence of the largest
            batch; the field then holds that number.
        tokens_per_page: tokens in one page, the same for every attention layer.
        hidden_size: elements of a hidden row; only speculative decoding on a hybrid base needs it.
        hidden_dtype: dtype of a hidden row.
    """

    layers: tuple[LayerType, ...]
    attention: tuple[AttentionLayerConfig, ...]
    recurrent: RecurrentStateConfig | None = None
    kv_dtype: str = "float16"
    max_batch_size: int = 1
    max_sequence_length: int = 4096
    num_pages: int = 0
    tokens_per_page: int = 128
    hidden_size: int = 0
    hidden_dtype: str = "float16"

    def __post_init__(self) -> None:
        for name in ("layers", "attention"):
            object.__setattr__(self, name, _as_tuple(f"EngineConfig.{name}", getattr(self, name)))
        self._check_layers()
        _check_dtype("EngineConfig.kv_dtype", self.kv_dtype)
        _check_dtype("EngineConfig.hidden_dtype", self.hidden_dtype)
        for name in ("max_batch_size", "max_sequence_length", "tokens_per_page"):
            _set_integer(self, name, 1)
        _set_integer(self, "num_pages", 0)
        _set_integer(self, "hidden_size", 0)
        if self.num_pages == 0 and self.attention:
            object.__setattr__(self, "num_pages", self.max_batch_size * self.pages_per_sequence)
            as_integer(
                "EngineConfig.num_pages, by default max_batch_size * pages_per_sequence,",
                self.num_pages,
                1,
                error=DeploymentError,
            )

    def _check_layers(self) -> None:
        if not self.layers:
            raise DeploymentError("EngineConfig.layers is empty; name at least one layer")
        strangers = [layer for layer in self.layers if not isinstance(layer, LayerType)]
        if strangers:
            raise DeploymentError(f"EngineConfig.layers holds {strangers[0]!r}; use LayerType members")
        for layer in self.attention:
            _check_type("EngineConfig.attention", layer, AttentionLayerConfig)
        _check_type("EngineConfig.recurrent", self.recurrent, RecurrentStateConfig, optional=True)
        if len(self.attention) != self.num_attention_layers:
            raise DeploymentError(
                f"EngineConfig.attention has {len(self.attention)} entries for {self.num_attention_layers} attention "
                "layers; give one AttentionLayerConfig per attention layer"
            )
        if (self.recurrent is not None) != (self.num_recurrent_layers > 0):
            raise DeploymentError(
                f"EngineConfig.recurrent is {self.recurrent!r} for {self.num_recurrent_layers} recurrent layers; "
                "give a RecurrentStateConfig exactly when there are recurrent layers"
            )

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence: the length of a page-table row."""
        return -(-self.max_sequence_length // self.tokens_per_page)

    @property
    def num_attention_layers(self) -> int:
        """How many layers keep paged keys and values."""
        return self.layers.count(LayerType.ATTENTION)

    @property
    def num_recurrent_layers(self) -> int:
        """How many layers keep a fixed-size state."""
        return self.layers.count(LayerType.RECURRENT)


@dataclass(frozen=True, slots=True)
class SpecDecodeConfig:
    """Shape of one speculative step.

    Attributes:
        mode: the scheme.
        drafting_top_k: candidates that the draft model proposes at each position.
        drafting_step: positions that the draft model runs ahead.
        verify_size: tokens that the base model verifies at once.
    """

    mode: SpecDecodeMode
    drafting_top_k: int = 1
    drafting_step: int = 1
    verify_size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.mode, SpecDecodeMode):
            raise DeploymentError(f"SpecDecodeConfig.mode is {self.mode!r}; use a SpecDecodeMode member")
        for name in ("drafting_top_k", "drafting_step", "verify_size"):
            _set_integer(self, name, 1)


@dataclass(frozen=True, slots=True)
class DeploymentConfig:
    """The base engine, and the draft engine and scheme of speculative decoding where there are any."""

    base: EngineConfig
    draft: EngineConfig | None = None
    spec: SpecDecodeConfig | None = None

    def __post_init__(self) -> None:
        _check_type("DeploymentConfig.base", self.base, EngineConfig)
        _check_type("DeploymentConfig.draft", self.draft, EngineConfig, optional=True)
        _check_type("DeploymentConfig.spec", self.spec, SpecDecodeConfig, optional=True)

    @property
    def spec_mode(self) -> SpecDecodeMode:
        """The speculative scheme; `NONE` also when there is no `spec`."""
        return SpecDecodeMode.NONE if self.spec is None else self.spec.mode


@dataclass(frozen=True, slots=True)
class ContextCacheConfig:
    """How the cache behaves.

    Attributes:
        enabled: `False` runs every request as a bypass.
        max_records: endpoints kept at most; 0 keeps nothing.
        recurrent_snapshot_pool_bytes: device memory for snapshots of recurrent state.
        partial_kv_snapshot_pool_bytes: device memory for snapshots of partly filled pages.
        hash_key: 16 secret bytes that key the hash, so that several processes agree; `None` takes the
            process's own random key. It is in no repr, message or log, and a configuration that has one is not pickled.
        page_sanitizer: check at reuse that no shared page has changed since its publication.
    """

    enabled: bool = True
    max_records: int = 1024
    recurrent_snapshot_pool_bytes: int = 0
    partial_kv_snapshot_pool_bytes: int = 0
    hash_key: bytes | None = field(default=None, repr=False)
    page_sanitizer: bool = False

    def __post_init__(self) -> None:
        _set_integer(self, "max_records", 0)
        for name in ("recurrent_snapshot_pool_bytes", "partial_kv_snapshot_pool_bytes"):
            _set_integer(self, name, 0, 1 << 63)
        for name in ("enabled", "page_sanitizer"):
            _check_type(f"ContextCacheConfig.{name}", getattr(self, name), bool)
        if self.hash_key is None:
            return
        if not isinstance(self.hash_key, (bytes, bytearray)) or len(self.hash_key) != HASH_KEY_BYTES:
            kind = type(self.hash_key).__name__
            size = f" of {len(self.hash_key)}" if isinstance(self.hash_key, (bytes, bytearray)) else ""
            raise DeploymentError(
                f"ContextCacheConfig.hash_key is a {kind}{size}; give {HASH_KEY_BYTES} bytes, or None for the process's own key"
            )
        object.__setattr__(self, "hash_key", bytes(self.hash_key))  # a bytearray stays its maker's, to overwrite

    def __reduce__(self) -> tuple[Any, ...]:
        if self.hash_key is not None:
            raise TypeError("a ContextCacheConfig with a hash_key is not pickled; send the key by a way of its own")
        return ContextCacheConfig, astuple(self)

    def __copy__(self) -> ContextCacheConfig:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextCacheConfig:
        return self


EXECUTION_MODES: dict[ContextCacheDeploymentKind, tuple[ContextCacheExecutionMode, ...]] = {
    ContextCacheDeploymentKind.VANILLA: (ContextCacheExecutionMode.VANILLA,),
    ContextCacheDeploymentKind.PURE_RECURRENT: (ContextCacheExecutionMode.VANILLA,),
    ContextCacheDeploymentKind.HYBRID: (ContextCacheExecutionMode.VANILLA,),
    ContextCacheDeploymentKind.EAGLE: (ContextCacheExecutionMode.VANILLA, ContextCacheExecutionMode.EAGLE),
    ContextCacheDeploymentKind.HYBRID_MTP: (ContextCacheExecutionMode.VANILLA, ContextCacheExecutionMode.MTP),
    ContextCacheDeploymentKind.SHARED_KV: (ContextCacheExecutionMode.VANILLA, ContextCacheExecutionMode.SHARED_KV),
}
"""Execution modes that each kind of deployment serves."""


def validate_context_cache_deployment(deployment: DeploymentConfig) -> ContextCacheDeploymentKind:
    """Say which kind of deployment this is.

    Raises:
        DeploymentError: the engines and the scheme do not make one of the six kinds; the message names both sides.
    """
    _check_type("the deployment", deployment, DeploymentConfig)
    base, draft, mode = deployment.base, deployment.draft, deployment.spec_mode
    if mode is SpecDecodeMode.NONE:
        if draft is not None:
            raise DeploymentError("there is a draft engine but no speculative scheme; give DeploymentConfig.spec")
        return _plain_kind(base)
    if mode is SpecDecodeMode.SHARED_KV:
        if draft is not None:
            raise DeploymentError("SHARED_KV drafts read the base's KV; leave DeploymentConfig.draft at None")
        if base.num_recurrent_layers:
            raise DeploymentError(_wrong_base(mode, base, "attention layers only"))
        return ContextCacheDeploymentKind.SHARED_KV
    _check_draft_engine(base, draft, mode)
    if mode is SpecDecodeMode.EAGLE:
        if base.num_recurrent_layers:
            raise DeploymentError(_wrong_base(mode, base, "attention layers only"))
        return ContextCacheDeploymentKind.EAGLE
    if not (base.num_recurrent_layers and base.num_attention_layers):
        raise DeploymentError(_wrong_base(mode, base, "attention and recurrent layers"))
    if base.hidden_size < 1:
        raise DeploymentError("MTP saves a hidden row of the base; EngineConfig.hidden_size is 0, give its width")
    return ContextCacheDeploymentKind.HYBRID_MTP


def _plain_kind(base: EngineConfig) -> ContextCacheDeploymentKind:
    if not base.num_recurrent_layers:
        return ContextCacheDeploymentKind.VANILLA
    if not base.num_attention_layers:
        return ContextCacheDeploymentKind.PURE_RECURRENT
    return ContextCacheDeploymentKind.HYBRID


def _check_draft_engine(base: EngineConfig, draft: EngineConfig | None, mode: SpecDecodeMode) -> None:
    if draft is None:
        raise DeploymentError(f"{mode.name} needs a draft engine; give DeploymentConfig.draft")
    if draft.num_recurrent_layers:
        raise DeploymentError(
            f"the {mode.name} draft engine has {draft.num_recurrent_layers} recurrent layers; it may have attention only"
        )
    if draft.tokens_per_page != base.tokens_per_page:
        raise DeploymentError(
            f"the base has {base.tokens_per_page} tokens a page and the draft {draft.tokens_per_page}; "
            "paired pages need the same number"
        )


def _wrong_base(mode: SpecDecodeMode, base: EngineConfig, wanted: str) -> str:
    return (
        f"{mode.name} needs a base with {wanted}; this one has {base.num_attention_layers} attention and "
        f"{base.num_recurrent_layers} recurrent layers"
    )


def _set_integer(config: object, field: str, least: int, limit: int = INT32_LIMIT) -> None:
    """Check a number of a configuration under construction, and keep it as an `int`."""
    name = f"{type(config).__name__}.{field}"
    value = as_integer(name, getattr(config, field), least, limit, error=DeploymentError)
    object.__setattr__(config, field, value)


def _as_tuple(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except NOT_ITERABLE:
        raise DeploymentError(f"{name} is {values!r}; give a tuple with one entry a layer") from None


def _check_type(name: str, value: Any, kind: type | tuple[type, ...], *, optional: bool = False) -> None:
    if isinstance(value, kind) or (optional and value is None):
        return
    wanted = kind if isinstance(kind, type) else kind[0]
    raise DeploymentError(f"{name} is {value!r}; give a {wanted.__name__}{' or None' if optional else ''}")


def _check_dtype(name: str, dtype: str) -> None:
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise DeploymentError(f"{name} is {dtype!r}; choose one of {', '.join(DTYPE_BYTES)}")
