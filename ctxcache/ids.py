"""Names for the values that cross module borders: the 128-bit digest and the enumerations."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from operator import index
from typing import Any, Self

from ctxcache.errors import ContractError, PoisonedError, RequestFailedError

_WORD_LIMIT = 1 << 64


@dataclass(frozen=True, slots=True, order=True)
class Hash128:
    """A 128-bit digest as two unsigned 64-bit words. Falsy exactly when both words are zero.

    Attributes:
        hi: the more significant word, `0 <= hi < 2**64`. A NumPy integer, as rows of keys hold, becomes an `int`.
        lo: the less significant word, likewise.

    Raises:
        ContractError: a word is no integer, or out of range.
    """

    hi: int
    lo: int

    def __post_init__(self) -> None:
        for name, word in (("hi", self.hi), ("lo", self.lo)):
            if type(word) is not int:
                object.__setattr__(self, name, _as_word(name, word))
            elif not 0 <= word < _WORD_LIMIT:
                raise ContractError(f"Hash128.{name} is {word}; pass an integer in [0, 2**64)")

    def __bool__(self) -> bool:
        return bool(self.hi | self.lo)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read 16 bytes, most significant first. `ContractError` for any other length or type."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise ContractError(f"Hash128.from_bytes got a {type(data).__name__}; pass 16 bytes")
        data = bytes(data)
        if len(data) != 16:
            raise ContractError(f"Hash128.from_bytes got {len(data)} bytes; a digest has exactly 16")
        return cls(int.from_bytes(data[:8], "big"), int.from_bytes(data[8:], "big"))

    def to_bytes(self) -> bytes:
        """Return the 16 bytes, most significant first: the inverse of `from_bytes`."""
        return self.hi.to_bytes(8, "big") + self.lo.to_bytes(8, "big")

    def __str__(self) -> str:
        return self.to_bytes().hex()


def _as_word(name: str, word: Any) -> int:
    """Return an integer of another type (a NumPy scalar is an `Integral` too, an `IntEnum`) as a word, or refuse."""
    if type(word) is not bool and isinstance(word, Integral):
        with suppress(TypeError):  # NumPy derives lengths of time from its integers
            number = index(word)
            if 0 <= number < _WORD_LIMIT:
                return number
    raise ContractError(f"Hash128.{name} is {word!r}; pass an integer in [0, 2**64)")


class ContextCacheCoordinatorStatus(Enum):
    """What became of an operation whose failure is not the caller's mistake."""

    OK = "ok"
    REQUEST_FAILED = "request_failed"
    POISONED = "poisoned"

    def raise_for_status(self) -> None:
        """Raise `RequestFailedError` or `PoisonedError` for the two failures; do nothing for `OK`."""
        if self is ContextCacheCoordinatorStatus.REQUEST_FAILED:
            raise RequestFailedError(
                "out of pages, or another request is active; finish that one, or ask for a smaller batch"
            )
        if self is ContextCacheCoordinatorStatus.POISONED:
            raise PoisonedError(
                "a drain failed; call shutdown() until it returns OK, then recover() where the device context is healthy, or "
                "build another coordinator"
            )


class ContextCacheExecutionMode(Enum):
    """How a batch decodes: plainly, or with one of the speculative schemes."""

    VANILLA = "vanilla"
    EAGLE = "eagle"
    MTP = "mtp"
    SHARED_KV = "shared_kv"


class ContextCacheLookupPolicy(Enum):
    """Whether a request looks for, and publishes, reusable state."""

    USE_CACHE = "use_cache"
    BYPASS = "bypass"


class ContextCacheCommitPolicy(Enum):
    """Whether generated tokens become reusable, or the prompt's state alone."""

    INCLUDING_GENERATED_TOKENS = "including_generated_tokens"
    PREFILL_STATE_ONLY = "prefill_state_only"


class ContextCacheDeploymentKind(Enum):
    """Which engines, pools and page tables belong together."""

    VANILLA = "vanilla"
    PURE_RECURRENT = "pure_recurrent"
    HYBRID = "hybrid"
    EAGLE = "eagle"
    HYBRID_MTP = "hybrid_mtp"
    SHARED_KV = "shared_kv"


