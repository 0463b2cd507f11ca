"""What is done about engines that die, fall silent, or are to be restarted: with engines and a proxy that are neither."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from engine_launcher.errors import EngineDiedError, LauncherError
from engine_launcher.fleet import Engine, EngineFleet
from engine_launcher.proxy_link import FileRoster, LinkError
from engine_launcher.restart import Care
from engine_launcher.settings import FleetSpec
from engine_launcher.supervisor import Supervisor

FAST = Care(
    restarts=3, restart_backoff=0.0, health_interval=0.001, health_timeout=5.0, health_failures=3, roll_wait=5.0
)


class FakeEngine:
    """Runs until told otherwise; counts what was done to it."""

    def __init__(self, index: int, url: str) -> None:
        self.name = f"engine {index}"
        self.log = Path(f"engine-{index}.log")
        self.url = url
        self.starts = 0
        self.stops = 0
        self.kills = 0
        self._ended = asyncio.Event()
        self.returncode: int | None = None

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    async def start(self) -> None:
        self.starts += 1
        self.returncode = None
        self._ended.clear()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    async def stop(self) -> None:
        self.stops += 1
        self.end(0)

    async def kill(self) -> None:
        self.kills += 1
        self.end(137)

    def processes(self) -> list[Any]:
        return []

    def signal_all(self, signum: int) -> None: ...

    def tail(self, lines: int = 40) -> str:
        return "last words"


class FakeFleet(EngineFleet):
    """Engines that are ready as soon as they are started, unless they are to fail."""

    def __init__(self, handles: Sequence[FakeEngine]) -> None:
        super().__init__(FleetSpec(count=len(handles), kind="sim"))
        self.handles = handles
        self.engines = [Engine(index, each, ready=True) for index, each in enumerate(handles)]
        self.failing = 0

    async def until_ready(self, engines: list[Engine]) -> None:
        await asyncio.sleep(0)
        if self.failing:
            self.failing -= 1
            raise EngineDiedError("it ended with exit code 1\nand a traceback")
        for each in engines:
            each.ready = True


class FakeLink:
    """A proxy that drains, and admits what was restarted."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.inflight = 0
        self.state = "ready"

    async def engine(self, url: str) -> dict[str, Any]:
        return {"state": self.state, "eligible": self.state == "ready", "reason": "because", "inflight": self.inflight}

    async def drain(self, url: str) -> None:
        self.did.append(f"drain {url}")

    async def admit(self, url: str) -> None:
        self.did.append(f"admit {url}")

    async def idle(self, urls: Sequence[str], limit: float) -> bool:
        self.did.append(f"idle {' '.join(urls)}")
        return not self.inflight


class Health:
    """A server whose ``/health`` can be told to fail."""

    def __init__(self) -> None:
        self.status = 200
        self.asked = 0
        self.running = 0

    async def health(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(status=self.status)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f'vllm:num_requests_running{{engine="0"}} {self.running}.0\n')


@pytest.fixture
async def health() -> AsyncIterator[tuple[Health, str]]:
    made = Health()
    app = web.Application()
    app.router.add_get("/health", made.health)
    app.router.add_get("/metrics", made.metrics)
    async with TestServer(app) as server:
        yield made, str(server.make_url("")).rstrip("/")


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(supervisor.run())
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)


async def test_an_engine_that_ends_is_started_again(health: tuple[Health, str]) -> None:
    one, other = FakeEngine(0, health[1]), FakeEngine(1, health[1])
    async with running(Supervisor(FakeFleet([one, other]), FAST)):
        one.end(137)
        await until(lambda: one.starts == 1)
        one.end(1)
        await until(lambda: one.starts == 2)
        assert other.starts == 0


