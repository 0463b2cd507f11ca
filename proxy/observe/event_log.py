"""One structured record for each control call and for each change that the fleet's events tell.

What is logged where it happens (states, gate, fleet version, restarts) is not repeated here. Events carry no bodies and
no credentials (`proxy.observe.events`), so neither do these records.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from proxy.core.calls import Kind
from proxy.core.merge import Outcome
from proxy.observe.syncs import kind_of

_log = logging.getLogger("fleetgate.events")

MAX_NAMED = 8
"""Engines that a record names; a fleet of hundreds that fails at once must still be one line."""

_TOLD: dict[str, tuple[int, str]] = {
    "engine_added": (logging.INFO, "engine added"),
    "engine_removed": (logging.INFO, "engine removed"),
    "engine_version": (logging.INFO, "engine shows another version"),
    "engine_suspect": (logging.INFO, "engine is checked"),
    "engine_paused": (logging.INFO, "engine was paused or resumed by somebody else"),
    "control_refused": (logging.WARNING, "control call refused"),
    "control_replayed": (logging.INFO, "control call replayed"),
    "round_broken": (logging.WARNING, "update round broken"),
    "group": (logging.INFO, "transfer group made"),
    "leg_late": (logging.WARNING, "answer came after nobody waited for it"),
    "sync_phase": (logging.DEBUG, "phase changed"),
}


def on_event(kind: str, details: Mapping[str, Any]) -> None:
    """A listener of `proxy.fleet.registry.Fleet`."""
    if kind == "control_call":
        _call(details)
        return
    told = _TOLD.get(kind)
    if told is not None and _log.isEnabledFor(told[0]):
        # The names that a record has already must not be set again.
        fields = {
            f"event_{key}" if key in ("name", "args", "message") else key: value for key, value in details.items()
        }
        _log.log(told[0], told[1], extra=fields)


def _call(details: Mapping[str, Any]) -> None:
    if kind_of(details["call"]) is Kind.READ and details["status"] < 400:
        return
    legs: Mapping[str, tuple[int | None, float, str]] = details["legs"]
    failed = [engine for engine, leg in legs.items() if leg[2] != Outcome.ANSWERED]
    fields: dict[str, Any] = {
        "call": details["call"],
        "status": details["status"],
        "client": details.get("client", "the proxy"),
        "seconds": round(details["seconds"], 6),
        "overhead_seconds": round(details["overhead_seconds"], 6),
        "engines": len(legs),
    }
    if details.get("request_id"):
        fields["request_id"] = details["request_id"]
    if legs:
        fields["slowest"] = max(legs, key=lambda engine: legs[engine][1])
    if failed:
        fields["failed"] = {engine: f"{legs[engine][2]} ({legs[engine][0]})" for engine in failed[:MAX_NAMED]}
        fields["failed_count"] = len(failed)
    _log.log(logging.INFO if details["status"] < 400 else logging.WARNING, "control call", extra=fields)
