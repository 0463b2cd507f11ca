"""Run everything on the GPU machine, or with ``--sim`` on simulated engines; results are saved after every phase.

``python benchmarks/gpu/run.py --gpus 2 --out DIR`` · ``--sim --scale 0.3`` tries the whole logic on a laptop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

import aiohttp
import killing
import phases
import tables
from rig import Control, RunFailed, Server, say
from stage import Options, Stage, more_files

ROOM = {"a": 60.0, "p": 50.0, "b": 80.0, "n": 70.0, "c": 100.0, "d": 90.0}
"""Seconds that must be left before the deadline for a phase to begin; its cells are kept as they come."""

JOIN_LIMIT = 45.0
"""Seconds for the first group and the first weights over NCCL: what hangs there never ends."""


class Run:
    """One run: phases in the order asked for, each kept from taking the others down."""

    def __init__(self, stage: Stage, wanted: str, modes: list[str]) -> None:
        self.stage, self.wanted, self.modes = stage, wanted, modes
        self.found: dict[str, Any] = {"sim": stage.options.sim, "gpus": stage.options.gpus, "model": stage.options.size}
        self.trainer: Any = None

    def save(self) -> None:
        """Write what is there; in one step."""
        path = self.stage.options.out / "results.json"
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(self.found, indent=1) + "\n")
        scratch.rename(path)
        (self.stage.options.out / "tables.md").write_text(tables.page(self.found))

    def keep(self, name: str, value: Any) -> None:
        """Book a result."""
        self.found[name] = value
        self.save()

    async def phase(self, name: str, work: Any) -> None:
        """Run one phase; its failure is a result too."""
        left = self.stage.options.deadline - time.time()
        if left < ROOM[name[0]] * min(1.0, self.stage.options.scale):
            say(f"{name}: not begun, {left:.0f} s are left")
            self.found.setdefault("not_run", []).append(name)
            self.save()
            return
        started = time.time()
        try:
            await self.guarded(work, left)
        except Exception as error:
            text = "".join(traceback.format_exception(error))[-3000:]
            say(f"{name} FAILED: {text}")
            self.found.setdefault("failed", {})[name] = text
        self.found.setdefault("phase_seconds", {})[name] = round(time.time() - started, 1)
        self.save()
        say(f"{name}: {time.time() - started:.0f} s; {self.stage.options.deadline - time.time():.0f} s left")

    async def guarded(self, work: Any, left: float) -> None:
        """Run it until it ends, time is up, or a process that it needs has died."""
        tasks = [asyncio.ensure_future(work()), asyncio.ensure_future(self.stage.death())]
        try:
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise RunFailed(f"not done within the {left:.0f} s that were left")
            for each in done:
                each.result()
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def throughput(self) -> None:
        """(a)."""
        await phases.throughput(self.stage, lambda rows: self.keep("throughput", rows))

    async def paired(self) -> None:
        """(a), both routes at once."""
        await phases.paired(self.stage, lambda rows: self.keep("paired", rows))

    async def early(self, name: str, backend: str, devices: list[int]) -> Any:
        """The trainer that was started with the engines, or a new one."""
        there = self.stage.spares.get(name)
        if there is None or not there.alive:
            return await self.stage.trainer(name, backend, devices)
        await there.ready()  # type: ignore[attr-defined]
        return there

    async def fleet_trainer(self) -> Any:
        """The proxy in front of the whole fleet, and a trainer that has joined it."""
        stage = self.stage
        if "proxy" not in stage.spares or not stage.spares["proxy"].alive:
            await stage.proxy("proxy", stage.urls)
        if self.trainer is not None and self.trainer.alive:
            return stage.spares["proxy"], self.trainer
        devices = list(range(stage.options.gpus))
        url = stage.spares["proxy"].url
        try:
            trainer = await self.early("trainer", stage.backend, devices)
            await trainer.ask("init", url=url)
            await trainer.ask("send", seed=0)
        except RunFailed as error:
            if stage.backend != "ipc":
                raise
            say(f"ipc does not work here, so the CPU backend is used: {error}")
            self.found["ipc_failed"] = str(error)[:3000]
            await stage.drop("trainer")
            stage.backend = "fleetgate_cpu"
            again = [stage.engine(f"{each.name}-cpu", gpu, stage.backend) for gpu, each in enumerate(stage.engines)]
            for each in stage.engines:
                each.kill()
            stage.engines = again
            for each in again:
                await each.start()
            await asyncio.gather(*(each.healthy(stage.session, 240) for each in again))
            await stage.proxy("proxy", stage.urls)
            trainer = await stage.trainer("trainer", stage.backend, [0])
            await trainer.ask("init", url=stage.spares["proxy"].url)
            await trainer.ask("send", seed=0)
        self.trainer = trainer
        self.found["backend"] = stage.backend
        return stage.spares["proxy"], trainer

    async def syncs(self) -> None:
        """(b) Both engines through one URL."""
        proxy, trainer = await self.fleet_trainer()
        await self.rounds("syncs", self.stage.urls, proxy, trainer, self.modes)

    async def nccl(self) -> None:
        """(b) Over NCCL: the trainer on GPU 0, engines on all others."""
        stage = self.stage
        trainer = await self.early("trainer-nccl", "nccl", [0])
        plain = stage.spares["plain"]
        await self.probe("straight, vLLM as it is", [plain.url], plain, trainer, 1, plain=True)
        await stage.drop("plain")
        urls = [each.url for name, each in stage.spares.items() if name.startswith("nccl-")]
        proxy = await stage.proxy("proxy-nccl", urls)
        # Where the weights do not arrive, the same without packing and then without the proxy says whose fault it is.
        right = await self.probe("through the proxy", urls, proxy, trainer, 1)
        if not right:
            right = await self.probe("through the proxy, unpacked", urls, proxy, trainer, 2, unpacked=True)
        if not right and len(urls) == 1:
            straight = Server("straight", [], {}, stage.options.work)
            straight.url = urls[0]
            await self.probe("straight", urls, straight, trainer, 1)
        if right:
            await self.rounds("syncs_nccl", urls, proxy, trainer, ["keep", "abort"])
        for name in ("trainer-nccl", "proxy-nccl", *(each for each in stage.spares if each.startswith("nccl-"))):
            await stage.drop(name)

    async def probe(self, name: str, urls: list[str], to: Server, trainer: Any, seed: int, **how: bool) -> bool:
        """One group, one update, and whether every engine then has the trainer's weights."""
        joined = await trainer.ask("init", JOIN_LIMIT, url=to.url, **how)
        control = Control(to.url, self.stage.session)
        await control.post("/pause?mode=abort")  # which clears the cache of what the old weights made of the prompt
        sent = await trainer.ask("send", JOIN_LIMIT, seed=seed)
        await control.post("/resume")
        version = (await Control(urls[0], self.stage.session).get("/weight_info"))["weight_version"]
        row = await phases.check(self.stage, urls, to, trainer, seed, version)
        row |= {"nccl_disabled": joined.get("disabled"), "send_seconds": sent["seconds"]}
        self.found.setdefault("nccl_probes", {})[name] = row
        self.save()
        judged = row["greedy"][0]
        say(
            f"n: {name}: nccl disabled {row['nccl_disabled']}, {row['trainers_checksums_equal']} of"
            f" {row['trainers_checksums']} checksums are the trainer's, greedy {judged['equal_bfloat16']} of"
            f" {judged['tokens']}, sent in {sent['seconds']:.3f} s"
        )
        # What vLLM fills the vocabulary's rows up with is its own affair: those two tensors may differ.
        return bool(row["trainers_checksums_equal"] >= row["trainers_checksums"] - 2)

    async def rounds(self, name: str, urls: list[str], proxy: Any, trainer: Any, modes: list[str]) -> None:
        """One mode after another."""
        count = max(3, round(50 * min(1.0, self.stage.options.scale)))
        if self.stage.backend == "fleetgate_cpu" and name == "syncs":
            count = min(count, 15)
        for mode in modes:
            gap = 0.3 if mode == "wait" else 0.5 if name == "syncs_nccl" else 0.7
            row = await phases.syncs(self.stage, urls, proxy, trainer, mode, count, f"{name}-{mode}-", gap)
            self.found.setdefault(name, []).append(row)
            self.save()
            say(f"{name} {mode}: window {row['window']}, engines {row['engines_own']}, errors {row['errors']}")

    async def policies(self) -> None:
        """(c)."""
        proxy, trainer = await self.fleet_trainer()
        for mode in ("none", "keep", "abort", "wait"):
            row = await phases.policies(self.stage, proxy, trainer, mode, 30 if mode == "none" else 62)
            self.found.setdefault("policies", []).append(row)
            self.save()
            say(f"c: {mode}: {row['finished_per_minute']:.0f} rollouts/min, errors {row['errors']}")

    async def kill(self) -> None:
        """(d)."""
        proxy, trainer = await self.fleet_trainer()
        self.keep("kill", await killing.kill(self.stage, proxy, trainer, "after-kill"))

    async def all(self) -> None:
        """Everything that was asked for."""
        works = {
            "a": ("a throughput", self.throughput),
            "p": ("p both routes at once", self.paired),
            "b": ("b syncs", self.syncs),
            "n": ("n syncs over nccl", self.nccl),
            "c": ("c ways of pausing", self.policies),
            "d": ("d engine killed", self.kill),
        }
        for each in self.wanted:
            if each == "n" and self.stage.options.gpus < 2:
                continue
            await self.phase(*works[each])


