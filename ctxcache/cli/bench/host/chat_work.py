"""What `ctxcache bench host` tells of eviction: a seeded chat load at half the memory that it needs, ours beside block-wise LRU."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ctxcache.arguments import Int32s
from ctxcache.cli.bench.host.manager_work import admit, make_manager, random_tokens
from ctxcache.cli.bench.verdicts import Spread, spread_of
from ctxcache.errors import InvariantError
from ctxcache.keys.chain import hash_full_blocks

_SEED = 1
_SYSTEM_PROMPTS, _SYSTEM_TOKENS = 4, 700
_MOST_TURNS = 12
_MESSAGE_TOKENS, _ANSWER_TOKENS = (20, 400), (50, 600)


class Turn(NamedTuple):
    """One turn: all tokens of its conversation after the answer, and how many of them are the prompt's."""

    tokens: Int32s
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ChatResult:
    """What a load did: the share of prompt tokens that was computed although cached once or not, in percent, and the times."""

    computed_percent: float
    microseconds_a_turn: Spread


def chat_load(num_conversations: int) -> list[Turn]:
    """Return the turns of so many conversations, interleaved; a few are far more active than the others."""
    rng = np.random.default_rng(_SEED)
    systems = [random_tokens(rng, _SYSTEM_TOKENS) for _ in range(_SYSTEM_PROMPTS)]
    histories = [systems[int(rng.integers(_SYSTEM_PROMPTS))] for _ in range(num_conversations)]
    left = rng.integers(1, _MOST_TURNS + 1, num_conversations)
    activity = rng.pareto(1.0, num_conversations) + 0.1
    turns = []
    while left.any():
        chances = activity * (left > 0)
        which = int(rng.choice(num_conversations, p=chances / chances.sum()))
        left[which] -= 1
        prompt = np.concatenate([histories[which], random_tokens(rng, int(rng.integers(*_MESSAGE_TOKENS)))])
        histories[which] = np.concatenate([prompt, random_tokens(rng, int(rng.integers(*_ANSWER_TOKENS)))])
        turns.append(Turn(histories[which], prompt.size))
    return turns


def half_of_what_it_needs(turns: list[Turn], block: int) -> int:
    """Return half the pages that would hold all blocks of a load at once; enough for the longest turn at least."""
    seen = {key.tobytes() for turn in turns for key in hash_full_blocks(turn.tokens, block)}
    return max(len(seen) // 2, max(turn.tokens.size for turn in turns) // block + 2)


def serve(turns: list[Turn], block: int, num_pages: int) -> ChatResult:
    """Serve a load with the manager: hash, lease the prompt, publish it, grow, publish the answer, release."""
    manager, computed, times = make_manager(block, num_pages), 0, []
    for turn in turns:
        started = time.perf_counter_ns()
        keys = hash_full_blocks(turn.tokens, block)
        plan = manager.plan(keys, turn.num_prompt_tokens, base_extra_tokens=0)
        lease = admit(manager, keys, turn.num_prompt_tokens)
        if turn.num_prompt_tokens >= block:
            manager.publish(lease, keys, turn.num_prompt_tokens)
        if not manager.grow(lease, -(-turn.tokens.size // block) - lease.base_pages.size):
            raise InvariantError("a benchmark's turn found no room; please report this")
        if turn.tokens.size >= block:
            manager.publish(lease, keys, turn.tokens.size)
        manager.release(lease)
        times.append((time.perf_counter_ns() - started) / 1e3)
        computed += turn.num_prompt_tokens - plan.reused_token_length
    return ChatResult(_percent(computed, turns), spread_of(times))


def serve_block_wise(turns: list[Turn], block: int, num_pages: int) -> float:
    """Return the percentage computed by block-wise LRU as vLLM does it: free blocks queue by release, a tail's first.

    Blocks of a prompt that are cached leave the queue; what is lacking is taken from its front, and forgotten there.
    """
    cached: dict[bytes, int] = {}
    queue: OrderedDict[int, bytes | None] = OrderedDict.fromkeys(range(num_pages))
    computed = 0
    for turn in turns:
        keys = [key.tobytes() for key in hash_full_blocks(turn.tokens, block)]
        pages = list(_leading_pages(cached, keys[: (turn.num_prompt_tokens - 1) // block]))
        computed += turn.num_prompt_tokens - len(pages) * block
        for page in pages:
            del queue[page]
        while len(pages) * block < turn.tokens.size:
            page, key = queue.popitem(last=False)
            if key is not None:
                del cached[key]
            pages.append(page)
        held = {page: key for key, page in zip(keys, pages, strict=False) if cached.setdefault(key, page) == page}
        for page in reversed(pages):
            queue[page] = held.get(page)
    return _percent(computed, turns)


def _leading_pages(cached: dict[bytes, int], keys: list[bytes]) -> Iterator[int]:
    for key in keys:
        if key not in cached:
            return
        yield cached[key]


def _percent(computed: int, turns: list[Turn]) -> float:
    return 100.0 * computed / sum(turn.num_prompt_tokens for turn in turns)


def chat_spread(name: str, block: int, num_conversations: int) -> Spread:
    """Return a row of the table: `chat` the time of a turn, `chat-computed` the percentage, `chat-ratio` ours of theirs."""
    turns = chat_load(num_conversations)
    num_pages = half_of_what_it_needs(turns, block)
    serve(turns[:8], block, num_pages)
    ours = serve(turns, block, num_pages)
    if name == "chat":
        return ours.microseconds_a_turn
    if name == "chat-computed":
        return spread_of([ours.computed_percent])
    return spread_of([ours.computed_percent / serve_block_wise(turns, block, num_pages)])
