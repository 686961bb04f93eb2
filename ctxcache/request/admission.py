"""What a caller says when a request begins and after each step. Plain values; the coordinator checks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ctxcache.ids import (
    ContextCacheCommitPolicy,
    ContextCacheExecutionMode,
    ContextCacheLookupPolicy,
)
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.keys.tokens import MediaHashes, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class ContextCacheSequenceAdmission:
    """One whole logical input, admitted before anybody knows how much of it must be computed.

    Attributes:
        token_ids: the prompt, at least one token.
        key_extras: identity that all its blocks share.
        per_position_media_hash: `None` for text; else one digest per token. A non-zero digest replaces the
            token id in the block's key.
    """

    token_ids: TokenIds
    key_extras: BlockKeyExtras = field(default_factory=BlockKeyExtras)
    per_position_media_hash: MediaHashes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ContextCacheBatchAdmission:
    """One request: a batch of sequences that prefill and decode together.

    Attributes:
        sequences: one admission per slot, in slot order.
        execution_mode: one that the deployment serves.
        lookup_policy: `BYPASS` uses managed private pages, looks nothing up and publishes nothing.
        commit_policy: whether generated tokens are published.
    """

    sequences: Sequence[ContextCacheSequenceAdmission]
    execution_mode: ContextCacheExecutionMode = ContextCacheExecutionMode.VANILLA
    lookup_policy: ContextCacheLookupPolicy = ContextCacheLookupPolicy.USE_CACHE
    commit_policy: ContextCacheCommitPolicy = ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS


@dataclass(frozen=True, slots=True)
class DecodingKvHeadroom:
    """Tokens beyond the committed ones that the next step may write.

    Attributes:
        base_extra_tokens: in the base model's pages.
        draft_extra_tokens: in the draft model's pages; means nothing in a mode without draft pages.
    """

    base_extra_tokens: int
    draft_extra_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ContextCacheSequenceAdvance:
    """How far one sequence got, as the runtime saw it after its own synchronisation.

    Attributes:
        accepted_token_ids: tokens accepted by this step, in order; the last one was only sampled: its state is not computed yet.
        committed_state_length: leading tokens whose model state is materialised in the bound cache.
    """

    accepted_token_ids: TokenIds
    committed_state_length: int

    @property
    def accepted_token_count(self) -> int:
        """How many tokens were accepted."""
        return len(self.accepted_token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class ContextCacheBatchAdvance:
    """The advances of a whole batch as arrays: no Python object a sequence.

    Attributes:
        accepted_token_ids: `int32[batch, k]`; row `i` holds its first `accepted_token_counts[i]` entries.
        accepted_token_counts: `int32[batch]`, each in `[0, k]`.
        committed_state_lengths: `int32[batch]`.
    """

    accepted_token_ids: NDArray[np.int32]
    accepted_token_counts: NDArray[np.int32]
    committed_state_lengths: NDArray[np.int32]
