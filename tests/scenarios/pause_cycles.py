"""Pause and resume, hundreds of times under load, in every mode: no client may notice but by waiting.

``python -m tests.scenarios.pause_cycles [--cycles 300] [--mode keep --mode abort --mode wait]``. With ``--vllm MODEL`` it
starts real vLLM servers, with ``--engine URL`` (repeated) it takes engines that are there already; then the tokens are
not checked.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from engine_launcher.fleet import EngineFleet, FleetSpec
from tests.tools.process import ProxyProcess, proxy_process
from tests.tools.rollouts import Verdict, make

ENGINES = 2
CLIENTS = 16
"""Rollouts at once."""
TOKENS_PER_SECOND = 400
"""Of one sequence of a simulated engine."""
MODES = ("keep", "abort", "wait")


class Cycles:
    """One run of one mode."""

    def __init__(self, proxy: ProxyProcess, mode: str, *, model: str, seed: int, checked: bool) -> None:
        self.proxy = proxy
        self.mode = mode
        self.model = model
        self.seed = seed
        self.checked = checked
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.seconds: list[float] = []
        self.over = False

    async def client(self, number: int) -> None:
        """One rollout after another."""
        rng = random.Random(f"{self.seed} {self.mode} {number}")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            while not self.over:
                rollout = make(rng, longest=60, seed=0 if self.checked else None, model=self.model)
                outcome = await rollout.run(session, self.proxy.url)
                self.outcomes[outcome.verdict] += 1
                allowed = {Verdict.WHOLE, Verdict.ABORTED} if self.mode == "abort" else {Verdict.WHOLE}
                if outcome.verdict not in allowed:
                    self.problems.append(f"{self.mode}: {outcome.verdict}: {outcome.detail}")

    async def run(self, cycles: int) -> None:
        """All cycles, and the load around them."""
        rng = random.Random(f"{self.seed} {self.mode}")
        clients = [asyncio.ensure_future(self.client(number)) for number in range(CLIENTS)]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            for _ in range(cycles):
                began = time.monotonic()
                for call in (f"/pause?mode={self.mode}", "/resume"):
                    async with session.post(self.proxy.url + call) as answer:
                        if answer.status != 200:
                            self.problems.append(f"{call}: {answer.status} {(await answer.text())[:300]}")
                self.seconds.append(time.monotonic() - began)
                await asyncio.sleep(rng.uniform(0.0, 0.03))
            self.over = True
            await asyncio.gather(*clients)
            fleet = await self.proxy.fleet(session)
            left = (sum(engine["inflight"] for engine in fleet["engines"]), fleet["gate"]["held_requests"])
            if left != (0, 0):
                self.problems.append(f"{self.mode}: left in flight and held: {left}")


async def main_async(options: argparse.Namespace) -> int:
    """Run; returns the exit code."""
    problems: list[str] = []
    async with AsyncExitStack() as stack:
        urls = options.engine
        real = bool(urls or options.vllm)
        if options.vllm:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            extra = ("--served-model-name", options.model, "--enable-scale-out", "--max-model-len", "2048")
            fleet = await stack.enter_async_context(
                EngineFleet(FleetSpec(kind="vllm", count=ENGINES, model=options.vllm, log_dir=logs, extra=extra))
            )
            urls = fleet.urls
        elif not urls:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            extra = ("--tokens-per-second", str(TOKENS_PER_SECOND))
            fleet = await stack.enter_async_context(
                EngineFleet(FleetSpec(kind="sim", count=ENGINES, log_dir=logs, extra=extra))
            )
            urls = fleet.urls
        proxy = await stack.enter_async_context(proxy_process(*urls))
        for mode in options.mode or MODES:
            run = Cycles(proxy, mode, model=options.model, seed=options.seed, checked=not real)
            await run.run(options.cycles)
            times = sorted(run.seconds)
            print(
                f"{mode}: {options.cycles} cycles, {dict(run.outcomes)}, {len(run.problems)} errors; pause and resume "
                f"took {times[len(times) // 2] * 1000:.1f} ms (median), {times[-1] * 1000:.0f} ms at most",
                flush=True,
            )
            problems += run.problems
    for problem in problems[:20]:
        print(f"FAILED {problem}")
    return 1 if problems else 0


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cycles", type=int, default=300, help="of each mode")
    parser.add_argument("--mode", action="append", choices=MODES, help="may be repeated; default: all")
    parser.add_argument("--engine", action="append", default=[], help="URL of a running engine; may be repeated")
    parser.add_argument("--vllm", type=Path, help="directory of a model for which real vLLM servers are started")
    parser.add_argument("--model", default="sim", help="name under which the engines serve their model")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    options = parser.parse_args()
    print(f"seed {options.seed}")
    return asyncio.run(main_async(options))


if __name__ == "__main__":
    sys.exit(main())
