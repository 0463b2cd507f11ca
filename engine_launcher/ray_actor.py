"""One engine on the node of a Ray cluster where its actor was placed. Imported on every node; needs no Ray itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from engine_launcher.gpus import VISIBLE, read_visible
from engine_launcher.local import LocalEngine
from engine_launcher.ports import free_ports
from engine_launcher.settings import TAIL_LINES, EngineSpec, Rotation

EVERYWHERE = ("0.0.0.0", "::")
"""Addresses to listen on that nobody can connect to by this name."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this node would reach: the node's own is taken in their place."""


@dataclass(frozen=True, slots=True)
class End:
    """How an engine's process ended."""

    code: int
    tail: str


class EngineHost:
    """The actor: starts, watches and ends the processes of one engine. Dies with its node, and they with it.

    Args:
        spec: the engine.
        address: of this node, as the others reach it.
        log_dir: on this node.
        stop_grace: seconds.
        rotation: of the log.
    """

    def __init__(self, spec: EngineSpec, address: str, *, log_dir: Path, stop_grace: float, rotation: Rotation) -> None:
        host = address if spec.host in LOOPBACK else spec.host
        # Chosen once: an engine that is started again on its node keeps its port.
        port = spec.port or free_ports(host, 1)[0]
        devices = read_visible(os.environ.get(VISIBLE, "")) if spec.gpus else ()
        placed = replace(spec, host=host)
        self._engine = LocalEngine(placed, port, devices, log_dir=log_dir, stop_grace=stop_grace, rotation=rotation)
        shown = address if host in EVERYWHERE else host
        self._url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"

    async def start(self) -> str:
        """Start it; returns its URL. Raises ``LauncherError``."""
        await self._engine.start()
        return self._url

    async def wait(self) -> End:
        """Wait until it ends."""
        code = await self._engine.wait()
        return End(code, self._engine.tail())

    async def tail(self) -> str:
        """The end of its log."""
        return self._engine.tail(TAIL_LINES)

    async def stop(self) -> None:
        """End it in order."""
        await self._engine.stop()

    async def kill(self) -> None:
        """End it at once."""
        await self._engine.kill()
