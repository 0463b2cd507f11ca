"""What goes wrong, at random moments of a sync."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine_launcher.sim.faults import parse_fault
from tests.scenarios.chaos_sync.engines import RELOAD, Engines, Slot
from tests.scenarios.chaos_sync.proxy_run import ProxyRun
from tests.scenarios.chaos_sync.truth import Truth

CONTROL = (
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/update_weights",
    "/finish_weight_update",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_info",
    "/is_paused",
    "/get_world_size",
    "/health",
    "/metrics",
    RELOAD,
)
GENERATION = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


@dataclass
class Torment:
    """Strikes one engine after another, and now and then the proxy.

    It keeps step with the trainer, not with the clock, so that a busy machine sees no more faults in a sync than an
    idle one.

    Args:
        every: calls of the trainer between two strikes, on average.
        proxy_every: calls of the trainer between two deaths of the proxy, on average; 0 never kills it.
    """

    engines: Engines
    truth: Truth
    proxy: ProxyRun
    proxy_down: list[tuple[float, float]]
    seed: int
    every: float
    proxy_every: float
    only: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    over: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed} torment")
        self._strikes = asyncio.Semaphore(0)
        self._deaths = asyncio.Semaphore(0)

    async def run(self) -> None:
        """Until `over`."""
        await asyncio.gather(self._engines(), self._proxy())

    def on_call(self) -> None:
        """The trainer makes a call: strike now or soon, maybe."""
        if not self.over and self.rng.random() < 1 / self.every:
            self._strikes.release()
        if not self.over and self.proxy_every and self.rng.random() < 1 / self.proxy_every:
            self._deaths.release()

    async def _engines(self) -> None:
        rng = self.rng
        kinds = {
            "killed": (self._kill, 3),
            "restarted fast": (self._fast, 4),
            "restarted fast with the fleet's weights": (self._fast_equal, 1),
            "call failed": (self._call_fails, 12),
            "frozen": (self._freeze, 0.5),
            "answers broke off": (self._cut, 1),
        }
        if self.only:
            kinds = {name: kind for name, kind in kinds.items() if name in self.only.split(",")}
        names = list(kinds)
        weights = [weight for _, weight in kinds.values()]
        while not self.over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._strikes.acquire()
                    await asyncio.sleep(rng.choice([0.0, rng.uniform(0.0, 0.01), rng.uniform(0.0, 0.1)]))
            if self.over or not names:
                continue
            name = rng.choices(names, weights)[0]
            slot = rng.choice(self.engines.slots)
            if slot.dead or slot.coming:
                continue
            said = await kinds[name][0](slot)
            self.counts[said or name] += 1

    async def _kill(self, slot: Slot) -> None:
        loop = asyncio.get_running_loop()
        slot.due = loop.time() + self.rng.choice([0.02, 0.1, 0.5, 1.5])
        self.truth.note(f"kill {slot}")
        slot.die()

    async def _fast(self, slot: Slot) -> None:
        await slot.restart()
        self.truth.note(f"{slot} restarted at once")

    async def _fast_equal(self, slot: Slot) -> None:
        """Restarted, and loaded what the fleet has, from a disk say: only its checksums can tell."""
        weights = self.truth.weights[self.truth.published[-1]]
        await slot.restart(weights)
        self.truth.note(f"{slot} restarted at once and loaded {weights}")

    async def _call_fails(self, slot: Slot) -> str:
        rng = self.rng
        path = rng.choice(CONTROL)
        action = rng.choice(["hang", "status", "status", "cut", "reset", "die", "delay", "success_false"])
        if action == "success_false" and path != "/update_weight_version":
            action = "status"
        rule: dict[str, Any] = {"path": path, "action": action, "times": rng.choice([1, 1, 1, 2, 4])}
        if action != "delay":
            rule["when"] = rng.choice(["before", "before", "after"])
        if action == "hang":
            rule["seconds"] = rng.uniform(0.3, 4.0)
        elif action == "delay":
            rule["seconds"] = rng.uniform(0.05, 2.5)
        elif action == "status":
            rule["status"] = rng.choice([500, 500, 503, 400])
        slot.engine.faults.replace([parse_fault(rule)])
        self.truth.note(f"{slot} gets {rule}")
        words = {"hang": "hangs", "status": "answers an error", "cut": "cuts", "reset": "resets", "die": "dies",
                 "delay": "is late", "success_false": "says success: false"}  # fmt: skip
        return f"{words[action]} {rule.get('when', 'before')} a call"

    async def _freeze(self, slot: Slot) -> None:
        seconds = self.rng.uniform(0.5, 3.0)
        engine = slot.engine
        self.truth.note(f"{slot} is frozen for {seconds:.1f} s")
        engine.faults.replace([parse_fault({"path": "*", "action": "delay", "seconds": seconds})])
        await asyncio.sleep(seconds / 2)
        engine.faults.replace([])

    async def _cut(self, slot: Slot) -> None:
        rule = {"path": self.rng.choice(GENERATION), "action": self.rng.choice(["cut", "reset"]), "times": 2}
        if self.rng.random() < 0.5:
            rule["after_tokens"] = self.rng.randrange(0, 10)
        slot.engine.faults.replace([parse_fault(rule)])

    async def _proxy(self) -> None:
        rng = random.Random(f"{self.seed} proxy killer")
        while not self.over:
            strike = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._deaths.acquire()
                    await asyncio.sleep(rng.choice([0.0, rng.uniform(0.0, 0.01), rng.uniform(0.0, 0.1)]))
                    strike = True
            if strike:
                await self.kill_proxy(rng.choice([0.0, 0.0, 0.3]))

    async def kill_proxy(self, seconds: float) -> None:
        """SIGKILL, and a new one on the same port."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.counts["proxy killed"] += 1
        self.truth.note("kill the proxy")
        window = (began, float("inf"))
        self.proxy_down.append(window)
        await self.proxy.kill()
        await asyncio.sleep(seconds)
        await self.proxy.start()
        self.proxy_down[self.proxy_down.index(window)] = (began, loop.time())
        self.truth.note("the proxy is back")
