"""The last weight syncs, each with its calls and what every engine did in them.

A trainer calls nothing a sync: it pauses, starts, updates, finishes and resumes, or does only some of that. Here a sync
is what lies between two states of rest: it begins with the gate closing or with the first call of an update, and ends
when the gate is open and no update is half done. Built from the fleet's events alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from proxy.core.calls import CALLS, Kind
from proxy.core.merge import Outcome

MAX_SYNCS = 50
"""Syncs that are kept; at one a minute most of an hour."""
MAX_CALLS = 64
"""Records kept of one sync; the rest is only counted. Calls of one name in a row, such as the hundreds of buckets of a
large model, are one record."""

_BEGINNERS = frozenset({Kind.PAUSE, Kind.INIT, Kind.START, Kind.UPDATE, Kind.FINISH, Kind.LABEL, Kind.SLEEP})
_IGNORED = frozenset({Kind.READ, Kind.ABORT})
_ENDERS = frozenset({Kind.FINISH, Kind.RESUME, Kind.WAKE})

GRACE = 1.0
"""Seconds after a sync came to rest in which the call that brought it there still counts to it."""

PHASES: dict[Kind, str] = {
    Kind.PAUSE: "pause",
    Kind.SLEEP: "pause",
    Kind.INIT: "init",
    Kind.START: "start",
    Kind.UPDATE: "update",
    Kind.FINISH: "finish",
    Kind.LABEL: "label",
    Kind.RESUME: "resume",
    Kind.WAKE: "resume",
}
"""The phase of a sync that a kind of call belongs to; all others are ``other``."""


def kind_of(call: str) -> Kind:
    """The kind of a call by its name; those of the configuration are `Kind.CUSTOM`."""
    known = CALLS.get(f"/{call}")
    return known.kind if known is not None else Kind.CUSTOM


@dataclass(slots=True)
class Sync:
    """One sync.

    Attributes:
        number: counts from 1 since the proxy started.
        started: Unix time (seconds).
        ended: Unix time (seconds), None while it runs.
        calls: its calls, in order of their ends, each with ``call, phase, count, status, started, ended, seconds,
            overhead_seconds, legs`` where a leg is ``status, seconds, outcome`` by engine. For a row of ``count``
            calls, durations are sums, and status and outcomes the worst.
        dropped: records beyond `MAX_CALLS`.
        version: the fleet version that it led to, if it changed.
        running: the call that runs now, with ``call, phase, started``.
        trouble: what went wrong, for people.
    """

    number: int
    started: float
    ended: float | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    version: str | None = None
    running: dict[str, Any] | None = None
    trouble: list[str] = field(default_factory=list)

    def as_json(self, now: float) -> dict[str, Any]:
        """For ``/fleet/syncs``."""
        outcome = "failed" if self.trouble else "ok" if self.ended is not None else "running"
        return {
            "number": self.number,
            "outcome": outcome,
            "version": self.version,
            "started": self.started,
            "ended": self.ended,
            "seconds": (self.ended if self.ended is not None else now) - self.started,
            "trouble": self.trouble,
            "running": self.running,
            "calls": self.calls,
            "dropped_calls": self.dropped,
        }


class SyncLog:
    """Listens to the fleet's events and keeps the last syncs.

    Args:
        clock: Unix time (seconds).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._syncs: deque[Sync] = deque(maxlen=MAX_SYNCS)
        self._numbers = itertools.count(1)
        self._current: Sync | None = None
        self._paused = False
        self._updating = False
        self._rest_at: float | None = None

    def on_event(self, kind: str, details: Mapping[str, Any]) -> None:
        """A listener of `proxy.fleet.registry.Fleet`."""
        match kind:
            case "control_call":
                self._call(details)
            case "lifecycle":
                self._holder(details["holder"])
            case "gate_closed":
                if self._rest_at is not None:
                    self._close(self._rest_at)
                self._paused = True
                self._open(self._clock())
            case "gate_opened":
                self._paused = False
                self._rest()
                calls = self._current.calls if self._current is not None else []
                if self._rest_at is not None and calls and calls[-1]["phase"] == PHASES[Kind.RESUME]:
                    self._close(self._rest_at)
            case "pause_lease_ended":
                if self._current is not None:
                    self._current.trouble.append(f"the pause lease ran out after {details['seconds']:.0f} s")
            case "round_broken":
                self._updating = False
                self._rest()
                if self._current is not None:
                    self._current.trouble.append(str(details["why"]))
            case "weight_version":
                if self._current is not None:
                    self._current.version = details["version"]

    def as_json(self, last: int = MAX_SYNCS) -> dict[str, Any]:
        """The last syncs, newest first, at most so many."""
        now = self._clock()
        if self._rest_at is not None and now - self._rest_at > GRACE:
            self._close(self._rest_at)
        return {"now": now, "syncs": [sync.as_json(now) for sync in islice(reversed(self._syncs), last)]}

    def _open(self, started: float) -> Sync:
        if self._current is None:
            self._current = Sync(next(self._numbers), started)
            self._syncs.append(self._current)
        return self._current

    def _holder(self, holder: Mapping[str, Any] | None) -> None:
        """A life-cycle call began or ended; one that could begin a sync does so now, not at its end."""
        if holder is None:
            if self._current is not None:
                self._current.running = None
                if not self._current.calls and not self._paused:
                    # It was refused before any engine was called.
                    self._syncs.remove(self._current)
                    self._current = None
            return
        call = str(holder["call"]).lstrip("/")
        kind = kind_of(call)
        if self._rest_at is not None and kind not in _ENDERS:
            self._close(self._rest_at)
        if self._current is None and kind in _BEGINNERS:
            self._open(self._clock())
        if self._current is not None:
            phase = PHASES.get(kind, "other")
            self._current.running = {"call": call, "phase": phase, "started": self._clock()}

    def _call(self, details: Mapping[str, Any]) -> None:
        call: str = details["call"]
        kind = kind_of(call)
        if kind in _IGNORED:
            return
        now = self._clock()
        started = now - details["seconds"]
        if self._rest_at is not None and (kind not in _ENDERS or now - self._rest_at > GRACE):
            self._close(self._rest_at)
        if self._current is None and kind not in _BEGINNERS:
            return
        sync = self._open(started)
        sync.started = min(sync.started, started)
        legs = {
            engine: {"status": leg[0], "seconds": leg[1], "outcome": str(leg[2])}
            for engine, leg in details["legs"].items()
        }
        last = sync.calls[-1] if sync.calls and not sync.dropped else None
        if last is not None and last["call"] == call and last["legs"].keys() == legs.keys():
            _join(last, details, legs, now)
        elif len(sync.calls) < MAX_CALLS:
            sync.calls.append(
                {
                    "call": call,
                    "phase": PHASES.get(kind, "other"),
                    "count": 1,
                    "status": details["status"],
                    "started": started,
                    "ended": now,
                    "seconds": details["seconds"],
                    "overhead_seconds": details["overhead_seconds"],
                    "legs": legs,
                }
            )
        else:
            sync.dropped += 1
        ok = details["status"] < 400
        if not ok:
            bad = [engine for engine, leg in legs.items() if leg["outcome"] != Outcome.ANSWERED]
            sync.trouble.append(f"{call} answered {details['status']}" + (f" ({', '.join(bad)})" if bad else ""))
        if kind in (Kind.START, Kind.UPDATE):
            self._updating = ok
        elif kind in _ENDERS and ok:
            self._updating = False
        self._rest()
        if self._rest_at is not None and kind is not Kind.PAUSE:
            self._close(now)

    def _rest(self) -> None:
        """Note when the sync came to rest; the call that brought it there may be told of only after that."""
        resting = self._current is not None and not self._paused and not self._updating
        self._rest_at = self._clock() if resting else None

    def _close(self, ended: float) -> None:
        if self._current is not None:
            self._current.ended = max(ended, self._current.started)
            self._current.running = None
        self._current = None
        self._rest_at = None


def _join(record: dict[str, Any], details: Mapping[str, Any], legs: dict[str, dict[str, Any]], now: float) -> None:
    """One more call of the same name, right after the one that is recorded."""
    record["count"] += 1
    record["status"] = max(record["status"], details["status"])
    record["ended"] = now
    record["seconds"] += details["seconds"]
    record["overhead_seconds"] += details["overhead_seconds"]
    for engine, leg in legs.items():
        known = record["legs"][engine]
        known["seconds"] += leg["seconds"]
        if leg["outcome"] != Outcome.ANSWERED:
            known["status"], known["outcome"] = leg["status"], leg["outcome"]
