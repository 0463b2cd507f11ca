"""The demo itself, small: engines, proxy, trainer and 12 rollouts in flight."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from processes import DEMO, Command

from examples.demo import run as demo
from examples.demo.settings import DemoSpec
from examples.demo.stack import Stack

SIM = "engine_launcher.sim"

pytestmark = pytest.mark.timeout(120)


async def test_every_token_of_the_demo_is_by_the_weights_that_its_span_names(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    args = ("--in-flight", "12", "--syncs", "2", "--run-dir", str(tmp_path), "--json", str(out))
    async with Command(*DEMO, *args) as command:
        code = await command.end()
        assert code == 0, "".join(command.lines)
        assert command.left() == []
    result = json.loads(out.read_text())
    assert result["failures"] == result["errors"] == []
    assert result["world_size"] == 3
    assert set(result["modes"]) == {"keep", "wait", "abort"}
    for mode in result["modes"].values():
        checked = mode["validation"]
        assert checked["tokens"] == mode["tokens"] > 0
        assert checked["mismatches"] == checked["malformed"] == 0
        assert all(sync["in_flight"] == 12 for sync in mode["syncs"])
    assert result["modes"]["keep"]["validation"]["frozen"] > 0
    assert result["modes"]["wait"]["validation"]["frozen"] == 0
    assert result["modes"]["wait"]["continued"] == 0
    assert result["modes"]["abort"]["continued"] > 0
    versions = {"default", *(f"{mode}-{index}" for mode in ("keep", "wait", "abort") for index in (1, 2))}
    assert set(result["tokens_by_version"]) == versions
    assert sum(result["tokens_by_version"].values()) == sum(each["tokens"] for each in result["modes"].values())


async def test_without_the_gate_clients_see_the_pause_and_the_demo_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def straight_to_the_engine(stack: Stack) -> None:
        stack.url = stack.fleet.urls[0]

    monkeypatch.setattr(Stack, "_start_proxy", straight_to_the_engine)
    result = await demo.run(DemoSpec(engines=1, in_flight=4, syncs=1, modes=("wait",), run_dir=tmp_path))
    assert any("Generation is paused" in each.message for each in result.errors)
    assert result.failures == [f"{len(result.errors)} errors reached clients"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_every_process(tmp_path: Path, signum: signal.Signals) -> None:
    async with Command(*DEMO, "--in-flight", "4", "--run-dir", str(tmp_path)) as command:
        await command.until("keep  sync  1")
        assert len(command.left()) > 3
        command.process.send_signal(signum)
        assert await command.end() == 130
        assert command.left() == []


async def test_an_engine_that_dies_half_way_fails_the_demo(tmp_path: Path) -> None:
    async with Command(*DEMO, "--in-flight", "4", "--run-dir", str(tmp_path)) as command:
        await command.until("keep  sync  1")
        os.kill(command.running(SIM)[0], signal.SIGKILL)
        assert await command.end() == 1
        assert command.left() == []
        assert "demo: POST /" in "".join(command.lines)


async def test_a_model_that_is_not_there_is_bad_usage(tmp_path: Path) -> None:
    args = ("--engine", "vllm", "--model", str(tmp_path / "none"), "--run-dir", str(tmp_path))
    async with Command(*DEMO, *args) as command:
        assert await command.end() == 2
        assert "make model" in "".join(command.lines)
