from __future__ import annotations

import json
import re
import time

import pytest
from click.testing import CliRunner

from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.server import SimEngine
from proxy import doctor, examine
from proxy.config import Settings
from proxy.doctor import compare, examine_all
from proxy.examine import Examined, Examiner, Finding, Grade


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(examine, "KEEP_ALIVE_WAIT", 0.3)


async def look(settings=None, *, before=None, clock=None, **config):
    engine = SimEngine(SimConfig(**config))
    await engine.start()
    try:
        if before is not None:
            before(engine)
        examiner = Examiner(engine.url, settings or Settings())
        if clock is not None:
            examiner._clock = clock
        return await examiner.examine()
    finally:
        await engine.stop()


def grades(examined):
    return {finding.check: finding.grade for finding in examined.findings if finding.grade is not Grade.OK}


def finding(examined, check):
    return next(each for each in examined.findings if each.check == check)


async def test_a_healthy_engine_has_nothing_to_fix():
    examined = await look()
    assert grades(examined) == {}
    assert len(examined.findings) == 10
    assert (examined.server, examined.models, examined.version) == ("0.33.0", ("tiny",), "default")


@pytest.mark.parametrize(
    ("config", "check", "grade", "fix"),
    [
        ({"dev_mode": False}, "dev-mode", Grade.FAIL, "VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, "scale-out", Grade.WARN, "--enable-scale-out"),
        ({"compat": "0.32"}, "vllm", Grade.WARN, "0.33"),
        ({"api_key": "secret"}, "models", Grade.WARN, "--engine-api-key"),
        ({"keep_alive_seconds": 0.1}, "keep-alive", Grade.FAIL, "--engine-idle"),
    ],
)
async def test_what_is_wrong_is_named_with_its_fix(config, check, grade, fix):
    found = finding(await look(**config), check)
    assert found.grade is grade
    assert fix in found.fix


async def test_with_the_right_key_all_is_well():
    assert grades(await look(Settings(engine_api_key="secret"), api_key="secret")) == {}


async def test_an_engine_left_paused_is_told():
    examined = await look(before=lambda engine: setattr(engine.core, "paused", "all"))
    assert grades(examined) == {"awake": Grade.WARN}


async def test_a_clock_that_is_off_is_told():
    examined = await look(clock=lambda: time.time() + 3600)
    assert grades(examined) == {"clock": Grade.WARN}
    assert re.fullmatch(r"36\d\d s behind this machine's", finding(examined, "clock").text)


async def test_where_nothing_listens_no_more_is_tried():
    (examined,) = await examine_all(["http://127.0.0.1:1"], Settings())
    assert [found.check for found in examined.findings] == ["reachable"]
    assert examined.findings[0].grade is Grade.FAIL


def seen(version="v1", models=("m",), server="0.33.0", grade=Grade.OK):
    return Examined("http://h:1", (Finding("reachable", grade, ""),), version, models, server)


def test_engines_that_differ_are_told_together():
    found = {each.check: each for each in compare([seen(), seen(), seen(version="v0", models=("n",), server="0.34.0")])}
    assert {name: each.grade for name, each in found.items()} == {
        "same-weights": Grade.WARN, "same-models": Grade.WARN, "same-vllm": Grade.WARN,
    }  # fmt: skip
    assert "'v1' on 2; 'v0' on 1" in found["same-weights"].text


def test_a_fleet_without_a_living_engine_fails():
    assert compare([seen(grade=Grade.FAIL)])[-1].grade is Grade.FAIL


def test_the_command_tells_usage_and_results_by_its_exit_code(monkeypatch, tmp_path):
    monkeypatch.delenv("FLEETGATE_ENGINE", raising=False)
    run = CliRunner().invoke
    assert run(doctor.doctor, []).exit_code == 2
    assert run(doctor.doctor, ["http://h:1/v1"]).exit_code == 2
    result = run(doctor.doctor, ["http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert re.search(r"FAIL\s+reachable", result.output)
    listed = tmp_path / "engines"
    listed.write_text("# two\nhttp://127.0.0.1:1\nhttp://127.0.0.1:2\n")
    config = tmp_path / "fleetgate.yaml"
    config.write_text(f"engines_file: {listed}\n")
    result = run(doctor.doctor, ["--config", str(config), "--json"])
    assert result.exit_code == 1
    assert len(json.loads(result.output)["engines"]) == 2
