"""Run every policy over every trace and write what came out: ``python -m benchmarks.simulate``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.simulate import plot, tables, traces
from benchmarks.simulate.policies import POLICIES, consistent_hash, sticky
from benchmarks.simulate.world import World
from proxy.core.balancing import Balancer

SESSIONS = {8: 96, 64: 40}
"""Sessions per engine of an agents trace: enough for a steady state at either size in a minute or two."""
SWEEP = [(margin, slack) for margin in (1.0, 1.25, 1.5, 2.0, float("inf")) for slack in (0.0, 2.0, 4.0, 8.0)]
SWEPT: dict[str, Callable[[float, float], Balancer]] = {
    "sticky": sticky,
    "consistent_hash": consistent_hash,
}


Job = tuple[str, int, int, int, str, tuple[float, float] | None]
"""Trace, engines, sessions an engine, seed, policy, limit."""


def _policy(name: str, limit: tuple[float, float] | None) -> Balancer:
    return POLICIES[name]() if limit is None else SWEPT[name](*limit)


def _one(job: Job) -> dict[str, object]:
    trace, engines, each, seed, name, limit = job
    row = World(traces.make(trace, engines, each, seed), _policy(name, limit), name, engines).run().row()
    if limit is not None:
        row["margin"], row["slack"] = limit
    return row


def _run(jobs: list[Job], processes: int, kept: Path) -> list[dict[str, object]]:
    """Results in the order of the jobs; each is kept as soon as it is there, so that a run that is cut off goes on."""
    known: dict[str, dict[str, object]] = {}
    if kept.exists():
        known = {line["job"]: line["row"] for line in map(json.loads, kept.read_text().splitlines())}
    names = [repr(job) for job in jobs]
    missing = [(name, job) for name, job in zip(names, jobs, strict=True) if name not in known]
    with ProcessPoolExecutor(processes) as pool, kept.open("a") as out:
        for (name, _), row in zip(missing, pool.map(_one, [job for _, job in missing]), strict=True):
            known[name] = row
            out.write(json.dumps({"job": name, "row": row}) + "\n")
            out.flush()
            print(f"\r{len(known)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [known[name] for name in names]


def _list(text: str, kind: Callable[[str], object] = str) -> list[object]:
    return [kind(item) for item in text.split(",")]


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.add_argument("--engines", type=partial(_list, kind=int), default=[8, 64], help="fleet sizes")
    parser.add_argument("--traces", type=_list, default=list(traces.names()), help="which traces")
    parser.add_argument("--policies", type=_list, default=list(POLICIES), help="which policies")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--sessions", type=int, default=0, help="sessions per engine; default: by the size of the fleet"
    )
    parser.add_argument("--sweep", action="store_true", help="sweep margin and slack of the limit too (8 engines)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--runs", type=Path, default=Path(".run/balancing.jsonl"), help="each run, as soon as it is there"
    )
    parser.add_argument("--resume", action="store_true", help="go on with a run that was cut off")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--img", type=Path, default=Path("docs/img"))
    args = parser.parse_args(None if argv is None else list(argv))

    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.runs
    kept.parent.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        kept.unlink(missing_ok=True)
    jobs: list[Job] = [
        (trace, size, args.sessions or SESSIONS.get(size, 64), args.seed, name, None)
        for size in args.engines
        for trace in args.traces
        for name in args.policies
    ]
    rows = _run(jobs, args.processes, kept)
    swept: list[dict[str, object]] = []
    if args.sweep:
        keyed = [name for name in args.traces if name not in ("longtail", "groups")]
        swept = _run(
            [(t, 8, 48, args.seed, name, limit) for name in SWEPT for limit in SWEEP for t in keyed],
            args.processes,
            kept,
        )
    text = tables.report(rows, swept, [traces.make(name, 8, 8, 1) for name in args.traces])
    (args.out / "balancing.md").write_text(text)
    # Infinity is no JSON number; a margin of none says the same.
    for row in swept:
        row["margin"] = None if row["margin"] == float("inf") else row["margin"]
    (args.out / "balancing.json").write_text(json.dumps({"runs": rows, "sweep": swept}, indent=1) + "\n")
    args.img.mkdir(parents=True, exist_ok=True)
    (args.img / "balancing.svg").write_text(plot.bars(rows))
    if swept:
        (args.img / "balancing-margin.svg").write_text(plot.sweep(swept))
    print(text)


if __name__ == "__main__":
    main()
