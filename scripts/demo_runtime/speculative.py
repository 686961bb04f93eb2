"""How a runtime uses the coordinator when it drafts: several tokens a step, and state of which only a part is kept.

`answer_speculatively` is the whole story, for one sequence. What differs from `conversation.answer_batch`:

- A step writes further than it commits. Rejected tokens leave keys and values behind the committed length, in pages that
  the next step writes again. The coordinator never publishes beyond what it was told is committed.
- There may be two caches, the base's and the draft's. A page of one is worth nothing without the page of the other: the
  coordinator publishes and reuses pairs, as far as both states agree, the *common* length.
- What the draft keeps at a page's last position depends on the token behind the page. So a hit gives its last page back
  and computes it again, base and draft.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ctxcache import (
    ContextCacheBatchAdmission,
    ContextCacheCoordinator,
    ContextCacheExecutionMode,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from demo_runtime.conversation import Answer, StopRule
from demo_runtime.drafters import Drafter, Proposal
from demo_runtime.eagle import rows_of
from demo_runtime.engine import Engine
from demo_runtime.model import LlamaModel
from demo_runtime.tiles import Chunk, Floats


@dataclass(slots=True, eq=False)
class SpeculativeAnswer(Answer):
    """What a model said, and how much of it was guessed before.

    Attributes:
        proposals: one for each step.
        num_accepted_drafts: drafted tokens that are in the answer.
    """

    proposals: list[Proposal] = field(default_factory=list)
    num_accepted_drafts: int = 0

    @property
    def num_drafted(self) -> int:
        """Drafted tokens."""
        return sum(len(proposal.tokens) for proposal in self.proposals)

    @property
    def acceptance(self) -> float:
        """Accepted part of the drafted tokens, 0 to 1; 0 when nothing was drafted."""
        return self.num_accepted_drafts / self.num_drafted if self.num_drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a verification gave on average; the prefill's token is not counted."""
        return (len(self.tokens) - 1) / len(self.proposals) if self.proposals else 0.0

    def has_same_drafts(self, other: SpeculativeAnswer) -> bool:
        """Whether both runs drafted the same in every step, from the same bits."""
        return len(self.proposals) == len(other.proposals) and all(
            mine.is_same(theirs) for mine, theirs in zip(self.proposals, other.proposals, strict=True)
        )


class SpeculativeRuntime:
    """A base model that verifies, a drafter, and the coordinator over the pages of both.

    Args:
        model: the base.
        base: its pages; slot 0 is used.
        drafter: guesses.
        coordinator: has `base`, and the drafter's engine where it has one.
        mode: the execution mode of the deployment.
        drafting_step: tokens that are drafted in one step.

    Attributes:
        headroom: how far beyond the committed tokens one step may write, in the base's pages and in the draft's.
    """

    def __init__(
        self,
        model: LlamaModel,
        base: Engine,
        drafter: Drafter,
        coordinator: ContextCacheCoordinator,
        mode: ContextCacheExecutionMode,
        drafting_step: int,
    ) -> None:
        self.base = base
        self.drafter = drafter
        self.coordinator = coordinator
        self.mode = mode
        self.drafting_step = drafting_step
        # A step computes the lookahead and every draft, and then the draft's state of all that was accepted of them.
        # The coordinator's own choice for a draft would be one token less: enough for drafting, not for following.
        self.headroom = DecodingKvHeadroom(drafting_step + 1, drafting_step + 1 if drafter.engine else 0)
        self._model = model

    def compute(self, tokens: Sequence[int]) -> Floats:
        """Compute tokens behind the base's length, without committing them; float32 `[n, width]`, residual streams."""
        chunk = Chunk(0, self.base.length, np.asarray(tokens, dtype=np.int32))
        return rows_of(self._model.residuals([chunk], self.base.memory)[-1], chunk)

    def logits(self, residuals: Floats) -> Floats:
        """Return the logits of each row, float32 `[n, vocabulary]`."""
        return self._model.logits(residuals)

    def common_length(self) -> int:
        """Return how far the states of base and draft agree, from the device lengths of both."""
        draft = self.drafter.engine
        return self.base.length if draft is None else min(self.base.length, draft.length)


