"""What the control plane's events add up to."""

from __future__ import annotations

from typing import Any

from proxy.observe.stats import CALL_BUCKETS, Histogram


class ControlStats:
    """Counts control calls; listens to the fleet's events.

    Attributes:
        fanout_seconds: a call as the trainer saw it, by call.
        fanout_overhead: a call's time over its slowest leg, by call.
        fanout_failures: legs that failed, by (call, engine).
        pause_seconds: from a pause to the resume that ended it.
        overdue: a pause lasts longer than ``pause_warn``.
    """

    def __init__(self) -> None:
        self.fanout_seconds: dict[str, Histogram] = {}
        self.fanout_overhead: dict[str, Histogram] = {}
        self.fanout_failures: dict[tuple[str, str], int] = {}
        self.pause_seconds = Histogram(CALL_BUCKETS)
        self.overdue = 0.0

    def on_event(self, kind: str, details: dict[str, Any]) -> None:
        """A listener of `proxy.fleet.registry.Fleet`."""
        match kind:
            case "control_call":
                self._call(details)
            case "gate_opened":
                self.pause_seconds.observe(details["seconds"])
                self.overdue = 0.0
            case "pause_overdue":
                self.overdue = 1.0

    def _call(self, details: dict[str, Any]) -> None:
        call: str = details["call"]
        self.fanout_seconds.setdefault(call, Histogram(CALL_BUCKETS)).observe(details["seconds"])
        self.fanout_overhead.setdefault(call, Histogram(CALL_BUCKETS)).observe(max(0.0, details["overhead_seconds"]))
        for engine, leg in details["legs"].items():
            if leg[2] != "answered" or leg[0] >= 400:
                key = (call, engine)
                self.fanout_failures[key] = self.fanout_failures.get(key, 0) + 1
