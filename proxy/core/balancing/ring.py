"""Consistent hashing: where a key stands among engines, the same in every process."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice

from proxy.core.balancing.base import Candidate

POINTS = 64
"""Places of an engine of weight 1 on the ring; the spread of shares is about 1 / sqrt(POINTS), an eighth."""
MAX_POINTS = 1024
"""Places of one engine at most, whatever its weight: a ring of 64 such engines takes some 20 ms to make."""
_PER_DIGEST = 8
"""A digest of 64 bytes makes this many places of 8 bytes."""


def place_of(key: bytes) -> int:
    """A key's place on the ring: 64 bits of BLAKE2b, which, unlike `hash`, has no seed of the process in it."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


def _places(engine_id: str, count: int) -> list[int]:
    out: list[int] = []
    for number in range(-(-count // _PER_DIGEST)):
        digest = hashlib.blake2b(f"{engine_id}#{number}".encode()).digest()
        out.extend(int.from_bytes(digest[at : at + 8], "big") for at in range(0, 64, 8))
    return out[:count]


class Ring:
    """Engines on a ring, each at places in proportion to its weight.

    An engine that is not among the candidates is stepped over, which sends its keys where they would go had it never
    been there; so one that is out for a moment costs no rebuilding.
    """

    def __init__(self) -> None:
        self._points: dict[str, int] = {}
        self._ring: list[tuple[int, str]] = []

    def cover(self, candidates: Sequence[Candidate]) -> None:
        """Make sure that all candidates have their places."""
        new = {
            candidate.id: min(MAX_POINTS, max(1, round(POINTS * candidate.weight)))
            for candidate in candidates
            if self._points.get(candidate.id) != min(MAX_POINTS, max(1, round(POINTS * candidate.weight)))
        }
        if new:
            self._ring = [item for item in self._ring if item[1] not in new]
            for engine_id, count in new.items():
                self._points[engine_id] = count
                self._ring.extend((at, engine_id) for at in _places(engine_id, count))
            self._ring.sort()

    def remove(self, engine_id: str) -> None:
        """An engine left."""
        if self._points.pop(engine_id, None) is not None:
            self._ring = [item for item in self._ring if item[1] != engine_id]

    def walk(self, key: bytes) -> Iterator[str]:
        """Ids of engines clockwise from a key's place, once round; an engine comes as often as it has places."""
        ring = self._ring
        start = bisect_left(ring, (place_of(key), ""))
        for _, engine_id in islice(ring, start, None):
            yield engine_id
        for _, engine_id in islice(ring, start):
            yield engine_id
