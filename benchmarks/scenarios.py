"""What is measured, one function a scenario. Each returns numbers by name; units are in the names.

Traffic scenarios run against candidates that share two mock engines and stay up; memory and control scenarios start a
candidate of their own, because what they measure depends on what a process has done before.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import procs
from candidates import Candidate, Running, launch
from procs import Held, Mock, http, load, wish

Numbers = dict[str, float]


@dataclass(frozen=True)
class Lengths:
    """How long things run.

    Attributes:
        warm: seconds before what counts.
        seconds: that count.
        calls: control calls of a fan-out measurement.
    """

    warm: float = 0.5
    seconds: float = 3.0
    calls: int = 200


def _per(result: dict[str, Any], unit: str, name: str) -> Numbers:
    count = max(1, result[unit])
    ticks = max(1.0, result["user_ns"] + result["kernel_ns"])
    total = result["cpu_ns"] / 1e3 / count
    return {
        f"cpu_us_per_{name}": total,
        f"user_us_per_{name}": total * result["user_ns"] / ticks,
        f"kernel_us_per_{name}": total * result["kernel_ns"] / ticks,
        f"{name}s_per_s": result[unit] / result["seconds"],
        "cpu_share": result["cpu_ns"] / 1e9 / result["seconds"],
        "waited_share": result["waited_ns"] / 1e9 / result["seconds"],
        "errors": result["errors"],
        "stale": result["stale"],
    }


def closed(port: int, pids: list[int], lengths: Lengths, connections: int, **options: Any) -> Numbers:
    """Small requests, one after another on so many connections."""
    result = load(port, pids=pids, connections=connections, warm=lengths.warm, seconds=lengths.seconds, **options)
    latency = result["latency_us"]
    return {**_per(result, "answers", "request"), "p50_us": latency["p50"], "p99_us": latency["p99"]}


def open_loop(port: int, pids: list[int], lengths: Lengths, rate: int) -> Numbers:
    """Small requests at fixed times."""
    result = load(
        port, pids=pids, mode="open", rate=rate, connections=512, warm=lengths.warm, seconds=lengths.seconds + 1
    )
    latency = result["latency_us"]
    return {**_per(result, "answers", "request"), "p50_us": latency["p50"], "p99_us": latency["p99"]}


def streams(port: int, pids: list[int], lengths: Lengths, count: int, interval_us: int) -> Numbers:
    """Event streams: flat out (interval 0), or paced and begun one after another within a second."""
    paced = interval_us > 0
    result = load(
        port,
        pids=pids,
        connections=count,
        stream=True,
        wish=wish(events=100 if paced else 500, us=interval_us),
        warm=1.5 if paced else lengths.warm,
        ramp=1.0 if paced else None,
        seconds=lengths.seconds,
    )
    delay = result["event_delay_us"]
    return {**_per(result, "events", "event"), "p50_us": delay["p50"], "p99_us": delay["p99"]}


def big(port: int, pids: list[int], lengths: Lengths) -> Numbers:
    """5 MB in, 5 MB out."""
    size = 5_000_000
    result = load(
        port,
        pids=pids,
        connections=4,
        body=size,
        wish=wish(size=size),
        warm=lengths.warm,
        seconds=lengths.seconds,
    )
    return {**_per(result, "answers", "request"), "p50_us": result["latency_us"]["p50"]}


Traffic = Callable[[int, list[int], Lengths], Numbers]
TRAFFIC: dict[str, Traffic] = {
    "c32": lambda port, pids, lengths: closed(port, pids, lengths, 32),
    "c256": lambda port, pids, lengths: closed(port, pids, lengths, 256),
    "open500": lambda port, pids, lengths: open_loop(port, pids, lengths, 500),
    "flat": lambda port, pids, lengths: streams(port, pids, lengths, 32, 0),
    "paced100": lambda port, pids, lengths: streams(port, pids, lengths, 100, 20_000),
    "paced500": lambda port, pids, lengths: streams(port, pids, lengths, 500, 20_000),
    "fresh32": lambda port, pids, lengths: closed(port, pids, lengths, 32, fresh=True),
    "big": big,
}


@contextlib.contextmanager
def alone(candidate: Candidate, mock: Mock) -> Iterator[Running]:
    """A candidate of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        running = launch(candidate, mock.urls, Path(folder))
        try:
            time.sleep(0.5)
            yield running
        finally:
            running.stop()


def _settled_rss(pids: list[int]) -> int:
    return int(statistics.median(procs.rss_kb(pids) for _ in range(3)))


