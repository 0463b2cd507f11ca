#!/usr/bin/env python3
"""Measure fleetgate and its peers in one run: ``make bench`` or ``make bench-quick``.

Candidates take turns within each repetition, so that what else happens on the machine hits all of them alike; medians
over the repetitions are reported, and ratios are taken within the run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import candidates
import procs
import report
import scenarios
from candidates import Candidate, Running
from scenarios import Lengths, Numbers

FULL = ("c32", "c256", "open500", "flat", "paced100", "paced500", "fresh32", "big")
QUICK = ("c32", "open500", "flat", "paced100")
OPEN = (2000, 5000, 10_000)
QUICK_PEERS = ("fleetgate", "nginx", "vllm-router", "vllm-router rr")
GROUPS = ("traffic", "memory", "control", "scale", "restart", "workers")


class Run:
    """One run: what was asked for and what has been found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.lengths = Lengths(warm=0.3, seconds=1.5, calls=60) if args.quick else Lengths(seconds=args.seconds)
        self.found: dict[str, dict[str, list[Numbers]]] = {}
        self.left_out: dict[str, str] = {}
        self.notes: list[str] = []

    def add(self, name: str, scenario: str, numbers: Numbers) -> None:
        """Keep what was measured, and say it."""
        self.found.setdefault(name, {}).setdefault(scenario, []).append(numbers)
        shown = "  ".join(f"{key}={value:.4g}" for key, value in list(numbers.items())[:7])
        print(f"{scenario:>12} {name:<14} {shown}", flush=True)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Take the machine for one measurement, if others share it by a lock."""
        if self.args.lock is None:
            yield
            return
        with self.args.lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def measure(self, name: str, scenario: str, call: Any) -> None:
        """Run one scenario for one candidate; what fails is noted and the run goes on."""
        try:
            with self.turn():
                numbers = call()
        except (procs.BenchError, OSError, subprocess.SubprocessError, ValueError) as error:
            self.notes.append(f"{name}, {scenario}: {error}")
            print(f"{scenario:>12} {name:<14} FAILED {error}", flush=True)
            return
        self.add(name, scenario, numbers)


def choose(args: argparse.Namespace, run: Run) -> list[Candidate]:
    """The candidates that can be measured here."""
    wanted = args.only or (list(QUICK_PEERS) if args.quick else [item.name for item in candidates.ALL])
    chosen = []
    for candidate in candidates.ALL:
        if candidate.name not in wanted:
            continue
        why = candidate.missing()
        if why is None:
            chosen.append(candidate)
        else:
            run.left_out[candidate.name] = why
    return chosen + [candidates.custom(spec) for spec in args.also]


def traffic(run: Run, chosen: list[Candidate], names: list[str], repeats: int) -> None:
    """The traffic scenarios, candidates taking turns."""
    with procs.mock(2) as mock, tempfile.TemporaryDirectory(prefix="bench-") as folder:
        running: list[Running] = []
        try:
            for candidate in chosen:
                try:
                    running.append(candidates.launch(candidate, mock.urls, Path(folder)))
                except procs.BenchError as error:
                    run.left_out[candidate.name] = str(error)
            time.sleep(0.5)
            for turn in range(repeats):
                for name in names:
                    call = scenarios.TRAFFIC[name]
                    if turn == 0 or name in ("open500", "paced100", "paced500"):
                        run.measure("direct", name, lambda call=call: call(mock.ports[0], [], run.lengths))
                    # The order changes from turn to turn, so that nobody always follows the same neighbour.
                    for item in running[turn % len(running) :] + running[: turn % len(running)]:
                        run.measure(
                            item.candidate.name,
                            name,
                            lambda call=call, item=item: call(item.port, item.pids, run.lengths),
                        )
        finally:
            for item in running:
                item.stop()


def memory(run: Run, chosen: list[Candidate]) -> None:
    """Requests open at engines and held at the gate."""
    for wanted in (2000,) if run.args.quick else OPEN:
        count = min(wanted, procs.most_open())
        if count < wanted:
            run.notes.append(f"open{wanted} and held{wanted} were taken with {count} requests: open files are limited")
        for candidate in chosen:
            run.measure(candidate.name, f"open{wanted}", lambda c=candidate, n=count: scenarios.open_requests(c, n))
            if candidate.ours:
                run.measure(candidate.name, f"held{wanted}", lambda c=candidate, n=count: scenarios.held_requests(c, n))


def control(run: Run, chosen: list[Candidate]) -> None:
    """Fan-out and resume; only fleetgate has them."""
    for candidate in (item for item in chosen if item.ours):
        for engines in (2, 16) if run.args.quick else (2, 16, 64):
            run.measure(
                candidate.name, f"fanout{engines}", lambda c=candidate, n=engines: scenarios.fan_out(c, n, run.lengths)
            )
        for _ in range(1 if run.args.quick else 5):
            run.measure(candidate.name, "resume2000", lambda c=candidate: scenarios.held_requests(c, 2000))


def scale(run: Run, chosen: list[Candidate]) -> None:
    """What is idle must not cost."""
    for candidate in chosen:
        if candidate.name == "plain aiohttp":
            continue
        run.measure(candidate.name, "engines64", lambda c=candidate: scenarios.many_engines(c, 64, run.lengths))
        run.measure(candidate.name, "beside2000", lambda c=candidate: scenarios.beside_open(c, 2000, run.lengths))


def restart(run: Run, chosen: list[Candidate]) -> None:
    """Start to first answer."""
    for candidate in chosen:
        run.measure(candidate.name, "restart", lambda c=candidate: scenarios.restart(c))


def workers(run: Run, chosen: list[Candidate]) -> None:
    """One worker against two."""
    if not any(item is candidates.FLEETGATE for item in chosen):
        return
    two = candidates.fleetgate_with("--workers", "2", name="two workers")
    for _ in range(1 if run.args.quick else 3):
        run.measure("fleetgate", "workers2", lambda: scenarios.workers(candidates.FLEETGATE, two, run.lengths))


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cpu": model,
        "cores": procs.cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit,
        "open_files": procs.raise_file_limit(),
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part of it, in under three minutes")
    parser.add_argument("--repeats", type=int, help="repetitions of the traffic scenarios (3; quick 1)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--only", nargs="*", help="candidates, by name")
    parser.add_argument("--groups", nargs="*", choices=GROUPS, help="kinds of scenarios")
    parser.add_argument("--traffic", nargs="*", choices=FULL, help="traffic scenarios")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=COMMAND", help="a further candidate")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="watch fleetgate's memory for so long instead")
    parser.add_argument("--lock", type=Path, help="lock file taken for each measurement")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--name", default=datetime.now(UTC).strftime("%Y-%m-%d"), help="name of the result files")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run and report."""
    args = parse(arguments)
    # Ended from outside, it still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    run = Run(args)
    facts = machine()
    if procs.cores() < 2:
        run.notes.append("only one core: proxy, engines and load share it, so only CPU times mean anything")
    begun = time.monotonic()
    load_before = os.getloadavg()[0]
    chosen = choose(args, run)
    if args.soak:
        run.measure("fleetgate", "soak", lambda: scenarios.soak(candidates.FLEETGATE, args.soak))
    else:
        groups = args.groups or (["traffic", "memory", "control"] if args.quick else list(GROUPS))
        if "traffic" in groups:
            names = args.traffic or list(QUICK if args.quick else FULL)
            traffic(run, chosen, names, args.repeats or (1 if args.quick else 3))
        for group in (memory, control, scale, restart, workers):
            if group.__name__ in groups:
                group(run, chosen)
    facts |= {"minutes": round((time.monotonic() - begun) / 60, 1), "load_before": round(load_before, 2)}
    document = {"machine": facts, "left_out": run.left_out, "notes": run.notes, "results": run.found}
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"{args.name}{'-quick' if args.quick else ''}.json"
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = report.write(document, target)
    print("\n" + text)
    return 0 if run.found else 1


if __name__ == "__main__":
    sys.exit(main())
