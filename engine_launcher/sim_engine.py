"""Command of a simulated engine: ``python -m engine_launcher.sim``, in the launcher's own environment."""

from __future__ import annotations

import os
import sys

from engine_launcher.settings import EngineCommand, FleetSpec

DEFAULT_NAME = "sim"
"""Model name that simulated engines serve under when none is given."""


def sim_command(spec: FleetSpec, port: int) -> EngineCommand:
    """How to start one simulated engine on ``port``."""
    argv = (
        sys.executable,
        "-m",
        "engine_launcher.sim",
        "--host",
        spec.host,
        "--port",
        str(port),
        "--model-name",
        str(spec.model or DEFAULT_NAME),
        "--seed",
        str(spec.seed),
        *spec.extra,
    )
    return EngineCommand(argv, {**os.environ, "PYTHONUNBUFFERED": "1", **spec.environment})
