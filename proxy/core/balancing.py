"""Who gets the next rollout: one small class a policy, one method, no clock and no randomness of its own.

Every policy takes the engines that may be chosen (never an empty list) and returns one of them. Load is requests in
flight divided by the engine's weight (its world size), so that a server of four workers gets four times the work.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from random import Random
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What a policy sees of an engine."""

    @property
    def id(self) -> str:
        """Unique and stable."""

    @property
    def inflight(self) -> int:
        """Requests that hold a slot."""

    @property
    def weight(self) -> float:
        """Share of the load relative to others, above zero."""


C = TypeVar("C", bound=Candidate)


class Balancer(Protocol):
    """A policy."""

    def select(self, candidates: Sequence[C], key: bytes | None, now: float) -> C:
        """The engine for a request.

        Args:
            candidates: eligible engines, at least one.
            key: the session of the request, or None.
            now: seconds, monotonic.
        """

    def finish(self, key: bytes) -> bool:
        """A session is over; True if it was known."""

    def forget(self, engine_id: str) -> None:
        """An engine left, or what it remembers was lost."""


def load(candidate: Candidate) -> float:
    """Requests in flight per unit of weight."""
    return candidate.inflight / candidate.weight


class LeastInflight:
    """The least busy engine; ties go round, so that idle engines share the first requests evenly."""

    def __init__(self) -> None:
        self._turn = 0

    def select(self, candidates: Sequence[C], key: bytes | None, now: float) -> C:  # noqa: ARG002 - a policy's form
        """The least busy of the candidates, beginning the search one further each time."""
        count = len(candidates)
        start = self._turn % count
        self._turn = start + 1
        best = candidates[start]
        lowest = best.inflight / best.weight
        if lowest:
            for index in range(start + 1, start + count):
                candidate = candidates[index - count if index >= count else index]
                at = candidate.inflight / candidate.weight
                if at < lowest:
                    best, lowest = candidate, at
        return best

    def finish(self, key: bytes) -> bool:  # noqa: ARG002
        """Sessions are not remembered."""
        return False

    def forget(self, engine_id: str) -> None:
        """Nothing is remembered of an engine."""


class RoundRobin(LeastInflight):
    """Each engine in turn, whatever its load."""

    def select(self, candidates: Sequence[C], key: bytes | None, now: float) -> C:  # noqa: ARG002
        """The next one."""
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class PowerOfTwo(LeastInflight):
    """The less busy of two taken at random."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def select(self, candidates: Sequence[C], key: bytes | None, now: float) -> C:  # noqa: ARG002
        """One of a random pair."""
        if len(candidates) == 1:
            return candidates[0]
        first, second = self._random.sample(candidates, 2)
        return first if load(first) <= load(second) else second


class ConsistentHash:
    """A session's place on a ring of engines, with a bound on how far above the mean an engine may be loaded.

    Without the bound one slow engine locks its sessions in and thrashes (the field saw prefix hits fall from 98 to
    5 %); with it the next engine on the ring takes over (Mirrokni et al., consistent hashing with bounded loads).
    """

    POINTS = 64
    """Places of an engine on the ring; the spread of shares is about 1 / sqrt(POINTS)."""

    def __init__(self, *, bound: float = 1.25, floor: int = 2) -> None:
        self._bound = bound
        self._floor = floor
        self._spread = LeastInflight()
        self._members: tuple[str, ...] = ()
        self._ring: list[tuple[int, str]] = []

    def select(self, candidates: Sequence[C], key: bytes | None, now: float) -> C:
        """The first engine clockwise from the key that is not over the bound."""
        if key is None:
            return self._spread.select(candidates, key, now)
        members = tuple(sorted(candidate.id for candidate in candidates))
        if members != self._members:
            self._members = members
            self._ring = sorted(
                (_hash(f"{member}#{point}".encode()), member) for member in members for point in range(self.POINTS)
            )
        by_id = {candidate.id: candidate for candidate in candidates}
        mean = sum(load(candidate) for candidate in candidates) / len(candidates)
        limit = max(self._floor, mean * self._bound)
        start = bisect_left(self._ring, (_hash(key), ""))
        for step in range(len(self._ring)):
            candidate = by_id[self._ring[(start + step) % len(self._ring)][1]]
            if load(candidate) <= limit:
                return candidate
        return self._spread.select(candidates, key, now)

    def finish(self, key: bytes) -> bool:  # noqa: ARG002
        """Sessions are not remembered."""
        return False

    def forget(self, engine_id: str) -> None:
        """The ring follows the candidates."""


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


class Sticky:
    """A session stays on one engine, where its prefix is cached; requests without a session go to the least busy.

    The first turn goes to the engine with the least load, sessions counted as well as requests: sessions between
    turns will come back. A session leaves when its engine has over ``margin`` times the mean load plus ``slack``.

    Args:
        ttl: seconds after which an unused session is forgotten.
        max_sessions: sessions remembered; the one unused for longest goes first.
        margin: times the mean load at which a session moves.
        slack: requests above that which never move a session, so that small fleets do not flap.
    """

    def __init__(self, *, ttl: float, max_sessions: int, margin: float, slack: int = 4) -> None:
        self._ttl = ttl
        self._max = max_sessions
        self._margin = margin
        self._slack = slack
        self._spread = LeastInflight()
        self._sessions: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._count: dict[str, int] = {}

    def select(self, candidates: Sequence[C], key: bytes | None, now: float) -> C:
        """The session's engine, unless that is gone or too far above the mean."""
        if key is None:
            return self._spread.select(candidates, key, now)
        self._expire(now)
        known = self._sessions.get(key)
        if known is not None:
            for candidate in candidates:
                if candidate.id == known[0]:
                    if not self._overloaded(candidate, candidates):
                        self._sessions[key] = (candidate.id, now)
                        self._sessions.move_to_end(key)
                        return candidate
                    break
            self._drop(key)
        chosen = min(candidates, key=lambda c: ((c.inflight + self._count.get(c.id, 0)) / c.weight, load(c), c.id))
        self._sessions[key] = (chosen.id, now)
        self._count[chosen.id] = self._count.get(chosen.id, 0) + 1
        if len(self._sessions) > self._max:
            self._drop(next(iter(self._sessions)))
        return chosen

    def _overloaded(self, candidate: C, candidates: Sequence[C]) -> bool:
        if len(candidates) == 1:
            return False
        mean = sum(load(other) for other in candidates) / len(candidates)
        return load(candidate) > mean * self._margin + self._slack

    def _expire(self, now: float) -> None:
        while self._sessions:
            key = next(iter(self._sessions))
            if now - self._sessions[key][1] < self._ttl:
                return
            self._drop(key)

    def _drop(self, key: bytes) -> bool:
        known = self._sessions.pop(key, None)
        if known is None:
            return False
        left = self._count.get(known[0], 1) - 1
        if left > 0:
            self._count[known[0]] = left
        else:
            self._count.pop(known[0], None)
        return True

    def finish(self, key: bytes) -> bool:
        """A session is over."""
        return self._drop(key)

    def forget(self, engine_id: str) -> None:
        """Sessions of an engine that left find a new one at their next turn."""
        for key in [key for key, (engine, _) in self._sessions.items() if engine == engine_id]:
            self._drop(key)
