"""The exact keys of all lengths behind a block, made in one pass, are those made one by one."""

from __future__ import annotations

import numpy as np
import pytest
from support.keys import KEY

from ctxcache.errors import ContractError
from ctxcache.ids import Hash128
from ctxcache.keys.chain import KeyHasher
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.keys.tokens import as_media_array, as_token_array


@pytest.mark.parametrize("page", [1, 2, 7, 16])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 33, 50])
@pytest.mark.parametrize("first_media", [None, 0, 3, 20])
def test_all_lengths_behind_a_block_have_the_keys_that_they_have_alone(page, num_tokens, first_media) -> None:
    """Whatever the page, where the text ends, and from where on there is media; negative tokens too."""
    tokens = as_token_array([7 - i * 1_000_003 for i in range(num_tokens)])
    media = None
    if first_media is not None:
        media = as_media_array(
            [Hash128(5, i) if i >= first_media else Hash128(0, 0) for i in range(num_tokens)], num_tokens
        )
    keys = KeyHasher(page, KEY).start(BlockKeyExtras(isolation_digest=Hash128(1, 2)))
    keys.extend(tokens, media)
    for blocks in range(num_tokens // page + 1):
        rows = keys.exact_keys_behind(tokens, media, blocks)
        last = min((blocks + 1) * page, num_tokens)
        assert rows.shape == (last - blocks * page + 1, 2)
        for i, row in enumerate(rows):
            assert Hash128(*row.tolist()) == keys.exact_key(tokens, media, blocks * page + i)


def test_blocks_that_are_not_hashed_are_refused() -> None:
    """Behind more blocks than were hashed there is nothing to begin from."""
    tokens = as_token_array(np.arange(20, dtype=np.int32))
    keys = KeyHasher(16, KEY).start()
    with pytest.raises(ContractError, match="extend"):
        keys.exact_keys_behind(tokens, None, 1)
