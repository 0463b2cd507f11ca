"""A fleet of simulated engines: started, ended, killed and restarted as one thing."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import aiohttp
import pytest

from engine_launcher.errors import EngineDiedError, EngineSlowError, LauncherError, PortTakenError, UsageError
from engine_launcher.fleet import EngineFleet
from engine_launcher.settings import FleetSpec


def spec(tmp_path: Path, **more: object) -> FleetSpec:
    return FleetSpec(**{"count": 2, "kind": "sim", "log_dir": tmp_path / "logs", "stop_grace": 5.0, **more})


async def health(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
        return answer.status


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_all_answer_inside_and_none_is_left_after(tmp_path: Path) -> None:
    async with EngineFleet(spec(tmp_path)) as fleet:
        assert [await health(url) for url in fleet.urls] == [200, 200]
        assert [each.state for each in fleet.engines] == ["ready", "ready"]
        pids = [info.pid for each in fleet.engines for info in each.process.processes()]
        assert len(pids) == 2
    assert all(gone(pid) for pid in pids)
    assert [each.state for each in fleet.engines] == ["ended", "ended"]


async def test_a_killed_engine_is_gone_alone_and_comes_back_on_its_port(tmp_path: Path) -> None:
    async with EngineFleet(spec(tmp_path)) as fleet:
        await fleet.kill(1)
        assert fleet.engines[1].state == "ended"
        assert await health(fleet.urls[0]) == 200
        with pytest.raises(aiohttp.ClientConnectionError):
            await health(fleet.urls[1])
        await fleet.restart(1)
        assert await health(fleet.urls[1]) == 200


async def test_an_engine_that_ends_by_itself_is_noticed(tmp_path: Path) -> None:
    async with EngineFleet(spec(tmp_path)) as fleet:
        death = asyncio.ensure_future(fleet.first_death())
        await asyncio.sleep(0)
        os.kill(fleet.engines[1].process.processes()[0].pid, 9)
        engine = await death
        assert engine.index == 1
        assert "ended with exit code 137" in str(engine.died())


async def test_progress_is_told(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def note(fleet: EngineFleet) -> None:
        seen.append([each.state for each in fleet.engines])

    async with EngineFleet(spec(tmp_path), on_progress=note):
        assert seen[-1] == ["ready", "ready"]


async def test_an_engine_that_dies_at_start_is_shown_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineDiedError, match=r"(?s)engine 0 .*exit code 2.*unrecognized arguments: --no-such"):
        async with EngineFleet(spec(tmp_path, count=1, extra=("--no-such-flag",))):
            pytest.fail("it cannot have started")


async def test_an_engine_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    fleet = EngineFleet(spec(tmp_path, count=1, ready_wait=0.001))
    with pytest.raises(EngineSlowError, match=r"within 0\.001 s"):
        await fleet.__aenter__()
    assert not fleet.engines[0].process.alive


async def test_a_port_in_use_stops_it_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortTakenError):
            async with EngineFleet(spec(tmp_path, count=1, port=taken.getsockname()[1])):
                pytest.fail("it cannot have started")
    assert not (tmp_path / "logs").exists()


async def test_the_file_of_urls_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "engines"
    async with EngineFleet(spec(tmp_path)) as fleet:
        fleet.write_urls(path)
        assert path.read_text().splitlines() == fleet.urls
        assert list(path.parent.iterdir()) == [path]
        with pytest.raises(LauncherError, match="cannot be written"):
            fleet.write_urls(path / "below-a-file")


async def test_the_engine_core_of_a_simulated_engine_cannot_be_killed(tmp_path: Path) -> None:
    async with EngineFleet(spec(tmp_path, count=1)) as fleet:
        with pytest.raises(LauncherError, match="no VLLM::EngineCore"):
            await fleet.kill_core(0)
        with pytest.raises(LauncherError, match="there is no engine 1"):
            await fleet.kill(1)


def test_a_spec_that_cannot_work_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--count 0"):
        EngineFleet(spec(tmp_path, count=0))
