"""N engines as one thing: started together, ready when all answer, ended together.

::

    async with EngineFleet(FleetSpec(kind="sim", count=2)) as fleet:
        print(fleet.urls)
        await fleet.kill(1)
        await fleet.restart(1)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import aiohttp

from engine_launcher.errors import EngineDiedError, EngineSlowError, LauncherError
from engine_launcher.local import Handle, local_engines
from engine_launcher.settings import HEALTH_INTERVAL, HEALTH_TIMEOUT, TAIL_LINES, FleetSpec
from proxy.tasks import spawn

if TYPE_CHECKING:
    from engine_launcher.ray_backend import Cluster


@dataclass(slots=True)
class Engine:
    """One engine of a fleet."""

    index: int
    process: Handle
    ready: bool = False
    started: float = 0.0
    """``time.monotonic()`` of its last start."""

    @property
    def url(self) -> str:
        """Where it serves."""
        return self.process.url

    @property
    def port(self) -> int:
        """The port of its URL."""
        return urlsplit(self.url).port or 0

    @property
    def state(self) -> str:
        """``ready``, ``starting`` or ``ended``."""
        if not self.process.alive:
            return "ended"
        return "ready" if self.ready else "starting"

    def died(self) -> EngineDiedError:
        """The error for an engine that ended by itself."""
        return EngineDiedError(
            f"{self.process.name} ended with exit code {self.process.returncode}; the end of {self.process.log}:\n"
            f"{self.process.tail() or '(nothing was logged)'}"
        )


class EngineFleet:
    """Starts the engines of a spec on entry and ends every process of theirs on exit, whatever happened between."""

    def __init__(self, spec: FleetSpec, *, on_progress: Callable[[EngineFleet], None] | None = None) -> None:
        spec.check()
        self.spec = spec
        self.engines: list[Engine] = []
        self._cluster: Cluster | None = None
        self._on_progress = on_progress or (lambda _: None)

    @property
    def urls(self) -> list[str]:
        """Base URL of each engine, in order."""
        return [each.url for each in self.engines]

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all and wait until all answer.

        Raises ``UsageError``, ``PortTakenError``, ``EngineDiedError`` or ``EngineSlowError``; what was started until
        then still runs, so call ``stop`` (the context manager does).
        """
        handles = await self._handles()
        self.engines += [Engine(index, each) for index, each in enumerate(handles)]
        # On another machine a start takes a while; those of this one cost milliseconds.
        await asyncio.gather(*map(self.launch, self.engines))
        await self.until_ready(self.engines)

    async def _handles(self) -> Sequence[Handle]:
        if self.spec.backend == "local":
            return await local_engines(self.spec)
        from engine_launcher.ray_backend import ray_engines  # noqa: PLC0415 - Ray is an extra

        found, self._cluster = await ray_engines(self.spec)
        return found

    async def launch(self, engine: Engine) -> None:
        """Start one engine without waiting until it answers; raises ``LauncherError``."""
        engine.ready = False
        engine.started = time.monotonic()
        await engine.process.start()

    async def until_ready(self, engines: list[Engine]) -> None:
        """Wait for ``/health`` of each; the first that fails ends the wait for all."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                async with asyncio.TaskGroup() as group:
                    for each in engines:
                        group.create_task(self._ready(each, session), name=f"ready {each.index}")
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None

    async def _ready(self, engine: Engine, session: aiohttp.ClientSession) -> None:
        deadline = engine.started + self.spec.ready_wait
        while time.monotonic() < deadline:
            if not engine.process.alive:
                raise engine.died()
            try:
                async with session.get(f"{engine.url}/health") as answer:
                    engine.ready = answer.status == 200
            except (aiohttp.ClientError, TimeoutError):
                engine.ready = False
            if engine.ready and engine.process.alive:
                self._on_progress(self)
                return
            self._on_progress(self)
            await asyncio.sleep(HEALTH_INTERVAL)
        raise EngineSlowError(
            f"{engine.process.name} did not answer {engine.url}/health within {self.spec.ready_wait:g} s "
            f"(--ready-wait); the end of {engine.process.log}:\n"
            f"{engine.process.tail(TAIL_LINES) or '(nothing was logged)'}"
        )

    async def first_death(self) -> Engine:
        """Wait until some engine ends, and return it."""
        waits = {spawn(each.process.wait(), name=f"watch {each.index}"): each for each in self.engines}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for each in waits:
                each.cancel()

    def _engine(self, index: int) -> Engine:
        if not 0 <= index < len(self.engines):
            raise LauncherError(f"there is no engine {index}: this fleet has {len(self.engines)}, counted from 0")
        return self.engines[index]

    async def kill(self, index: int) -> None:
        """End one engine at once and without order, server and children, as a crash of the machine would."""
        engine = self._engine(index)
        engine.ready = False
        await engine.process.kill()

    async def restart(self, index: int) -> None:
        """Start one engine anew on its old port, ending it first if it runs, and wait until it answers."""
        engine = self._engine(index)
        await engine.process.stop()
        await self.launch(engine)
        await self.until_ready([engine])

    async def kill_core(self, index: int) -> list[int]:
        """SIGKILL vLLM's engine process only, so that the server is left to notice; returns the process ids.

        Raises ``LauncherError`` where there is none, as with the simulated engine.
        """
        engine = self._engine(index)
        cores = [each.pid for each in engine.process.processes() if each.name.startswith("VLLM::EngineCore")]
        if not cores:
            raise LauncherError(f"{engine.process.name} has no VLLM::EngineCore process")
        for pid in cores:
            os.kill(pid, signal.SIGKILL)
        return cores

    def freeze(self, index: int) -> None:
        """Stop all of an engine's processes without ending them: connections stay open and nothing answers."""
        self._engine(index).process.signal_all(signal.SIGSTOP)

    def thaw(self, index: int) -> None:
        """Let a frozen engine go on."""
        self._engine(index).process.signal_all(signal.SIGCONT)

    async def stop(self) -> None:
        """End all engines, all at once; returns when no process of theirs is left.

        An engine that is not ready yet has nothing to end in order, and vLLM does not heed SIGTERM while it starts.
        """
        await asyncio.gather(*(each.process.stop() if each.ready else each.process.kill() for each in self.engines))
        for each in self.engines:
            each.ready = False
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.close()

    async def kill_all(self) -> None:
        """End all engines at once with SIGKILL."""
        await asyncio.gather(*(each.process.kill() for each in self.engines))

    def write_urls(self, path: Path) -> None:
        """Write one URL a line to ``path``, in one step, so that a reader never sees half a list."""
        write_urls(path, self.urls)


def write_urls(path: Path, urls: Sequence[str]) -> None:
    """Write one URL a line to ``path``, in one step; raises ``LauncherError``."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text("".join(f"{each}\n" for each in urls))
        scratch.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise LauncherError(f"--engines-file {path} cannot be written: {error.strerror}") from None
