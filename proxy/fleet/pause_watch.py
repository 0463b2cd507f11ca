"""Engines that somebody else paused: kept out of rotation, and asked until they go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.tasks import spawn


class PauseWatch:
    """One task per engine that is paused behind the proxy's back.

    Args:
        fleet: told when an engine's pause begins or ends.
        ask: says whether generation is paused at an engine; None where it does not answer.
        interval: seconds between two questions.
    """

    def __init__(self, fleet: Fleet, ask: Callable[[Engine], Awaitable[bool | None]], interval: float) -> None:
        self._fleet = fleet
        self._ask = ask
        self._interval = interval
        self._tasks: dict[Engine, asyncio.Task[None]] = {}

    def watch(self, engine: Engine) -> None:
        """Keep it out of rotation until it says that it goes on."""
        if engine not in self._tasks:
            self.set(engine, paused=True)
            self._tasks[engine] = spawn(self._until_resumed(engine), name=f"watch pause {engine.id}")

    def set(self, engine: Engine, *, paused: bool) -> None:
        """It is known to be paused, or to go on."""
        if engine.paused != paused:
            engine.paused = paused
            self._fleet.emit("engine_paused", engine=engine.id, paused=paused)
            self._fleet.refresh()

    async def forget(self, engine: Engine) -> None:
        """It left the fleet."""
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _until_resumed(self, engine: Engine) -> None:
        try:
            while engine.alive and engine.paused:
                await asyncio.sleep(self._interval)
                if await self._ask(engine) is False:
                    engine.reported_paused = False
                    break
        finally:
            self._tasks.pop(engine, None)
            self.set(engine, paused=False)
