"""An engine that does exactly what a script says, byte by byte: raw asyncio, no HTTP library in between.

::

    async with FaultEngine(cut_after(100, chunked(b"x" * 500))) as engine:
        ...                        # point the proxy at engine.url
        engine.requests[0].raw     # the exact bytes that reached it

A script is ``async def script(wire, request)``; it gets each data request and writes whatever it likes. Paths that only
the proxy's probes ask for are answered apart (``/health`` 200, the RL routes 404: a plain engine), unless the engine is
made with ``probes=False``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

PROBED = frozenset({"/health", "/weight_info", "/is_paused", "/metrics", "/get_world_size", "/load"})


@dataclass
class Request:
    """One request as it came.

    Attributes:
        raw_head: request line and fields, to the letter, without the empty line.
        body: the body without its framing.
        raw_body: with it.
        wire: the connection.
    """

    raw_head: bytes
    body: bytes
    raw_body: bytes
    wire: Wire

    @property
    def raw(self) -> bytes:
        return self.raw_head + b"\r\n\r\n" + self.raw_body

    @property
    def method(self) -> str:
        return self.raw_head.split(b" ", 1)[0].decode()

    @property
    def target(self) -> str:
        return self.raw_head.split(b" ", 2)[1].decode("latin-1")

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def fields(self) -> list[tuple[bytes, bytes]]:
        """Fields in order and case."""
        lines = self.raw_head.split(b"\r\n")[1:]
        return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]

    def field(self, name: str) -> str | None:
        for key, value in self.fields:
            if key.lower() == name.lower().encode():
                return value.decode("latin-1")
        return None


class Wire(asyncio.Protocol):
    """One connection of the engine."""

    def __init__(self, engine: FaultEngine) -> None:
        self.engine = engine
        self.transport: asyncio.Transport | None = None
        self.buffer = bytearray()
        self.gone = asyncio.Event()
        self.gone_at = 0.0
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self.task: asyncio.Task[None] | None = None
        self.served = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.engine.wires.append(self)
        self.task = asyncio.get_running_loop().create_task(self._serve())

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone_at = asyncio.get_running_loop().time()
        self.gone.set()
        self._news.set()
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self._news.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def more(self) -> None:
        """Wait for more bytes.

        Raises:
            ConnectionError: the client went away.
        """
        self._news.clear()
        if self.gone.is_set():
            raise ConnectionError
        await self._news.wait()
        if self.gone.is_set() and not self.buffer:
            raise ConnectionError

    async def until(self, mark: bytes) -> bytes:
        """Bytes up to and with ``mark``."""
        start = 0
        while (at := self.buffer.find(mark, start)) < 0:
            start = max(0, len(self.buffer) - len(mark))
            await self.more()
        taken = bytes(self.buffer[: at + len(mark)])
        del self.buffer[: at + len(mark)]
        return taken

    async def exactly(self, count: int) -> bytes:
        while len(self.buffer) < count:
            await self.more()
        taken = bytes(self.buffer[:count])
        del self.buffer[:count]
        return taken

    async def drop_body(self, count: int) -> None:
        """Read and forget, without holding more than a piece at once."""
        while count:
            if not self.buffer:
                await self.more()
            taken = min(count, len(self.buffer))
            del self.buffer[:taken]
            count -= taken

    async def send(self, data: bytes) -> None:
        """Write and wait until the transport has room."""
        if self.transport is None or self.gone.is_set():
            raise ConnectionError
        self.transport.write(data)
        await self._writable.wait()
        if self.gone.is_set():
            raise ConnectionError

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def reset(self) -> None:
        """Close with RST."""
        if self.transport is not None:
            sock = self.transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    async def head(self) -> bytes:
        return (await self.until(b"\r\n\r\n"))[:-4]

    async def body(self, head: bytes) -> tuple[bytes, bytes]:
        """The body, without and with its framing."""
        lower = head.lower()
        if b"\r\ntransfer-encoding: chunked" in lower:
            raw = bytearray()
            body = bytearray()
            while True:
                line = await self.until(b"\r\n")
                size = int(line.strip().split(b";")[0], 16)
                piece = await self.exactly(size + 2)
                raw += line + piece
                body += piece[:-2]
                if not size:
                    return bytes(body), bytes(raw)
        for line in lower.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                data = await self.exactly(int(line.partition(b":")[2]))
                return data, data
        return b"", b""

    async def _serve(self) -> None:
        engine = self.engine
        with contextlib.suppress(ConnectionError):
            await engine.on_connect(self)
            while not self.gone.is_set():
                head = await self.head()
                path = head.split(b" ", 2)[1].partition(b"?")[0].decode("latin-1")
                if engine.probes and path in PROBED:
                    await self.body(head)
                    await self.send(engine.probe_answer(path))
                    continue
                if engine.reads_body:
                    body, raw = await self.body(head)
                else:
                    body = raw = b""
                request = Request(head, body, raw, self)
                self.served += 1
                engine.requests.append(request)
                engine.came.set()
                engine.running += 1
                engine.peak = max(engine.peak, engine.running)
                try:
                    await engine.script(self, request)
                finally:
                    engine.running -= 1


Script = Callable[[Wire, Request], Awaitable[None]]


@dataclass(eq=False)
class FaultEngine:
    """A scriptable engine.

    Args:
        script: what happens to each data request.
        probes: answer the proxy's probes apart from the script.
        reads_body: read the request body before the script runs.
        paused: what ``/is_paused`` answers; None for 404.
        version: what ``/weight_info`` answers; None for 404, as a server without the RL routes.
    """

    script: Script
    probes: bool = True
    reads_body: bool = True
    paused: bool | None = None
    version: str | None = None
    healthy: bool = True
    requests: list[Request] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    peak: int = 0
    port: int = 0

    async def on_connect(self, wire: Wire) -> None:
        """A hook for faults that strike before a request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def open_wires(self) -> list[Wire]:
        return [wire for wire in self.wires if not wire.gone.is_set()]

    def probe_answer(self, path: str) -> bytes:
        if path == "/health":
            return answer_bytes(200 if self.healthy else 503, b"")
        if path == "/is_paused" and self.paused is not None:
            return answer_bytes(200, b'{"is_paused":%s}' % (b"true" if self.paused else b"false"))
        if path == "/weight_info" and self.version is not None:
            return answer_bytes(200, b'{"weight_version":"%s"}' % self.version.encode())
        return answer_bytes(404, b'{"detail":"Not Found"}')

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Wire(self), "127.0.0.1", self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self, *, reset: bool = False) -> None:
        """Close the port and every connection; ``start`` opens the same port again."""
        self._server.close()
        for wire in self.open_wires:
            if reset:
                wire.reset()
            else:
                wire.transport.abort()  # type: ignore[union-attr]
        tasks = [wire.task for wire in self.wires if wire.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.wires.clear()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def next_request(self) -> Request:
        """Wait for the next data request."""
        self.came.clear()
        await self.came.wait()
        return self.requests[-1]


def answer_bytes(
    status: int, body: bytes, *, kind: bytes = b"application/json", extra: bytes = b"", reason: bytes = b"X"
) -> bytes:
    return (
        b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (status, reason, kind, len(body), extra)
        + body
    )
