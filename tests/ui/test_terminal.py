from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import pytest

COMMAND = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from proxy.cli import main; main()"
"""What a terminal starts. Where the tests run in the background of a script, ctrl-C is ignored by all it starts."""


async def fleetgate(*arguments, interrupt_on=None):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        COMMAND,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    if interrupt_on is not None:
        seen = b""
        async with asyncio.timeout(30):
            while interrupt_on not in seen:
                data = await process.stdout.read(4096)
                assert data, "it ended by itself"
                seen += data
        process.send_signal(signal.SIGINT)
        rest, error = await process.communicate()
        return process.returncode, (seen + rest).decode(), error.decode()
    out, error = await process.communicate()
    return process.returncode, out.decode(), error.decode()


async def test_status_shows_the_running_fleet(demo):
    code, out, _ = await fleetgate("status", "--url", demo.url)
    assert code == 0
    assert "ready 3 of 3" in out
    assert out.count("● ready") == 3


async def test_status_as_json_is_the_fleet(demo):
    code, out, _ = await fleetgate("status", "--url", demo.url, "--json")
    assert code == 0
    assert len(json.loads(out)["engines"]) == 3


async def test_watch_goes_on_until_it_is_interrupted(demo):
    code, out, error = await fleetgate("status", "--url", demo.url, "--watch", interrupt_on=b"ready 3 of 3")
    assert (code, error) == (0, "")
    assert "Engine" in out


async def test_watch_on_a_terminal_redraws_the_screen(demo):
    ours, theirs = os.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", COMMAND, "status", "--url", demo.url, "--watch",
        stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    async with asyncio.timeout(30):
        while seen.count(b"ready 3 of 3") < 2:
            seen += await asyncio.to_thread(os.read, ours, 65536)
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 0
    os.close(ours)
    assert b"\x1b[?1049h" in seen, "the alternate screen leaves the user's own alone"


async def test_a_sync_report_tells_what_each_engine_did(demo):
    await demo.join()
    await demo.end(await demo.begin(), "step-1")
    code, out, _ = await fleetgate("sync-report", "--url", demo.url)
    assert code == 0
    assert "-> step-1" in out
    for name in ("pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"):
        assert name in out
    code, out, _ = await fleetgate("sync-report", "--url", demo.url, "--json", "--last", "1")
    (sync,) = json.loads(out)
    assert sync["version"] == "step-1"
    assert set(sync["calls"][0]["legs"]) == set(demo.app.fleet.engines)


async def test_before_the_first_sync_the_report_says_so(demo):
    assert "no weight sync" in (await fleetgate("sync-report", "--url", demo.url))[1]


@pytest.mark.parametrize("command", ["status", "sync-report"])
async def test_where_there_is_no_proxy_it_says_what_to_do(demo, command):
    code, _, error = await fleetgate(command, "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "--url" in error
    code, _, error = await fleetgate(command, "--url", demo.engines[0].url)
    assert code == 1
    assert "is it a fleetgate proxy?" in error
