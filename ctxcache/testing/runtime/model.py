"""A model without weights: it reads the cache as an attention kernel would, and holds every word against the oracle.

Everything in here runs on the device's time, as work of the stream: it looks at device views and device lengths alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ctxcache.arguments import Words
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.page_table import KVPageTable
from ctxcache.ids import LayerType
from ctxcache.testing.oracle import GARBAGE, Part, Transcript, first_mismatch


@dataclass(frozen=True, slots=True)
class Span:
    """What one pass over one sequence does to its paged state, in tokens.

    Attributes:
        valid: positions below are checked first.
        start, stop: positions that are computed and written.
        junk_stop: positions from `stop` up to here are overwritten with garbage, as rejected draft tokens do.
        length: what the device length of the slot must be before; it is `stop` afterwards.
        row: the pages that the device row of the slot must name, in order, and no more.
    """

    valid: int
    start: int
    stop: int
    junk_stop: int
    length: int
    row: tuple[int, ...]


class PagedModel:
    """The attention layers of one engine, base or draft, over its pools and its page table."""

    def __init__(
        self, cache: HybridCacheManager, table: KVPageTable | None, parts: tuple[Part, Part], report: list[str]
    ) -> None:
        self._cache = cache
        self._table = table
        self._parts = parts
        self._report = report
        self._page = cache.config.tokens_per_page
        self._layers = [i for i, layer in enumerate(cache.config.layers) if layer is LayerType.ATTENTION]

    def run(self, slot: int, transcript: Transcript, span: Span, what: str) -> None:
        """Check what is there, compute what is not, and move the slot's length on."""
        lengths = np.asarray(self._cache.kv_lengths)
        if lengths[slot] != span.length:
            self._say(f"{what}: the device length of slot {slot} is {lengths[slot]} and must be {span.length}")
        lengths[slot] = span.stop
        limit = self._cache.config.max_sequence_length
        if self._table is not None:
            limit = min(limit, len(span.row) * self._page)
        if max(span.stop, span.junk_stop) > limit:
            self._say(
                f"{what}: slot {slot} writes up to {max(span.stop, span.junk_stop)}, and its pages end at {limit}"
            )
        if self._table is None:
            return
        view = np.asarray(self._table.kernel_view)
        pages, values = view[slot]
        needed = -(-max(span.valid, span.junk_stop, span.stop) // self._page)
        row, value_row = pages[:needed].astype(np.int64), values[:needed]
        if needed > pages.size or (row < 0).any() or (value_row != row + self._cache.num_pages).any():
            self._say(f"{what}: the device row of slot {slot} is {pages.tolist()} and lacks one of {needed} pages")
            return
        if tuple(pages[pages >= 0].tolist()) != span.row or (values[len(span.row) :] >= 0).any():
            self._say(f"{what}: the device row of slot {slot} is {pages.tolist()} and must be {span.row}")
        positions = np.arange(needed * self._page)
        pages_of, offsets = row[positions // self._page], positions % self._page
        valid, written = slice(span.valid), slice(span.start, max(span.junk_stop, span.stop))
        junk = np.arange(span.stop, written.stop, dtype=np.uint64) + np.uint64(GARBAGE)
        for layer in self._layers:
            words = np.asarray(self._cache.kv_pool(layer)).view(np.uint64)[..., 0, 0]
            for half, part in enumerate(self._parts):
                expected = transcript.words(part, layer, 0, max(span.valid, span.stop))
                found = words[half, pages_of[valid], offsets[valid]]
                wrong = first_mismatch(found, expected[valid])
                if wrong is not None:
                    self._say(
                        f"{what}: slot {slot}, layer {layer}, {part.name}: page {pages_of[wrong]} holds wrong bytes at "
                        f"position {wrong}"
                    )
                content = np.concatenate((expected[span.start : span.stop], junk))
                words[half, pages_of[written], offsets[written]] = content

    def check_idle_rows(self, batch: int, what: str) -> None:
        """Check that no row behind the batch names a page: kernels of a fixed batch read those too."""
        if self._table is not None and (np.asarray(self._table.kernel_view)[batch:] >= 0).any():
            self._say(f"{what}: a device row behind a batch of {batch} still names pages")

    def _say(self, violation: str) -> None:
        self._report.append(violation)


class RecurrentModel:
    """The recurrent layers of the base: state and convolution state of a slot tell which tokens they have seen."""

    def __init__(self, cache: HybridCacheManager, report: list[str]) -> None:
        self._report = report
        self._max_batch = cache.max_batch
        self._arrays = [
            (layer, part, array)
            for layer, kind in enumerate(cache.config.layers)
            if kind is LayerType.RECURRENT
            for part, array in (
                (Part.STATE, cache.recurrent_state(layer)),
                (Part.CONVOLUTION, cache.conv_state(layer)),
            )
        ]

    def run(self, slot: int, transcript: Transcript, start: int, stop: int, what: str) -> None:
        """Check that the state has seen `start` tokens, and let it see `stop`."""
        for layer, part, array in self._arrays:
            words = self._words(array)
            if (words[slot] != transcript.state(part, layer, start)).any():
                self._report.append(f"{what}: slot {slot}, layer {layer}: {part.name} is not that of {start} tokens")
            words[slot] = transcript.state(part, layer, stop)

    def spoil(self, word: int) -> None:
        """Leave in every slot what another request would."""
        for _, _, array in self._arrays:
            self._words(array)[:] = word

    def _words(self, array: Any) -> Words:
        """Look anew each time: where an array lies on a GPU, it is looking that waits for the stream."""
        return np.asarray(array).reshape(self._max_batch, -1).view(np.uint64)


class HiddenModel:
    """The hidden rows that the base leaves for its MTP draft: `[batch, rows, 1]` words."""

    def __init__(self, hidden_states: Any, report: list[str]) -> None:
        self._hidden_states = hidden_states
        self._report = report

    def write(self, slot: int, row: int, transcript: Transcript, length: int) -> None:
        """Leave the hidden row of token `length - 1`."""
        self._words()[slot, row] = transcript.state(Part.HIDDEN, 0, length)

    def check(self, slot: int, row: int, transcript: Transcript, length: int, what: str) -> None:
        """Check that a restored row is that of token `length - 1`."""
        if self._words()[slot, row] != transcript.state(Part.HIDDEN, 0, length):
            self._report.append(f"{what}: slot {slot}: the hidden row is not that of token {length - 1}")

    def _words(self) -> Words:
        return np.asarray(self._hidden_states).view(np.uint64)[..., 0]