def open_requests(candidate: Candidate, count: int) -> Numbers:
    """Memory of requests that are open at engines, and what the proxy spends while nothing happens on them."""
    with procs.mock(2) as mock, alone(candidate, mock) as running:
        load(running.port, connections=32, warm=0, seconds=0.5)
        pids = running.pids
        before = _settled_rss(pids)
        held = Held(running.port, count, wish(hold=True))
        mock.wait_for("held", count, 20)
        at_engines = mock.ask("stats")["held"]
        time.sleep(0.5)
        during = _settled_rss(pids)
        idle_from = procs.cpu_ns(pids)
        time.sleep(1.0)
        idle = procs.cpu_ns(pids) - idle_from
        mock.ask("release")
        result = held.result(20)
    return {
        "kb_each": (during - before) / count,
        "before_mb": before / 1024,
        "during_mb": during / 1024,
        "at_engines": at_engines,
        "answers": result["answers"],
        "errors": result["errors"] + result["unanswered"],
        "idle_cpu_share": idle / 1e9,
    }


def _control(port: int, path: str) -> None:
    status, body, _ = http(port, "POST", path)
    if status != 200:
        raise procs.BenchError(f"{path} answered {status}: {body[:300]!r}")


def held_requests(candidate: Candidate, count: int, body: int = 2048) -> Numbers:
    """Memory of requests held at the closed gate; then the time from /resume to the last one at its engine."""
    with procs.mock(2) as mock, alone(candidate, mock) as running:
        load(running.port, connections=32, warm=0, seconds=0.5)
        pids = running.pids
        before = _settled_rss(pids)
        _control(running.port, "/pause?mode=keep")
        mock.ask("reset")
        held = Held(running.port, count, wish(), body)
        time.sleep(1.0)
        during = _settled_rss(pids)
        early = mock.ask("stats")["requests"]
        idle_from = procs.cpu_ns(pids)
        time.sleep(1.0)
        idle = procs.cpu_ns(pids) - idle_from
        cpu_from = procs.cpu_ns(pids)
        resumed = time.monotonic_ns()
        _control(running.port, "/resume")
        answered = time.monotonic_ns()
        result = held.result(20)
        cpu = procs.cpu_ns(pids) - cpu_from
        stats = mock.ask("stats")
    return {
        "kb_each": (during - before) / count,
        "kb_each_less_body": (during - before) / count - body / 1024,
        "idle_cpu_share": idle / 1e9,
        "resume_first_ms": (stats["first_ns"] - resumed) / 1e6,
        "resume_last_ms": (stats["last_ns"] - resumed) / 1e6,
        "resume_call_ms": (answered - resumed) / 1e6,
        "resume_cpu_us_each": cpu / 1e3 / count,
        "passed_the_closed_gate": early,
        "answers": result["answers"],
        "errors": result["errors"] + result["unanswered"],
    }