def answer_speculatively(
    runtime: SpeculativeRuntime,
    prompt: Sequence[int],
    stop: StopRule,
    *,
    lookup_policy: ContextCacheLookupPolicy = ContextCacheLookupPolicy.USE_CACHE,
) -> SpeculativeAnswer:
    """Answer a prompt as greedy decoding would, drafting ahead.

    Args:
        runtime: base, drafter, and their context cache.
        prompt: token ids.
        stop: when the answer ends.
        lookup_policy: `BYPASS` computes everything and keeps nothing.
    """
    coordinator = runtime.coordinator
    answer = SpeculativeAnswer(stop)
    started = time.perf_counter()
    admission = ContextCacheBatchAdmission(
        [ContextCacheSequenceAdmission(prompt)], execution_mode=runtime.mode, lookup_policy=lookup_policy
    )
    begun = coordinator.begin_request(admission, None, headroom=runtime.headroom)
    begun.status.raise_for_status()
    assert begun.admission is not None  # noqa: S101 - the status is OK
    with begun.admission.request as request:
        # Bind: rows and lengths of base and draft. Both begin at the same position, at the edge of a page.
        coordinator.prepare_prefill(request).raise_for_status()
        (start,) = begun.admission.prefill_starts
        residuals = runtime.compute(prompt[start:])
        runtime.base.commit(len(prompt) - start)
        answer.reused_tokens = start
        answer.take(runtime.logits(residuals[-1:])[0])
        answer.prefill_seconds = time.perf_counter() - started
        # The prompt's boundary is frozen, not published: the draft's own prefill is only the next thing on the stream.
        # Base and draft will agree on the whole prompt, and the first verification proves it.
        prefilled = [ContextCacheSequenceAdvance(answer.tokens, len(prompt))]
        coordinator.finalize_prefill_publication(request, prefilled, [len(prompt)]).raise_for_status()
        runtime.drafter.follow(residuals, [*prompt[start + 1 :], answer.tokens[0]])
        while not answer.ended:
            # Room for all that the step may write, whether it will be kept or not.
            coordinator.prepare_decode_step(request, headroom=runtime.headroom).raise_for_status()
            accepted = _draft_and_verify(runtime, prompt, answer)
            advance = ContextCacheSequenceAdvance(accepted, runtime.base.length)
            coordinator.complete_decode_step(
                request,
                [advance],
                publishable_completed_slots=[0] if answer.ended else [],
                common_state_lengths=[runtime.common_length()],
            ).raise_for_status()
        coordinator.finish(request).raise_for_status()
    return answer


def _draft_and_verify(runtime: SpeculativeRuntime, prompt: Sequence[int], answer: SpeculativeAnswer) -> list[int]:
    """Draft, let the base compute the lookahead and all drafts at once, and keep what it would have said itself."""
    proposal = runtime.drafter.propose([*prompt, *answer.tokens], runtime.drafting_step)
    answer.proposals.append(proposal)
    # Row i tells what the base says behind the i-th of these: it is right as long as every draft before it was.
    residuals = runtime.compute([answer.tokens[-1], *proposal.tokens])
    accepted: list[int] = []
    for draft, logits in zip([*proposal.tokens, None], runtime.logits(residuals), strict=True):
        answer.take(logits)
        accepted.append(answer.tokens[-1])
        answer.num_accepted_drafts += accepted[-1] == draft
        if accepted[-1] != draft or answer.ended:
            break
    # The rest of the rows was computed from rejected drafts. Their keys and values stay behind the length.
    runtime.base.commit(len(accepted))
    runtime.drafter.follow(residuals[: len(accepted)], accepted)
    return accepted
