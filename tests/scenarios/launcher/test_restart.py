"""The launcher's stories on simulated engines; on real vLLM where it is there. `make show-restart` prints them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scenarios.launcher.restart import STORIES
from tests.scenarios.launcher.stage import ENGINE_PYTHON, MODEL


@pytest.mark.parametrize("story", list(STORIES))
async def test_on_simulated_engines(story: str, tmp_path: Path) -> None:
    report = await STORIES[story]("sim", tmp_path)
    print(report)
    assert len(report.lines) > 4


@pytest.mark.vllm
@pytest.mark.timeout(1800)
async def test_a_killed_vllm_is_admitted_by_the_checksums_of_its_restored_checkpoint(tmp_path: Path) -> None:
    if not ENGINE_PYTHON.exists() or not MODEL.exists():
        if os.environ.get("FLEETGATE_REQUIRE_VLLM") == "1":
            pytest.fail("run `make engine model` first")
        pytest.skip("needs `make engine model`")
    print(await STORIES["restore"]("vllm", tmp_path))
