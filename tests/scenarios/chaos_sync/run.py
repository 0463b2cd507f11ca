"""One run: engines, proxy, load, trainer and torment together, and the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from proxy.core.marks import read_label
from proxy.tasks import spawn
from tests.scenarios.chaos_sync.clients import Load
from tests.scenarios.chaos_sync.engines import RELOAD, Engines
from tests.scenarios.chaos_sync.proxy_run import ProxyRun
from tests.scenarios.chaos_sync.torment import Torment
from tests.scenarios.chaos_sync.trainer import Trainer
from tests.scenarios.chaos_sync.truth import DEFAULT, Truth

SETTINGS: dict[str, object] = {
    # Short limits, so that hundreds of hangs fit into a few minutes.
    "pause_timeout": 2,
    "pause_wait_timeout": 3,
    "resume_timeout": 3,
    "transfer_timeout": 3,
    "control_timeout": 2,
    "probe_interval": 0.5,
    "probe_timeout": 1,
    "hold_timeout": 20,
    "fanout_paths": RELOAD,
}
GROWTH = 24 << 20
"""Bytes by which the proxy's memory may grow in the part of the run in which it is not killed."""
FILES = 4
"""Open files by which an idle proxy may differ from an idle one: this program's own connections, a probe."""
QUIET_PART = 0.75
"""Share of the syncs after which the proxy is not killed any more, so that its growth can be measured."""
UNLABEL_SECONDS = 6.0
"""Within this time a label that met an engine in the moment of its restart is taken back."""
SETTLE_SECONDS = 15.0
"""Within this time after the last fault everything must be as it was."""


@dataclass
class Options:
    """What to run.

    Attributes:
        syncs: weight syncs; each is tried until it works.
        engines: simulated engines.
        clients: requests in flight.
        every: calls of the trainer between two faults, on average.
        proxy_every: calls of the trainer between two deaths of the proxy, on average; 0 never.
        careless: the trainer resumes after the proxy's death as if nothing had happened, so that what the engines know
            of a half-sent update has to be enough.
    """

    seed: int = 1
    syncs: int = 500
    engines: int = 5
    clients: int = 24
    every: float = 8.0
    proxy_every: float = 0.0
    only: str = ""
    trace: str = ""
    careless: bool = False
    stop_at_first: bool = False
    verbose: bool = False


async def chaos(options: Options) -> int:
    """One run; returns the exit code."""
    print(
        f"seed {options.seed}: {options.syncs} syncs over {options.engines} engines, {options.clients} clients",
        flush=True,
    )
    began = time.monotonic()
    truth = Truth(verbose=options.verbose)
    truth.started = began
    engines = Engines(options.engines, truth, tokens_per_second=240)
    await engines.start()
    proxy = ProxyRun([slot.url for slot in engines.slots], SETTINGS)
    proxy.on_version = truth.publish
    try:
        await proxy.start()
        proxy.files_when_idle = proxy.files
        return await _chaos(options, truth, engines, proxy, began)
    finally:
        await proxy.kill()
        await engines.stop()
        if options.trace:
            _write(options.trace, [*truth.trace, "", "-- the proxy's log", *proxy.lines])


def _write(path: str, lines: list[str]) -> None:
    Path(path).write_text("\n".join(lines) + "\n")


async def _chaos(options: Options, truth: Truth, engines: Engines, proxy: ProxyRun, began: float) -> int:
    load = Load(proxy.url, truth, options.seed, longest=120)
    torment = Torment(
        engines, truth, proxy, load.proxy_down, options.seed, options.every, options.proxy_every, options.only
    )
    trainer = Trainer(proxy.url, truth, engines, options.seed, load.unpaused, load.proxy_down)
    trainer.on_call = torment.on_call
    trainer.careless = options.careless
    nurse = spawn(engines.nurse(), name="nurse")
    loading = spawn(load.run(options.clients), name="load")
    tormenting = spawn(torment.run(), name="torment")
    async with trainer:
        for number in range(1, options.syncs + 1):
            await trainer.sync(number)
            await _after_sync(truth, engines, load, trainer)
            if number == int(options.syncs * QUIET_PART):
                torment.proxy_every = 0.0
            if number % 25 == 0:
                print(
                    f"  {time.monotonic() - began:5.0f} s: {number} syncs, {load.checked} answers checked, "
                    f"{torment.counts.total()} faults, {truth.violations.total()} violations",
                    flush=True,
                )
            if not proxy.memory_at_start and number > int(options.syncs * QUIET_PART) + options.syncs // 20:
                proxy.memory_at_start = proxy.memory
            if options.stop_at_first and truth.violations:
                break
        torment.over = True
        await tormenting
        for slot in engines.slots:
            slot.engine.faults.replace([])
        await _cured(truth, engines, trainer, options.syncs + 1)
        await _after_sync(truth, engines, load, trainer)
        load.over = True
        await loading
        load.judge()
        await _quiet(truth, trainer, proxy)
    nurse.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await nurse
    code = await proxy.stop()
    if code:
        truth.violation("exit code", f"the proxy ended with {code}")
    for line in proxy.errors[:5]:
        truth.violation("error in the proxy's log", line)
    _report(options, truth, load, torment, trainer, proxy, time.monotonic() - began)
    return 1 if truth.violations else 0


