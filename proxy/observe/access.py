"""One record a request: who, where, how long. Never bodies, header values or credentials.

A rollout fleet answers thousands of requests a second; a record of each would cost more than the proxying. Above a rate
only a sample is written, evenly over each second, and every record tells for how many it stands.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.data.exchange import Exchange

_log = logging.getLogger("fleetgate.access")

FULL_RATE = 100
"""Records a second up to which every request has one. A record costs some 55 microseconds: at most 0.6 % of a core."""
FAILURE_RATE = 100
"""Records a second of answers of 500 and above, on top: wanted in an incident, yet they must not fill a disk."""


class Sampler:
    """Decides which requests get a record.

    In each second the first `rate` events pass. If the second before had more, every n-th passes instead, so that the
    records are spread over the second rather than crowded at its start.

    Args:
        rate: records a second.
    """

    __slots__ = ("_count", "_every", "_passed", "_rate", "_second", "skipped")

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._second = -1
        self._count = 0
        self._passed = 0
        self._every = 1
        self.skipped = 0
        """Events without a record since the last record."""

    def passes(self, now: float) -> bool:
        """Whether an event at this time (seconds, monotonic) gets a record."""
        second = int(now)
        if second != self._second:
            idle = second != self._second + 1
            self._every = 1 if idle else max(1, -(-self._count // self._rate))
            self._second, self._count, self._passed = second, 0, 0
        self._count += 1
        if self._passed < self._rate and self._count % self._every == 0:
            self._passed += 1
            return True
        self.skipped += 1
        return False

    def take_skipped(self) -> int:
        """Events that the next record stands for besides its own."""
        skipped, self.skipped = self.skipped, 0
        return skipped


_requests = Sampler(FULL_RATE)
_failures = Sampler(FAILURE_RATE)


def record(exchange: Exchange, status: int, seconds: float) -> None:
    """Log one finished request, if the sample takes it.

    Args:
        exchange: the request.
        status: what the client got; 499 if it went away.
        seconds: from its head to the last byte of its answer.
    """
    sampler = _failures if status >= 500 else _requests
    if not sampler.passes(exchange.client.loop.time()):
        return
    skipped = sampler.take_skipped()
    engine = exchange.last_engine
    fields = {
        "request_id": exchange.request_id,
        "engine": engine.id if engine is not None else None,
        "weight_version": exchange.version.decode("latin-1"),
        "attempts": exchange.attempts,
        "seconds": round(seconds, 6),
        "bytes_in": exchange.body_size,
        "bytes_out": exchange.relay.bytes_out,
    }
    if skipped:
        fields["skipped"] = skipped
    _log.info("%s %s %d", exchange.head.method.decode("latin-1"), exchange.route, status, extra=fields)
