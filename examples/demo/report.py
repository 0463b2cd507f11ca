"""The demo's result: tables for a reader, and the same as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from examples.demo.judge import Verdict
from examples.demo.rollouts import Rollout, VisibleError
from examples.demo.settings import DemoSpec
from examples.demo.syncs import Sync

WIDTH: Final = 118
"""Columns of the tables, so that they look alike in a terminal and in a README."""

ERRORS_SHOWN: Final = 5


@dataclass(slots=True)
class Result:
    """Everything that a run found."""

    spec: DemoSpec
    world_size: int
    start_seconds: float
    run_seconds: float
    validate_seconds: float
    rollouts: list[Rollout]
    errors: list[VisibleError]
    syncs: list[Sync]
    verdicts: Mapping[str, Verdict]

    @property
    def failures(self) -> list[str]:
        """Why the demo did not show what it should; empty when it did."""
        found = []
        if self.errors:
            found.append(f"{len(self.errors)} errors reached clients")
        for mode, verdict in self.verdicts.items():
            if verdict.mismatches or verdict.malformed:
                found.append(f"{mode}: {verdict.mismatches} wrong tokens, {verdict.malformed} answers with bad spans")
            if verdict.blind:
                found.append(f"{mode}: the judge did not notice swapped weights")
        if "keep" in self.verdicts and not self.verdicts["keep"].frozen:
            found.append("keep: no rollout was frozen across an update, so nothing was shown; take more syncs")
        return found

    def of(self, mode: str) -> tuple[list[Rollout], list[VisibleError], list[Sync]]:
        """What belongs to one mode."""
        return (
            [each for each in self.rollouts if each.mode == mode],
            [each for each in self.errors if each.mode == mode],
            [each for each in self.syncs if each.mode == mode],
        )


def continued(rollouts: Sequence[Rollout]) -> int:
    """Aborted parts that the client sent again."""
    return sum(len(each.pieces) - 1 for each in rollouts)


def tokens_by_version(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Tokens that each version made, by what the spans say."""
    found: Counter[str] = Counter()
    for span in (span for each in rollouts for piece in each.pieces for span in piece.spans):
        found[span["version"]] += span["end"] - span["start"]
    return dict(found)


def as_json(result: Result) -> dict[str, Any]:
    """Everything that the tables show, and the single values behind their medians. Times in seconds."""
    modes = {}
    for mode in result.verdicts:
        rollouts, errors, syncs = result.of(mode)
        modes[mode] = {
            "rollouts": len(rollouts),
            "rollouts_by_kind": dict(Counter(str(each.kind) for each in rollouts)),
            "tokens": sum(len(piece.tokens) for each in rollouts for piece in each.pieces),
            "continued": continued(rollouts),
            "errors": len(errors),
            "syncs": [asdict(each) for each in syncs],
            "window_p50": statistics.median(each.window for each in syncs),
            "window_max": max(each.window for each in syncs),
            "slowest_engine_p50": statistics.median(each.engines for each in syncs),
            "slowest_engine_max": max(each.engines for each in syncs),
            "proxy_adds_p50": statistics.median(each.added for each in syncs),
            "proxy_adds_max": max(each.added for each in syncs),
            "validation": asdict(result.verdicts[mode]),
        }
    return {
        "engine": result.spec.engine,
        "engines": result.spec.engines,
        "world_size": result.world_size,
        "in_flight": result.spec.in_flight,
        "start_seconds": result.start_seconds,
        "run_seconds": result.run_seconds,
        "validate_seconds": result.validate_seconds,
        "modes": modes,
        "tokens_by_version": tokens_by_version(result.rollouts),
        "errors": [asdict(each) for each in result.errors],
        "failures": result.failures,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _p50_max(values: Sequence[float]) -> tuple[str, str]:
    return _ms(statistics.median(values)), _ms(max(values))


def modes_table(result: Result) -> Table:
    """Rollouts and pause windows."""
    table = Table(title="Rollouts and pause windows (ms, from sending /pause to the answer of /resume)")
    for name in ("mode", "syncs", "in flight", "finished", "continued", "errors"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for name in ("window p50", "max", "slowest engine's own p50", "max", "proxy adds p50", "max"):
        table.add_column(name, justify="right")
    for mode in result.verdicts:
        rollouts, errors, syncs = result.of(mode)
        table.add_row(
            mode,
            str(len(syncs)),
            str(min(each.in_flight for each in syncs)),
            str(len(rollouts)),
            str(continued(rollouts)),
            str(len(errors)),
            *_p50_max([each.window for each in syncs]),
            *_p50_max([each.engines for each in syncs]),
            *_p50_max([each.added for each in syncs]),
        )
    return table


def versions_table(result: Result) -> Table:
    """Tokens by weight version: a row for each mode's syncs, the n-th column being the n-th version."""
    found = tokens_by_version(result.rollouts)
    table = Table(title="Tokens by weight version")
    table.add_column("version")
    columns = max(len(result.of(mode)[2]) for mode in result.verdicts)
    for index in range(1, columns + 1):
        table.add_column(f"-{index}", justify="right")
    table.add_row("default", str(found.get("default", 0)))
    for mode in result.verdicts:
        table.add_row(mode, *(str(found.get(each.version, 0)) for each in result.of(mode)[2]))
    return table


def validation_table(result: Result) -> Table:
    """What was computed again."""
    by = "transformers" if result.spec.engine == "vllm" else "the pure function"
    table = Table(title=f"Validation: every token against the greedy choice of its version's weights, by {by}")
    names = ("mode", "answers", "tokens", "frozen answers", "borders", "before", "after", "mismatches", "bad spans")
    for name in (*names, "swapped: tokens", "found wrong"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode, each in result.verdicts.items():
        counts = (each.pieces, each.tokens, each.frozen, each.borders, each.frozen_before, each.frozen_after)
        rest = (each.mismatches, each.malformed, each.counter_tokens, each.counter_wrong)
        table.add_row(mode, *map(str, (*counts, *rest)))
    return table


def show(result: Result) -> None:
    """Print the tables and the verdict."""
    console = Console(width=WIDTH, highlight=False)
    for table in (modes_table(result), versions_table(result), validation_table(result)):
        console.print(table)
    spec = result.spec
    total = sum(len(piece.tokens) for each in result.rollouts for piece in each.pieces)
    console.print(
        f"{spec.engines} {spec.engine} engines behind one URL, {spec.in_flight} rollouts in flight, one trainer in a "
        f"world of {result.world_size}: {len(result.rollouts)} rollouts, {total} tokens, {len(result.syncs)} weight "
        f"syncs, {len(result.errors)} client-visible errors.\n"
        f"Start {result.start_seconds:.1f} s, run {result.run_seconds:.1f} s, validation "
        f"{result.validate_seconds:.1f} s."
    )
    for each in result.errors[:ERRORS_SHOWN]:
        console.print(f"error in {each.mode}, rollout {each.rollout} ({each.kind}): {each.message}", markup=False)
    for reason in result.failures:
        console.print(f"FAILED: {reason}", markup=False)
