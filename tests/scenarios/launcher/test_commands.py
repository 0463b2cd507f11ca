"""``fleetgate engines`` and ``fleetgate up -c`` from outside: registration, draining, health, unequal engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine_launcher import guard
from tests.scenarios.launcher.stage import own_environment
from tests.tools.process import proxy_process

SIM = ("--kind", "sim", "--count", "2")
SPEED = ("--", "--tokens-per-second", "60")
ROLLOUT = {"model": "sim", "prompt": "hello", "max_tokens": 90, "ignore_eos": True}
SOON = 60.0
"""Seconds for what should take one or two: the machine may be busy with other work."""

TOKEN = "a token that nobody guesses"


class Launcher:
    """A command of the launcher as a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            self.lines.append(raw.decode(errors="replace").rstrip())

    async def said(self, text: str) -> str:
        async with asyncio.timeout(SOON):
            while True:
                for line in self.lines:
                    if re.search(text, line):
                        return line
                assert self.process.returncode is None or text in "".join(self.lines), "\n".join(self.lines)
                await asyncio.sleep(0.02)

    def engines(self) -> dict[str, int]:
        """Process ids of the engines' servers by port."""
        found = {}
        for pid in guard.descendants(self.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "-I" not in words and "engine_launcher.sim" in words:
                found[words[words.index("--port") + 1]] = pid
        return found


@contextlib.asynccontextmanager
async def launched(*argv: str, **environment: str) -> AsyncIterator[Launcher]:
    """Run a command of ``fleetgate``; it must end with 0 on SIGTERM and leave nothing behind."""
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("fleetgate")), *argv),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=own_environment() | environment,
    )
    made = Launcher(process)
    reading = asyncio.ensure_future(made.read())
    try:
        yield made
        children = guard.descendants(process.pid)
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(SOON):
            assert await process.wait() == 0, "\n".join(made.lines[-30:])
        assert not set(children) & set(guard.parents())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def fleet(session: aiohttp.ClientSession, url: str) -> dict[str, dict[str, Any]]:
    async with session.get(f"{url}/fleet") as answer:
        return {each["id"]: each for each in (await answer.json())["engines"]}


async def ready(session: aiohttp.ClientSession, url: str, count: int) -> dict[str, dict[str, Any]]:
    async with asyncio.timeout(SOON):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                found = await fleet(session, url)
                if sum(each["eligible"] for each in found.values()) == count:
                    return found
            await asyncio.sleep(0.05)


async def rollouts(session: aiohttp.ClientSession, url: str, count: int) -> list[asyncio.Task[int]]:
    """Rollouts that have reached their engines; each task is the number of tokens it got."""

    async def one() -> int:
        async with session.post(f"{url}/v1/completions", json=ROLLOUT) as answer:
            assert answer.status == 200, await answer.text()
            return int((await answer.json())["usage"]["completion_tokens"])

    tasks = [asyncio.ensure_future(one()) for _ in range(count)]
    async with asyncio.timeout(SOON):
        while sum(each["inflight"] for each in (await fleet(session, url)).values()) < count:
            await asyncio.sleep(0.02)
    return tasks


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as made:
        yield made


