"""What the director tells workers of the fleet, and what workers count, as JSON-like data. No I/O here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import SecretStr

from proxy.config import FanoutPath, Settings
from proxy.core.engine_state import State
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.observe.stats import DataStats, Histogram

Snapshot = dict[str, Any]


def fleet_snapshot(fleet: Fleet, acks: dict[str, int]) -> Snapshot:
    """Everything that a worker needs to route requests.

    Args:
        fleet: the director's.
        acks: for each engine, the last claim of this worker that has been heard.
    """
    return {
        "version": fleet.version,
        "engines": [
            {
                "id": engine.id,
                "url": engine.url,
                "state": str(engine.state),
                "reason": engine.reason,
                "paused": engine.paused,
                "suspect": engine.suspect,
                "updating": engine.updating,
                "asleep": sorted(engine.asleep),
                "plain": engine.plain,
                "version": engine.version,
                "weight": engine.weight,
                "ack": acks.get(engine.id, 0),
            }
            for engine in fleet
        ],
    }


def apply_engine(engine: Engine, told: Snapshot, claim: int) -> None:
    """Take over what the director knows of an engine.

    A worker that claimed an engine to be suspect or paused keeps it out until the director has heard that claim:
    a snapshot made before says nothing about it.
    """
    heard = told["ack"] >= claim
    engine.state = State(told["state"])
    engine.reason = told["reason"]
    engine.paused = told["paused"] or (engine.paused and not heard)
    engine.suspect = told["suspect"] or (engine.suspect and not heard)
    engine.updating = told["updating"]
    engine.asleep = frozenset(told["asleep"])
    engine.plain = told["plain"]
    engine.version = told["version"]
    engine.weight = told["weight"]


def stats_snapshot(stats: DataStats, engines: Iterable[Engine], *, held: int, held_bytes: int, now: float) -> Snapshot:
    """What one worker counted since it started, and what it holds now."""
    return {
        "requests": [[route, code, count] for (route, code), count in stats.requests.items()],
        "engine_requests": [[engine, code, count] for (engine, code), count in stats.engine_requests.items()],
        "retries": dict(stats.retries),
        "disconnects": stats.disconnects,
        "continued": stats.continued,
        "histograms": {name: [*histogram.counts, histogram.total] for name, histogram in _histograms(stats).items()},
        "connections": stats.connections,
        "held": held,
        "held_bytes": held_bytes,
        "engines": {
            engine.id: [engine.inflight, now - engine.last_byte if engine.last_byte else -1.0] for engine in engines
        },
    }


def _histograms(stats: DataStats) -> dict[str, Histogram]:
    return {
        "request_seconds": stats.request_seconds,
        "first_byte_seconds": stats.first_byte_seconds,
        "hold_seconds": stats.hold_seconds,
    }


def merge_stats(into: DataStats, snapshots: Iterable[Snapshot]) -> None:
    """Set ``into`` to the sum of what workers counted, those that ended included."""
    fresh = DataStats()
    sums = _histograms(fresh)
    for told in snapshots:
        for route, code, count in told["requests"]:
            fresh.requests[route, code] = fresh.requests.get((route, code), 0) + count
        for engine, code, count in told["engine_requests"]:
            fresh.engine_requests[engine, code] = fresh.engine_requests.get((engine, code), 0) + count
        for reason, count in told["retries"].items():
            fresh.retries[reason] = fresh.retries.get(reason, 0) + count
        fresh.disconnects += told["disconnects"]
        fresh.continued += told["continued"]
        fresh.connections += told["connections"]
        for name, values in told["histograms"].items():
            histogram = sums[name]
            histogram.counts = [left + right for left, right in zip(histogram.counts, values[:-1], strict=True)]
            histogram.total += values[-1]
    into.__dict__.update(fresh.__dict__)


def retired(told: Snapshot) -> Snapshot:
    """The counts of a worker that ended: its counters stay, what it held is gone."""
    return {**told, "connections": 0, "held": 0, "held_bytes": 0, "engines": {}}


def worker_settings(settings: Settings, workers: int) -> Settings:
    """The settings of one worker: limits that are the fleet's are shared out, rounded up."""

    def share(value: int) -> int:
        return -(-value // workers)

    shared = {
        name: share(getattr(settings, name))
        for name in ("max_held_requests", "max_held_bytes", "max_connections", "max_inflight")
    }
    return settings.model_copy(update=shared)


def dump_settings(settings: Settings) -> dict[str, Any]:
    """Settings as JSON, secrets included: only ever sent over the socket pair."""
    out: dict[str, Any] = {}
    for name in Settings.model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        elif isinstance(value, list):
            value = [item.model_dump() if isinstance(item, FanoutPath) else item for item in value]
        elif value is not None and not isinstance(value, (bool, int, float)):
            value = str(value)
        out[name] = value
    return out
