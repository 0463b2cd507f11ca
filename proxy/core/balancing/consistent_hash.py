"""Consistent hashing with bounded load: sessions on a ring, no engine far above its share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.core.balancing.base import C, Candidate, Shares, Stateless
from proxy.core.balancing.ring import Ring
from proxy.core.balancing.spread import LeastInflight


class ConsistentHash(Stateless):
    """A session's engine is where its key stands on a ring, unless that one is loaded too far above its share.

    Two proxies agree about a session without talking, as long as neither sees the engine over its bound. Without a
    bound one saturated engine locks its sessions in and thrashes: the field saw prefix hits fall from 98 to 5 % and
    rollouts take four times as long. With it the next engine on the ring takes over (Mirrokni, Thorup and Zadimoghaddam
    2018).

    Args:
        bound: times its share of all requests that an engine may hold; infinity switches the bound off.
        slack: requests per unit of weight that an engine may always hold, so that an idle fleet does not scatter
            sessions.
    """

    def __init__(self, *, bound: float = 1.25, slack: int = 4) -> None:
        self._bound = bound
        self._slack = slack
        self._spread = LeastInflight()
        self._ring = Ring()
        self._shares = Shares()
        self._by_id: dict[str, Any] = {}

    def select(self, candidates: Sequence[C], key: bytes | None, now: float, prompt: bytes = b"") -> C:  # noqa: ARG002
        """The first engine clockwise from the key that is not over its bound."""
        if key is None:
            return self._spread.select(candidates, key, now)
        if self._shares.look(candidates):
            self._ring.cover(candidates)
            self._by_id = {candidate.id: candidate for candidate in candidates}
        by_id = self._by_id
        share = -1.0
        full: set[str] = set()
        chosen: C
        for engine_id in self._ring.walk(key):
            if engine_id not in by_id or engine_id in full:
                continue
            chosen = by_id[engine_id]
            after = chosen.inflight + 1
            if after <= self._slack * chosen.weight:
                return chosen
            if share < 0:
                share = self._bound * self._share(candidates)
            # For whole numbers the same as after <= ceil(share), and right for an infinite bound.
            if after < share * chosen.weight + 1:
                return chosen
            full.add(engine_id)
            if len(full) == len(by_id):
                break
        return self._spread.select(candidates, key, now)

    def _share(self, candidates: Sequence[Candidate]) -> float:
        """Requests per unit of weight, the new one counted in."""
        return (sum([candidate.inflight for candidate in candidates]) + 1) / self._shares.total

    def forget(self, engine_id: str) -> None:
        """Keys find their engine again by themselves; only the places of one that left are dropped."""
        self._ring.remove(engine_id)
        self._shares = Shares()
