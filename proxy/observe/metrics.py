"""The proxy's own metric families, made when somebody scrapes.

Every family of the contract is on the page from the first scrape on, and series that alerts count on begin at 0:
a counter that appears with the value 1 is no increase to Prometheus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest as generate_text
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from proxy.core.engine_state import State
from proxy.core.failures import Kind
from proxy.observe.control_stats import SYNC_CALLS
from proxy.observe.exposition import Format
from proxy.observe.stats import CALL_BUCKETS, Histogram

if TYPE_CHECKING:
    from proxy.data.plane import DataPlane
    from proxy.observe.control_stats import ControlStats
    from proxy.observe.scrape import Scraper

_EOF = b"# EOF\n"
SAMPLES_A_PIECE = 32
"""Samples that are written in one go: prometheus-client takes some 10 microseconds for each."""
_NOTHING = Histogram(CALL_BUCKETS)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, buckets=_buckets(histogram), sum_value=histogram.total)


def _by_call(name: str, text: str, histograms: dict[str, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=["call"])
    for call in dict.fromkeys((*SYNC_CALLS, *histograms)):
        histogram = histograms.get(call, _NOTHING)
        family.add_metric([call], _buckets(histogram), histogram.total)
    return family


def _counter(name: str, text: str, labels: list[str], counts: Iterable[tuple[Iterable[str], int]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts:
        family.add_metric([str(value) for value in values], count)
    return family


class FleetgateCollector:
    """Turns plain counters into metric families.

    Args:
        plane: the data plane.
        control: what the control plane counts.
        scraper: reads the engines' pages, if anything does.
    """

    def __init__(self, plane: DataPlane, control: ControlStats, scraper: Scraper | None = None) -> None:
        self._plane = plane
        self._control = control
        self._scraper = scraper

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield InfoMetricFamily("fleetgate_build", "Version of the proxy.", {"version": version("fleetgate")})
        yield from self._requests()
        yield from self._engines()
        yield from self._gate()
        yield from self._calls()

    def _requests(self) -> Iterator[Metric]:
        stats = self._plane.stats
        yield _counter(
            "fleetgate_requests",
            "Answers to clients; code 499: the client went away.",
            ["route", "code"],
            (((route, str(code)), count) for (route, code), count in stats.requests.items()),
        )
        answers = {(engine.id, 200): 0 for engine in self._plane.fleet} | stats.engine_requests
        yield _counter(
            "fleetgate_engine_requests",
            "Answers of engines, those that were tried again included.",
            ["engine", "code"],
            (((name, str(code)), count) for (name, code), count in answers.items()),
        )
        yield _histogram(
            "fleetgate_request_seconds", "From a request's head to its answer's end.", stats.request_seconds
        )
        yield _histogram(
            "fleetgate_first_byte_seconds",
            "From a request's head to its answer's first byte.",
            stats.first_byte_seconds,
        )
        retries = {str(kind): 0 for kind in Kind} | stats.retries
        yield _counter(
            "fleetgate_retries",
            "Requests sent again, by what had failed.",
            ["reason"],
            (((reason,), count) for reason, count in retries.items()),
        )
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
            "fleetgate_weight_versions_in_service",
            "Distinct weight labels among living engines, fenced ones included; above 1 the fleet is mixed.",
            len(in_service),
        )
        yield GaugeMetricFamily(
            "fleetgate_eligible_engines", "Engines that may get a request now.", len(fleet.eligible)
        )
        restarts = {engine.id: 0 for engine in fleet} | self._control.restarts
        yield _counter(
            "fleetgate_engine_restarts",
            "Restarts of an engine's process that were noticed.",
            ["engine"],
            (((name,), count) for name, count in restarts.items()),
        )
        if self._scraper is not None:
            stale = GaugeMetricFamily(
                "fleetgate_engine_scrape_stale",
                "1 while the vllm families of an engine are its last page's, or missing, because it is slow or down.",
                labels=["engine"],
            )
            for name, old in self._scraper.stale().items():
                stale.add_metric([name], float(old))
            yield stale

    def _gate(self) -> Iterator[Metric]:
        gate = self._plane.gate
        yield GaugeMetricFamily("fleetgate_held_requests", "Requests held at the gate.", gate.held)
        yield GaugeMetricFamily("fleetgate_held_bytes", "Bytes of bodies held at the gate.", gate.held_bytes)
        yield _histogram("fleetgate_hold_seconds", "Time of a request in the gate.", self._plane.stats.hold_seconds)
        yield GaugeMetricFamily("fleetgate_paused", "1 while the gate is closed.", float(gate.closed))
        since = self._plane.fleet.clock() - gate.closed_since if gate.closed else 0.0
        yield GaugeMetricFamily(
            "fleetgate_paused_for_seconds", "How long the gate has been closed; 0 while it is open.", max(0.0, since)
        )

    def _calls(self) -> Iterator[Metric]:
        control = self._control
        yield _histogram("fleetgate_pause_seconds", "From a pause to the resume that ended it.", control.pause_seconds)
        overdue = self._plane.gate.closed and control.overdue
        yield GaugeMetricFamily("fleetgate_pause_overdue", "1 while a pause is longer than pause-warn.", float(overdue))
        yield _by_call("fleetgate_fanout_seconds", "A control call as the trainer saw it.", control.fanout_seconds)
        yield _by_call(
            "fleetgate_fanout_overhead_seconds",
            "A control call's time over its slowest leg.",
            control.fanout_overhead,
        )
        failures = {(call, engine.id): 0 for call in SYNC_CALLS for engine in self._plane.fleet}
        yield _counter(
            "fleetgate_fanout_failures",
            "Legs of control calls that failed.",
            ["call", "engine"],
            (failures | control.fanout_failures).items(),
        )
        yield _counter(
            "fleetgate_control_refused",
            "Control calls that were refused before any engine was touched.",
            ["call", "code"],
            control.refused.items(),
        )


class _One:
    """What prometheus-client takes for a registry: one family, or a part of one."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> tuple[Metric, ...]:
        """The family."""
        return (self._metric,)


class OwnPage:
    """The proxy's own families.

    Args:
        plane: the data plane.
        control: what the control plane counts.
        scraper: reads the engines' pages, if anything does.
    """

    def __init__(self, plane: DataPlane, control: ControlStats, scraper: Scraper | None = None) -> None:
        self._collectors = (
            FleetgateCollector(plane, control, scraper),
            ProcessCollector(registry=CollectorRegistry(auto_describe=False)),
        )

    def render(self, fmt: Format) -> Iterator[bytes]:
        """The page in pieces, without the last line of OpenMetrics, because more families follow."""
        generate: Any = generate_text if fmt is Format.TEXT else generate_openmetrics
        for collector in self._collectors:
            for metric in collector.collect():
                samples, metric.samples = metric.samples, []
                head = generate(_One(metric)).removesuffix(_EOF)
                yield head
                for start in range(0, len(samples), SAMPLES_A_PIECE):
                    metric.samples = samples[start : start + SAMPLES_A_PIECE]
                    yield generate(_One(metric)).removesuffix(_EOF).removeprefix(head)
