"""Why an input would reuse what it would: the answer to "why is this slow?", without touching anything.

The manager knows how far an input matches. What lies beyond it is a memory of which identities the beginnings of published
sequences were seen under, by which a miss can be explained as theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ctxcache.arguments import Int32s, Words
from ctxcache.ids import MissReason, ReusePlanKind
from ctxcache.keys.chain import KeyHasher, SequenceKeys
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.manager.results import MatchResult

_BEGINNINGS = 1024
_IDENTITIES = 8


@dataclass(frozen=True, slots=True)
class MatchExplanation:
    """What one sequence of an admission would reuse now, and what stopped the match.

    Attributes:
        sequence: index of the sequence in the admission.
        input_tokens: tokens of the input.
        matched_tokens: tokens that match.
        reused_tokens: tokens that would not be computed.
        plan_kind: kind of the plan.
        diverged_at_token: first token of the first full block that is not cached; `None` when every full block is.
        reason: why not more is reused.
    """

    sequence: int
    input_tokens: int
    matched_tokens: int
    reused_tokens: int
    plan_kind: ReusePlanKind
    diverged_at_token: int | None
    reason: MissReason


_NOTHING_MATCHED = frozenset({MissReason.NO_MATCH, MissReason.NO_CHECKPOINT, MissReason.EVICTED})


def explain_match(
    sequence: int, input_tokens: int, match: MatchResult, tokens_per_page: int, *, other_identity: bool
) -> MatchExplanation:
    """Put the manager's view of one sequence into the caller's words.

    Args:
        sequence: index in the admission.
        input_tokens: tokens of the input.
        match: what the manager says.
        tokens_per_page: P.
        other_identity: the same beginning was published under other extras, and not under these.
    """
    all_blocks = match.matched_full_blocks == input_tokens // tokens_per_page
    hidden = other_identity and match.matched_full_blocks == 0 and match.reason in _NOTHING_MATCHED
    return MatchExplanation(
        sequence=sequence,
        input_tokens=input_tokens,
        matched_tokens=match.matched_token_length,
        reused_tokens=match.reused_token_length,
        plan_kind=match.kind,
        diverged_at_token=None if all_blocks else match.matched_full_blocks * tokens_per_page,
        reason=MissReason.OTHER_IDENTITY if hidden else match.reason,
    )


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
        tokens: Int32s,
        media: Words | None,
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

    def knows_another(self, tokens: Int32s, media: Words | None, extras: BlockKeyExtras) -> bool:
        """Say whether a sequence that begins like this was published under other extras, and not under these."""
        content = self._content(tokens, media)
        identities = [] if content is None else self._seen.get(content, [])
        return bool(identities) and extras not in identities

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()

    def _content(self, tokens: Int32s, media: Words | None) -> bytes | None:
        """Return the key of the first full block as if it had no identity; `None` when there is no full block."""
        size = self._tokens_per_page
        if tokens.size < size:
            return None
        keys = self._hasher.start(BlockKeyExtras())
        keys.extend(tokens[:size], None if media is None else media[:size])
        return bytes(keys.full_block_keys[0])
