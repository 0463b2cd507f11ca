"""Engines that tests control, and a control plane in front of them, on the running loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from proxy.config import Settings
from proxy.control.plane import ControlPlane
from proxy.core.engine_state import State
from proxy.data.gate import Gate
from proxy.data.handoff import web_runner
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.observe.events import KINDS
from tests.scenarios.control.mock import MockEngine

FAST = {"probe_interval": 0.05, "probe_timeout": 3.0, "pause_watch_interval": 0.05, "replay_window": 5.0}


@dataclass(eq=False)
class FakeRequest:
    """What the tracker knows of a request."""

    request_id: str
    route: str
    engine: Engine | None
    prompts: int = 1
    aborted: bool = False

    def abort(self) -> None:
        self.aborted = True


class FakeTracker:
    def __init__(self) -> None:
        self.requests: list[FakeRequest] = []

    async def refresh(self) -> None:
        """Nobody else has requests."""

    def find(self, request_id: str) -> list[FakeRequest]:
        return [item for item in self.requests if item.request_id == request_id]

    def all(self) -> list[FakeRequest]:
        return list(self.requests)


class FakeBalancer:
    def __init__(self) -> None:
        self.sessions: set[bytes] = set()

    def finish(self, key: bytes) -> bool:
        return key in self.sessions

    def forget(self, engine_id: str) -> None:
        pass


class FakeData:
    """The parts of the data plane that the control plane touches; the gate is the real one."""

    def __init__(self, fleet: Fleet) -> None:
        self.gate = Gate(max_requests=16, max_bytes=1 << 20, can_pass=lambda: bool(fleet.eligible))
        self.tracker = FakeTracker()
        self.balancer = FakeBalancer()


@dataclass
class Rig:
    engines: list[MockEngine]
    plane: ControlPlane
    data: FakeData
    base: str
    http: aiohttp.ClientSession
    events: list[tuple[str, dict[str, Any]]]

    async def call(self, path: str, *, method: str = "POST", status: int | None = 200, **kw: Any) -> Any:
        async with self.http.request(method, URL(self.base + path, encoded=True), **kw) as response:
            text = await response.text()
            assert "Content-Length" in response.headers
            if status is not None:
                assert response.status == status, f"{path}: {response.status} {text}"
            try:
                return await response.json(content_type=None)
            except ValueError:
                return text

    async def get(self, path: str, *, status: int | None = 200, **kw: Any) -> Any:
        return await self.call(path, method="GET", status=status, **kw)

    async def raw(self, head: str, body: bytes = b"") -> bytes:
        """A request written by hand, for what clients hide; the answer as it came."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.base.rsplit(":", 1)[1]))
        writer.write(head.replace("\n", "\r\n").encode() + b"Host: x\r\nConnection: close, x-hop\r\n\r\n" + body)
        answer = await reader.read()
        writer.close()
        return answer

    def engine(self, index: int) -> Engine:
        return self.plane.fleet.engines[self.engines[index].id]

    def states(self) -> list[str]:
        return [str(self.engine(index).state) for index in range(len(self.engines))]

    async def until(self, what: Callable[[], bool], limit: float = 5.0) -> None:
        async with asyncio.timeout(limit):
            while not what():
                await asyncio.sleep(0.01)

    async def restart(self, index: int, **changes: Any) -> None:
        """Replace an engine's process, and wait until the proxy has noticed."""
        engine = self.engine(index)
        before = engine.boot
        await self.engines[index].restart(**changes)
        await self.until(lambda: engine.boot > before)

    async def until_state(self, index: int, state: State | str, limit: float = 5.0) -> None:
        await self.until(lambda: self.engine(index).state == state, limit)

    async def sync(self, payload: Any = "w1", version: str | None = None, **kw: Any) -> None:
        await self.call("/pause?mode=keep", **kw)
        await self.call("/start_weight_update", **kw)
        await self.call("/update_weights", json={"update_info": {"names": [payload]}}, **kw)
        await self.call("/finish_weight_update", json={"weight_version": version} if version else None, **kw)
        await self.call("/resume", **kw)

    def seen(self, path: str) -> list[int]:
        return [len(engine.calls(path)) for engine in self.engines]


@asynccontextmanager
async def rig(count: int = 2, *, engines: list[MockEngine] | None = None, **settings: Any) -> AsyncIterator[Rig]:
    mocks = engines if engines is not None else [MockEngine() for _ in range(count)]
    for mock in mocks:
        if mock._runner is None:
            await mock.start()
    async with proxy_for(mocks, **settings) as built:
        try:
            yield built
        finally:
            for mock in mocks:
                mock.heal()
    for mock in mocks:
        await mock.kill()


@asynccontextmanager
async def proxy_for(mocks: list[MockEngine], *, wait: bool = True, **settings: Any) -> AsyncIterator[Rig]:
    fleet = Fleet(asyncio.get_running_loop().time)
    config = Settings(engine=[mock.url for mock in mocks], **{**FAST, **settings})
    data = FakeData(fleet)
    plane = ControlPlane(config, fleet, data)  # type: ignore[arg-type]
    events: list[tuple[str, dict[str, Any]]] = []
    fleet.listeners.append(lambda kind, details: events.append((kind, details)))
    runner = web_runner(plane.make_app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    starting = asyncio.ensure_future(plane.start())
    if wait:
        await starting
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as http:
        try:
            yield Rig(mocks, plane, data, base, http, events)
            assert {kind for kind, _ in events} <= KINDS
        finally:
            await starting
            await plane.stop()
            await runner.cleanup()
            for engine in fleet:
                engine.upstream.close()
            await asyncio.sleep(0)
