"""Which identities the beginnings of published sequences were seen under: what lets a miss be explained as theirs."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from ctxcache.keys.chain import KeyHasher, SequenceKeys
from ctxcache.keys.identity import BlockKeyExtras

_BEGINNINGS = 1024
_IDENTITIES = 8


class IdentityMemory:
    """A bounded memory, by the content of a sequence's first full block, of the extras it was published with.

    It answers questions only; no plan looks at it. It may remember what was evicted since, until `clear()`.
    """

    def __init__(self, hasher: KeyHasher, tokens_per_page: int) -> None:
        self._hasher = hasher
        self._tokens_per_page = tokens_per_page
        self._seen: OrderedDict[bytes, list[BlockKeyExtras]] = OrderedDict()

    def note(
        self,
        keys: SequenceKeys,
        tokens: NDArray[np.int32],
        media: NDArray[np.uint64] | None,
        extras: BlockKeyExtras,
    ) -> None:
        """Remember that a sequence which begins like this was published under `extras`; `keys` are its own.

        Without extras its first key is already that of its content alone.
        """
        if keys.unlabelled and keys.num_hashed_blocks:
            content: bytes | None = keys.full_block_keys[0].tobytes()
        else:
            content = self._content(tokens, media)
        if content is None:
            return
        identities = self._seen.setdefault(content, [])
        self._seen.move_to_end(content)
        if extras not in identities:
            identities.append(extras)
            del identities[:-_IDENTITIES]
        if len(self._seen) > _BEGINNINGS:
            self._seen.popitem(last=False)

    def knows_another(
        self, tokens: NDArray[np.int32], media: NDArray[np.uint64] | None, extras: BlockKeyExtras
    ) -> bool:
        """Say whether a sequence that begins like this was published under other extras, and not under these."""
        content = self._content(tokens, media)
        identities = [] if content is None else self._seen.get(content, [])
        return bool(identities) and extras not in identities

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()

    def _content(self, tokens: NDArray[np.int32], media: NDArray[np.uint64] | None) -> bytes | None:
        """Return the key of the first full block as if it had no identity; `None` when there is no full block."""
        size = self._tokens_per_page
        if tokens.size < size:
            return None
        keys = self._hasher.start(BlockKeyExtras())
        keys.extend(tokens[:size], None if media is None else media[:size])
        return bytes(keys.full_block_keys[0])