async def test_at_the_cap_it_is_given_up_struck_off_and_the_others_go_on(
    health: tuple[Health, str], tmp_path: Path
) -> None:
    one, other = FakeEngine(0, health[1]), FakeEngine(1, health[1] + "/other")
    file = tmp_path / "engines"
    supervisor = Supervisor(FakeFleet([one, other]), Care(restarts=0, health_interval=60.0), roster=FileRoster(file))
    await supervisor.show()
    assert file.read_text().split() == [one.url, other.url]
    async with running(supervisor) as task:
        one.end(1)
        await until(lambda: file.read_text().split() == [other.url])
        assert not task.done()
        other.end(1)
        await task
    assert file.read_text() == ""
    assert supervisor.living == []


async def test_failed_starts_count_against_the_cap(health: tuple[Health, str]) -> None:
    one = FakeEngine(0, health[1])
    fleet = FakeFleet([one])
    fleet.failing = 3
    async with running(Supervisor(fleet, FAST)) as task:
        one.end(1)
        await task
    assert one.starts == 3
    assert one.kills == 3


async def test_a_start_that_works_in_the_end_is_enough(health: tuple[Health, str]) -> None:
    one = FakeEngine(0, health[1])
    fleet = FakeFleet([one])
    fleet.failing = 2
    async with running(Supervisor(fleet, FAST)) as task:
        one.end(1)
        await until(lambda: one.starts == 3 and fleet.engines[0].ready)
        assert not task.done()


async def test_one_that_does_not_answer_is_killed_and_started_again(health: tuple[Health, str]) -> None:
    server, url = health
    one = FakeEngine(0, url)
    async with running(Supervisor(FakeFleet([one]), FAST)):
        await until(lambda: server.asked > 5)
        assert one.starts == 0
        server.status = 503
        await until(lambda: one.starts == 1)
        assert one.kills == 1
        assert one.stops == 0
        server.status = 200


async def test_all_are_restarted_in_turn(health: tuple[Health, str]) -> None:
    engines = [FakeEngine(index, f"{health[1]}/{index}") for index in range(3)]
    link = FakeLink()
    care = Care(health_interval=60.0, roll_wait=5.0)
    supervisor = Supervisor(FakeFleet(engines), care, link=link)  # type: ignore[arg-type]
    async with running(supervisor):
        await supervisor.roll()
    assert [(each.stops, each.starts, each.kills) for each in engines] == [(1, 1, 0)] * 3
    assert link.did == [f"{what} {each.url}" for each in engines for what in ("drain", "idle")]


async def test_one_that_does_not_run_empty_serves_on_and_the_others_are_left_alone(health: tuple[Health, str]) -> None:
    engines = [FakeEngine(index, f"{health[1]}/{index}") for index in range(2)]
    link = FakeLink()
    link.inflight = 1
    supervisor = Supervisor(FakeFleet(engines), Care(health_interval=60.0), link=link)  # type: ignore[arg-type]
    async with running(supervisor):
        with pytest.raises(LauncherError, match="still had requests"):
            await supervisor.roll()
    assert [(each.stops, each.starts) for each in engines] == [(0, 0)] * 2
    assert link.did[-1] == f"admit {engines[0].url}"


async def test_one_that_is_not_admitted_ends_the_round(health: tuple[Health, str]) -> None:
    engines = [FakeEngine(index, f"{health[1]}/{index}") for index in range(2)]
    link = FakeLink()
    link.state = "fenced"
    care = Care(health_interval=60.0, roll_wait=0.01)
    supervisor = Supervisor(FakeFleet(engines), care, link=link)  # type: ignore[arg-type]
    async with running(supervisor):
        with pytest.raises(LauncherError, match=r"not admitted within 0\.01 s .*fenced: because"):
            await supervisor.roll()
    assert [each.starts for each in engines] == [1, 0]


