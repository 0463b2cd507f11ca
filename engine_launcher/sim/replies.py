"""Answers on the wire: JSON, server-sent events, and the ways in which either can be broken."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, Any

from aiohttp import web

from engine_launcher.sim.errors import WireError, dumps
from engine_launcher.sim.faults import Fault

if TYPE_CHECKING:
    from engine_launcher.sim.server import SimEngine

ENGINE: web.AppKey[SimEngine] = web.AppKey("engine")
STREAM_FAULT: web.RequestKey[Fault] = web.RequestKey("stream_fault", Fault)
_RST = struct.pack("ii", 1, 0)
GARBAGE = b"\x16\x03\x01\x02\x00\x01\x00 this is not HTTP \xff\xfe\r\n\r\n"


def json_reply(payload: Any, status: int = 200) -> web.Response:
    """Return a JSON answer."""
    return web.Response(body=dumps(payload), status=status, content_type="application/json")


def error_reply(error: WireError) -> web.Response:
    """Return an error in the OpenAI shape."""
    return json_reply(error.payload(), error.status)


def close(request: web.Request, *, rst: bool = False) -> None:
    """Close the connection of ``request`` after what was written, or with a RST at once."""
    transport = request.transport
    if transport is None:
        return
    if rst:
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
        transport.abort()
    else:
        transport.close()


def dead_reply(request: web.Request, *, rst: bool = False) -> web.StreamResponse:
    """Close the connection; the returned response is never written, since its connection is gone."""
    close(request, rst=rst)
    return web.Response()


def partial_reply(request: web.Request, response: web.Response, fault: Fault) -> web.StreamResponse:
    """Write the head and the first bytes of ``response``, then break the connection."""
    body = response.body if isinstance(response.body, bytes) else b""
    head = (
        f"HTTP/1.1 {response.status} {response.reason}\r\nContent-Type: {response.content_type}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    if request.transport is not None:
        request.transport.write(head.encode() + body[: fault.after_bytes or 0])
    return dead_reply(request, rst=fault.action == "reset")


async def hang(fault: Fault) -> None:
    """Wait for ``seconds``, or for ever (until the client goes away)."""
    if fault.seconds is not None:
        await asyncio.sleep(fault.seconds)
    else:
        await asyncio.get_running_loop().create_future()


class BareResponse(web.Response):
    """An answer without a media type, as Starlette's plain ``Response``; aiohttp would name one."""


class EventStream:
    """A streamed answer. Its head goes out before the engine has seen the request, as vLLM's does."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        headers = {"Content-Type": "text/event-stream; charset=utf-8"}
        given = request.headers.get("X-Request-Id")
        if given is not None and request.app[ENGINE].config.request_id_headers:
            headers["X-Request-Id"] = given
        self._response = web.StreamResponse(headers=headers)
        self._begun = False
        self._broken = False
        self._bytes = 0
        self._tokens = 0
        fault = request.get(STREAM_FAULT)
        self._fault: Fault | None = fault

    async def begin(self) -> None:
        """Send the head now."""
        if not self._begun:
            self._begun = True
            await self._response.prepare(self._request)
            self._request.writer.send_headers()

    async def event(self, payload: Any, *, name: str | None = None, tokens: int = 0) -> None:
        """Send one event; ``tokens`` says how many generated tokens it carries."""
        prefix = b"" if name is None else b"event: " + name.encode() + b"\n"
        await self.write(prefix + b"data: " + dumps(payload) + b"\n\n", tokens=tokens)

    async def write(self, chunk: bytes, *, tokens: int = 0) -> None:
        """Send bytes, unless a fault says that they do not arrive."""
        if self._broken:
            return
        await self.begin()
        if self._fault is None:
            await self._response.write(chunk)
            return
        await self._write_until_fault(chunk, tokens, self._fault)

    async def _write_until_fault(self, chunk: bytes, tokens: int, fault: Fault) -> None:
        if fault.after_tokens is not None and self._tokens + tokens > fault.after_tokens:
            await self._strike(fault)
            return
        if fault.after_bytes is not None and self._bytes + len(chunk) > fault.after_bytes:
            part = chunk[: fault.after_bytes - self._bytes]
            if part:
                await self._response.write(part)
            await self._strike(fault)
            return
        self._tokens += tokens
        self._bytes += len(chunk)
        await self._response.write(chunk)

    async def _strike(self, fault: Fault) -> None:
        engine = self._request.app[ENGINE]
        self._fault = None
        if fault.action in ("hang", "delay"):
            await hang(fault)
            if fault.action == "hang":
                self.break_off()
            return
        if fault.action in ("error_event", "status"):
            payload = fault.body
            if payload is None:
                payload = {
                    "error": {
                        "message": "Injected fault",
                        "type": "InternalServerError",
                        "param": None,
                        "code": fault.status,
                    }
                }
            await self._response.write(b"data: " + dumps(payload) + b"\n\ndata: [DONE]\n\n")
            await self._response.write_eof()
            self._broken = True
        elif fault.action == "die":
            self._broken = True
            engine.die()
        elif fault.action == "engine_dead":
            engine.kill_engine()
        else:
            if fault.action == "garbage" and self._request.transport is not None:
                self._request.transport.write(GARBAGE)
            self.break_off(rst=fault.action == "reset")

    def break_off(self, *, rst: bool = False) -> None:
        """Close the connection inside the body: no closing chunk is sent."""
        self._broken = True
        close(self._request, rst=rst)

    @property
    def broken(self) -> bool:
        """Whether the connection was broken off on purpose; nothing more needs to be generated."""
        return self._broken

    async def end(self) -> web.StreamResponse:
        """End the body."""
        if not self._broken:
            await self.begin()
            await self._response.write_eof()
        return self._response
