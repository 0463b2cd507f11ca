"""Counters and histograms that cost next to nothing on the hot path.

prometheus-client takes a lock and a label look-up for each observation; here an observation is a dictionary entry or
a bisection. `proxy.observe.metrics` turns them into its families when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

ROLLOUT_BUCKETS: tuple[float, ...] = (
    0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600,
)  # fmt: skip
"""Seconds: a rollout lasts from milliseconds (a refusal) to an hour."""
CALL_BUCKETS: tuple[float, ...] = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    15,
    60,
    300,
    1800,
)
"""Seconds: a control call lasts from a millisecond to the limit of an update."""


class Histogram:
    """Counts by bucket. Not cumulative here; the exposition adds up."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts)


class DataStats:
    """What the data plane counts.

    Attributes:
        requests: answers by (route, status code); 499 for clients that went away.
        engine_requests: answers of engines by (engine, status code).
        request_seconds: from the head of a request to the last byte of its answer.
        first_byte_seconds: from the head of a request to the first byte of its answer.
        hold_seconds: time in the gate of each held request.
        retries: re-sends by reason (`proxy.core.failures.Kind`).
        disconnects: clients that went away before their answer was whole.
        continued: requests that went on after their engine aborted them.
        connections: client connections open.
    """

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.engine_requests: dict[tuple[str, int], int] = {}
        self.request_seconds = Histogram(ROLLOUT_BUCKETS)
        self.first_byte_seconds = Histogram(ROLLOUT_BUCKETS)
        self.hold_seconds = Histogram(ROLLOUT_BUCKETS)
        self.retries: dict[str, int] = {}
        self.disconnects = 0
        self.continued = 0
        self.connections = 0

    def answered(self, route: str, code: int) -> None:
        """A client got an answer, or went away (499)."""
        key = (route, code)
        self.requests[key] = self.requests.get(key, 0) + 1

    def engine_answered(self, engine: str, code: int) -> None:
        """An engine answered with a status."""
        key = (engine, code)
        self.engine_requests[key] = self.engine_requests.get(key, 0) + 1

    def retried(self, reason: str) -> None:
        """A request is sent again."""
        self.retries[reason] = self.retries.get(reason, 0) + 1

    def forget(self, engine: str) -> None:
        """An engine left: with discovery, engines come and go under new names, and series must not pile up."""
        for key in [key for key in self.engine_requests if key[0] == engine]:
            del self.engine_requests[key]
