"""From what an engine is to be to the command that starts it, on the machine where it runs.

Nothing is decided earlier than at the start of a process: the newest checkpoint is looked for each time, and the vLLM
that is there is the one of that machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from engine_launcher.restore import Checkpoint, newest
from engine_launcher.settings import EngineCommand, EngineSpec
from engine_launcher.sim_engine import sim_command
from engine_launcher.vllm_engine import VllmInstall, locate, probe, vllm_command

_log = logging.getLogger("fleetgate.launcher")

_installs: dict[Path, VllmInstall] = {}
"""What each vLLM said about itself: asking takes seconds, and it does not change under a running launcher."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, and the checkpoint that it loads."""

    command: EngineCommand
    restored: Checkpoint | None


async def install_of(spec: EngineSpec) -> VllmInstall | None:
    """The vLLM that the engine is started with; ``None`` for a simulated one. Raises ``UsageError``."""
    if spec.kind == "sim":
        return None
    python = locate(spec.vllm, os.environ)
    if python not in _installs:
        _installs[python] = await probe(python)
    return _installs[python]


async def prepare(spec: EngineSpec, port: int, devices: tuple[str, ...] = ()) -> Launch:
    """The command for one engine, with the newest checkpoint there is.

    Raises ``UsageError`` where it cannot work.
    """
    restored = None
    if spec.restore_from is not None:
        restored = await asyncio.to_thread(newest, spec.restore_from)
        what = "the base model" if restored is None else str(restored.path)
        _log.info("engine %s on port %d loads %s", spec.name, port, what)
    install = await install_of(spec)
    if install is None:
        return Launch(sim_command(spec, port, restored), restored)
    return Launch(vllm_command(spec, install, port, devices, restored), restored)
