"""Both managers side by side: told the same, and compared in everything that can be seen."""

from __future__ import annotations

from dataclasses import dataclass

from ctxcache.errors import ContractError
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.ids import MissReason, ResourceType
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.testing import ReferenceManager
from support.manager_views import plain, view


@dataclass
class Sequence:
    """One running sequence: its lease of either manager, and what the runtime knows of it."""

    leases: tuple
    mode: Mode
    tokens: tuple[int, ...]
    reservations: tuple = (None, None)
    reserved_length: int = 0


class Twins:
    """The fast manager and its plain-Python twin, and the sequences that run on both."""

    def __init__(self, **options) -> None:
        self.fast, self.twin = ContextCacheManager(**options), ReferenceManager(**options)
        self.sequences: list[Sequence] = []
        self._seen: list[dict] | None = None  # views of both since the last change

    def views(self) -> list[dict]:
        if self._seen is None:
            self._seen = [
                view(manager, [sequence.leases[side] for sequence in self.sequences])
                for side, manager in enumerate((self.fast, self.twin))
            ]
        return self._seen

    def added(self, sequence: Sequence) -> None:
        """A lease was acquired for a sequence."""
        self.sequences.append(sequence)
        self._seen = None

    def removed(self, index: int) -> Sequence:
        """A sequence is about to be released."""
        self._seen = None
        return self.sequences.pop(index)

    def both(self, method, arguments=lambda _side: (), **options):
        """Call a method of both managers; return both results, or `None` when both refused and nothing changed."""
        before = self.views()
        outcomes = []
        for side, manager in enumerate((self.fast, self.twin)):
            try:
                outcomes.append((True, getattr(manager, method)(*arguments(side), **options)))
            except ContractError as error:
                outcomes.append((False, error))
        (fast_worked, fast), (twin_worked, twin) = outcomes
        assert fast_worked == twin_worked, f"{method}: the fast manager says {fast!r}, the twin {twin!r}"
        self._seen = None
        if not fast_worked:
            assert self.views() == before, f"{method} was refused ({fast}) and changed something"
            return None
        if method != "match":
            assert plain(fast) == plain(twin), method
        return fast, twin

    def refused(self, method, arguments=lambda _side: (), **options) -> None:
        assert self.both(method, arguments, **options) is None, f"{method} was not refused"

    def match(self, keys, num_tokens, options) -> None:
        """Ask both how far an input matches."""
        fast, twin = (plain(result) for result in self.both("match", lambda _side: (keys, num_tokens), **options))
        # The fast manager remembers evicted keys in a table in which a later one may displace an earlier one.
        if twin["reason"] is MissReason.EVICTED and fast["reason"] is not MissReason.EVICTED:
            places = [key.lo % 4096 for key in self.twin.lately_evicted_keys]
            assert len(set(places)) < len(places)
            fast["reason"] = MissReason.EVICTED
        assert fast == twin

    def compare(self) -> None:
        """Everything to be seen is equal, the counters balance, and the invariants of both hold."""
        fast, twin = self.views()
        assert fast == twin
        counters = self.fast.counters()
        assert counters == self.twin.counters()
        assert counters.publication_attempts == (
            counters.committed_publications + counters.existing_publications + counters.refused_publications
        )
        for manager in (self.fast, self.twin):
            manager.check_invariants()

    def nothing_is_held(self) -> None:
        """Every resource has come home."""
        for manager in (self.fast, self.twin):
            for kind in ResourceType:
                assert manager.pool(kind).free == manager.pool(kind).capacity