RECURRENT_KINDS = frozenset(
    {
        ContextCacheDeploymentKind.PURE_RECURRENT,
        ContextCacheDeploymentKind.HYBRID,
        ContextCacheDeploymentKind.HYBRID_MTP,
    }
)
"""Deployments whose base has recurrent layers: they reuse state at checkpoints, exact lengths that were captured."""

PAIRED_KINDS = frozenset({ContextCacheDeploymentKind.EAGLE, ContextCacheDeploymentKind.HYBRID_MTP})
"""Deployments whose draft model has pages of its own, which are reused in pairs with the base's."""


class Phase(Enum):
    """The part of its life that a request is in, as callers see it."""

    ADMITTED = "admitted"
    EXECUTING = "executing"
    FINISHING = "finishing"
    POISONED = "poisoned"


class AcquireStatus(Enum):
    """What became of an attempt to turn a plan into a lease."""

    ACQUIRED = "acquired"
    STALE_PLAN = "stale_plan"
    INSUFFICIENT_CAPACITY = "insufficient_capacity"


class PublishStatus(Enum):
    """Whether a publication made a record, or found (and touched) the one that stood there."""

    PUBLISHED = "published"
    EXISTING_RECORD = "existing_record"


class PublicationPoint(Enum):
    """The host-visible completion at which a checkpoint is published."""

    PREFILL_END = "prefill_end"
    DECODE_END = "decode_end"


class ReusePlanKind(Enum):
    """How a plan uses what it matched."""

    STANDARD = "standard"
    NO_REUSABLE_PREFIX = "no_reusable_prefix"
    FULL_INPUT_REWIND = "full_input_rewind"


class SpecReplayMode(Enum):
    """What a speculative hit computes again so that the draft model sees its successor token."""

    NONE = "none"
    FULL_PAGE = "full_page"


class MissReason(Enum):
    """Why a sequence reuses less than its whole input.

    Members:
        NONE: nothing more could be reused.
        EMPTY_CACHE: there is no record.
        NO_MATCH: nothing begins like this.
        DIVERGED: the input parts from what is cached at `diverged_at_token`.
        PARTIAL_BLOCK: what is left is shorter than a block; only full blocks are shared.
        REWIND: the whole input matched; its last block is computed again for logits.
        BYPASS: nothing is looked up.
        EVICTED: it was there lately and had to go.
        NO_CHECKPOINT: blocks match, but no recurrent state was kept along them.
        WRONG_CHECKPOINT_LENGTH: state was kept at the input's own length, and at least one token must be computed.
        OTHER_IDENTITY: the same beginning is known under another adapter, tenant or other extras.
        UNPAIRED_DRAFT: base pages match; their draft pages were never computed.
        REPLAY: the last matched block is computed again for the draft model's sake.
    """

    NONE = "none"
    EMPTY_CACHE = "empty_cache"
    NO_MATCH = "no_match"
    DIVERGED = "diverged"
    PARTIAL_BLOCK = "partial_block"
    REWIND = "rewind"
    BYPASS = "bypass"
    EVICTED = "evicted"
    NO_CHECKPOINT = "no_checkpoint"
    WRONG_CHECKPOINT_LENGTH = "wrong_checkpoint_length"
    OTHER_IDENTITY = "other_identity"
    UNPAIRED_DRAFT = "unpaired_draft"
    REPLAY = "replay"


class ResourceType(Enum):
    """The four typed pools of the cache."""

    BASE_KV_PAGE = "base_kv_page"
    DRAFT_KV_PAGE = "draft_kv_page"
    RECURRENT_SNAPSHOT = "recurrent_snapshot"
    PARTIAL_KV_SNAPSHOT = "partial_kv_snapshot"


class LayerType(Enum):
    """What a layer keeps between tokens: paged keys and values, or a fixed-size state."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"


class SpecDecodeMode(Enum):
    """The speculative scheme of a deployment."""

    NONE = "none"
    EAGLE = "eagle"
    MTP = "mtp"
    SHARED_KV = "shared_kv"
