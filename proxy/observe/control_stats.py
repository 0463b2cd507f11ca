"""What the control plane's events add up to."""

from __future__ import annotations

import time
from typing import Any

from proxy.core.merge import Outcome
from proxy.observe import event_log
from proxy.observe.stats import CALL_BUCKETS, ROLLOUT_BUCKETS, Histogram
from proxy.observe.syncs import SyncLog

SYNC_CALLS: tuple[str, ...] = (
    "pause",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "update_weight_version",
    "resume",
)
"""Calls whose series are on the page from the start, at 0."""
MAX_CALLS = 128
"""Values of the label ``call``. vLLM's calls are some 26; a prefix in ``fanout_paths`` lets clients make up more, which
are counted together as ``other``."""


class ControlStats:
    """Counts control calls; listens to the fleet's events.

    Attributes:
        fanout_seconds: a call as the trainer saw it, by call.
        fanout_overhead: a call's time over its slowest leg, by call.
        fanout_failures: legs that failed, by (call, engine).
        refused: calls refused before any engine was touched, by (call, code).
        restarts: restarts of engines that were noticed, by engine.
        pause_seconds: from a pause to the resume that ended it.
        overdue: the pause that lasts, or the last one, was longer than ``pause_warn``.
        syncs: the last weight syncs.
    """

    def __init__(self) -> None:
        self.fanout_seconds: dict[str, Histogram] = {}
        self.fanout_overhead: dict[str, Histogram] = {}
        self.fanout_failures: dict[tuple[str, str], int] = {}
        self.refused: dict[tuple[str, str], int] = {}
        self.restarts: dict[str, int] = {}
        self.pause_seconds = Histogram(ROLLOUT_BUCKETS)
        self.overdue = False
        self.syncs = SyncLog(time.time)
        self._calls: set[str] = set(SYNC_CALLS)

    def on_event(self, kind: str, details: dict[str, Any]) -> None:
        """A listener of `proxy.fleet.registry.Fleet`."""
        match kind:
            case "control_call":
                self._call(details)
            case "control_refused":
                key = (self._label(details["call"]), str(details["code"]))
                self.refused[key] = self.refused.get(key, 0) + 1
            case "gate_closed":
                self.overdue = False
            case "gate_opened":
                self.pause_seconds.observe(details["seconds"])
                self.overdue = False
            case "pause_overdue":
                self.overdue = True
            case "engine_restarted":
                self.restarts[details["engine"]] = self.restarts.get(details["engine"], 0) + 1
            case "engine_removed":
                self._forget(details["engine"])
        self.syncs.on_event(kind, details)
        event_log.on_event(kind, details)

    def _label(self, call: str) -> str:
        if call not in self._calls:
            if len(self._calls) >= MAX_CALLS:
                return "other"
            self._calls.add(call)
        return call

    def _call(self, details: dict[str, Any]) -> None:
        call = self._label(details["call"])
        self.fanout_seconds.setdefault(call, Histogram(CALL_BUCKETS)).observe(details["seconds"])
        self.fanout_overhead.setdefault(call, Histogram(CALL_BUCKETS)).observe(max(0.0, details["overhead_seconds"]))
        for engine, (_status, _seconds, outcome) in details["legs"].items():
            if outcome != Outcome.ANSWERED:
                key = (call, engine)
                self.fanout_failures[key] = self.fanout_failures.get(key, 0) + 1

    def _forget(self, engine: str) -> None:
        """An engine left: with discovery, engines come and go under new names, and series must not pile up."""
        self.restarts.pop(engine, None)
        for key in [key for key in self.fanout_failures if key[1] == engine]:
            del self.fanout_failures[key]
