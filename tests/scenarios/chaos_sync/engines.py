"""Simulated engines inside this process, that die and come back on the same port within milliseconds.

Being in this process, they tell the truth about their weights at any moment, and a label is checked against them in the
very moment in which it is set.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.scheduler import EngineCore
from engine_launcher.sim.server import SimEngine
from proxy.core.calls import CALLS, ONCE
from proxy.tasks import spawn
from tests.scenarios.chaos_sync.truth import Truth

RELOAD = "/fetch_weights"
"""A framework's own path: the engines load the weights that it names, without start and finish."""
NEVER_TWICE = frozenset({*(path for path, call in CALLS.items() if call.kind in ONCE), RELOAD})


class WatchedCore(EngineCore):
    """An engine core that reports each label that it is given."""

    on_label: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "version" and self.on_label is not None:
            self.on_label(value, self.weights)


class Slot:
    """One engine of the fleet: a port, and whatever process is behind it now."""

    def __init__(self, index: int, truth: Truth, config: SimConfig) -> None:
        self.index = index
        self.truth = truth
        self.config = config
        self.port = 0
        self.engine: SimEngine = None  # type: ignore[assignment]
        self.boots = 0
        self.first_weights = ""
        self.due: float | None = None
        """Loop time at which it comes back, once it is dead."""
        self.calls: Counter[tuple[str, str]] = Counter()
        self._coming = asyncio.Lock()

    @property
    def id(self) -> str:
        """Its name in the proxy."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.id}"

    @property
    def fresh(self) -> bool:
        """Whether it still has the weights that it started with."""
        return self.engine.core.weights == self.first_weights

    @property
    def coming(self) -> bool:
        """Whether a new process is just starting."""
        return self._coming.locked()

    @property
    def dead(self) -> bool:
        return self.engine.core.dead

    def __repr__(self) -> str:
        return f"e{self.index}({self.id}, boot {self.boots})"

    async def start(self, weights: str | None = None) -> None:
        """A new process: base weights unless it loads others, label ``default``, a new start time."""
        engine = SimEngine(self.config, port=self.port)
        if weights is not None:
            engine.core.weights = weights
        self.watch(engine)
        self.first_weights = engine.core.weights
        for _ in range(1000):
            try:
                await engine.start()
            except OSError:  # the old process's port is closed in the loop's next turns
                await asyncio.sleep(0)
            else:
                break
        self.engine = engine
        self.port = engine.port
        self.boots += 1
        self.due = None

    def watch(self, engine: SimEngine) -> None:
        core = engine.core
        core.__class__ = WatchedCore
        core.on_label = lambda label, weights: self.truth.labelled(repr(self), label, weights)  # type: ignore[attr-defined]

    def die(self) -> None:
        """As SIGKILL."""
        if not self.dead:
            self.engine.die()

    async def restart(self, weights: str | None = None) -> None:
        """Die if alive, and come back at once."""
        async with self._coming:
            self.die()
            old = self.engine
            self.count_calls()
            await self.start(weights)
            spawn(old.stop(), name="retire engine")

    def count_calls(self) -> list[tuple[str, str]]:
        """Count the trainer's calls that came since the last look; returns those that came twice."""
        again = []
        entries = self.engine.log.entries()
        self.engine.log.clear()
        for entry in entries:
            if entry["path"] not in NEVER_TWICE:
                continue
            ids = [value for name, value in entry["headers"] if name.lower() == "x-request-id"]
            if not ids:
                continue
            status = entry["status"]
            if entry["path"] == "/start_weight_update" and status is not None and status >= 400:
                # Refused because a broken round left a session open: the proxy closes it and starts again.
                continue
            key = (ids[0], entry["path"])
            self.calls[key] += 1
            if self.calls[key] > 1:
                again.append(key)
        return again


class Engines:
    """The fleet."""

    def __init__(self, count: int, truth: Truth, *, tokens_per_second: float) -> None:
        config = SimConfig(seed=0, tokens_per_second=tokens_per_second, extra_control_paths=(RELOAD,))
        self.truth = truth
        self.slots = [Slot(index, truth, config) for index in range(count)]

    async def start(self) -> None:
        for slot in self.slots:
            await slot.start()

    async def stop(self) -> None:
        for slot in self.slots:
            await slot.engine.stop()

    def of(self, engine_id: str) -> Slot | None:
        """The engine of this id."""
        return next((slot for slot in self.slots if slot.id == engine_id), None)

    async def nurse(self) -> None:
        """Bring dead engines back when they are due; runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        rng = random.Random(1)
        while True:
            await asyncio.sleep(0.01)
            for slot in self.slots:
                if not slot.dead or slot.coming:
                    continue
                if slot.due is None:
                    # It died of a fault at a call: nobody has said yet when it comes back.
                    slot.due = loop.time() + rng.choice([0.0, 0.0, 0.05, 0.3, 1.0])
                if loop.time() >= slot.due:
                    await slot.restart()
                    self.truth.note(f"{slot} is back")

    def check_fanouts(self) -> None:
        """No trainer's call may have reached an engine twice."""
        for slot in self.slots:
            for request_id, path in slot.count_calls():
                self.truth.violation("second fan-out", f"{slot} got {path} of {request_id} twice")