async def test_engines_register_themselves_and_are_drained_before_they_end(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with proxy_process(ready=0, control_token=TOKEN) as proxy:
        argv = ("engines", *SIM, "--register", proxy.url, "--log-dir", str(tmp_path))
        async with launched(*argv, *SPEED, FLEETGATE_CONTROL_TOKEN=TOKEN) as launcher:
            await ready(session, proxy.url, 2)
            running = await rollouts(session, proxy.url, 6)
            launcher.process.terminate()
            assert await asyncio.gather(*running) == [ROLLOUT["max_tokens"]] * 6
        assert await fleet(session, proxy.url) == {}
        assert TOKEN not in "".join(launcher.lines)


async def test_a_proxy_that_starts_later_and_one_that_restarts_are_told(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with proxy_process(ready=0) as first:
        port = first.url.rpartition(":")[2]
    argv = ("engines", *SIM, "--register", first.url, "--log-dir", str(tmp_path), "--drain", "1")
    async with launched(*argv, *SPEED) as launcher:
        await launcher.said("it is tried again")
        for _ in range(2):
            async with proxy_process(ready=0, port=port) as proxy:
                assert proxy.url == first.url
                await ready(session, proxy.url, 2)


async def test_with_a_file_alone_engines_are_struck_off_and_drained(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    file = tmp_path / "engines"
    async with proxy_process(ready=0, engines_file=file) as proxy:
        argv = ("engines", *SIM, "--engines-file", str(file), "--log-dir", str(tmp_path))
        async with launched(*argv, *SPEED) as launcher:
            await ready(session, proxy.url, 2)
            running = await rollouts(session, proxy.url, 6)
            launcher.process.terminate()
            assert await asyncio.gather(*running) == [ROLLOUT["max_tokens"]] * 6
        assert file.read_text() == ""


async def test_an_engine_that_hangs_is_killed_and_started_again(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    file = tmp_path / "engines"
    health = (
        "--health-interval",
        "0.2",
        "--health-timeout",
        "0.5",
        "--health-failures",
        "3",
        "--restart-backoff",
        "0.1",
    )
    async with proxy_process(ready=0, engines_file=file) as proxy:
        argv = ("engines", *SIM, "--engines-file", str(file), "--proxy", proxy.url, "--log-dir", str(tmp_path), *health)
        async with launched(*argv, *SPEED) as launcher:
            before = await ready(session, proxy.url, 2)
            port, pid = next(iter(launcher.engines().items()))
            os.kill(pid, signal.SIGSTOP)
            await launcher.said("did not answer /health 3 times in a row, and was killed")
            await launcher.said("answers again")
            async with asyncio.timeout(SOON):
                while (await fleet(session, proxy.url))[f"127.0.0.1:{port}"]["restarts"] == 0:
                    await asyncio.sleep(0.05)
            assert set(await ready(session, proxy.url, 2)) == set(before)
            assert launcher.engines()[port] != pid


async def test_a_second_name_for_the_proxy_is_refused() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine_launcher", *SIM, "--register", "http://127.0.0.1:1", "--engines-file", "x"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"--register and --engines-file both name the engines to a proxy; give one of them" in err


FLEET = """
kind: sim
args: [--tokens-per-second, 60]
restart_backoff: 0.1
engines:
  - {name: small, count: 2}
  - {name: big, args: [--world-size, 4], env: {FG_MARK: big one}}
proxy:
  port: 0
  min-engines: 3
  policy: least_inflight
"""


async def test_a_fleet_file_is_one_supervised_unit(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    logs = tmp_path / "logs"
    async with launched("up", "-c", str(tmp_path / "fleet.yaml"), "--log-dir", str(logs)) as launcher:
        url = (await launcher.said("listening on")).split()[-1]
        before = await ready(session, url, 3)
        assert sorted(each["world_size"] for each in before.values()) == [1, 1, 4]
        assert sorted(each.name for each in logs.glob("*.log")) == [
            "engine-big.log",
            "engine-small-0.log",
            "engine-small-1.log",
        ]
        (big,) = [name for name, each in before.items() if each["world_size"] == 4]
        pid = launcher.engines()[big.rpartition(":")[2]]
        assert b"FG_MARK=big one" in environment_of(pid)
        os.kill(pid, signal.SIGKILL)
        await launcher.said(r"engine big .* answers again")
        assert set(await ready(session, url, 3)) == set(before)
        pids = launcher.engines()
        running = await rollouts(session, url, 6)
        launcher.process.send_signal(signal.SIGUSR1)
        await launcher.said("every engine was restarted")
        assert await asyncio.gather(*running) == [ROLLOUT["max_tokens"]] * 6
        after = launcher.engines()
        assert after.keys() == pids.keys()
        assert not set(after.values()) & set(pids.values())
