"""One client connection: bytes in, requests out, answers back in order.

llhttp (`httptools`) splits the bytes; `proxy.core.framing` refuses what is ambiguous. Requests of the data plane become
an `Exchange`; every other path (control calls, /fleet, /metrics) is handed, one request at a time, to the aiohttp
application (`proxy.data.handoff`). Pipelined requests wait until the one before them is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from proxy.core.framing import RequestHead, inspect
from proxy.core.paths import Route
from proxy.data.exchange import Exchange
from proxy.errors import (
    BadRequest,
    FleetgateError,
    HeadersTooLarge,
    LoopDetected,
    PathRefused,
    SlowClient,
    TargetTooLong,
)

if TYPE_CHECKING:
    from proxy.server import Server

_log = logging.getLogger("fleetgate.front")

MAX_PIPELINED = 16
"""Requests that may wait behind one another on a connection before the proxy stops reading it. Nobody who generates
pipelines; the bound keeps a stranger from queueing work."""
CUT_FLUSH = 5.0
"""Seconds that the last bytes of a cut answer get to leave before the connection is aborted."""


class Inbound(Protocol):
    """A request as the connection sees it: an `Exchange`, or one that aiohttp answers."""

    head: RequestHead
    body_done: bool

    def begin(self) -> None:
        """It is this request's turn."""

    def body_data(self, data: bytes) -> None:
        """A piece of the body."""

    def body_end(self) -> None:
        """The body is whole."""

    def client_slow(self) -> None:
        """The body stopped coming."""

    def client_writable(self, writable: bool) -> None:
        """The client takes (no) more of its answer for now."""

    def client_gone(self) -> None:
        """The client went away."""


