"""Whose tokens they are: the extras and the media that make equal tokens of different owners different."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ctxcache.keys.identity import AdapterKey, BlockKeyExtras, hash_opaque_identity

Media: TypeAlias = NDArray[np.uint64] | None

NOBODY, TENANT, ADAPTER, MEDIA = range(4)
"""Identities of a `Transcript`: nobody in particular, a tenant, an adapter, a picture in place of the prompt's words."""


def extras_of(identity: int) -> BlockKeyExtras:
    """Return what an identity adds to every block's key."""
    digest = hash_opaque_identity(str(identity))
    if identity == TENANT:
        return BlockKeyExtras(isolation_digest=digest)
    return BlockKeyExtras(adapter=AdapterKey(digest, identity)) if identity == ADAPTER else BlockKeyExtras()


def media_of(identity: int, prompt: Sequence[int]) -> Media:
    """Return the digests of a prompt's positions, `uint64[n, 2]`; `None` for text.

    A digest stands for its position's token, which is a mere placeholder then. So each token here has one of its own.
    """
    if identity != MEDIA:
        return None
    return np.array([(position + 1, token + 1) for position, token in enumerate(prompt)], np.uint64)


def media_behind(media: Media, num_tokens: int) -> Media:
    """Return the digests of so many positions of a sequence: what it has generated has none."""
    if media is None:
        return None
    longer = np.zeros((num_tokens, 2), np.uint64)
    known = min(num_tokens, len(media))
    longer[:known] = media[:known]
    return longer
