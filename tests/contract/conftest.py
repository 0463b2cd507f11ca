"""The engines under test: the simulated one, and real vLLM. Every test runs on both.

Two servers of each kind for the whole session: ``main`` in development mode, and ``guarded`` with an API key, a queue
limit, no development mode and no scale-out routes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine_launcher.errors import LauncherError
from engine_launcher.fleet import EngineFleet
from engine_launcher.settings import FleetSpec
from engine_launcher.vllm_engine import locate

from .wire import Answer, Connection

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

REQUIRE = "FLEETGATE_REQUIRE_VLLM"
"""Set to 1, a missing vLLM fails the tests instead of skipping them: CI must not pass without them."""
MODEL = "tiny"
API_KEY = "contract-key"
KEEP_ALIVE_SECONDS = 2
QUEUE_LIMIT = 2
SIM_TOKENS_PER_SECOND = 1000
"""About the speed of real vLLM with the tiny model, so that the same waits fit both."""

SIM_ARGUMENTS = {
    "main": ("--tokens-per-second", str(SIM_TOKENS_PER_SECOND), "--max-model-len", "2048", "--no-profiler",
             "--max-num-seqs", "64", "--keep-alive", "120"),
    "guarded": ("--tokens-per-second", str(SIM_TOKENS_PER_SECOND), "--max-model-len", "2048", "--no-profiler",
                "--api-key", API_KEY, "--no-dev-mode", "--no-scale-out", "--no-runtime-lora",
                "--enable-request-id-headers", "--max-num-queued-reqs", str(QUEUE_LIMIT),
                "--keep-alive", str(KEEP_ALIVE_SECONDS)),
}  # fmt: skip
VLLM_ARGUMENTS = {
    "main": ("--served-model-name", MODEL, "--enable-lora", "--max-lora-rank", "8"),
    "guarded": ("--served-model-name", MODEL, "--api-key", API_KEY, "--no-enable-scale-out",
                "--enable-request-id-headers", "--max-num-queued-reqs", str(QUEUE_LIMIT)),
}  # fmt: skip
VLLM_ENVIRONMENT = {
    "main": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    "guarded": {"VLLM_SERVER_DEV_MODE": "0", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_SECONDS)},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the records of real vLLM's answers anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Starting real engines takes minutes; and whoever kills one comes last.
    items.sort(key=lambda item: "kills" in item.keywords)
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            item.add_marker(pytest.mark.timeout(900))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kills: kills an engine, so it runs last")


class LoopThread:
    """An event loop of its own for the fleets, which outlive the loop of any one test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coro: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@dataclass
class Target:
    """One running engine."""

    kind: str
    fleet: EngineFleet
    thread: LoopThread
    key: str | None = None

    @property
    def host(self) -> str:
        return "127.0.0.1"

    @property
    def port(self) -> int:
        return self.fleet.engines[0].port

    def connect(self) -> Connection:
        return Connection(self.host, self.port)

    def headers(self, more: dict[str, str] | None = None) -> dict[str, str]:
        own = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return own | (more or {})

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """One request on a connection of its own."""
        async with self.connect() as connection:
            return await connection.call(method, path, body, self.headers(headers))

    async def post(self, path: str, body: Any = None) -> Answer:
        return await self.call("POST", path, body)

    async def get(self, path: str) -> Answer:
        return await self.call("GET", path)

    async def kill_core(self) -> None:
        """Kill the engine process behind the API server."""
        if self.kind == "sim":
            await self.post("/sim/kill_engine")
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.fleet.kill_core(0), self.thread.loop))

    async def restart(self) -> None:
        """Kill the server and start it anew on its port."""

        async def again() -> None:
            await self.fleet.kill(0)
            await self.fleet.restart(0)

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(again(), self.thread.loop))


class Engines:
    """Starts each fleet when a test first wants it."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._thread = LoopThread()
        self._targets: dict[tuple[str, str], Target] = {}
        self._fleets: list[EngineFleet] = []
        self._failed: dict[str, str] = {}
        self._model: Path | None = None

    def get(self, kind: str, role: str) -> Target:
        if kind in self._failed:
            pytest.fail(self._failed[kind])
        if (kind, role) not in self._targets:
            self._start(kind, role)
        return self._targets[kind, role]

    def _start(self, kind: str, role: str) -> None:
        # Both real servers at once: most of their start is one core's work each.
        roles = ["main", "guarded"] if kind == "vllm" else [role]
        fleets = {each: EngineFleet(self._spec(kind, each)) for each in roles}

        async def start() -> None:
            await asyncio.gather(*(fleet.start() for fleet in fleets.values()))

        self._fleets += fleets.values()
        try:
            self._thread.run(start())
        except LauncherError as error:
            # Every other test would wait as long for the same end.
            self._failed[kind] = str(error)
            pytest.fail(str(error))
        for each, fleet in fleets.items():
            self._targets[kind, each] = Target(kind, fleet, self._thread, API_KEY if each == "guarded" else None)

    def _spec(self, kind: str, role: str) -> FleetSpec:
        logs = self._scratch / f"{kind}-{role}"
        if kind == "sim":
            return FleetSpec(count=1, kind="sim", model=Path(MODEL), log_dir=logs, extra=SIM_ARGUMENTS[role])
        return FleetSpec(
            count=1,
            kind="vllm",
            model=self._tiny_model(),
            log_dir=logs,
            extra=VLLM_ARGUMENTS[role],
            environment=VLLM_ENVIRONMENT[role],
        )

    def _tiny_model(self) -> Path:
        if self._model is None:
            self._model = self._scratch / "tiny"
            python = locate(None, os.environ)
            subprocess.run(
                [python, "-m", "engine_launcher.tiny_model", str(self._model)], check=True, cwd=ROOT, timeout=300
            )
        return self._model

    def stop(self) -> None:
        async def stop() -> None:
            await asyncio.gather(*(fleet.stop() for fleet in self._fleets))

        self._thread.run(stop())
        self._thread.stop()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    scratch = tmp_path_factory.mktemp("engines")
    found = Engines(scratch)
    yield found
    found.stop()
    shutil.rmtree(scratch, ignore_errors=True)


def _vllm_or_skip() -> None:
    try:
        locate(None, os.environ)
    except Exception as error:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {error}")
        pytest.skip(f"real vLLM is not here: {error}")


BOTH = ["sim", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(params=BOTH)
def engine(request: pytest.FixtureRequest, engines: Engines) -> Target:
    """The server in development mode."""
    if request.param == "vllm":
        _vllm_or_skip()
    return engines.get(request.param, "main")


@pytest.fixture(params=BOTH)
def guarded(request: pytest.FixtureRequest, engines: Engines) -> Target:
    """The server with an API key, a queue limit, no development mode and no scale-out."""
    if request.param == "vllm":
        _vllm_or_skip()
    return engines.get(request.param, "guarded")


@pytest.fixture
def record(request: pytest.FixtureRequest) -> bool:
    """Whether this test writes its record instead of comparing with it."""
    wanted = bool(request.config.getoption("--record", default=False))
    return wanted and request.node.get_closest_marker("vllm") is not None
