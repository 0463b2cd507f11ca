"""``fleetgate up``: engines and proxy as one unit."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from pathlib import Path

import aiohttp
import pytest
from processes import UP, Command, command_line

SIM = "engine_launcher.sim"

pytestmark = pytest.mark.timeout(90)

ROLLOUT = {"model": "sim", "prompt": "hello", "max_tokens": 60, "ignore_eos": True}


def up(log_dir: Path, *args: str, **environment: str) -> Command:
    own = ("--kind", "sim", "--count", "2", "--port", "0", "--min-engines", "2", "--log-dir", str(log_dir))
    return Command(*UP, *own, *args, "--", "--tokens-per-second", "60", **environment)


def logs(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def listening(command: Command) -> str:
    """The proxy's URL, once both engines are ready behind it."""
    found = re.search(r"http://\S+", await command.until("listening on"))
    assert found is not None
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{found[0]}/ready") as answer:
                if answer.status == 200:
                    return found[0]
            await asyncio.sleep(0.05)


async def rollout(url: str) -> dict:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=ROLLOUT) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def metrics(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/metrics") as answer:
        return await answer.text()


def in_flight(text: str) -> int:
    return sum(int(float(each)) for each in re.findall(r"^fleetgate_inflight_requests\{\S+ (\S+)$", text, re.MULTILINE))


async def test_sigterm_lets_running_rollouts_end_before_the_engines_do(tmp_path: Path) -> None:
    async with up(tmp_path) as command:
        url = await listening(command)
        running = asyncio.ensure_future(rollout(url))
        async with aiohttp.ClientSession() as session:
            while not in_flight(await metrics(session, url)):
                await asyncio.sleep(0.02)
        command.process.send_signal(signal.SIGTERM)
        answer = await running
        assert answer["usage"]["completion_tokens"] == 60
        assert await command.end() == 0
        assert command.left() == []
        assert not [line for line in command.lines if " ERROR " in line or "Traceback" in line]


async def test_a_dead_engine_is_logged_and_the_other_goes_on_until_none_is_left(tmp_path: Path) -> None:
    async with up(tmp_path, "--restarts", "0") as command:
        url = await listening(command)
        first, second = command.running(SIM)
        os.kill(first, signal.SIGKILL)
        await command.until("ended with exit code 137")
        assert (await rollout(url))["usage"]["completion_tokens"] == 60
        os.kill(second, signal.SIGKILL)
        assert await command.end() == 1
        assert "no engine is left" in "".join(command.lines)
        assert command.left() == []


async def test_an_engine_that_died_is_started_again_when_asked_for(tmp_path: Path) -> None:
    async with up(tmp_path, "--restarts", "1") as command:
        url = await listening(command)
        os.kill(command.running(SIM)[0], signal.SIGKILL)
        await command.until("starting engine")
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200 and len(command.running(SIM)) == 2:
                        break
                await asyncio.sleep(0.1)
        command.process.send_signal(signal.SIGINT)
        assert await command.end() == 0
        assert command.left() == []


async def test_a_proxy_that_dies_ends_the_engines(tmp_path: Path) -> None:
    async with up(tmp_path) as command:
        await listening(command)
        (proxy,) = command.running("proxy")
        os.kill(proxy, signal.SIGKILL)
        assert await command.end() == 137
        assert command.left() == []


async def test_a_supervisor_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    async with up(tmp_path) as command:
        await listening(command)
        command.process.kill()
        await command.process.wait()
        await command.gone()


async def test_a_port_in_use_is_said_before_any_engine_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with up(tmp_path, "--port", str(port)) as command:
            assert await command.end() == 1
    assert f"cannot listen on 127.0.0.1:{port}" in "".join(command.lines)
    assert logs(tmp_path) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--count", "0"), "--count 0"),
        (("--hold-timeout", "-1"), "hold-timeout"),
        (("--kind", "vllm", "--model", "nowhere"), "nowhere is not a directory"),
        (("--engine", "http://127.0.0.1:1"), "No such option"),
        (("--host", "0.0.0.0"), "--control-token"),
    ],
)
async def test_bad_usage_ends_with_2_and_says_what_is_wrong(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    async with up(tmp_path, *args) as command:
        assert await command.end() == 2
    assert said in "".join(command.lines)


async def test_a_token_reaches_the_proxy_and_no_command_line(tmp_path: Path) -> None:
    token = "a-token-of-the-test"
    async with up(tmp_path, FLEETGATE_CONTROL_TOKEN=token) as command:
        url = await listening(command)
        for pid in command.left():
            assert token not in " ".join(command_line(pid))
        async with aiohttp.ClientSession() as session, session.post(f"{url}/pause") as answer:
            assert answer.status == 401
        command.process.send_signal(signal.SIGTERM)
        assert await command.end() == 0


async def test_the_launchers_own_variables_are_no_unknown_settings(tmp_path: Path) -> None:
    async with up(tmp_path, FLEETGATE_VLLM="nowhere", FLEETGATE_TRANSFER_TIMEOUT="5") as command:
        await listening(command)
        command.process.send_signal(signal.SIGTERM)
        assert await command.end() == 0
