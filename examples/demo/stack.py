"""The processes of the demo: engines, the proxy, and for real engines the trainer. All of them end with the demo."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from types import TracebackType
from typing import Final, Self

import aiohttp

from engine_launcher.fleet import EngineFleet
from engine_launcher.process import EngineProcess
from engine_launcher.settings import EngineCommand, FleetSpec
from examples.demo.settings import SIM_TOKENS_PER_SECOND, DemoFailed, DemoSpec

ENGINE_WAIT: Final = 400.0
"""Seconds for all engines to answer: two real ones take about 95 on two cores."""

PROXY_WAIT: Final = 30.0
"""Seconds for the proxy to listen and to know its engines."""

PROXY_GRACE: Final = 10.0
"""Seconds for the proxy to drain at the end; nothing runs by then."""

ENGINE_GRACE: Final = 10.0
"""Seconds for an engine to end by itself."""

LOOK_INTERVAL: Final = 0.05
"""Seconds between two looks at something that is starting."""

PROGRESS_INTERVAL: Final = 15.0
"""Seconds between two lines of progress while engines start."""

_LISTENING = re.compile(r"listening on (http://\S+)")


def say(text: str) -> None:
    """A line of progress; standard output is kept for the tables."""
    print(text, file=sys.stderr, flush=True)


def own_environment() -> dict[str, str]:
    """The environment without settings of a proxy that the user may run elsewhere."""
    return {key: value for key, value in os.environ.items() if not key.startswith("FLEETGATE_")}


class Stack:
    """Engines and a proxy in front of them, started on entry and ended on exit."""

    def __init__(self, spec: DemoSpec) -> None:
        self.url = ""
        self._spec = spec
        self._told = 0.0
        real = spec.engine == "vllm"
        self.fleet = EngineFleet(
            FleetSpec(
                count=spec.engines,
                kind=spec.engine,
                model=spec.model if real else None,
                vllm=spec.vllm,
                log_dir=spec.run_dir,
                ready_wait=ENGINE_WAIT,
                stop_grace=ENGINE_GRACE,
                extra=() if real else ("--tokens-per-second", str(SIM_TOKENS_PER_SECOND)),
            ),
            on_progress=self._progress,
        )
        self._proxy: EngineProcess | None = None

    def _progress(self, fleet: EngineFleet) -> None:
        now = time.monotonic()
        if now - self._told >= PROGRESS_INTERVAL:
            self._told = now
            ready = sum(each.ready for each in fleet.engines)
            waited = now - min(each.started for each in fleet.engines)
            say(f"  {ready} of {len(fleet.engines)} engines answer after {waited:.0f} s")

    async def __aenter__(self) -> Self:
        try:
            await self.fleet.start()
            await self._start_proxy()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start_proxy(self) -> None:
        argv = [sys.executable, "-m", "proxy", "--port", "0", "--min-engines", str(self._spec.engines)]
        for url in self.fleet.urls:
            argv += ["--engine", url]
        log = self._spec.run_dir / "proxy.log"
        self._proxy = EngineProcess("proxy", EngineCommand(tuple(argv), own_environment()), log, PROXY_GRACE)
        await self._proxy.start()
        try:
            async with asyncio.timeout(PROXY_WAIT):
                self.url = await self._listening()
                await self._ready()
        except TimeoutError:
            raise DemoFailed(f"the proxy was not ready within {PROXY_WAIT:g} s; see {log}") from None

    async def _listening(self) -> str:
        assert self._proxy is not None
        while True:
            found = _LISTENING.search(self._proxy.tail())
            if found:
                return found[1]
            if not self._proxy.alive:
                raise DemoFailed(f"the proxy ended with exit code {self._proxy.returncode}:\n{self._proxy.tail(10)}")
            await asyncio.sleep(LOOK_INTERVAL)

    async def _ready(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{self.url}/ready") as answer:
                    if answer.status == 200:
                        return
                await asyncio.sleep(LOOK_INTERVAL)

    async def stop(self) -> None:
        """End the proxy, then the engines. Fine to call twice."""
        if self._proxy is not None:
            await self._proxy.stop()
        await self.fleet.stop()
