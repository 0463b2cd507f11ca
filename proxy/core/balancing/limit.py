"""When affinity ends: how much an engine may hold before sessions and prompts leave it.

An engine that holds what others have no part in gets slower, so its sessions stay longer, so it holds still more; its
cache thrashes, and every turn costs a whole prefill. The field saw prefix hits fall from 98 to 5 % that way. A limit
breaks the circle. One that is too tight undoes affinity; docs/balancing.md shows both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.balancing.base import C, Shares

ENGINES_A_PICK = 16
"""Engines looked at for one decision on average: in a larger fleet the sum of all requests is used a few times, since a
request more or less hardly changes the share of each."""

FREE = 4
"""Requests per unit of weight that no engine has to give up: a batch of four is hardly slower than one of one, and the
few parallel requests of one session in an idle fleet had better stay together. More (8) costs 4 % of p99."""


class Limit:
    """``margin`` times the load of the other engines, plus ``slack``; the new request counted in.

    The others and not all: of two engines one could never hold twice its share of both, however bad it got.

    Args:
        margin: times the mean load per unit of weight of the others; infinity: there is no limit.
        slack: requests per unit of weight on top, so that small numbers do not make sessions flap.
    """

    def __init__(self, *, margin: float, slack: float) -> None:
        self.margin = margin
        self.slack = slack
        self._shares = Shares()
        self._total = 0
        self._good_for = 0

    def over(self, candidate: C, candidates: Sequence[C], times: float = 1.0) -> bool:
        """Whether an engine would be over its limit with one more request.

        Args:
            candidate: the engine.
            candidates: all engines that may be chosen.
            times: how many requests one of this engine counts for, if it is slow.
        """
        after = (candidate.inflight + 1) * times
        if after <= FREE * candidate.weight or len(candidates) == 1:
            return False
        if self._shares.look(candidates) or not self._good_for:
            self._total = sum([other.inflight for other in candidates])
            self._good_for = max(1, len(candidates) // ENGINES_A_PICK)
        self._good_for -= 1
        others = (self._total - candidate.inflight) / (self._shares.total - candidate.weight)
        return after > (others * self.margin + self.slack) * candidate.weight
