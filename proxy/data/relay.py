"""An answer on its way to one client: head, pieces, end; or an error event and a cut.

From the first byte on the request cannot be sent again, so everything here is final. A cut answer never passes for a
whole one: inside a stream the client first gets one error event in the route's own protocol, then the connection ends
without the closing chunk (RFC 9112 section 8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core import routes
from proxy.core.sse import ends_event, looks_whole
from proxy.data.flood import BURST

if TYPE_CHECKING:
    from proxy.data.exchange import Exchange
    from proxy.data.upstream import Head
    from proxy.errors import FleetgateError

TAIL = 512
"""Bytes of the end of an answer kept where only the end of the connection delimits it."""

JOINED = 16_384
"""Bytes below which a piece waits for the next one of the same turn: copying them costs less than a system call."""


class Relay:
    """Writes one answer.

    Args:
        exchange: the request that is answered.

    Attributes:
        stream: the answer is an event stream.
        begun: the head of an answer was written.
        pinging: its head went out early, with the first ping to a held stream.
        bytes_out: bytes of body written.
    """

    __slots__ = (
        "_burst",
        "_chunked",
        "_delimited",
        "_exchange",
        "_flood",
        "_stated",
        "_tail",
        "_unsent",
        "_waiting",
        "_wrote",
        "begun",
        "bytes_out",
        "pinging",
        "stream",
    )

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._chunked = False
        self._delimited = True  # by the engine
        self._stated = False  # the client was told a length
        self._tail = b""
        self.stream = False
        self.begun = False
        self.pinging = False
        self.bytes_out = 0
        self._unsent = b""
        self._flood = exchange.plane.flood
        self._wrote = 0.0
        self._burst = 0
        self._waiting = False

    def begin(self, head: Head, *, more: bool = False) -> None:
        """Pass on the head of an engine's answer.

        Args:
            head: the head.
            more: a call of `data` or `end` follows in this turn of the loop: what is small waits for it, so that both
                leave in one system call.
        """
        exchange = self._exchange
        request = exchange.head
        no_body = request.method == b"HEAD" or head.status in (204, 304)
        self._delimited = no_body or head.chunked or head.length is not None
        if self.pinging:
            return
        said = head.fields()
        lines = said.lines
        if head.length is not None and not head.chunked:
            self._stated = True
            if head.status != 204 and not (no_body and head.length == 0):
                lines.append(b"Content-Length: %d\r\n" % head.length)
        elif not no_body:
            self._chunked = request.http11
        if self.stream:
            # nginx buffers an event stream unless it is told not to.
            lines.append(b"X-Accel-Buffering: no\r\n")
        self._head(head.status, head.reason, lines, has_id=said.has_id, more=more)

    def switch(self, head: Head) -> None:
        """Pass on a 101 to WebSocket (RFC 6455 section 4.2.2)."""
        said = head.fields()
        lines = [*said.lines, b"Connection: Upgrade\r\nUpgrade: websocket\r\n"]
        self._head(101, head.reason or b"Switching Protocols", lines, has_id=said.has_id)

    def ping(self) -> None:
        """Keep a held stream's connection busy with an SSE comment, which clients skip.

        The first one commits the answer to 200 and an event stream, whose head says nothing of an engine.
        """
        if not self.pinging:
            self.pinging = True
            self.stream = True
            self._chunked = self._exchange.head.http11
            lines = [b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"]
            self._head(200, b"OK", lines)
        self.write(b": held\n\n")

    def _head(
        self,
        status: int,
        reason: bytes,
        lines: list[bytes],
        *,
        has_id: bool = False,
        more: bool = False,
    ) -> None:
        exchange = self._exchange
        client = exchange.client
        plane = exchange.plane
        parts: list[bytes] = [b"HTTP/1.1 %d " % status, reason, b"\r\n", *lines]
        engine = exchange.engine
        if engine is not None:
            # With a first ping nobody knows yet who will answer, from which weights, after how many attempts.
            parts += (b"X-Fleetgate-Engine: ", engine.id.encode("ascii"), b"\r\nX-Fleetgate-Weight-Version: ")
            parts += (exchange.version, b"\r\nX-Fleetgate-Attempts: %d\r\n" % exchange.attempts)
        if not has_id:
            parts += (b"X-Request-Id: ", exchange.id_bytes, b"\r\n")
        if self._chunked:
            parts.append(b"Transfer-Encoding: chunked\r\n")
        if status != 101 and not client.keeps_alive(exchange):
            parts.append(b"Connection: close\r\n")
        parts.append(b"\r\n")
        self.begun = True
        client.answer_begun()
        plane.stats.first_byte_seconds.observe(client.loop.time() - exchange.started)
        self._out(b"".join(parts), more=more)

    def data(self, data: bytes, now: float, more: bool = False) -> None:
        """Pass on a piece of the body.

        Args:
            data: the piece.
            now: loop time (seconds).
            more: as in `begin`.
        """
        if not self._delimited:
            self._tail = (self._tail + data)[-TAIL:]
        elif self.stream:
            self._tail = data[-4:] if len(data) >= 4 else (self._tail + data)[-4:]
        if self.stream and not more and len(data) < JOINED:
            gap = now - self._wrote
            if gap > self._flood.window * 2:
                self._burst = 0
            elif self._burst < BURST:
                self._burst += 1
            elif gap < self._flood.window:
                self._hold_back(data)
                return
            self._wrote = now
        self.bytes_out += len(data)
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if more or self._unsent:
            self._out(data, more=more)
        else:
            transport = self._exchange.client.transport
            if transport is not None and not transport.is_closing():
                transport.write(data)

    def _hold_back(self, data: bytes) -> None:
        """In a flood: write it with what comes until the window is over, and read that in one go as well."""
        self.write(data, more=True)
        if not self._waiting:
            self._waiting = True
            exchange = self._exchange
            exchange.client_writable(False)
            self._flood.later(self, exchange.client.loop)

    def flush(self) -> None:
        """Write what `data` held back, and go on reading."""
        self._waiting = False
        exchange = self._exchange
        client = exchange.client
        try:
            if self._unsent:
                self._wrote = client.loop.time()
                self._out(b"", more=False)
            if client.taking:
                exchange.client_writable(True)
        except Exception:
            exchange.crashed()

    def write(self, data: bytes, *, more: bool = False) -> None:
        """Write a piece of the body, framed. `data`, called per event, does the same without a further call."""
        self.bytes_out += len(data)
        self._out(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data, more=more)

    def _out(self, data: bytes, *, more: bool) -> None:
        if self._unsent:
            data = self._unsent + data
            self._unsent = b""
        if more and len(data) < JOINED:
            self._unsent = data
        else:
            self._exchange.client.write(data)

    def whole(self) -> bool:
        """Whether an answer whose engine ended it is complete.

        Only the end of the connection may delimit it; then its last bytes have to tell a whole generation from one
        that a dying engine left behind.
        """
        return self._delimited or not self._exchange.generation or looks_whole(self._tail, stream=self.stream)

    def end(self) -> None:
        """The answer is whole."""
        if self._chunked:
            self._out(b"0\r\n\r\n", more=False)
        elif self._unsent:
            self._out(b"", more=False)

    def cut(self, error: FleetgateError) -> None:
        """The answer broke off: say so in the stream's own protocol where one has begun, then cut the connection."""
        kind = routes.dialect(self._exchange.head.path)
        self.end_with(
            routes.error_event(kind, message=error.message, error_type=error.kind, code=error.code, status=error.status)
        )

    def end_with(self, event: bytes) -> None:
        """Write a last event, an error, where a stream has begun, then cut the connection."""
        exchange = self._exchange
        if self._unsent:
            self._out(b"", more=False)
        if not self.stream or self._stated:
            # JSON, or a stream of a stated length, which more bytes could make look complete.
            exchange.client.cut(hard=True)
            return
        self.write(event if ends_event(self._tail) else b"\n\n" + event)
        exchange.client.cut()
