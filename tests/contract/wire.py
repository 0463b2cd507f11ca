"""A raw HTTP/1.1 client: it shows what came over the connection, and how it ended.

aiohttp or httpx would hide what matters here: a body cut inside its chunks, a head that comes late, an idle connection
that is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any, Self

ANSWER_SECONDS = 60.0
"""Longest wait for a whole answer; a real engine on a loaded CPU takes several seconds for one."""


@dataclass
class Answer:
    """One answer, or as much of it as came.

    ``whole`` is False when the connection ended inside the body; ``silent`` when nothing at all came in time.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    silent: bool = False

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0]

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[tuple[str | None, Any]]:
        """The server-sent events, as (name, data); data is parsed unless it is not JSON."""
        found = []
        for block in self.body.decode().split("\n\n"):
            name, data = None, None
            for line in block.split("\n"):
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    data = line[6:]
            if data is not None:
                found.append((name, data if data == "[DONE]" else json.loads(data)))
        return found


class Connection:
    """One connection, on which requests are sent one after another."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"Host": f"{self.host}:{self.port}"}
        if body is not None:
            lines |= {"Content-Type": "application/json", "Content-Length": str(len(raw))}
        lines |= headers or {}
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
        self.writer.write(head.encode() + raw)
        await self.writer.drain()

    async def read_head(self, answer: Answer) -> None:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")
        answer.status = int(first.split(" ", 2)[1])
        for line in lines:
            name, colon, value = line.partition(":")
            if colon:
                answer.headers[name.lower()] = value.strip()

    async def read_body(self, answer: Answer) -> None:
        if "content-length" in answer.headers:
            answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
            answer.whole = True
            return
        if answer.headers.get("transfer-encoding") != "chunked":
            answer.body = await self.reader.read()
            answer.whole = True
            return
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            chunk = await self.reader.readexactly(size + 2)
            if size == 0:
                answer.whole = True
                return
            answer.body += chunk[:-2]

    async def receive(self, seconds: float = ANSWER_SECONDS) -> Answer:
        answer = Answer()
        try:
            async with asyncio.timeout(seconds):
                await self.read_head(answer)
                await self.read_body(answer)
        except TimeoutError:
            answer.silent = answer.status == 0
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        return answer

    async def look(self, seconds: float) -> bytes:
        """What comes within ``seconds``, raw."""
        found = b""
        try:
            async with asyncio.timeout(seconds):
                while chunk := await self.reader.read(1 << 16):
                    found += chunk
        except TimeoutError:
            pass
        return found

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        await self.send(method, path, body, headers)
        return await self.receive()
