"""The command line of one simulated engine."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys

import aiohttp
import pytest

from engine_launcher.sim.__main__ import main


async def test_prints_its_url_serves_and_stops_on_sigterm() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "engine_launcher.sim", "--model-name", "mine", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as answer:
            assert (await answer.json())["data"][0]["id"] == "mine"
    finally:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_death_has_the_exit_code_of_sigkill() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "engine_launcher.sim", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(f"{url}/sim/die")
    assert await process.wait() == 137


def test_a_taken_port_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_an_unknown_flag_is_bad_usage() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--no-such-flag"])
    assert caught.value.code == 2
