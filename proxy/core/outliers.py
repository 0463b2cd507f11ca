"""Engines that answer their probes but keep breaking requests: left out for a while, never all of them.

After Envoy's outlier detection: so many transport failures in a row, then out for a base time that doubles with each
ejection up to a cap; one good answer forgives. A refusal ("paused", "busy"), a 4xx and an engine's own 500 about a
request are no failures here: they say nothing against the engine (breakers that opened on 4xx took whole fleets down).
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.failures import Kind

COUNTED: frozenset[Kind] = frozenset({Kind.LOST, Kind.TIMEOUT, Kind.BROKEN, Kind.CUT})
"""Failures of the engine or its connection, not of the request."""
LONGEST = 300.0
"""Seconds of the longest ejection (Envoy's ``max_ejection_time``)."""
SHARE = 0.5
"""Of the engines at most so many are out at once; below half the rest would only fail for load."""


@dataclass(slots=True)
class _Record:
    failures: int = 0
    ejections: int = 0
    until: float = 0.0


class Outliers:
    """Who is left out.

    Args:
        limit: failures in a row that eject; 0: nobody ever is.
        seconds: length of the first ejection.
    """

    def __init__(self, *, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._records: dict[str, _Record] = {}

    def __bool__(self) -> bool:
        """Whether anybody has failed lately; most of the time nobody has, and nothing is looked up."""
        return bool(self._records)

    def out(self, engine: str, now: float) -> bool:
        """Whether this engine is left out now."""
        record = self._records.get(engine)
        return record is not None and record.until > now

    def failed(self, engine: str, kind: Kind, now: float, *, engines: int) -> float:
        """A request broke at an engine; returns the seconds for which it is now left out, or 0.

        Args:
            engine: its id.
            kind: how the request failed.
            now: seconds, monotonic.
            engines: engines that could take requests.
        """
        if not self._limit or kind not in COUNTED:
            return 0.0
        record = self._records.setdefault(engine, _Record())
        record.failures += 1
        if record.failures < self._limit or record.until > now:
            return 0.0
        already = sum(1 for other in self._records.values() if other.until > now)
        if already + 1 > engines * SHARE:
            return 0.0
        seconds: float = min(self._seconds * 2**record.ejections, LONGEST)
        record.ejections += 1
        record.failures = 0
        record.until = now + seconds
        return seconds

    def succeeded(self, engine: str, now: float) -> None:
        """An answer was whole: the engine is forgiven, unless it is still out (late answers never bring it back)."""
        record = self._records.get(engine)
        if record is not None and record.until <= now:
            del self._records[engine]

    def forget(self, engine: str) -> None:
        """Another process, or it left."""
        self._records.pop(engine, None)
