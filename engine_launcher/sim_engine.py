"""Command of a simulated engine: ``python -m engine_launcher.sim``, in the launcher's own environment."""

from __future__ import annotations

import os
import sys

from engine_launcher.restore import Checkpoint
from engine_launcher.settings import EngineCommand, EngineSpec

DEFAULT_NAME = "sim"
"""Model name that simulated engines serve under when none is given."""


def sim_command(spec: EngineSpec, port: int, restored: Checkpoint | None = None) -> EngineCommand:
    """How to start one simulated engine on ``port``; a checkpoint is the seed of its weights."""
    seed = spec.seed if restored is None or restored.sim_seed is None else restored.sim_seed
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
        str(seed),
        *spec.extra,
    )
    return EngineCommand(argv, {**os.environ, "PYTHONUNBUFFERED": "1", **spec.environment})
