"""The programs behind ``make chaos`` and its like, each in a small size, so that they keep working."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROGRAMS = {
    "chaos": ["--rollouts", "120", "--seed", "4"],
    "pause_cycles": ["--cycles", "4", "--seed", "4"],
    "keepalive_race": ["--count", "1000"],
    "memory": ["--count", "60"],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_small_run(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.scenarios.{name}", *PROGRAMS[name]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
