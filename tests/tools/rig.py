"""A whole proxy in this process, and a client that speaks bytes."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy import app as proxy_app
from proxy.app import App
from proxy.config import Settings
from tests.tools.fault_engine import FaultEngine

SOON = 10.0
"""Seconds after which a test stops waiting for what should have happened at once."""


async def eventually(condition: Callable[[], bool], what: str = "", seconds: float = SOON) -> None:
    """Wait until ``condition`` holds.

    Raises:
        AssertionError: it never did.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, f"never happened: {what or condition}"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def proxy_for(*engines: FaultEngine | str, ready: int | None = None, **settings: Any) -> AsyncIterator[App]:
    """A proxy in front of these engines, with ``ready`` (default: all) of them in rotation.

    Leaving it checks that nothing leaked: no request, no slot, no held one.
    """
    urls = [engine if isinstance(engine, str) else engine.url for engine in engines]
    app = await proxy_app.start(Settings(port=0, engine=urls, drain_timeout=1.0, **settings))
    try:
        wanted = len(urls) if ready is None else ready
        await eventually(lambda: len(app.fleet.eligible) >= wanted, f"{wanted} engines ready")
        yield app
        await eventually(lambda: not len(app.plane.tracker), f"requests left: {app.plane.tracker.all()}")
        assert [engine.inflight for engine in app.fleet] == [0] * len(app.fleet)
        assert app.plane.gate.held == 0
        assert app.plane.gate.held_bytes == 0
    finally:
        await app.stop()


@dataclass
class Reply:
    """One answer as a byte client sees it.

    Attributes:
        complete: its framing says that it is whole.
    """

    status: int
    head: bytes
    body: bytes
    complete: bool
    rest: bytes = b""

    def field(self, name: str) -> str | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.lower() == name.lower().encode():
                return value.strip().decode("latin-1")
        return None


class Client:
    """A connection that sends exactly what it is told and reads answers strictly."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @asynccontextmanager
    async def to(cls, url: str, *, limit: int = 1 << 20) -> AsyncIterator[Client]:
        host, _, port = url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def reply(self, *, head: bool = False) -> Reply:
        """The next answer, interim ones skipped.

        Raises:
            ConnectionError: the connection ended before a whole head.
        """
        while True:
            try:
                raw = await self.reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                raise ConnectionError(f"closed after {error.partial!r}") from None
            status = int(raw.split(b" ", 2)[1])
            if status >= 200 or status == 101:
                break
        fields = raw[:-4].lower()
        if head or status in (101, 204, 304):
            return Reply(status, raw[:-4], b"", complete=True)
        if b"\r\ntransfer-encoding: chunked" in fields:
            body, complete = await self._chunks()
            return Reply(status, raw[:-4], body, complete)
        for line in fields.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                wanted = int(line.partition(b":")[2])
                body = await self._upto(wanted)
                return Reply(status, raw[:-4], body, complete=len(body) == wanted)
        body, clean = await self._to_end()
        return Reply(status, raw[:-4], body, complete=clean)

    async def _upto(self, count: int) -> bytes:
        try:
            return await self.reader.readexactly(count)
        except asyncio.IncompleteReadError as error:
            return error.partial
        except ConnectionError:
            return b""

    async def _chunks(self) -> tuple[bytes, bool]:
        body = bytearray()
        try:
            while True:
                size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
                body += (await self.reader.readexactly(size + 2))[:-2]
                if not size:
                    return bytes(body), True
        except (asyncio.IncompleteReadError, ConnectionError):
            return bytes(body), False

    async def _to_end(self) -> tuple[bytes, bool]:
        body = bytearray()
        try:
            while data := await self.reader.read(65536):
                body += data
        except ConnectionError:
            return bytes(body), False
        return bytes(body), True

    async def closed(self) -> bool:
        """Wait for the end of the connection; True if nothing came before it."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


def post(path: str, body: bytes, *fields: str) -> bytes:
    """A plain POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: proxy", "Content-Type: application/json", *fields]
    return "\r\n".join(lines).encode("latin-1") + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def get(path: str, *fields: str) -> bytes:
    """A plain GET."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: proxy", *fields]).encode("latin-1") + b"\r\n\r\n"


async def ask(url: str, request: bytes) -> Reply:
    """One request on a connection of its own."""
    async with Client.to(url) as client:
        await client.send(request)
        return await client.reply(head=request.startswith(b"HEAD"))


def memory() -> int:
    """Resident bytes of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