async def _after_sync(truth: Truth, engines: Engines, load: Load, trainer: Trainer) -> None:
    """Judge every answer so far, the engines' logs, and whether who serves holds what the fleet claims."""
    await trainer.publish()
    load.judge()
    engines.check_fanouts()
    await _labels(truth, engines)
    suspects: dict[str, int] = {}
    for last in (False, False, True):
        fleet = await trainer.publish()
        if fleet is None:
            return
        found: dict[str, int] = {}
        for engine in fleet["engines"]:
            slot = engines.of(engine["id"])
            if slot is None or not engine["eligible"] or slot.dead:
                continue
            claimed = truth.weights.get(fleet["weight_version"])
            if slot.engine.core.weights != claimed:
                found[slot.id] = slot.boots
                if last and suspects.get(slot.id) == slot.boots:
                    truth.violation(
                        "serving engine with other weights",
                        f"{slot} holds {slot.engine.core.weights}, the fleet claims {claimed} ({engine['reason']})",
                    )
        suspects = found
        if not suspects:
            return
        await asyncio.sleep(0.2)


async def _labels(truth: Truth, engines: Engines) -> None:
    """No engine may keep a label that speaks for other weights; an engine that just restarted may have got one.

    Whoever is inside an update has its old label on new weights until that ends, well or not.
    """

    def lying() -> set[tuple[int, int]]:
        return {
            (slot.index, slot.boots)
            for slot in engines.slots
            if not slot.dead
            and slot.fresh
            and slot.engine.core.version != DEFAULT
            and not read_label(slot.engine.core.version).unfinished
            and truth.weights.get(slot.engine.core.version) != slot.engine.core.weights
        }

    found = lying()
    deadline = time.monotonic() + UNLABEL_SECONDS
    while found and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        found &= lying()
    for index, _ in found:
        slot = engines.slots[index]
        core = slot.engine.core
        truth.violation(
            "label on other weights", f"{slot} never took an update, holds {core.weights}, shows {core.version}"
        )


async def _cured(truth: Truth, engines: Engines, trainer: Trainer, number: int) -> None:
    """Once nothing breaks any more, one sync makes everything whole."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_SECONDS
    while any(slot.dead for slot in engines.slots) or not await _all_alive(trainer):
        await asyncio.sleep(0.1)
        if loop.time() > deadline:
            truth.violation("not cured", f"engines are not seen alive {SETTLE_SECONDS:g} s after the last fault")
            break
    before = trainer.results["synced"]
    # Engines that came back later than the last init are in no group; only a sync with an init reaches them.
    trainer.grouped, trainer.owes_sync = False, True
    await trainer.sync(number)
    if trainer.results["synced"] == before:
        truth.violation("not cured", "no sync worked any more although nothing broke")
    while True:
        fleet = await trainer.fleet()
        states = {engine["id"]: f"{engine['state']} ({engine['reason']})" for engine in fleet["engines"]}
        if all(engine["state"] == "ready" for engine in fleet["engines"]) and not fleet["paused"]:
            return
        if loop.time() > deadline + SETTLE_SECONDS:
            truth.violation("not cured", f"{SETTLE_SECONDS:g} s after a clean sync: {states}")
            return
        await asyncio.sleep(0.1)


async def _all_alive(trainer: Trainer) -> bool:
    fleet = await trainer.fleet()
    return all(engine["state"] in ("ready", "fenced") for engine in fleet["engines"])


async def _quiet(truth: Truth, trainer: Trainer, proxy: ProxyRun) -> None:
    """Nothing is left behind."""
    left: Mapping[str, float] = {}
    for _ in range(50):
        fleet = await trainer.fleet()
        left = {
            "in flight": sum(engine["inflight"] for engine in fleet["engines"]),
            "held": fleet["gate"]["held_requests"],
            "held bytes": fleet["gate"]["held_bytes"],
        }
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    for name, value in left.items():
        if value:
            truth.violation("left behind", f"{name}: {value}")
    await asyncio.sleep(3)  # idle engine connections are closed after two seconds
    grown = proxy.memory - proxy.memory_at_start if proxy.memory_at_start else 0
    files = proxy.files - proxy.files_when_idle
    print(f"the proxy at the end: memory {grown / (1 << 20):+.1f} MiB, open files {files:+d}")
    if grown > GROWTH:
        truth.violation("memory grew", f"{grown} bytes")
    if files > FILES:
        truth.violation("open files grew", f"{files}")


def _report(
    options: Options, truth: Truth, load: Load, torment: Torment, trainer: Trainer, proxy: ProxyRun, seconds: float
) -> None:
    def table(title: str, counts: Mapping[str, int]) -> None:
        print(title)
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            print(f"  {count:7d}  {name}")

    table("faults", torment.counts)
    table("syncs", trainer.results)
    table("the trainer's calls", trainer.answers)
    table("requests", load.outcomes)
    print(
        f"{load.checked} answers with {load.tokens} tokens checked, {load.crossed} of them not judged because weights "
        f"came while they ran unpaused; {trainer.replayed} calls sent twice; longest call {trainer.longest:.1f} s; "
        f"{proxy.starts} starts of the proxy; {seconds:.0f} s"
    )
    if truth.violations:
        table("VIOLATIONS", truth.violations)
        print(f"chaos-sync failed (seed {options.seed})")
    else:
        print(f"chaos-sync passed (seed {options.seed})")


__all__ = ["Options", "chaos"]
