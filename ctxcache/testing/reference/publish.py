"""Publication of the plain-Python manager: what a lease computed becomes a record."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ctxcache.errors import ContractError
from ctxcache.testing.reference.plans import keys_of
from ctxcache.testing.reference.state import DRAFT, Keys, LeaseState, RecordState, ReferenceState


def own_path(
    state: ReferenceState,
    lease: LeaseState,
    keys: NDArray[np.uint64],
    num_blocks: int,
    num_paired: int,
    *,
    attempted: bool,
) -> Keys:
    """Return the keys to publish. Counts an attempt as refused, and raises, where they are no prefix of the lease."""
    own = keys_of(keys, max(num_blocks, len(lease.known_keys)))
    known = len(lease.known_keys)
    parents = state.parents()
    chained = all(
        key not in parents or parents[key] == (own[index - 1] if index else None)
        for index, key in enumerate(own[:num_blocks])
    )
    if num_blocks > len(lease.base_pages) or num_paired > len(lease.draft_pages):
        problem = f"{num_blocks} blocks ({num_paired} paired) reach beyond the lease's pages"
    elif own[:known][-1:] != lease.known_keys[-1:]:
        problem = "the keys differ from those that the lease reused or published"
    elif not chained or len(set(own)) != len(own):
        problem = "the keys are no chain"
    else:
        return own[:num_blocks]
    state.refused += attempted
    raise ContractError(problem)


def new_record(state: ReferenceState, lease: LeaseState, path: Keys) -> RecordState:
    """Record an endpoint; the lease's pages become canonical for the blocks that are new."""
    for index, key in enumerate(path):
        state.page_of.setdefault(key, lease.base_pages[index])
    state.last_serial += 1
    record = RecordState(state.last_serial, path)
    state.records.append(record)
    return record


def pair(state: ReferenceState, lease: LeaseState, record: RecordState, num_paired: int) -> None:
    """Give a record the draft path of a lease: shared with other records as far as the following block is known."""
    replaced = list(record.draft_pages)
    path = []
    for index in range(num_paired):
        followed = record.keys[index : index + 2] if index + 1 < num_paired else ()
        shared = state.paired_draft_page(*followed) if followed else None
        path.append(lease.draft_pages[index] if shared is None else shared)
    record.draft_pages = path
    state.give_back([(DRAFT, page) for page in replaced if page not in path])
