"""Both managers, driven with the same random operations by Hypothesis and compared after every one.

Small pools, small pages, two token ids, prompts from a few streams that part late: prefixes collide, records stand in
each other's way, and everything runs out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ctxcache.ids import AcquireStatus
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from support.manager_misuse import pass_wrong_arguments, publish_another_sequence, use_a_released_lease
from support.manager_twins import Sequence, Twins
from support.manager_views import checkpoint_of, exact_keys_behind, keys_of

NUM_STEPS = 40
CHECKPOINT_KINDS = {Kind.PURE_RECURRENT, Kind.HYBRID, Kind.HYBRID_MTP}
PAIRED_MODES = {Mode.EAGLE, Mode.MTP}
MODES = {
    Kind.VANILLA: [Mode.VANILLA],
    Kind.SHARED_KV: [Mode.SHARED_KV, Mode.SHARED_KV, Mode.VANILLA],
    Kind.EAGLE: [Mode.EAGLE, Mode.EAGLE, Mode.VANILLA],
    Kind.PURE_RECURRENT: [Mode.VANILLA],
    Kind.HYBRID: [Mode.VANILLA],
    Kind.HYBRID_MTP: [Mode.MTP, Mode.MTP, Mode.MTP, Mode.VANILLA],
}
STREAMS = ((1,) * 24, (1,) * 5 + (2,) * 19, (1, 1, 2) + (1,) * 21, (1,) * 9 + (2,) * 15, (2,) * 24)


@dataclass
class Ran:
    """How much a machine class has run: steps of each example."""

    steps: list[int] = field(default_factory=list)

    @property
    def num_full_examples(self) -> int:
        """Examples that took all their steps."""
        return sum(steps >= NUM_STEPS for steps in self.steps)


class ManagerMachine(RuleBasedStateMachine):
    """Drives both managers. Subclasses fix the deployment kind."""

    kind: Kind
    ran: Ran

    def __init__(self) -> None:
        super().__init__()
        self.kept_plans: list[tuple] = []  # (plan of either manager, mode, tokens)
        self.released: list[tuple] = []
        self.num_steps = -1  # the first look is before the first step

    def teardown(self) -> None:
        """Let everything go: what is left must balance, and every resource come home."""
        if not hasattr(self, "twins"):
            return
        self.ran.steps.append(self.num_steps)
        while self.twins.sequences:
            self.release(0)
        self.twins.both("clear")
        self.everything_observable_is_equal()
        self.twins.nothing_is_held()

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that run on both; none before the managers are built."""
        return self.twins.sequences if hasattr(self, "twins") else []

    # --- what to do ------------------------------------------------------------------------------------------------

    @initialize(
        tokens_per_page=st.sampled_from([1, 2, 2, 3]),
        num_pages=st.integers(4, 12),
        num_draft_pages=st.integers(4, 12),
        num_snapshots=st.integers(1, 4),
        num_partial=st.integers(1, 4),
        max_records=st.sampled_from([0, 1, 2, 3, 4, 100, 100, 100]),
    )
    def build(self, tokens_per_page, num_pages, num_draft_pages, num_snapshots, num_partial, max_records):
        self.tokens_per_page = tokens_per_page
        has_pages, has_checkpoints = self.kind is not Kind.PURE_RECURRENT, self.kind in CHECKPOINT_KINDS
        options = {
            "tokens_per_page": tokens_per_page,
            "num_base_pages": num_pages * has_pages,
            "num_draft_pages": num_draft_pages * (self.kind in {Kind.EAGLE, Kind.HYBRID_MTP}),
            "num_recurrent_snapshots": num_snapshots * has_checkpoints,
            "num_partial_kv_snapshots": num_partial * (has_checkpoints and has_pages),
            "max_records": max_records,
            "kind": self.kind,
        }
        self.twins = Twins(**options)

    def prompt(self, stream: int, length: int) -> tuple[int, ...]:
        return STREAMS[stream % len(STREAMS)][: max(1, length % (6 * self.tokens_per_page + 1))]

    def plans_for(self, tokens, mode, base_extra=1, draft_extra=0, bypass=False):
        """Plan the same on both; compare the plans, and what `match` and the candidate lengths say."""
        keys = keys_of(tokens, self.tokens_per_page)
        options = {"mode": mode, "bypass": bypass}
        if self.kind in CHECKPOINT_KINDS:
            lengths = self.twins.both("candidate_checkpoint_lengths", lambda _side: (keys, len(tokens)))[0].tolist()
            options["exact_keys"] = [checkpoint_of(tokens[:length], self.tokens_per_page) for length in lengths]
            options["exact_keys"].append(checkpoint_of(tokens, self.tokens_per_page))  # never shorter than the input
            strays = {2, 3, 4} - {len(tokens), *lengths}  # of another prompt, mostly: its blocks do not match
            options["exact_keys"] += [checkpoint_of(STREAMS[-1][:length], self.tokens_per_page) for length in strays]
            longest = self.twins.both(
                "longest_checkpoint",
                lambda _side: (
                    keys,
                    len(tokens),
                    lambda blocks: exact_keys_behind(tokens, blocks, self.tokens_per_page),
                ),
            )
            assert longest[0] == longest[1]
        self.twins.match(keys, len(tokens), options)
        draft_extra = draft_extra if mode in PAIRED_MODES else 0
        return self.twins.both(
            "plan",
            lambda _side: (keys, len(tokens)),
            base_extra_tokens=base_extra,
            draft_extra_tokens=draft_extra,
            **options,
        )

    def acquire_plans(self, plans, mode, tokens) -> None:
        results = self.twins.both("acquire", lambda side: (plans[side],))
        assert all(result.plan is plan for result, plan in zip(results, plans, strict=True))
        if results[0].status is AcquireStatus.ACQUIRED:
            self.twins.added(Sequence(tuple(result.lease for result in results), mode, tokens))
        else:
            assert results[0].lease is results[1].lease is None

    @rule(
        stream=st.integers(0, 4),
        length=st.integers(1, 18),
        mode=st.integers(0, 3),
        base_extra=st.sampled_from([1, 1, 0, 4]),
        draft_extra=st.sampled_from([0, 2]),
        bypass=st.sampled_from([False, False, True]),
        publish=st.booleans(),
    )
    def begin(self, stream, length, mode, base_extra, draft_extra, bypass, publish):
        """Plan and acquire at once, and perhaps publish; cold, all pages are the sequence's own."""
        tokens, modes = self.prompt(stream, length), MODES[self.kind]
        mode = modes[mode % len(modes)]
        before = len(self.sequences)
        self.acquire_plans(self.plans_for(tokens, mode, base_extra, draft_extra, bypass), mode, tokens)
        if publish and len(self.sequences) > before:
            self.publish_whole(before)

    @rule(
        stream=st.integers(0, 4),
        length=st.integers(1, 18),
        mode=st.integers(0, 3),
        more=st.lists(st.sampled_from([1, 1, 2]), max_size=3),
        lag=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def serve(self, stream, length, mode, more, lag):
        """A whole life at once: begin, publish, decode, publish (perhaps with a draft that lags behind), release."""
        before = len(self.sequences)
        self.begin(stream, length, mode, 1, 0, bypass=False, publish=True)
        if len(self.sequences) > before:
            if more:
                self.decode(before, more)
            self.finish(before, lag)

    @rule(
        stream=st.integers(0, 4),
        length=st.integers(1, 18),
        mode=st.integers(0, 3),
        publish=st.booleans(),
        lag=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def serve_prompt(self, stream, length, mode, publish, lag):
        """A life that ends with its prompt, published or not."""
        before = len(self.sequences)
        self.begin(stream, length, mode, 1, 0, bypass=False, publish=False)
        if len(self.sequences) > before:
            if publish:
                self.finish(before, lag)
            else:
                self.release(before)

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 9), draft_extra=st.sampled_from([0, 2]), bypass=st.booleans(), publish=st.booleans())
    def begin_twin(self, index, draft_extra, bypass, publish):
        """Begin a second sequence with the tokens of a running one; cold, its pages are all its own."""
        other = self.sequences[index % len(self.sequences)]
        before = len(self.sequences)
        plans = self.plans_for(other.tokens, other.mode, 1, draft_extra, bypass)
        self.acquire_plans(plans, other.mode, other.tokens)
        if publish and len(self.sequences) > before:
            self.publish_whole(before)

    @rule(stream=st.integers(0, 4), length=st.integers(1, 18), mode=st.integers(0, 3))
    def keep_plan(self, stream, length, mode):
        """Plan now, acquire later: the plan may go stale."""
        tokens, modes = self.prompt(stream, length), MODES[self.kind]
        mode = modes[mode % len(modes)]
        self.kept_plans.append((self.plans_for(tokens, mode), mode, tokens))

    @precondition(lambda self: self.kept_plans)
    @rule(index=st.integers(0, 9), keep=st.booleans())
    def acquire_kept_plan(self, index, keep):
        at = index % len(self.kept_plans)
        plans, mode, tokens = self.kept_plans[at] if keep else self.kept_plans.pop(at)
        self.acquire_plans(plans, mode, tokens)

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 9), tokens=st.lists(st.sampled_from([1, 1, 2]), min_size=1, max_size=4))
    def decode(self, index, tokens):
        """Append tokens to a sequence and grow its lease to hold them."""
        sequence = self.sequences[index % len(self.sequences)]
        sequence.tokens += tuple(tokens)
        base, draft = self.missing_pages(sequence, len(sequence.tokens))
        self.twins.both("grow", lambda side: (sequence.leases[side], base, draft))

    def missing_pages(self, sequence, num_tokens) -> tuple[int, int]:
        if self.kind is Kind.PURE_RECURRENT:
            return 0, 0
        pages = -(-num_tokens // self.tokens_per_page)
        lease = sequence.leases[0]
        paired = sequence.mode in PAIRED_MODES
        return max(0, pages - lease.base_pages.size), max(0, pages - lease.draft_pages.size) * paired

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 9), base=st.integers(-1, 4), draft=st.integers(-1, 3))
    def grow(self, index, base, draft):
        sequence = self.sequences[index % len(self.sequences)]
        self.twins.both("grow", lambda side: (sequence.leases[side], base, draft))

    @precondition(lambda self: self.sequences)
    @rule(
        order=st.integers(0, 5),
        base=st.lists(st.integers(0, 7), min_size=6, max_size=6),
        draft=st.none() | st.lists(st.integers(0, 7), min_size=6, max_size=6),
        only_ask=st.booleans(),
    )
    def grow_many(self, order, base, draft, only_ask):
        """Grow several leases to targets, all or none; ask beforehand which could."""
        chosen = (self.sequences[order % len(self.sequences) :] + self.sequences[: order % len(self.sequences)])[:6]
        arguments = [np.array([s.leases[0].row for s in chosen], np.int32), np.array(base[: len(chosen)], np.int32)]
        if draft is not None:
            targets = [
                target * (sequence.mode in PAIRED_MODES) for target, sequence in zip(draft, chosen, strict=False)
            ]
            arguments.append(np.array(targets, np.int32))
        can = self.twins.both("can_grow_leases", lambda _side: arguments)
        if only_ask:
            return
        grown = self.twins.both("grow_leases", lambda _side: arguments)
        assert (grown[0] is not None) == bool(can[0].all())

    @precondition(lambda self: self.sequences)
    @rule(
        index=st.integers(0, 9),
        length=st.integers(0, 24),
        draft_length=st.integers(0, 24),
        whole=st.sampled_from([True, True, False]),
        moves=st.booleans(),
    )
    def publish(self, index, length, draft_length, whole, moves):
        """Publish some length: often all, sometimes again, sometimes more than there is."""
        sequence = self.sequences[index % len(self.sequences)]
        length = len(sequence.tokens) if whole else min(length, len(sequence.tokens))
        self.publish_blocks(sequence, length, draft_length % (length + 1) if draft_length < 18 else length, moves)

    def publish_blocks(self, sequence, length, draft_length, moves=False):
        keys = keys_of(sequence.tokens, self.tokens_per_page)
        paired = self.kind is Kind.EAGLE and sequence.mode is Mode.EAGLE
        options = {"draft_state_length": draft_length} if paired else {}
        options["moves_own_record"] = moves
        self.twins.both("publish", lambda side: (sequence.leases[side], keys, length), **options)

    def publish_whole(self, index, lag=0):
        """Publish all that a sequence has, as the coordinator would; a draft may lag so many tokens behind."""
        sequence = self.sequences[index]
        if self.kind not in CHECKPOINT_KINDS:
            self.publish_blocks(sequence, len(sequence.tokens), max(0, len(sequence.tokens) - lag))
            return
        if not sequence.reserved_length:
            self.reserve(index, 0, whole=True)
        if sequence.reserved_length:
            self.publish_checkpoint_of(sequence, sequence.reserved_length)
            self.retire_reservation(sequence)

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 9), lag=st.sampled_from([0, 0, 0, 1, 3]))
    def finish(self, index, lag):
        """Publish all and release."""
        index %= len(self.sequences)
        self.publish_whole(index, lag)
        self.release(index)

    @precondition(lambda self: self.sequences and self.kind in CHECKPOINT_KINDS)
    @rule(index=st.integers(0, 9), length=st.integers(0, 24), whole=st.booleans())
    def reserve(self, index, length, whole):
        sequence = self.sequences[index % len(self.sequences)]
        length = len(sequence.tokens) if whole else min(length, len(sequence.tokens))
        reservations = self.twins.both("reserve_snapshots", lambda side: (sequence.leases[side], length))
        if reservations is not None and reservations[0] is not None:
            sequence.reservations, sequence.reserved_length = reservations, length

    @precondition(lambda self: any(sequence.reserved_length for sequence in self.sequences))
    @rule(
        index=st.integers(0, 9), retire=st.sampled_from([True, True, False]), wrong_length=st.sampled_from([0, 0, 0, 1])
    )
    def publish_checkpoint(self, index, retire, wrong_length):
        reserved = [sequence for sequence in self.sequences if sequence.reserved_length]
        sequence = reserved[index % len(reserved)]
        self.publish_checkpoint_of(sequence, sequence.reserved_length - wrong_length)
        if retire:
            self.retire_reservation(sequence)

    def publish_checkpoint_of(self, sequence, length):
        keys = keys_of(sequence.tokens, self.tokens_per_page)
        checkpoint = checkpoint_of(sequence.tokens[:length], self.tokens_per_page)
        self.twins.both(
            "publish_checkpoint",
            lambda side: (sequence.leases[side], keys, checkpoint, sequence.reservations[side]),
        )

    @precondition(lambda self: any(sequence.reserved_length for sequence in self.sequences))
    @rule(index=st.integers(0, 9))
    def retire(self, index):
        reserved = [sequence for sequence in self.sequences if sequence.reserved_length]
        self.retire_reservation(reserved[index % len(reserved)])

    def retire_reservation(self, sequence):
        self.twins.both("retire_snapshots", lambda side: (sequence.leases[side], sequence.reservations[side]))
        sequence.reservations, sequence.reserved_length = (None, None), 0

    @precondition(lambda self: self.sequences and self.kind in CHECKPOINT_KINDS)
    @rule(index=st.integers(0, 9))
    def restored(self, index):
        sequence = self.sequences[index % len(self.sequences)]
        self.twins.both("release_restored_snapshots", lambda side: (sequence.leases[side],))

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 9))
    def release(self, index):
        sequence = self.twins.removed(index % len(self.sequences))
        self.released.append(sequence.leases)
        self.twins.both("release", lambda side: (sequence.leases[side],))

    @rule(really=st.sampled_from([False, False, False, True]))
    def clear(self, really):
        """Forget everything, now and then; refused while a lease is out."""
        if not really:
            return
        assert (self.twins.both("clear") is None) == bool(self.sequences)

    # --- what must be refused --------------------------------------------------------------------------------------

    @rule(index=st.integers(0, 9), position=st.integers(0, 17), which=st.integers(0, 2))
    def misuse(self, index, position, which):
        """Break the contract in one of many ways."""
        if which == 0 and self.released:
            use_a_released_lease(self.twins, self.released[index % len(self.released)], self.tokens_per_page)
        elif which == 1 and self.sequences and self.kind not in CHECKPOINT_KINDS:
            publish_another_sequence(
                self.twins, self.sequences[index % len(self.sequences)], position, self.tokens_per_page
            )
        elif self.sequences:
            sequence = self.sequences[index % len(self.sequences)]
            pass_wrong_arguments(self.twins, sequence, position, self.tokens_per_page, MODES[self.kind])

    @invariant()
    def everything_observable_is_equal(self):
        if hasattr(self, "twins"):
            self.num_steps += 1
            self.twins.compare()
