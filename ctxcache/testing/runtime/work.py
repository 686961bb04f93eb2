"""What the model of a simulated runtime enqueues: one pass over one sequence at a time, and which pages it touches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ctxcache.device.resources import ContextCachePhysicalResources
from ctxcache.ids import ResourceType
from ctxcache.manager.results import CacheRequestLease
from ctxcache.testing.deferred import Use
from ctxcache.testing.oracle import Part, Transcript
from ctxcache.testing.runtime.identities import Media
from ctxcache.testing.runtime.model import HiddenModel, PagedModel, RecurrentModel, Span

MODEL_ROW, RESTORED_ROW = 0, 1
"""Rows of the hidden states: where the model leaves its own, and where a restored one goes."""

_SPOILED = 0x5A5A5A5A5A5A5A5A

Enqueue: TypeAlias = Callable[[Callable[[], None], Sequence[Use]], None]


@dataclass(slots=True, eq=False)
class Running:
    """One sequence of the batch, as the runtime knows it. Lengths are in tokens.

    Attributes:
        lease: its hold on pages, to be read.
        media: digests of its prompt's positions, `None` for text.
        transcript: its tokens.
        reused: what the prefill did not compute.
        committed: tokens whose state is materialised, or will be once the stream has run.
        common: tokens on which base and draft agree.
        draft_valid: tokens whose draft state holds.
        draft_length: the draft's device length.
    """

    lease: CacheRequestLease
    media: Media
    transcript: Transcript
    reused: int
    committed: int
    common: int
    draft_valid: int
    draft_length: int


class ModelWork:
    """The models of a deployment, base and draft: `enqueue` takes their work, with what it touches."""

    def __init__(
        self, resources: ContextCachePhysicalResources, hidden: Any, enqueue: Enqueue, report: list[str]
    ) -> None:
        self._enqueue = enqueue
        base, draft = resources.base_cache, resources.draft_cache
        self._tokens_per_page = base.config.tokens_per_page
        self._base = PagedModel(base, resources.base_page_table, (Part.KEY, Part.VALUE), report)
        self._recurrent = RecurrentModel(base, report)
        self._draft: PagedModel | None = None
        if draft is not None:
            self._draft = PagedModel(draft, resources.draft_page_table, (Part.DRAFT_KEY, Part.DRAFT_VALUE), report)
        self._hidden_model = None if hidden is None else HiddenModel(hidden, report)

    def spoil_states(self) -> None:
        """Leave in every recurrent slot what another request would."""
        self._recurrent.spoil(_SPOILED)

    def compute(self, slot: int, running: Running, stop: int, what: str, *, junk_stop: int, batch: int) -> None:
        """Enqueue the base's work up to `stop` tokens; the positions behind it, up to `junk_stop`, get garbage."""
        start, transcript = running.committed, running.transcript
        row = tuple(running.lease.base_pages.tolist())
        span = Span(valid=start, start=start, stop=stop, junk_stop=max(stop, junk_stop), length=start, row=row)
        running.committed = stop

        def work() -> None:
            self._base.run(slot, transcript, span, what)
            self._base.check_idle_rows(batch, what)
            self._recurrent.run(slot, transcript, start, stop, what)

        self._enqueue(work, self._uses(running.lease, ResourceType.BASE_KV_PAGE, span, what))

    def compute_draft(self, slot: int, running: Running, stop: int, junk_stop: int, what: str) -> None:
        """Enqueue the draft's, where there is a draft and it is not there yet."""
        model, transcript = self._draft, running.transcript
        if model is None or stop < running.draft_valid:
            return
        start = running.draft_valid
        row, junk_stop = tuple(running.lease.draft_pages.tolist()), max(stop, junk_stop)
        span = Span(valid=start, start=start, stop=stop, junk_stop=junk_stop, length=running.draft_length, row=row)
        running.draft_valid = running.draft_length = stop
        uses = self._uses(running.lease, ResourceType.DRAFT_KV_PAGE, span, what)
        self._enqueue(lambda: model.run(slot, transcript, span, what), uses)

    def fold(self, slot: int, running: Running) -> None:
        """Compute the draft's state of the boundary token from the restored hidden row."""
        transcript, length, model = running.transcript, running.reused, self._hidden_model
        running.draft_valid = length - 1
        if model is not None:
            self._enqueue(lambda: model.check(slot, RESTORED_ROW, transcript, length, "fold"), ())
        self.compute_draft(slot, running, length, length, "fold")

    def leave_hidden_row(self, slot: int, running: Running, length: int) -> None:
        """Enqueue what leaves the hidden row of token `length - 1` for an endpoint to capture."""
        transcript, model = running.transcript, self._hidden_model
        if model is not None:
            self._enqueue(lambda: model.write(slot, MODEL_ROW, transcript, length), ())

    def _uses(self, lease: CacheRequestLease, resource: ResourceType, span: Span, what: str) -> list[Use]:
        pages = (lease.base_pages if resource is ResourceType.BASE_KV_PAGE else lease.draft_pages).tolist()
        size = self._tokens_per_page
        first, last = span.start // size, -(-span.junk_stop // size)
        writes = span.junk_stop > span.start
        return [Use(resource, page, writes and first <= index < last, what) for index, page in enumerate(pages[:last])]


def sample(transcript: Transcript) -> int:
    """Return the token that follows: a function of all that came before, from a tiny vocabulary."""
    words = transcript.words(Part.KEY, 0, len(transcript) - 1, len(transcript))
    return int(words[0] % 3)
