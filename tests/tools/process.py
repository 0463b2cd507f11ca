"""The real proxy as a process of its own, as users start it."""

from __future__ import annotations

import asyncio
import re
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from resource import getpagesize
from typing import Any

import aiohttp

_LISTENING = re.compile(r"listening on (https?://\S+)")
START_SECONDS = 30.0
"""The machine may be busy with other work."""


@dataclass
class ProxyProcess:
    """A running ``fleetgate proxy``.

    Attributes:
        lines: what it logged so far.
    """

    process: asyncio.subprocess.Process
    url: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * getpagesize()

    @property
    def files(self) -> int:
        """Open file descriptors."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def cpu(self) -> float:
        """Seconds of processor time, user and system."""
        parts = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(parts[11]) + int(parts[12])) / 100.0

    async def fleet(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """``GET /fleet``."""
        async with session.get(f"{self.url}/fleet") as answer:
            return await answer.json()

    async def metric(self, session: aiohttp.ClientSession, name: str) -> float:
        """The sum over all series of one metric."""
        async with session.get(f"{self.url}/metrics") as answer:
            page = await answer.text()
        total = 0.0
        for line in page.splitlines():
            if line.startswith((name + " ", name + "{")):
                total += float(line.rsplit(" ", 1)[1])
        return total

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            self.lines.append(line)
            if not self.url and (found := _LISTENING.search(line)):
                self.url = found[1]


@asynccontextmanager
async def proxy_process(*engines: str, ready: int | None = None, **settings: Any) -> AsyncIterator[ProxyProcess]:
    """Start it in front of these engines and wait until ``ready`` (default: all) of them are in rotation.

    Raises:
        AssertionError: it did not start, or it did not end with 0 on SIGTERM.
    """
    arguments = ["--port", "0"]
    for engine in engines:
        arguments += ["--engine", engine]
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        else:
            arguments += [
                each for item in (value if isinstance(value, list) else [value]) for each in (flag, str(item))
            ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *arguments, stderr=asyncio.subprocess.PIPE, limit=1 << 20
    )
    proxy = ProxyProcess(process)
    reading = asyncio.ensure_future(proxy._read())
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_SECONDS
    try:
        while not proxy.url:
            assert process.returncode is None, "\n".join(proxy.lines)
            assert loop.time() < deadline, "\n".join(proxy.lines)
            await asyncio.sleep(0.02)
        wanted = len(engines) if ready is None else ready
        trust = ssl.create_default_context(cafile=str(settings["tls_cert"])) if "tls_cert" in settings else True
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session:
            while True:
                fleet = await proxy.fleet(session)
                if sum(engine["state"] == "ready" for engine in fleet["engines"]) >= wanted:
                    break
                assert loop.time() < deadline, fleet
                await asyncio.sleep(0.05)
        yield proxy
        process.terminate()
        code = await asyncio.wait_for(process.wait(), 60)
        assert code == 0, f"exit code {code}:\n" + "\n".join(proxy.lines[-30:])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading
