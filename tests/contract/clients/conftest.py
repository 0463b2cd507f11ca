"""Engines, the proxy as users start it, and the process that the real clients run in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.server import SimEngine
from tests.tools.process import ProxyProcess, proxy_process

from .using import CLIENTS_PYTHON, Clients, has_engine

REQUIRE = "FLEETGATE_REQUIRE_VLLM"
UNTIL_SECONDS = 20.0
"""After which what should have happened by now never will."""


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    """Where the SDKs run."""
    if not CLIENTS_PYTHON.exists():
        pytest.skip("the clients are not here: `make clients` installs them into .clients and runs these tests")
    running = Clients(tmp_path_factory.mktemp("clients") / "worker.log")
    yield running
    running.stop()


@pytest.fixture(scope="session")
def torch_clients(clients: Clients) -> Clients:
    """The same, for clients that import torch and vLLM."""
    if not has_engine():
        reason = "this client imports vLLM, which `make engine` builds into .engine"
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return clients


@dataclass
class SimFleet:
    """Simulated engines in this process, and the proxy in one of its own."""

    engines: list[SimEngine]
    proxy: ProxyProcess
    http: aiohttp.ClientSession
    """With the proxy as its base."""

    @property
    def url(self) -> str:
        return self.proxy.url

    async def get(self, path: str) -> Any:
        async with self.http.get(path) as answer:
            assert answer.status == 200, (answer.status, await answer.text())
            return await answer.json()

    async def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        async with self.http.post(path, json=body) as answer:
            assert answer.status == status, (answer.status, await answer.text())
            return await answer.json()

    async def states(self) -> list[str]:
        """State of each engine, in order."""
        return [engine["state"] for engine in (await self.get("/fleet"))["engines"]]

    def calls(self, path: str) -> list[list[dict[str, Any]]]:
        """What each engine got on a path."""
        return [engine.log.entries(path=path) for engine in self.engines]

    def faults(self, *rules: Any, engine: int | None = None) -> None:
        """Put fault rules in force on one engine, or on all."""
        for index, each in enumerate(self.engines):
            if engine is None or index == engine:
                each.faults.replace(list(rules))

    async def samples(self, name: str, **labels: str) -> float:
        """The sum over those series of a metric that have these labels."""
        async with self.http.get("/metrics") as answer:
            page = await answer.text()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in page.splitlines() if line.startswith(name + "{") and all(w in line for w in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def restore(self) -> None:
        """Undo what a test did: faults, pauses, speed, logs."""
        for engine in self.engines:
            engine.faults.replace([])
            engine.core.resume()
            engine.core.speed.tokens_per_second = engine.config.tokens_per_second
        await self.post("/resume")
        for engine in self.engines:
            engine.log.clear()


async def until(check: Callable[[], Awaitable[Any]]) -> Any:
    """Ask until the answer is true, and return it; the limit only ends a hang."""
    async with asyncio.timeout(UNTIL_SECONDS):
        while True:
            if found := await check():
                return found
            await asyncio.sleep(0.02)


async def held(fleet: SimFleet, count: int) -> None:
    """Wait until the gate holds so many requests."""

    async def check() -> bool:
        return await fleet.proxy.metric(fleet.http, "fleetgate_held_requests") == count

    await until(check)


@asynccontextmanager
async def sim_fleet(*configs: SimConfig, kind: type[SimEngine] = SimEngine, **settings: Any) -> AsyncIterator[SimFleet]:
    """One engine for each config, and the proxy in front of them with these flags."""
    engines = [kind(config) for config in configs]
    try:
        for engine in engines:
            await engine.start()
        async with (
            proxy_process(*(engine.url for engine in engines), **settings) as proxy,
            aiohttp.ClientSession(proxy.url) as http,
        ):
            for engine in engines:
                engine.log.clear()
            yield SimFleet(engines, proxy, http)
    finally:
        for engine in engines:
            await engine.stop()