async def test_a_rolling_restart_needs_a_proxy_and_runs_once_at_a_time(health: tuple[Health, str]) -> None:
    one = FakeEngine(0, health[1])
    with pytest.raises(LauncherError, match="give --proxy URL"):
        await Supervisor(FakeFleet([one]), FAST).roll()
    link = FakeLink()
    link.state = "fenced"
    supervisor = Supervisor(FakeFleet([one]), Care(health_interval=60.0), link=link)  # type: ignore[arg-type]
    async with running(supervisor):
        first = asyncio.ensure_future(supervisor.roll())
        await asyncio.sleep(0)
        with pytest.raises(LauncherError, match="runs already"):
            await supervisor.roll()
        link.state = "ready"
        await first


async def test_at_the_end_the_proxy_drains_all(health: tuple[Health, str]) -> None:
    engines = [FakeEngine(index, f"{health[1]}/{index}") for index in range(2)]
    link = FakeLink()
    fleet = FakeFleet(engines)
    fleet.engines[1].ready = False
    await Supervisor(fleet, FAST, link=link).drain()  # type: ignore[arg-type]
    assert link.did == [f"drain {engines[0].url}", f"idle {engines[0].url}"]


async def test_a_proxy_that_is_gone_holds_nothing_up(health: tuple[Health, str]) -> None:
    class Gone(FakeLink):
        async def drain(self, url: str) -> None:
            raise LinkError("no connection")

    await Supervisor(FakeFleet([FakeEngine(0, health[1])]), FAST, link=Gone()).drain()  # type: ignore[arg-type]


async def test_with_a_file_alone_the_engines_are_struck_off_and_asked_themselves(
    health: tuple[Health, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_launcher.supervisor.FILE_GRACE", 0.01)
    server, url = health
    server.running = 2
    file = tmp_path / "engines"
    supervisor = Supervisor(FakeFleet([FakeEngine(0, url)]), Care(drain=60.0), roster=FileRoster(file))
    await supervisor.show()
    draining = asyncio.ensure_future(supervisor.drain())
    await until(lambda: file.read_text() == "")
    await asyncio.sleep(0.05)
    assert not draining.done()
    server.running = 0
    await draining


async def test_an_engine_that_the_proxy_does_not_know_keeps_the_others_from_nothing(health: tuple[Health, str]) -> None:
    class Forgetful(FakeLink):
        async def drain(self, url: str) -> None:
            if url.endswith("/0"):
                raise LinkError("unknown engine")
            await super().drain(url)

    engines = [FakeEngine(index, f"{health[1]}/{index}") for index in range(2)]
    link = Forgetful()
    await Supervisor(FakeFleet(engines), FAST, link=link).drain()  # type: ignore[arg-type]
    assert link.did == [f"drain {engines[1].url}", f"idle {engines[0].url} {engines[1].url}"]


async def test_one_that_was_given_up_is_left_out_of_a_rolling_restart(health: tuple[Health, str]) -> None:
    engines = [FakeEngine(index, f"{health[1]}/{index}") for index in range(2)]
    link = FakeLink()
    care = Care(restarts=0, health_interval=60.0)
    supervisor = Supervisor(FakeFleet(engines), care, link=link)  # type: ignore[arg-type]
    async with running(supervisor):
        engines[0].end(1)
        await until(lambda: len(supervisor.living) == 1)
        await supervisor.roll()
    assert [each.starts for each in engines] == [0, 1]


async def test_a_proxy_that_restarts_meanwhile_does_not_end_a_rolling_restart(health: tuple[Health, str]) -> None:
    class Restarting(FakeLink):
        asked = 0

        async def engine(self, url: str) -> dict[str, Any]:
            self.asked += 1
            if self.asked == 2:
                raise LinkError("no connection")
            return await super().engine(url)

    one, link = FakeEngine(0, health[1]), Restarting()
    supervisor = Supervisor(FakeFleet([one]), Care(health_interval=60.0), link=link)  # type: ignore[arg-type]
    async with running(supervisor):
        await supervisor.roll()
    assert (one.starts, link.asked) == (1, 3)
