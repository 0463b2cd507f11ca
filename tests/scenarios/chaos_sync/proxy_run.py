"""The real proxy in a process of its own, killed and started again on the same port."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from resource import getpagesize

from engine_launcher.ports import free_ports

START_SECONDS = 120.0
"""For a new proxy to listen: it looks at each engine first, frozen ones too, on a machine that may be busy."""
_VERSION = re.compile(r"fleet version: .+ -> '([^']+)' \(by ")


class ProxyRun:
    """One port, and the proxy that listens there now."""

    def __init__(self, engines: list[str], settings: dict[str, object]) -> None:
        self.port = free_ports("127.0.0.1", 1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = ["--port", str(self.port)]
        for engine in engines:
            self._arguments += ["--engine", engine]
        for name, value in settings.items():
            self._arguments += [f"--{name.replace('_', '-')}", str(value)]
        self.process: asyncio.subprocess.Process | None = None
        self.lines: deque[str] = deque(maxlen=20_000)
        self.errors: list[str] = []
        self._reading: asyncio.Task[None] | None = None
        self.starts = 0
        self.on_version: Callable[[str], None] | None = None
        """Called with each version that the proxy logs as the fleet's, also those that pass between two looks."""
        self.memory_at_start = 0
        self.files_when_idle = 0

    async def start(self) -> None:
        """Returns once it listens."""
        process = self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy", *self._arguments, stderr=asyncio.subprocess.PIPE, limit=1 << 20
        )
        self.starts += 1
        listening = asyncio.get_running_loop().create_future()
        self._reading = asyncio.ensure_future(self._read(process, listening))
        await asyncio.wait_for(listening, START_SECONDS)

    async def _read(self, process: asyncio.subprocess.Process, listening: asyncio.Future[None]) -> None:
        assert process.stderr is not None
        async for raw in process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            self.lines.append(line)
            if (found := _VERSION.search(line)) and self.on_version is not None:
                self.on_version(found[1])
            if " ERROR " in line or line.startswith("Traceback"):
                self.errors.append(line)
            if not listening.done() and re.search(r"listening on http://\S+", line):
                listening.set_result(None)
        if not listening.done():
            listening.set_exception(RuntimeError("the proxy ended:\n" + "\n".join(self.lines)))

    async def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        assert self._reading is not None
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reading

    async def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        assert self._reading is not None
        if self.process.returncode is None:
            self.process.terminate()
        code = await asyncio.wait_for(self.process.wait(), 60)
        await self._reading
        return code

    @property
    def memory(self) -> int:
        """Resident bytes."""
        assert self.process is not None
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * getpagesize()

    @property
    def files(self) -> int:
        """Open file descriptors."""
        assert self.process is not None
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))
