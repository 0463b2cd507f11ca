"""Engines as processes of this machine, and what a fleet asks of an engine wherever it runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from engine_launcher.gpus import divide, visible, wanted
from engine_launcher.launch import install_of, prepare
from engine_launcher.ports import free_ports, named_ports
from engine_launcher.process import EngineProcess, ProcessInfo
from engine_launcher.settings import TAIL_LINES, EngineCommand, EngineSpec, FleetSpec, Rotation


class Handle(Protocol):
    """One engine as its fleet sees it: may be started, ended and started again."""

    name: str
    log: Path

    @property
    def url(self) -> str:
        """Where it serves; empty before its first start. It may change when it is started again elsewhere."""

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""

    @property
    def returncode(self) -> int | None:
        """Exit code, 128 + N when signal N ended it; ``None`` while it runs."""

    async def start(self) -> None:
        """Start it; raises ``LauncherError``."""

    async def wait(self) -> int:
        """Wait until it ends, and return its exit code."""

    async def stop(self) -> None:
        """End it in order, and whatever is left by force. Fine when it has ended."""

    async def kill(self) -> None:
        """End it at once. Fine when it has ended."""

    def processes(self) -> list[ProcessInfo]:
        """Its processes on this machine."""

    def signal_all(self, signum: signal.Signals) -> None:
        """Send a signal to each of them."""

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of its log, as far as they are known here."""


class LocalEngine(EngineProcess):
    """An engine on this machine. Its port and its GPUs are its own for as long as the fleet lives."""

    def __init__(
        self,
        spec: EngineSpec,
        port: int,
        devices: tuple[str, ...],
        *,
        log_dir: Path,
        stop_grace: float,
        rotation: Rotation,
    ) -> None:
        name, log = f"engine {spec.name} ({spec.kind}, port {port})", log_dir / f"engine-{spec.name}.log"
        super().__init__(name, EngineCommand((), {}), log, stop_grace, rotation)
        self.spec = spec
        self.port = port
        self.devices = devices

    @property
    def url(self) -> str:
        """Where it serves."""
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Start it with the newest checkpoint there is; raises ``LauncherError``."""
        self.command = (await prepare(self.spec, self.port, self.devices)).command
        await super().start()


async def local_engines(fleet: FleetSpec) -> list[LocalEngine]:
    """The engines of a spec on this machine, with ports and GPUs; nothing is started.

    Raises ``UsageError`` for too few GPUs and ``PortTakenError`` for a port in use, before anything runs.
    """
    plan = fleet.plan()
    devices = await _devices(plan)
    ports = _ports(fleet, plan)
    return [
        LocalEngine(*each, log_dir=fleet.log_dir, stop_grace=fleet.stop_grace, rotation=fleet.rotation)
        for each in zip(plan, ports, devices, strict=True)
    ]


async def _devices(plan: Sequence[EngineSpec]) -> list[tuple[str, ...]]:
    """GPUs for those that run on them."""
    wants = []
    for each in plan:
        install = await install_of(each)
        on_gpu = install is not None and install.device == "gpu"
        # Somebody who asks for GPUs is to hear that there are none, rather than to get an engine on the CPU.
        wants.append(wanted(each.gpus, each.extra) if on_gpu or (each.gpus and each.kind == "vllm") else 0)
    return divide(await visible(os.environ) if any(wants) else (), wants)


def _ports(fleet: FleetSpec, plan: Sequence[EngineSpec]) -> list[int]:
    if not fleet.engines and fleet.port is not None:
        return named_ports(fleet.host, fleet.port, fleet.count)
    found = {each.port: named_ports(each.host, each.port, 1)[0] for each in plan if each.port is not None}
    unnamed = [each for each in plan if each.port is None]
    # One more than needed for each named port, which free ports may hit.
    free = [each for each in free_ports(plan[0].host, len(unnamed) + len(found)) if each not in found]
    return [each.port if each.port is not None else free.pop(0) for each in plan]
