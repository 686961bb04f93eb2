"""Under which keys state is published: those of exactly the tokens that it was computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ctxcache.keys.chain import hash_exact_prefix, hash_full_blocks
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.manager.results import CacheRequestLease, HybridCheckpointKey
from ctxcache.testing.runtime.deployments import HASH_KEY
from ctxcache.testing.runtime.identities import Media
from ctxcache.testing.taps import tap

Identity: TypeAlias = tuple[list[int], BlockKeyExtras, Media]


class KeyOracle:
    """Listens to a manager, and hashes in one go what each publication says it is."""

    def __init__(
        self, manager: Any, identity_of: Callable[[CacheRequestLease], Identity | None], report: list[str]
    ) -> None:
        """Begin to listen.

        Args:
            manager: of a deployment of `ctxcache.testing.runtime.deployments`.
            identity_of: says the tokens of a running lease, its extras and its media; `None` for a lease that does not run.
            report: violations are added here.
        """
        self._tokens_per_page = int(manager.tokens_per_page)
        self._identity_of = identity_of
        self._report = report
        tap(manager, "publish", before=self._publishes)
        tap(manager, "publish_checkpoint", before=self._publishes_checkpoint)

    def _publishes(self, lease: CacheRequestLease, keys: NDArray[np.uint64], length: int, **_: Any) -> None:
        identity = self._identity_of(lease)
        if identity is None:
            self._report.append("a publication by a lease of no running sequence")
            return
        tokens, extras, media = identity
        blocks = tokens[: length // self._tokens_per_page * self._tokens_per_page]
        shown = None if media is None else media[: len(blocks)]
        expected = hash_full_blocks(blocks, self._tokens_per_page, extras, shown, key=HASH_KEY)
        if not np.array_equal(keys[: len(expected)], expected):
            self._report.append(f"blocks of {blocks} were published under the keys of other tokens")

    def _publishes_checkpoint(
        self, lease: CacheRequestLease, keys: NDArray[np.uint64], checkpoint: HybridCheckpointKey, *_: Any
    ) -> None:
        self._publishes(lease, keys, checkpoint.exact_length)
        identity = self._identity_of(lease)
        if identity is None:
            return
        tokens, extras = identity[0][: checkpoint.exact_length], identity[1]
        media = None if identity[2] is None else identity[2][: checkpoint.exact_length]
        expected = hash_exact_prefix(tokens, self._tokens_per_page, extras, media, key=HASH_KEY)
        if checkpoint.exact_prefix_digest != expected:
            self._report.append(f"a checkpoint of {tokens} was published under another key")
