"""The page ``/metrics``: the proxy's own families, made when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest

from proxy.core.engine_state import State
from proxy.observe.stats import Histogram

if TYPE_CHECKING:
    from proxy.data.plane import DataPlane
    from proxy.observe.control_stats import ControlStats


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, buckets=_buckets(histogram), sum_value=histogram.total)


class FleetgateCollector:
    """Turns plain counters into metric families.

    Args:
        plane: the data plane.
        control: what the control plane counts.
    """

    def __init__(self, plane: DataPlane, control: ControlStats) -> None:
        self._plane = plane
        self._control = control

    def collect(self) -> Iterator[Metric]:
        """All families of the contract."""
        yield from self._requests()
        yield from self._engines()
        yield from self._gate()
        yield from self._calls()

    def _requests(self) -> Iterator[Metric]:
        stats = self._plane.stats
        requests = CounterMetricFamily(
            "fleetgate_requests", "Answers to clients; code 499: the client went away.", labels=["route", "code"]
        )
        for (route, code), count in stats.requests.items():
            requests.add_metric([route, str(code)], count)
        yield requests
        engine = CounterMetricFamily("fleetgate_engine_requests", "Answers of engines.", labels=["engine", "code"])
        for (name, code), count in stats.engine_requests.items():
            engine.add_metric([name, str(code)], count)
        yield engine
        yield _histogram(
            "fleetgate_request_seconds", "From a request's head to its answer's end.", stats.request_seconds
        )
        yield _histogram(
            "fleetgate_first_byte_seconds",
            "From a request's head to its answer's first byte.",
            stats.first_byte_seconds,
        )
        retries = CounterMetricFamily(
            "fleetgate_retries", "Requests sent again, by what had failed.", labels=["reason"]
        )
        for reason, count in stats.retries.items():
            retries.add_metric([reason], count)
        yield retries
        yield CounterMetricFamily(
            "fleetgate_client_disconnects", "Clients that went away before their answer was whole.", stats.disconnects
        )
        yield CounterMetricFamily(
            "fleetgate_continued_requests", "Requests continued after their engine aborted them.", stats.continued
        )
        yield GaugeMetricFamily("fleetgate_connections", "Client connections open.", stats.connections)

    def _engines(self) -> Iterator[Metric]:
        fleet = self._plane.fleet
        inflight = GaugeMetricFamily("fleetgate_inflight_requests", "Requests at an engine.", labels=["engine"])
        states = GaugeMetricFamily(
            "fleetgate_engine_state", "1 for the state an engine is in.", labels=["engine", "state"]
        )
        versions = InfoMetricFamily("fleetgate_engine_weight_version", "Weight label of an engine.", labels=["engine"])
        in_service: set[str | None] = set()
        for engine in fleet:
            inflight.add_metric([engine.id], engine.inflight)
            for state in State:
                states.add_metric([engine.id, str(state)], float(engine.state is state))
            if engine.version is not None:
                versions.add_metric([engine.id], {"version": engine.version})
            if engine.alive and not engine.plain:
                in_service.add(engine.version)
        yield inflight
        yield states
        yield versions
        yield GaugeMetricFamily(
            "fleetgate_weight_versions_in_service", "Distinct weight labels among living engines.", len(in_service)
        )

    def _gate(self) -> Iterator[Metric]:
        gate = self._plane.gate
        yield GaugeMetricFamily("fleetgate_held_requests", "Requests held at the gate.", gate.held)
        yield GaugeMetricFamily("fleetgate_held_bytes", "Bytes of bodies held at the gate.", gate.held_bytes)
        yield _histogram("fleetgate_hold_seconds", "Time of a request in the gate.", self._plane.stats.hold_seconds)
        yield GaugeMetricFamily("fleetgate_paused", "1 while the gate is closed.", float(gate.closed))

    def _calls(self) -> Iterator[Metric]:
        control = self._control
        yield _histogram("fleetgate_pause_seconds", "From a pause to the resume that ended it.", control.pause_seconds)
        yield GaugeMetricFamily(
            "fleetgate_pause_overdue", "1 while a pause is longer than pause-warn.", control.overdue
        )
        seconds = HistogramMetricFamily(
            "fleetgate_fanout_seconds", "A control call as the trainer saw it.", labels=["call"]
        )
        for call, histogram in control.fanout_seconds.items():
            seconds.add_metric([call], _buckets(histogram), histogram.total)
        yield seconds
        overhead = HistogramMetricFamily(
            "fleetgate_fanout_overhead_seconds", "A control call's time over its slowest leg.", labels=["call"]
        )
        for call, histogram in control.fanout_overhead.items():
            overhead.add_metric([call], _buckets(histogram), histogram.total)
        yield overhead
        failures = CounterMetricFamily(
            "fleetgate_fanout_failures", "Legs of control calls that failed.", labels=["call", "engine"]
        )
        for (call, engine), count in control.fanout_failures.items():
            failures.add_metric([call, engine], count)
        yield failures


def render(plane: DataPlane, control: ControlStats) -> bytes:
    """The proxy's own families in the Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FleetgateCollector(plane, control))  # type: ignore[arg-type]
    return generate_latest(registry)
