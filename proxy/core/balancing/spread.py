"""Policies that know no sessions: the least busy engine, each in turn, the less busy of two."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from random import Random

from proxy.core.balancing.base import C, Shares, Stateless

WINDOW = 16
"""Engines looked at for one pick, so that it costs the same in any fleet. In a larger one the window goes round, and an
engine that got idle is seen a few picks later; the least of 16 does as well as the least of all (docs/balancing.md)."""


class LeastInflight(Stateless):
    """The least busy engine; ties go round, so that idle engines share the first requests evenly."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._turn = 0

    def select(self, candidates: Sequence[C], key: bytes | None, now: float, prompt: bytes = b"") -> C:  # noqa: ARG002
        """The least busy of the candidates, the search beginning after the last one taken."""
        count = len(candidates)
        turn = self._turn if self._turn < count else 0
        self._shares.look(candidates)
        weights = self._shares.weights
        if weights is None and not candidates[turn].inflight:
            self._turn = turn + 1
            return candidates[turn]
        # The window, from `turn` on and round the end.
        end = turn + min(count, WINDOW)
        seen = candidates[turn:end]
        if end > count:
            seen = [*seen, *candidates[: end - count]]
        if weights is None:
            loads: list[float] = [candidate.inflight for candidate in seen]
        else:
            loads = [(candidate.inflight + 1) / candidate.weight for candidate in seen]
        index = loads.index(min(loads))
        # In a large fleet the next window begins at the end of this one, so that every engine is seen soon.
        self._turn = (turn + (index + 1 if count <= WINDOW else WINDOW - 1)) % count
        return seen[index]


class RoundRobin(Stateless):
    """Each engine in turn, as often as its weight says, whatever its load.

    With unequal weights this is stride scheduling (Waldspurger 1995): an engine's pass grows by one over its weight
    each time it is taken, and the lowest pass is next.
    """

    def __init__(self) -> None:
        self._shares = Shares()
        self._turn = 0
        self._passes: dict[str, float] = {}

    def select(self, candidates: Sequence[C], key: bytes | None, now: float, prompt: bytes = b"") -> C:  # noqa: ARG002
        """The next one."""
        shares = self._shares
        shares.look(candidates)
        if shares.weights is None:
            self._turn = turn = self._turn + 1
            return candidates[turn % len(candidates)]
        passes = self._passes
        if any([candidate.id not in passes for candidate in candidates]):  # noqa: C419 - a list is faster
            # One that comes later begins where the others are: it has no arrears to make up for.
            start = min([passes[candidate.id] for candidate in candidates if candidate.id in passes], default=0.0)
            for candidate in candidates:
                passes.setdefault(candidate.id, start)
        chosen = min(candidates, key=lambda candidate: passes[candidate.id])
        passes[chosen.id] += 1 / chosen.weight
        return chosen

    def forget(self, engine_id: str) -> None:
        """An engine that left is no longer counted."""
        self._passes.pop(engine_id, None)


class PowerOfTwo(Stateless):
    """The less busy of two taken at random, in proportion to their weights.

    Where several proxies share a fleet and each sees only its own requests, chance keeps them from all taking the
    same engine at once (Mitzenmacher 2001).
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._shares = Shares()
        self._bounds: list[float] = []

    def select(self, candidates: Sequence[C], key: bytes | None, now: float, prompt: bytes = b"") -> C:  # noqa: ARG002
        """One of a random pair."""
        count = len(candidates)
        shares = self._shares
        if shares.look(candidates) and shares.weights is not None:
            self._bounds = list(accumulate(shares.weights))
        draw = self._random.random
        if shares.weights is None:
            first = int(draw() * count)
            # A step of 1 to count - 1 further: never the same one, unless there is only one.
            second = (first + 1 + int(draw() * (count - 1))) % count
        else:
            first = bisect(self._bounds, draw() * shares.total, hi=count - 1)
            second = bisect(self._bounds, draw() * shares.total, hi=count - 1)
        one, other = candidates[first], candidates[second]
        return one if (one.inflight + 1) * other.weight <= (other.inflight + 1) * one.weight else other
