"""One client connection: bytes in, requests out, answers back in order.

llhttp (`httptools`) splits the bytes; `proxy.core.framing` refuses what is ambiguous. Requests of the data plane become
an `Exchange`; every other path (control calls, /fleet, /metrics) is handed, one request at a time, to the aiohttp
application (`proxy.data.handoff`). Pipelined requests wait until the one before them is answered.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import httptools

from proxy.core.framing import inspect
from proxy.core.paths import Route
from proxy.core.repeats import Repeats
from proxy.data.exchange import Exchange
from proxy.data.inbound import Inbound
from proxy.data.replies import error_answer
from proxy.data.tunnel import TunnelConnection
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
_REFUSE = Route.REFUSE
_DATA = Route.DATA


class Front(TunnelConnection):
    """One client connection."""

    __slots__ = (
        "_begun",
        "_error",
        "_fields",
        "_frame_bytes",
        "_head_bytes",
        "_head_since",
        "_last_read",
        "_repeats",
        "_timer",
        "_url",
    )

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._repeats = Repeats(server.plane.limits)
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._head_since = 0.0
        self._frame_bytes = 0
        self._last_read = 0.0
        self._error: FleetgateError | None = None
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Front {self.peer.decode('latin-1')} active={self._active!r} queued={len(self._queue)}>"

    # The loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection; over the limit it is refused with an answer."""
        self.opened(transport)
        self._last_read = self.loop.time()
        refusal = self._server.opened(self)
        if refusal is not None:
            self.write(error_answer(refusal, close=True))
            self.linger()
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The client went away: end all that is done for it."""
        self.lost()
        self._server.closed(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tunnel = None
        active, self._active = self._active, None
        queue, self._queue = self._queue, []
        for request in (active, *queue):
            if request is not None:
                try:
                    request.client_gone()
                except Exception:
                    request.crashed()

    def eof_received(self) -> bool:
        """A client that sends no more is treated as gone: it cannot be told from one that closed."""
        return False

    def pause_writing(self) -> None:
        """The client reads slower than the engine writes: only its own stream stops, and not for ever."""
        self.stalls()
        if self._active is not None:
            self._active.client_writable(False)

    def resume_writing(self) -> None:
        """The client caught up."""
        self.caught_up()
        if self._active is not None:
            self._active.client_writable(True)

    def data_received(self, data: bytes) -> None:
        """Parse. Whatever is wrong closes the connection, after an answer that says what."""
        if self._tunnel is not None:
            self._tunnel(data)
            return
        if self.closing or self._deaf:
            return
        if self._tunnel_early is not None:
            self._early(data)
            return
        self._last_read = now = self.loop.time()
        if self._arriving is None:
            if not self._head_since:
                self._head_since = now
            self._head_bytes += len(data)
        else:
            self._frame_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            self._callback_failed(error.__context__)
            return
        except httptools.HttpParserError as error:
            # Bytes after the last request of a connection are nobody's.
            if not self._deaf:
                self.refuse(BadRequest(f"not a valid HTTP/1.1 request: {error}"))
            return
        else:
            if self._arriving is None:
                if self._head_since and self._head_bytes > self._server.max_head:
                    self.refuse(HeadersTooLarge(f"the request head is over {self._server.max_head} bytes"))
            elif self._frame_bytes > self._server.max_head:
                # Chunk extensions or trailers without end.
                self.refuse(HeadersTooLarge(f"over {self._server.max_head} bytes came that belong to no body"))
            if self._queue and not self._deaf:
                # Nobody who generates pipelines: what waits behind a request stays in the socket.
                self.pause_reading()
            return
        self._upgrade(rest)

    def _callback_failed(self, error: BaseException | None) -> None:
        if isinstance(error, FleetgateError):
            self.refuse(error)
            return
        _log.error("a request could not be handled", exc_info=error)
        self.refuse(FleetgateError("the proxy failed to handle the request; see its log"))

    # httptools' side

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
        url, self._url = self._url, b""
        fields = self._fields
        method, version = parser.get_method(), parser.get_http_version()
        head = self._repeats.find(method, url, version, fields)
        if head is None:
            plane = server.plane
            head = inspect(method, url, version, fields, limits=plane.limits, session_headers=plane.session_headers)
            self._repeats.keep(method, url, version, fields, head)
        if head.upgrade:
            self._judge_upgrade(head)
        self._head_since = 0.0
        self._head_bytes = self._frame_bytes = 0
        if head.via is not None and server.plane.name in head.via:
            raise LoopDetected("the request came back to the proxy that sent it; an engine URL points at the proxy")
        owner = server.owner(head.path)
        if owner is _REFUSE:
            raise PathRefused(f"the path {head.path[:128]!r} would be read as a control path; write it plainly")
        self._fields = []
        if owner is _DATA:
            request: Inbound = Exchange(server.plane, self, head)
        else:
            request = server.handoff(self, head)
            self._controls = True
        self._arriving = request
        if self._active is None:
            self._start(request)
        else:
            self._queue.append(request)

    def on_body(self, data: bytes) -> None:
        """A piece of a body."""
        self._frame_bytes = 0
        if self._arriving is not None:
            self._arriving.body_data(data)

    def on_message_complete(self) -> None:
        """The request is whole."""
        request = self._arriving
        if request is not None:
            if not request.head.keep_alive:
                if self._body_skipped(request.head):
                    return
                self._deaf = True
            request.body_end()
            self._arriving = None

    # Requests

    def _start(self, request: Inbound) -> None:
        self._active = request
        self._begun = False
        if self._server.plane.draining and isinstance(request, Exchange):
            request.stopped(self._server.stopping)
            return
        if request.head.expect_continue and not request.body_done:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.begin()

    def keeps_alive(self, request: Inbound) -> bool:
        """Whether the connection may carry another request after this one's answer."""
        if self.closing or self._tunnel_early is not None:
            return False
        if self._server.plane.draining and isinstance(request, Exchange):
            return False
        return request.head.keep_alive and request.body_done

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
            self._answer_nobody(error)
        elif not request.body_done or self._tunnel_early is not None:
            # The rest of the body is read and thrown away for a moment, or a reset would take the answer with it.
            self.linger()
        elif not self.keeps_alive(request) or self.transport.is_closing():
            self.close()
        elif self._queue:
            self.loop.call_soon(self._next)
        else:
            self._next()

    def _next(self) -> None:
        if self.transport is None or self._active is not None or self.closing:
            return
        if self._timer is None:
            self._arm()
        if not self._queue:
            self._resume_head()
            return
        request = self._queue.pop(0)
        if not self._queue and self._error is None:
            self._resume_head()
        try:
            self._start(request)
        except Exception:
            request.crashed()

    def _resume_head(self) -> None:
        if self._head_since:
            self._head_since = self.loop.time()
        if self.reading_paused:
            self.resume_reading()

    def refuse(self, error: FleetgateError) -> None:
        """Answer with an error when it is its turn, and read nothing more."""
        arriving, self._arriving = self._arriving, None
        self._deaf = True
        if self._active is None:
            self._answer_nobody(error)
        elif self._active is not arriving:
            if arriving is not None:
                # It is queued and will never be whole; nobody began it.
                self._queue.remove(arriving)
                arriving.client_gone()
            self._error = error
        elif self._begun:
            # Its answer has begun; the rest of its body is nonsense.
            self.cut(hard=True)
        else:
            arriving.refused(error)

    def _answer_nobody(self, error: FleetgateError) -> None:
        """An error about what never became a request."""
        self._server.plane.stats.answered("other", error.status)
        fields, self._fields = self._fields, []
        sent = next((value for name, value in fields if value and name.lower() == b"x-request-id"), None)
        self.write(error_answer(error, close=True, extra=[self._id_field(sent)]))
        self.linger()

    def _id_field(self, sent: bytes | None) -> tuple[str, str]:
        plane = self._server.plane
        return "X-Request-Id", (sent or plane.new_id(plane.next_order())).decode("latin-1")

    def send_error(self, error: FleetgateError, request: Inbound) -> None:
        """A whole answer of the proxy's own, in the OpenAI error shape."""
        if not isinstance(request, Exchange):
            extra = [self._id_field(request.head.request_id)]
        else:
            extra = [
                ("X-Request-Id", request.request_id),
                ("X-Fleetgate-Attempts", str(request.attempts)),
                ("X-Fleetgate-Weight-Version", self._server.plane.version_header().decode("latin-1")),
            ]
            if request.last_engine is not None:
                extra.append(("X-Fleetgate-Engine", request.last_engine.id))
        close = not self.keeps_alive(request)
        self.write(error_answer(error, close=close, bodyless=request.head.method == b"HEAD", extra=extra))

    def cut(self, *, hard: bool = False) -> None:
        """End the connection so that the answer cannot pass for a whole one.

        Args:
            hard: drop what is buffered; otherwise it gets a moment to leave first.
        """
        active = self._active
        # An HTTP/1.0 answer ends with its connection: only a reset tells a cut from an end.
        if hard or (active is not None and not active.head.http11):
            self.reset()
        else:
            self.close()

    # Reading

    def resume_reading(self) -> None:
        """Go on reading; the time until now is not the client's."""
        if self.reading_paused:
            self._last_read = self.loop.time()
        super().resume_reading()

    # Slow clients

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._server.tick, self._tick)

    def _tick(self) -> None:
        """Judge the waiting states by their limits. A connection whose answer is under way has no timer."""
        self._timer = None
        if self.transport is None or self.closing:
            return
        settings = self._server.plane.settings
        now = self.loop.time()
        if self._head_since:
            if now - self._head_since >= settings.header_timeout and not self.reading_paused:
                self.refuse(SlowClient(f"the request head did not arrive within {settings.header_timeout:g} s"))
                return
        elif self._arriving is not None:
            if not self.reading_paused and now - self._last_read >= settings.body_timeout:
                arriving, self._arriving = self._arriving, None
                if arriving is self._active:
                    arriving.client_slow()
                else:
                    self.close()
                return
        elif self._active is not None or self._tunnel is not None:
            return
        elif now - self._last_read >= settings.client_idle:
            self.close()
            return
        self._arm()