def fan_out(candidate: Candidate, engines: int, lengths: Lengths, control_us: int = 20_000) -> Numbers:
    """What the proxy adds to a control call over the slowest engine, seen from its caller."""
    call = {"method": "POST", "path": "/reset_prefix_cache", "body": 0, "connections": 1, "warm": 0}
    with procs.mock(engines, control_us=control_us) as mock, alone(candidate, mock) as running:
        load(running.port, count=10, **call)
        one = load(mock.ports[0], count=lengths.calls // 2, **call)["latency_us"]
        mock.ask("reset")
        result = load(running.port, count=lengths.calls, pids=running.pids, **call)
        calls = mock.ask("stats")["calls"]
        mock.ask("control_us=0")
        quick = load(running.port, count=lengths.calls, pids=running.pids, **call)
    latency = result["latency_us"]
    return {
        "overhead_p50_ms": (latency["p50"] - one["p50"]) / 1e3,
        "overhead_p99_ms": (latency["p99"] - one["p50"]) / 1e3,
        "overhead_max_ms": (latency["max"] - one["p50"]) / 1e3,
        "cpu_ms_per_call": result["cpu_ns"] / 1e6 / lengths.calls,
        "instant_engines_p50_ms": quick["latency_us"]["p50"] / 1e3,
        "instant_engines_p99_ms": quick["latency_us"]["p99"] / 1e3,
        "engines_called": calls / lengths.calls,
        "errors": result["errors"] + quick["errors"],
    }


def many_engines(candidate: Candidate, engines: int, lengths: Lengths) -> Numbers:
    """What a large fleet costs: doing nothing, per request, and per scrape of the merged metrics."""
    with procs.mock(engines) as mock, alone(candidate, mock) as running:
        pids = running.pids
        time.sleep(1.0)
        idle_from = procs.cpu_ns(pids)
        time.sleep(4.0)
        idle = procs.cpu_ns(pids) - idle_from
        small = closed(running.port, pids, lengths, 32)
        mock.ask("reset")
        load(running.port, connections=32, warm=0, seconds=1)
        stats = mock.ask("stats")
        numbers: Numbers = {
            "idle_cpu_share": idle / 4e9,
            "cpu_us_per_request": small["cpu_us_per_request"],
            "least_to_most": stats["least"] / max(1, stats["most"]),
            "errors": small["errors"],
        }
        if candidate.ours:
            scrape = load(
                running.port, pids=pids, method="GET", path="/metrics", body=0, connections=1, count=20, warm=0
            )
            numbers |= {
                "scrape_p50_ms": scrape["latency_us"]["p50"] / 1e3,
                "scrape_p99_ms": scrape["latency_us"]["p99"] / 1e3,
                "scrape_cpu_ms": scrape["cpu_ns"] / 20e6,
                "scrape_kb": scrape["bytes"] / 20 / 1024,
                "scrape_errors": scrape["errors"],
            }
    return numbers


def beside_open(candidate: Candidate, count: int, lengths: Lengths) -> Numbers:
    """Small requests while others are open at engines: idle company must cost nothing."""
    with procs.mock(2) as mock, alone(candidate, mock) as running:
        pids = running.pids
        before = closed(running.port, pids, lengths, 32)
        held = Held(running.port, count, wish(hold=True))
        mock.wait_for("held", count, 20)
        during = closed(running.port, pids, lengths, 32)
        held.drop()
    return {
        "cpu_us_per_request_before": before["cpu_us_per_request"],
        "cpu_us_per_request_during": during["cpu_us_per_request"],
        "errors": before["errors"] + during["errors"],
    }


def restart(candidate: Candidate, times: int = 3) -> Numbers:
    """From the start of the process to its first answer from an engine."""
    found = []
    with procs.mock(2) as mock:
        for _ in range(times):
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                running = launch(candidate, mock.urls, Path(folder))
                found.append(running.ready)
                running.stop()
    return {"first_answer_s": statistics.median(found)}


def soak(candidate: Candidate, seconds: float, rate: int = 200) -> Numbers:
    """Memory over time under a mixed load: small requests, streams, clients that leave."""
    with procs.mock(2) as mock, alone(candidate, mock) as running:
        pids = running.pids
        samples: list[tuple[float, int, float]] = []
        begun = time.monotonic()
        errors = 0.0
        while time.monotonic() - begun < seconds:
            small = load(
                running.port,
                pids=pids,
                mode="open",
                rate=rate,
                connections=64,
                warm=0,
                seconds=8,
                fresh=len(samples) % 2 == 1,
            )
            load(running.port, connections=20, stream=True, wish=wish(events=1000, us=20_000), warm=0, seconds=1)
            errors += small["errors"]
            cpu = small["cpu_ns"] / 1e3 / max(1, small["answers"])
            samples.append((time.monotonic() - begun, procs.rss_kb(pids), cpu))
    quarter = max(1, len(samples) // 4)
    early = statistics.median(sample[1] for sample in samples[quarter : 2 * quarter] or samples)
    late = statistics.median(sample[1] for sample in samples[-quarter:])
    return {
        "seconds": samples[-1][0],
        "mb_second_quarter": early / 1024,
        "mb_last_quarter": late / 1024,
        "growth_kb_per_minute": (late - early) / max(0.1, (samples[-1][0] * 0.625) / 60),
        "cpu_us_first": samples[0][2],
        "cpu_us_last": samples[-1][2],
        "errors": errors,
    }


def workers(one: Candidate, two: Candidate, lengths: Lengths) -> Numbers:
    """One process against two on the same core: what sharing costs, and how evenly the load is split.

    On a machine without two cores to spare for the proxy, throughput cannot be seen directly. With CPU cost per request
    c1 and c2 and the busier worker taking a share s of the requests, two free cores give c1 / (c2 * s) times the
    throughput of one.
    """
    with procs.mock(2) as mock:
        with alone(one, mock) as running:
            single = closed(running.port, running.pids, lengths, 256)
        with alone(two, mock) as running:
            pids = running.pids
            before = {pid: procs.cpu_ns([pid]) for pid in pids}
            double = closed(running.port, pids, lengths, 256)
            spent = sorted((procs.cpu_ns([pid]) - before[pid] for pid in pids), reverse=True)
    share = spent[0] / max(1, sum(spent))
    return {
        "cpu_us_per_request_one": single["cpu_us_per_request"],
        "cpu_us_per_request_two": double["cpu_us_per_request"],
        "busier_share": share,
        "throughput_of_two_free_cores": single["cpu_us_per_request"] / (double["cpu_us_per_request"] * share),
        "errors": single["errors"] + double["errors"],
    }
