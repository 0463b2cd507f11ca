"""How long `/metrics` holds the event loop: ``python benchmarks/metrics_page.py [ENGINES]``.

Recorded pages of vLLM stand in for the engines' answers. Processor time is measured, so that other work on the machine
does not count.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from time import thread_time
from typing import Any

import uvloop

from proxy.app import GC_THRESHOLD
from proxy.config import Settings
from proxy.core.engine_state import State
from proxy.data.connection import Head
from proxy.data.plane import DataPlane
from proxy.data.upstream import Answer
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.observe.control_stats import SYNC_CALLS, ControlStats
from proxy.observe.exposition import Format
from proxy.observe.metrics import OwnPage
from proxy.observe.pages import _pieces
from proxy.observe.scrape import Scraper
from proxy.observe.turns import paced

RECORDED = Path(__file__).parents[1] / "tests" / "unit" / "observe" / "pages_recorded" / "vllm-0.33.prom"
ROUNDS = 20


class Recorded:
    """An engine's connections, as far as its page goes."""

    def __init__(self) -> None:
        self._answer = Answer(Head(200, b"OK", [], None, chunked=False, keep_alive=True), RECORDED.read_bytes())

    async def fetch(self, *_: Any, **__: Any) -> Answer:
        return self._answer


class Loop:
    """Measures the turns of the loop."""

    def __init__(self) -> None:
        self.turns: list[float] = []

    async def watch(self) -> None:
        last = thread_time()
        while True:
            await asyncio.sleep(0)
            now = thread_time()
            self.turns.append(now - last)
            last = now


async def main(engines: int) -> None:
    fleet = Fleet(asyncio.get_running_loop().time)
    plane = DataPlane(Settings(), fleet)
    control = ControlStats()
    upstream: Any = Recorded()
    for number in range(engines):
        engine = Engine(f"10.0.0.{number}:8000", f"http://10.0.0.{number}:8000", upstream)
        engine.state, engine.version = State.READY, "step-1"
        fleet.add(engine)
        plane.stats.engine_answered(engine.id, 200)
    legs = {engine.id: (200, 0.1, "answered") for engine in fleet}
    for call in SYNC_CALLS:
        control.on_event(
            "control_call", {"call": call, "status": 200, "seconds": 0.1, "overhead_seconds": 0.01, "legs": legs}
        )
    scraper = Scraper(fleet)
    own = OwnPage(plane, control, scraper)
    loop = Loop()
    watching = asyncio.ensure_future(loop.watch())
    print(
        f"{engines} engines; processor time in milliseconds, {ROUNDS} pages each, the first with every series unknown"
    )
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
    for fmt in Format:
        longest, spent, size = [], [], 0
        for _ in range(ROUNDS):
            scraper._round_at = float("-inf")
            await asyncio.sleep(0)
            loop.turns.clear()
            began = thread_time()
            await scraper.refresh()
            parts = [part async for part in paced(own.render(fmt))] + await scraper.merged(fmt)
            size = 0
            async for piece in paced(_pieces(parts)):
                size += len(piece)
            spent.append(1e3 * (thread_time() - began))
            longest.append(1e3 * max(loop.turns))
        print(
            f"{fmt.name.lower():<12} {size / 1e6:.1f} MB, {sorted(spent)[ROUNDS // 2]:.0f} in all; "
            f"longest turn of the loop: p50 {sorted(longest)[ROUNDS // 2]:.2f}, max {max(longest):.2f}"
        )
    watching.cancel()
    await scraper.stop()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 64))
