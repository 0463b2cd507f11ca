"""Markdown of what came out."""

from __future__ import annotations

from math import exp, inf, log
from typing import Any

from benchmarks.simulate.traces import Trace

Row = dict[str, Any]


def report(rows: list[Row], swept: list[Row], known: list[Trace]) -> str:
    out = [
        "Times in seconds of simulated time; a completion is a rollout from its first request to its last token.",
        "",
    ]
    out += ["| trace | what it is |", "|---|---|"]
    out += [f"| `{trace.name}` | {trace.says} |" for trace in known]
    for size in _distinct(rows, "engines"):
        sized = [row for row in rows if row["engines"] == size]
        out += ["", f"### Overall, {size} engines", "", *_overall(sized)]
        out += ["", f"### Every trace, {size} engines", "", *_every(sized)]
    if swept:
        out += ["", "### The limit: margin and slack, 8 engines", ""]
        out += ["Geometric mean over the keyed traces, relative to the best cell of the policy: mean / p99.", ""]
        for name in _distinct(swept, "policy"):
            out += [*limits([row for row in swept if row["policy"] == name], name), ""]
    return "\n".join(out).rstrip() + "\n"


def _distinct(rows: list[Row], field: str) -> list[Any]:
    return list(dict.fromkeys(row[field] for row in rows))


def relative(rows: list[Row], by: tuple[str, ...], field: str) -> dict[tuple[Any, ...], float]:
    """Geometric mean over traces of a figure, relative to the best in each trace."""
    best: dict[str, float] = {}
    for row in rows:
        best[row["trace"]] = min(best.get(row["trace"], inf), row[field])
    logs: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        logs.setdefault(tuple(row[name] for name in by), []).append(log(row[field] / best[row["trace"]]))
    return {key: exp(sum(values) / len(values)) for key, values in logs.items()}


def _overall(rows: list[Row]) -> list[str]:
    figures = [relative(rows, ("policy",), field) for field in ("mean", "p90", "p99", "makespan")]
    out = ["Geometric mean over the traces, relative to the best policy in each trace (1.00 is best everywhere).", ""]
    out += ["| policy | mean | p90 | p99 | makespan |", "|---|--:|--:|--:|--:|"]
    for (name,) in sorted(figures[0], key=lambda key: figures[0][key]):
        out.append(f"| {name} | " + " | ".join(f"{figure[(name,)]:.2f}" for figure in figures) + " |")
    return out


def _every(rows: list[Row]) -> list[str]:
    out = [
        "| trace | policy | mean | p90 | p99 | makespan | prefix hits | imbalance |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for trace in _distinct(rows, "trace"):
        these = [row for row in rows if row["trace"] == trace]
        low = min(row["mean"] for row in these)
        for number, row in enumerate(these):
            mean = f"{row['mean']:.1f}"
            # Within a percent of the best is as good: another seed would order them differently.
            mean = f"**{mean}**" if row["mean"] <= low * 1.01 else mean
            out.append(
                f"| {f'`{trace}`' if not number else ''} | {row['policy']} | {mean} "
                f"| {row['p90']:.0f} | {row['p99']:.0f} "
                f"| {row['makespan']:.0f} | {row['hits']:.0%} | {row['imbalance']:.2f} |"
            )
    return out


def limits(rows: list[Row], name: str) -> list[str]:
    mean = relative(rows, ("margin", "slack"), "mean")
    tail = relative(rows, ("margin", "slack"), "p99")
    slacks = _distinct(rows, "slack")
    out = [f"| `{name}`: margin | " + " | ".join(f"slack {slack:g}" for slack in slacks) + " |"]
    out.append("|---|" + "--:|" * len(slacks))
    for margin in _distinct(rows, "margin"):
        cells = [f"{mean[margin, slack]:.2f} / {tail[margin, slack]:.2f}" for slack in slacks]
        out.append(f"| {'none' if margin == inf else f'{margin:g}'} | " + " | ".join(cells) + " |")
    return out
