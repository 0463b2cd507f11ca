"""Requests that aiohttp answers: control calls, /fleet, /metrics, the live page.

The front has parsed and checked the request; it is written out again as one plain HTTP/1.1 request to an aiohttp
protocol that lives for this request only and writes straight into the client's transport. When the answer is out,
the front goes on reading the connection. So one port serves both, the data plane pays nothing for aiohttp, and aiohttp
never sees ambiguous framing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from proxy.core.framing import RequestHead
from proxy.data.gathered import Gathered

if TYPE_CHECKING:
    from proxy.data.front import Front

_log = logging.getLogger("fleetgate.handoff")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def web_runner(app: web.Application, **options: Any) -> web.AppRunner:
    """Run an application as all of the proxy's are: a client that leaves ends its handler, a body stays as it came."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, auto_decompress=False, **options)


class WebSide:
    """The aiohttp side of the shared port.

    Args:
        app: answers the requests.
    """

    def __init__(self, app: web.Application) -> None:
        app.middlewares.insert(0, self._finish)
        self._runner = web_runner(app, keepalive_timeout=3600)
        self._handed: dict[asyncio.BaseProtocol, Handed] = {}

    async def start(self) -> None:
        """Freeze the application and run its start-up hooks."""
        await self._runner.setup()

    async def stop(self) -> None:
        """Run the clean-up hooks."""
        await self._runner.cleanup()

    def protocol(self, handed: Handed) -> asyncio.Protocol:
        """A fresh aiohttp protocol for one request."""
        server = self._runner.server
        assert server is not None
        protocol = server()
        self._handed[protocol] = handed
        return protocol

    def forget(self, protocol: asyncio.BaseProtocol) -> None:
        """Its request is over."""
        self._handed.pop(protocol, None)

    @web.middleware
    async def _finish(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Write the answer out whole, then tell the front; outermost, so that nothing follows."""
        handed = self._handed.get(request.protocol)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = error
        if handed is not None:
            try:
                await response.prepare(request)
                await response.write_eof()
            except ConnectionError:
                # The client went away while it was answered; aiohttp would take that for a fault of the handler.
                return response
            handed.answered()
        return response


class _Lent(asyncio.Transport):
    """The client's transport, lent to aiohttp for one answer: after `recall` it can no longer be written or closed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._real: asyncio.Transport | None = transport

    def recall(self) -> None:
        """The answer is out; the connection goes on without aiohttp."""
        self._real = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._real is not None and not self._real.is_closing():
            self._real.write(data)

    def close(self) -> None:
        if self._real is not None:
            self._real.close()

    def abort(self) -> None:
        if self._real is not None:
            self._real.abort()

    def is_closing(self) -> bool:
        return self._real is None or self._real.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._real.get_extra_info(name, default) if self._real is not None else default

    def get_write_buffer_size(self) -> int:
        return self._real.get_write_buffer_size() if self._real is not None else 0

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        """The request is whole; reading is the front's business."""

    def resume_reading(self) -> None:
        """Likewise."""


class Handed(Gathered):
    """One request on its way through aiohttp."""

    def __init__(self, side: WebSide, client: Front, head: RequestHead, *, limit: int) -> None:
        super().__init__(client, head, limit=limit)
        self._side = side
        self._protocol: asyncio.Protocol | None = None
        self._lent: _Lent | None = None

    def client_writable(self, writable: bool) -> None:
        """Back-pressure goes on to aiohttp."""
        if self._protocol is not None:
            if writable:
                self._protocol.resume_writing()
            else:
                self._protocol.pause_writing()

    def pass_on(self, body: bytes) -> None:
        """Give the request to a fresh aiohttp protocol that writes into the client's transport."""
        transport = self._client.transport
        if transport is None:
            return
        self._protocol = protocol = self._side.protocol(self)
        self._client.answer_begun()
        self._lent = _Lent(transport)
        protocol.connection_made(self._lent)
        # A client of HTTP/1.0 cannot read chunks, and aiohttp has to know.
        protocol.data_received(self.plain_request(body, version=b"1.1" if self.head.http11 else b"1.0"))

    def answered(self) -> None:
        """Aiohttp wrote the whole answer; let its task reach its rest before it is ended."""
        if not self._over:
            self._over = True
            self._client.loop.call_soon(self._done)

    def _done(self) -> None:
        self._end(None)
        self._client.request_done(self)

    def drop(self) -> None:
        """Aiohttp cancels the handler."""
        self._end(ConnectionResetError("the client went away"))

    def _end(self, error: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        if self._lent is not None:
            self._lent.recall()
        if protocol is not None:
            self._side.forget(protocol)
            protocol.connection_lost(error)