class Front(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_active",
        "_arriving",
        "_begun",
        "_closing",
        "_cut_timer",
        "_error",
        "_fields",
        "_head_bytes",
        "_head_since",
        "_last_read",
        "_parser",
        "_paused",
        "_queue",
        "_server",
        "_stall_left",
        "_stall_timer",
        "_timer",
        "_tunnel",
        "_tunnel_early",
        "_url",
        "loop",
        "peer",
        "transport",
        "trusted",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self.loop = server.loop
        self.transport: asyncio.Transport | None = None
        self.peer = b"unknown"
        self.trusted = False
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._head_since = 0.0
        self._last_read = 0.0
        self._arriving: Inbound | None = None
        self._active: Inbound | None = None
        self._queue: list[Inbound] = []
        self._error: FleetgateError | None = None
        self._begun = False
        self._closing = False
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._stall_left = 0
        self._cut_timer: asyncio.TimerHandle | None = None
        self._tunnel: Callable[[bytes], None] | None = None
        self._tunnel_early: bytes | None = None

    def __repr__(self) -> str:
        return f"<Front {self.peer.decode('latin-1')} active={self._active!r} queued={len(self._queue)}>"

    # The loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection; over the limit it is refused with an answer."""
        # uvloop's transports have the interface of asyncio.Transport without being one.
        self.transport = made = cast("asyncio.Transport", transport)
        address = transport.get_extra_info("peername")
        host = address[0] if isinstance(address, tuple) else "unix"
        self.peer = host.encode("ascii", "replace")
        self.trusted = self._server.plane.trusts(host)
        made.set_write_buffer_limits(high=self._server.plane.settings.stream_buffer)
        self._last_read = self.loop.time()
        refusal = self._server.opened(self)
        if refusal is not None:
            self.send_error(refusal, None)
            self.close()
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The client went away: end all that is done for it."""
        self.transport = None
        self._server.closed(self)
        for timer in (self._timer, self._stall_timer, self._cut_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._stall_timer = self._cut_timer = None
        tunnel, self._tunnel = self._tunnel, None
        active, self._active = self._active, None
        queue, self._queue = self._queue, []
        self._closing = True
        if active is not None:
            active.client_gone()
        for waiting in queue:
            waiting.client_gone()
        del tunnel

    def eof_received(self) -> bool:
        """A client that sends no more is treated as gone: it cannot be told from one that closed."""
        return False

    def pause_writing(self) -> None:
        """The client reads slower than the engine writes: only its own stream stops, and not for ever."""
        if self._active is not None:
            self._active.client_writable(False)
        if self._stall_timer is None and self.transport is not None:
            self._stall_left = self.transport.get_write_buffer_size()
            limit = self._server.plane.settings.stalled_client_timeout
            self._stall_timer = self.loop.call_later(limit, self._stalled)

    def resume_writing(self) -> None:
        """The client caught up."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if self._active is not None:
            self._active.client_writable(True)

    def _stalled(self) -> None:
        self._stall_timer = None
        if self.transport is None:
            return
        left = self.transport.get_write_buffer_size()
        limit = self._server.plane.settings.stalled_client_timeout
        if left < self._stall_left:
            self._stall_left = left
            self._stall_timer = self.loop.call_later(limit, self._stalled)
            return
        _log.warning("client %s read nothing for %g s; its connection is cut", self.peer.decode("latin-1"), limit)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse. Whatever is wrong closes the connection, after an answer that says what."""
        if self._tunnel is not None:
            self._tunnel(data)
            return
        if self._tunnel_early is not None:
            self._early(data)
            return
        if self._closing:
            return
        self._last_read = now = self.loop.time()
        if self._arriving is None:
            if not self._head_since:
                self._head_since = now
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError as error:
            refusal = error.__context__
            if not isinstance(refusal, FleetgateError):
                _log.exception("a request could not be handled", exc_info=refusal)
                refusal = BadRequest("the request could not be handled")
            self.refuse(refusal)
            return
        except httptools.HttpParserError as error:
            self.refuse(BadRequest(f"not a valid HTTP/1.1 request: {error}"))
            return
        if self._head_since and self._arriving is None:
            limit = self._server.max_head
            if self._head_bytes > limit:
                self.refuse(HeadersTooLarge(f"the request head is over {limit} bytes"))
                return
        if len(self._queue) > MAX_PIPELINED:
            self.pause_reading()

    # httptools' side

    def on_message_begin(self) -> None:
        """A request begins."""
        self._url = b""
        self._fields = []

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url
        limit = self._server.plane.limits.request_line
        if len(self._url) > limit:
            raise TargetTooLong(f"the request line is over {limit} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field; fields after the body (trailers) are dropped, vLLM reads none (RFC 9110 section 6.5.1)."""
        if self._arriving is None:
            fields = self._fields
            fields.append((name, value))
            limit = self._server.plane.limits.headers
            if len(fields) > limit:
                raise HeadersTooLarge(f"the request has over {limit} header fields")

    def on_headers_complete(self) -> None:
        """The head is complete: refuse it, or begin (or queue) the request."""
        server = self._server
        parser = self._parser
        head = inspect(
            parser.get_method(),
            self._url,
            parser.get_http_version(),
            self._fields,
            limits=server.plane.limits,
            session_headers=server.plane.session_headers,
        )
        self._fields = []
        self._head_since = 0.0
        self._head_bytes = 0
        if head.via is not None and server.plane.name in head.via:
            raise LoopDetected("the request came back to the proxy that sent it; an engine URL points at the proxy")
        owner = server.owner(head.path)
        if owner is Route.REFUSE:
            raise PathRefused(f"the path {head.path[:128]!r} would be read as a control path; write it plainly")
        request: Inbound = Exchange(server.plane, self, head) if owner is Route.DATA else server.handoff(self, head)
        self._arriving = request
        if self._active is None:
            self._start(request)
        else:
            self._queue.append(request)

    def on_body(self, data: bytes) -> None:
        """A piece of a body."""
        if self._arriving is not None:
            self._arriving.body_data(data)

    def on_message_complete(self) -> None:
        """The request is whole."""
        request, self._arriving = self._arriving, None
        if request is not None:
            request.body_end()

    # Requests

    def _start(self, request: Inbound) -> None:
        self._active = request
        self._begun = False
        if request.head.expect_continue and not request.body_done:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.begin()

    def keeps_alive(self, request: Inbound) -> bool:
        """Whether the connection may carry another request after this one's answer."""
        return request.head.keep_alive and request.body_done and not self._closing and not self._server.plane.draining

    def answer_begun(self) -> None:
        """The head of an answer is about to be written: from here on nothing else may answer this request."""
        self._begun = True

    def request_done(self, request: Inbound) -> None:
        """A request is over; the next one may begin."""
        if request is not self._active:
            return
        self._active = None
        if self.transport is None:
            return
        if self._error is not None and not self._queue:
            error, self._error = self._error, None
            self.send_error(error, None)
            self.close()
        elif not self.keeps_alive(request) or self.transport.is_closing():
            self.close()
        else:
            self.loop.call_soon(self._next)

    def _next(self) -> None:
        if self.transport is None or self._active is not None or self._closing:
            return
        if self._queue:
            self._start(self._queue.pop(0))
        else:
            self.resume_reading()
            self._arm()

    def refuse(self, error: FleetgateError) -> None:
        """Answer with an error when it is its turn, and read nothing more."""
        arriving, self._arriving = self._arriving, None
        if self._active is None or (self._active is arriving and not self._begun):
            active, self._active = self._active, None
            self._server.plane.stats.answered("other", error.status)
            self.send_error(error, active)
            self.close()
            if active is not None:
                active.client_gone()
        elif self._active is arriving:
            # Its answer has begun; the rest of its body is nonsense.
            self.cut(hard=True)
        else:
            self._error = error
            self.pause_reading()

    def _upgrade(self, rest: bytes) -> None:
        """The request asks for an upgrade.

        Only a WebSocket that an engine accepts becomes a tunnel; bytes that follow any other kind are never read as a
        request (CVE-2026-2833 in another proxy).
        """
        active = self._active
        if active is not None and active.head.websocket:
            self._tunnel_early = b""
            self._early(rest)
        else:
            if active is not None:
                active.head.keep_alive = False
            self._closing = True
            self.pause_reading()

    def _early(self, data: bytes) -> None:
        assert self._tunnel_early is not None
        self._tunnel_early += data
        if len(self._tunnel_early) > self._server.plane.settings.stream_buffer:
            self.pause_reading()

    def open_tunnel(self, sink: Callable[[bytes], None]) -> None:
        """Pass every further byte of the client to ``sink``."""
        early = self._tunnel_early
        self._tunnel_early = None
        self._tunnel = sink
        if early:
            sink(early)
        self.resume_reading()

    # Bytes to the client

    def write(self, data: bytes) -> None:
        """Write unless the connection is closing (uvloop raises there)."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def send_error(self, error: FleetgateError, request: Inbound | None) -> None:
        """A whole answer of the proxy's own, in the OpenAI error shape."""
        body = error.body()
        close = request is None or not self.keeps_alive(request)
        lines = [f"HTTP/1.1 {error.status} {_REASONS.get(error.status, 'Error')}"]
        lines += [f"{name}: {value}" for name, value in error.headers()]
        if isinstance(request, Exchange):
            lines.append(f"X-Request-Id: {request.request_id}")
            lines.append(f"X-Fleetgate-Attempts: {request.attempts}")
            lines.append(f"X-Fleetgate-Weight-Version: {self._server.plane.version_header().decode('latin-1')}")
            if request.engine is not None:
                lines.append(f"X-Fleetgate-Engine: {request.engine.id}")
        lines.append(f"Content-Length: {len(body)}")
        if close:
            lines.append("Connection: close")
        head = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"
        is_head = request is not None and request.head.method == b"HEAD"
        self.write(head if is_head else head + body)

    def cut(self, *, hard: bool = False) -> None:
        """End the connection so that the answer cannot pass for a whole one.

        Args:
            hard: drop what is buffered; otherwise it gets a moment to leave first.
        """
        self._closing = True
        transport = self.transport
        if transport is None:
            return
        active = self._active
        if hard or (active is not None and not active.head.http11):
            # An HTTP/1.0 answer ends with its connection: only a reset tells a cut from an end.
            sock = transport.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
            return
        transport.close()
        self._cut_timer = self.loop.call_later(CUT_FLUSH, transport.abort)

    def close(self) -> None:
        """Close after what is buffered has left."""
        self._closing = True
        if self.transport is not None:
            self.transport.close()
            if self._cut_timer is None:
                limit = self._server.plane.settings.stalled_client_timeout
                self._cut_timer = self.loop.call_later(limit, self.transport.abort)

    def close_if_idle(self) -> None:
        """The proxy stops: a connection without a request is closed, another one after its answer."""
        if self._active is None:
            self.close()

    # Reading

    def pause_reading(self) -> None:
        """Leave the client's bytes in the socket."""
        if not self._paused and self.transport is not None:
            self._paused = True
            with contextlib.suppress(RuntimeError):
                self.transport.pause_reading()
            self._server.reading_paused(self)

    def resume_reading(self) -> None:
        """Go on reading."""
        if self._paused and self.transport is not None:
            self._paused = False
            self._last_read = self.loop.time()
            with contextlib.suppress(RuntimeError):
                self.transport.resume_reading()
            self._server.reading_resumed(self)

    def peer_closed(self) -> bool:
        """Whether the client closed its side, asked of the kernel: while reading is paused the loop does not say."""
        transport = self.transport
        sock = transport.get_extra_info("socket") if transport is not None else None
        if sock is None:
            return False
        try:
            state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            return False
        return state not in _OPEN_STATES

    def abort(self) -> None:
        """Drop the connection."""
        if self.transport is not None:
            self.transport.abort()

    # Slow clients

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._server.tick, self._tick)

    def _tick(self) -> None:
        """Judge the waiting states by their limits. A connection whose answer is under way has no timer."""
        self._timer = None
        if self.transport is None or self._closing:
            return
        settings = self._server.plane.settings
        now = self.loop.time()
        if self._head_since:
            if now - self._head_since >= settings.header_timeout:
                self.refuse(SlowClient(f"the request head did not arrive within {settings.header_timeout:g} s"))
                return
        elif self._arriving is not None:
            if not self._paused and now - self._last_read >= settings.body_timeout:
                arriving, self._arriving = self._arriving, None
                if arriving is self._active:
                    arriving.client_slow()
                self._closing = True
                return
        elif self._active is not None or self._tunnel is not None:
            return
        elif now - self._last_read >= settings.client_idle:
            self.close()
            return
        self._arm()


_OPEN_STATES = frozenset({1, 2, 3})
"""TCP_ESTABLISHED, TCP_SYN_SENT, TCP_SYN_RECV of the kernel's ``tcp_states.h``."""

_REASONS = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    414: "URI Too Long",
    417: "Expectation Failed",
    424: "Failed Dependency",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
    508: "Loop Detected",
}
