"""An engine that is killed, and a rolling restart, under load and with the launcher running; the time line is printed.

``python -m tests.scenarios.launcher.restart [--kind sim|vllm] [--story NAME]``. Ends with an error if another engine's
rollout was touched, if a request went to the dead engine after its first refusal, if a token came from weights that
are not the fleet's, or if a client saw an error that the launcher and the proxy could have prevented.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from examples.demo.settings import DemoFailed
from proxy.tasks import spawn
from tests.scenarios.launcher.stage import Stage, stage


@dataclass
class Line:
    """What happened when; seconds since the kill or the signal."""

    seconds: float
    text: str


@dataclass
class Report:
    """What one story showed."""

    title: str
    lines: list[Line] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        told = [f"{each.seconds:8.2f} s  {each.text}" for each in sorted(self.lines, key=lambda line: line.seconds)]
        return "\n".join([self.title, *told, *(f"   {name}: {value}" for name, value in self.facts.items())])


@dataclass(frozen=True)
class Size:
    """How large a story is, by kind of engine: workers, shortest and longest rollout, seconds that a start may take."""

    workers: int
    lengths: tuple[int, int]
    start: float


SYNC_EVERY = 1.5
"""Seconds between two syncs of a trainer that goes on through a rolling restart."""
SIZES = {"sim": Size(24, (30, 120), 60.0), "vllm": Size(12, (40, 160), 900.0)}


async def killed(kind: str, directory: Path, *, restored: bool) -> Report:
    """Kill one of three engines under load; it comes back by checksum of a restored checkpoint, or by the next sync."""
    size = SIZES[kind]
    way = "a restored checkpoint" if restored else "the next sync"
    report = Report(f"kill -9 of one of three {kind} engines under load, back by {way}")
    async with stage(kind, directory, "--restart-backoff", "0.5", seconds=size.start) as show:
        await show.sync("step-1")
        if restored:
            await show.save("step-1")
        victim = show.ids()[1]
        async with show.load(size.workers, size.lengths):
            await until(lambda: min(len(done_by(show, each)) for each in show.ids()) >= 2, 60)
            at = time.monotonic()
            pids = show.kill(1)
            report.lines.append(Line(0.0, f"kill -9 of engine 1 ({victim}), processes {', '.join(map(str, pids))}"))
            report.lines.append(Line(await show.said("ended with exit code", 30) - at, "the launcher sees its end"))
            again = await show.said("starting engine 1", 30)
            report.lines.append(Line(again - at, "the launcher waits its back-off, then starts it again on its port"))
            if restored:
                took = await show.said("checkpoints/step-1", 60)
                report.lines.append(Line(took - at, "it loads the checkpoint step-1"))
            fenced = await show.until(victim, "fenced", at, size.start)
            if not restored:
                await asyncio.sleep(2.0)
                assert show.looks[victim][-1].state == "fenced", show.looks[victim][-3:]
                report.lines.append(Line(time.monotonic() - at, "the trainer inits its group anew and sends step-2"))
                await show.sync("step-2")
            ready = await show.until(victim, "ready", fenced.when, 60)
            served = time.monotonic()
            await until(lambda: any(each.started > served for each in done_by(show, victim)), 60)
            answered = min(each.ended for each in done_by(show, victim) if each.started > ready.when)
            report.lines.append(Line(answered - at, "its first whole rollout since"))
        for move in show.moves:
            if move.when > at and move.engine == victim:
                report.lines.append(Line(move.when - at, f"the proxy: {move.state} ({move.reason})"))
        await judge_kill(show, report, victim, at, ready.when)
        if restored:
            assert "checksums" in ready.reason, ready.reason
    return report


async def judge_kill(show: Stage, report: Report, victim: str, at: float, admitted: float) -> None:
    """What must hold whatever brought the engine back."""
    noticed = next(look.when for look in show.looks[victim] if look.when > at and not look.eligible)
    others = [each for each in show.done if each.engine != victim]
    hurt = [each for each in show.done if each.error]
    tokens, wrong = await show.mismatches(victim)
    report.facts |= {
        "rollouts": len(show.done),
        "of other engines, with errors": sum(bool(each.error) for each in others if each.engine),
        "cut, having begun at the dead one": sum(each.engine == victim for each in hurt),
        "sent again elsewhere before their first byte": sum(each.attempts > 1 and not each.error for each in others),
        "answered by the dead one between its end and its admission": sum(
            noticed < each.started and each.ended < admitted for each in done_by(show, victim)
        ),
        "tokens judged": tokens,
        "tokens of other weights than they name": wrong,
        "versions that made tokens": ", ".join(sorted(show.versions())),
    }
    assert not [each.error for each in others if each.error], [each.error for each in others if each.error]
    for each in hurt:
        assert each.started <= noticed, (each, noticed)
    out = []
    for look in show.looks[victim]:
        if look.when >= noticed:
            if look.eligible:
                break
            out.append(look)
    assert {"down", "fenced"} & {look.state for look in out}, out
    counts = [look.inflight for look in out]
    assert counts == sorted(counts, reverse=True), f"new requests went to the dead engine: {counts}"
    assert tokens
    assert not wrong
    assert "default" not in show.versions()


async def rolled(kind: str, directory: Path, *, restored: bool) -> Report:
    """Restart every engine in turn under load: drained, restarted, admitted by its checkpoint or by the next sync."""
    size = SIZES[kind]
    way = "a checkpoint" if restored else "the next sync of a trainer that goes on"
    report = Report(f"rolling restart of three {kind} engines under load, each back by {way}")
    async with stage(kind, directory, seconds=size.start) as show:
        await show.sync("step-1")
        if restored:
            await show.save("step-1")
        before = {each: await started_at(show, each) for each in show.urls}
        async with show.load(size.workers, size.lengths):
            await until(lambda: len(show.done) > size.workers, 60)
            trainer = None if restored else spawn(trains(show, report), name="trainer")
            at = time.monotonic()
            show.launcher.send_signal(signal.SIGUSR1)
            report.lines.append(Line(0.0, "SIGUSR1 to the launcher"))
            whole = await show.said("every engine was restarted", 3 * size.start)
            report.lines.append(Line(whole - at, "the launcher: every engine was restarted"))
            if trainer is not None:
                trainer.cancel()
                await asyncio.wait([trainer])
                assert trainer.cancelled(), trainer.exception()
            marked = len(show.done)
            await until(lambda: len(show.done) >= marked + size.workers, 60)
        for line in report.lines:
            # What the trainer did, on the clock of the signal.
            line.seconds -= at if line.seconds > at else 0.0
        for move in show.moves:
            if move.when > at:
                index = show.ids().index(move.engine)
                report.lines.append(Line(move.when - at, f"engine {index}: {move.state} ({move.reason})"))
        tokens, wrong = await show.mismatches()
        errors = [each.error for each in show.done if each.error]
        report.facts |= {
            "rollouts": len(show.done),
            "errors that clients saw": len(errors),
            "most engines out of rotation at once": most_out(show, at, whole),
            "tokens judged": tokens,
            "tokens of other weights than they name": wrong,
            "versions that made tokens": ", ".join(sorted(show.versions())),
        }
        assert not errors, errors
        assert not wrong
        assert "default" not in show.versions()
        if restored:
            assert show.versions() == {"step-1"}
            assert most_out(show, at, whole) == 1
        for url, was in before.items():
            assert await started_at(show, url) > was, url
    return report


async def trains(show: Stage, report: Report) -> None:
    """A sync every few seconds; one that fails is given up and followed by the next, as trainers do."""
    for step in itertools.count(2):
        await asyncio.sleep(SYNC_EVERY)
        try:
            await show.sync(f"step-{step}")
        except DemoFailed as failed:
            report.lines.append(Line(time.monotonic(), f"the trainer: step-{step} failed: {failed}"))
            await show.control.call(None, "/resume")
        else:
            report.lines.append(Line(time.monotonic(), f"the trainer: step-{step} is in"))


def done_by(show: Stage, engine: str) -> list:
    return [each for each in show.done if each.engine == engine and not each.error]


def most_out(show: Stage, start: float, end: float) -> int:
    """Largest number of engines that were not ready at the same time."""
    out: set[str] = set()
    most = 0
    for move in show.moves:
        (out.discard if move.state == "ready" else out.add)(move.engine)
        if start <= move.when <= end:
            most = max(most, len(out))
    return most


async def started_at(show: Stage, url: str) -> float:
    async with show.session.get(f"{url}/metrics") as answer:
        page = await answer.text()
    line = next(line for line in page.splitlines() if line.startswith("process_start_time_seconds"))
    return float(line.split()[-1])


async def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        await asyncio.sleep(0.02)


STORIES: dict[str, Callable[[str, Path], Awaitable[Report]]] = {
    "sync": lambda kind, directory: killed(kind, directory, restored=False),
    "restore": lambda kind, directory: killed(kind, directory, restored=True),
    "rolling": lambda kind, directory: rolled(kind, directory, restored=True),
    "rolling-sync": lambda kind, directory: rolled(kind, directory, restored=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=list(SIZES), default="sim")
    parser.add_argument("--story", choices=list(STORIES), action="append", help="default: all of them")
    args = parser.parse_args()
    for name in args.story or STORIES:
        with tempfile.TemporaryDirectory() as directory:
            print(asyncio.run(STORIES[name](args.kind, Path(directory))), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