async def main() -> int:
    """Raise the engines, run the phases, end everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sim", action="store_true")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phases", default="apbncd")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--size", default="0.7b")
    parser.add_argument("--seconds", type=float, default=1100.0, help="all of it must have ended by then")
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu/work"))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--sync-load", type=int, default=512)
    both = ["streamed", "whole"]
    parser.add_argument("--in-flight", type=int, nargs="*", help="rollouts in flight of p; 512 and 2,048")
    parser.add_argument("--forms", nargs="*", choices=both, default=both, help="of p")
    parser.add_argument("--turns", type=int, nargs="*", help="rollouts in flight of a; those of p")
    parser.add_argument("--turn-forms", nargs="*", choices=both, default=both, help="of a")
    parser.add_argument("--rounds", type=int, default=1, help="of a: straight, proxy, proxy, straight")
    parser.add_argument("--modes", nargs="*", default=["keep", "abort", "wait"], help="of b")
    args = parser.parse_args()
    more_files()
    for each in (args.out, args.work):
        each.mkdir(parents=True, exist_ok=True)
    options = Options(args.sim, args.gpus, args.out.absolute(), args.scale, args.size, time.time() + args.seconds)
    options.work, options.clients = args.work.absolute(), args.clients
    options.phases, options.rounds = args.phases if args.gpus > 1 else args.phases.replace("n", ""), args.rounds
    options.in_flight = tuple(args.in_flight or ([64, 128] if args.sim else [512, 2048]))
    options.turns = tuple(args.turns or options.in_flight)
    options.forms = tuple(each == "streamed" for each in args.forms)
    options.turn_forms = tuple(each == "streamed" for each in args.turn_forms)
    # No limit of connections: counters and control calls must never wait for one another.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        stage = Stage(options, session)
        stage.facts["sync_load"] = args.sync_load
        run = Run(stage, args.phases, args.modes)
        try:
            run.keep("date", time.strftime("%Y-%m-%d"))
            run.keep("versions", stage.versions())
            await asyncio.wait_for(stage.raise_engines(), args.seconds)
            run.keep("facts", stage.facts)
            await run.all()
        except (RunFailed, TimeoutError, OSError) as error:
            run.found.setdefault("failed", {})["run"] = str(error)[-3000:]
            say(f"FAILED: {error}")
            return 1
        finally:
            with contextlib.suppress(Exception):
                run.save()
            await stage.end()
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
