"""One connection to an engine: one exchange at a time, bytes in and out.

Framing is parsed by llhttp (`httptools`). What a connection has to say goes to its `Receiver`; what went wrong comes as
a `Failure`, so this is the seam at which foreign exceptions end. An exception inside a receiver never leaves a client
hanging: it is told to end its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import httptools

from proxy.core.answers import read_fields
from proxy.core.failures import Failure, Kind
from proxy.data.head import Head, Headers, Receiver

if TYPE_CHECKING:
    from proxy.data.upstream import Upstream

_log = logging.getLogger("fleetgate.connection")

DEAD_PEER = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""Seconds of silence before the kernel asks whether a peer is still there, seconds between its questions, and how many
it asks. A machine that lost its power sends no end of its connections; a silent rollout is told apart within 35 s."""


def watch_peer(sock: socket.socket) -> None:
    """Let the kernel notice a peer that vanished without closing (RFC 9293 section 3.8.4)."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in DEAD_PEER:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Connection(asyncio.Protocol):
    """One connection to an engine. Either idle in the pool, or busy with one `Receiver`."""

    __slots__ = (
        "_body",
        "_bodyless",
        "_complete",
        "_dirty",
        "_end",
        "_fields",
        "_head",
        "_head_bytes",
        "_head_done",
        "_parser",
        "_poller",
        "_reading",
        "_reason",
        "_refused",
        "closed",
        "dedicated",
        "idle_since",
        "on_body",
        "receiver",
        "request_open",
        "reused",
        "transport",
        "tunnel",
        "upstream",
    )

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.transport: asyncio.Transport | None = None
        self.receiver: Receiver | None = None
        self.reused = False
        self.closed = False
        self.dedicated = False
        """For one exchange only: never given to another."""
        self.idle_since = 0.0
        self.tunnel: Callable[[bytes], None] | None = None
        self._reading = True
        self._poller: select.poll | None = None
        self._body: list[bytes] = []
        self.on_body = self._body.append
        """httptools calls it with each piece of a body: a function of C, so that a small chunk runs no Python."""
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._fields: Headers = []
        self._reason = b""
        self._body.clear()
        self._head: Head | None = None
        self._head_bytes = 0
        self._head_done = False
        self._complete = False
        self._end = 0
        self._dirty = False
        self._bodyless = False
        self._refused = ""
        self.request_open = False

    # The loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport and a poller that tells whether an idle connection holds bytes."""
        # uvloop's transports have the interface of asyncio.Transport without being one.
        self.transport = cast("asyncio.Transport", transport)
        self.upstream.connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            watch_peer(sock)
            self._poller = select.poll()
            self._poller.register(sock.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the receiver what that means for its exchange."""
        self.closed = True
        self.transport = None
        self.upstream.forget(self)
        receiver, self.receiver = self.receiver, None
        tunnel, self.tunnel = self.tunnel, None
        if receiver is None:
            return
        try:
            if tunnel is not None:
                tunnel(b"")
                return
            failure = self._why_lost(exc)
            self.upstream.lost_busy(failure.kind)
            receiver.on_failure(failure)
        except Exception:
            receiver.on_crash()

    def _why_lost(self, exc: Exception | None) -> Failure:
        detail = f"{type(exc).__name__}: {exc}" if exc is not None else "the engine closed the connection"
        if self._head is not None:
            return Failure(Kind.CUT, f"{detail} inside its answer")
        if self._head_bytes:
            return Failure(Kind.CUT, f"{detail} inside the head of its answer")
        if self.reused:
            return Failure(Kind.STALE, f"{detail} (a reused connection, no answer byte)")
        return Failure(Kind.LOST, f"{detail} before any answer byte")

    def eof_received(self) -> bool:
        """An answer that only this delimits ends here (RFC 9112 section 6.3); a tunnel ends with `connection_lost`."""
        head = self._head if self.tunnel is None else None
        if head is not None and self.receiver is not None and head.length is None and not head.chunked:
            self._finish()
            self._dirty = True
            self._deliver()
        return False

    def pause_writing(self) -> None:
        """The engine reads slower than the client sends."""
        if self.receiver is not None:
            self.receiver.on_writable(False)

    def resume_writing(self) -> None:
        """The engine caught up."""
        if self.receiver is not None:
            self.receiver.on_writable(True)

    def data_received(self, data: bytes) -> None:
        """Parse, then deliver what this read brought in one go."""
        receiver = self.receiver
        if receiver is None:
            # Nobody asked: these bytes must never become the next request's answer.
            self.abort()
            return
        if self.tunnel is not None:
            self.tunnel(data)
            return
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._switch(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            if self._complete:
                self._dirty = True
            else:
                self._fail(Failure(Kind.BROKEN, f"not a valid HTTP answer: {error}"))
                return
        if self._head_bytes < 0 and not self._complete:
            # In the middle of an answer, as most of what is ever read.
            parts = self._body
            if parts:
                piece = b"".join(parts)
                parts.clear()
                try:
                    receiver.on_data(piece, False)
                except Exception:
                    self._crashed(receiver)
            return
        if self._refused:
            self._fail(Failure(Kind.BROKEN, self._refused))
            return
        if not self._head_done and self._head_bytes > self.upstream.header_limit:
            self._fail(Failure(Kind.BROKEN, f"the head of the answer is over {self.upstream.header_limit} bytes"))
            return
        self._deliver()

    # httptools' side

    def on_message_begin(self) -> None:
        """A message that begins after ours is complete was not asked for."""
        if self._complete:
            self._dirty = True

    def on_status(self, status: bytes) -> None:
        """Reason phrase, maybe in pieces."""
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        """One field; fields after the body are trailers, which are dropped (RFC 9110 section 6.5.1)."""
        if not self._head_done and not self._complete:
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Build the head, unless it is interim."""
        if self._complete:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            return
        self._head_done = True
        said = read_fields(self._fields)
        length = said.length
        coding = said.coding
        if coding is not None and coding.lower() != b"chunked":
            # Other codings would have to be undone here; no engine that was not broken sends one unasked.
            self._refused = f"the answer has the transfer coding {coding[:64]!r}, which was not asked for"
        if self._bodyless and length != 0 and status not in (204, 304):
            # llhttp cannot be told that an answer to HEAD has no body, so this connection ends with it.
            self._finish()
            self._dirty = True
        if length is None and (self._bodyless or status in (204, 304)):
            length = 0
        self._head = Head(
            status, self._reason, self._fields, length, coding is not None, self._parser.should_keep_alive(), said
        )

    def on_message_complete(self) -> None:
        """The end, unless it was an interim answer."""
        if self._head_done:
            self._finish()
        else:
            self._fields = []
            self._reason = b""

    def _finish(self) -> None:
        """The answer is whole: pieces of a body that follow are not its own."""
        if not self._complete:
            self._complete = True
            self._end = len(self._body)

    # Our side

    @property
    def has_more(self) -> bool:
        """Inside a receiver's event: whether another one follows in the same turn of the loop."""
        return self._complete or bool(self._body)

    def _crashed(self, receiver: Receiver) -> None:
        self.receiver = None
        self.abort()
        receiver.on_crash()

    def _deliver(self) -> None:
        receiver = self.receiver
        if receiver is None:
            return
        try:
            head = self._head
            if head is not None and self._head_bytes > 0:
                self._head_bytes = -1
                receiver.on_head(head)
            if self._complete:
                del self._body[self._end :]
            if self._body and self.receiver is receiver:
                data = b"".join(self._body)
                self._body.clear()
                receiver.on_data(data, self._complete)
            if self._complete and self.receiver is receiver:
                self.receiver = None
                self._release()
                receiver.on_end()
        except Exception:
            self._crashed(receiver)

    def _release(self) -> None:
        """The answer is whole: the connection may serve again if both sides are through with the exchange."""
        head = self._head
        if self._dirty or self.request_open or self.dedicated or head is None or not head.keep_alive or self.closed:
            # An engine that answered before it had the whole request would take the next one for the rest of it.
            self.close()
            return
        self._reset()
        # A slow client may have stopped the reading in the very read that brought the end.
        self.resume_reading()
        self.upstream.put_idle(self)

    def _fail(self, failure: Failure) -> None:
        receiver, self.receiver = self.receiver, None
        self.abort()
        if receiver is not None:
            try:
                receiver.on_failure(failure)
            except Exception:
                receiver.on_crash()

    def _switch(self, rest: bytes) -> None:
        """101: from here on bytes are the other protocol's. The receiver sets `tunnel` inside `on_head`."""
        receiver = self.receiver
        if receiver is None or self._head is None:
            self.abort()
            return
        self._head_bytes = -1
        try:
            receiver.on_head(self._head)
            if self.tunnel is not None and rest:
                self.tunnel(rest)
        except Exception:
            receiver.on_crash()
        if self.tunnel is None:
            self.abort()

    def send(self, receiver: Receiver, data: bytes, *, bodyless_answer: bool = False, open_body: bool = False) -> None:
        """Begin an exchange: write the head (and as much of the body as is there) and wait for the answer.

        Args:
            receiver: gets the answer.
            data: bytes to write.
            bodyless_answer: the request is a HEAD.
            open_body: more of the body follows by `write`; `request_open` is cleared after the last piece.
        """
        assert self.receiver is None
        self.receiver = receiver
        self._bodyless = bodyless_answer
        self.request_open = open_body
        transport = self.transport
        if transport is None or transport.is_closing():
            # Dead between the check and now: a fresh look at the loop's next turn keeps callers simple.
            self.receiver = None
            kind = Kind.STALE if self.reused else Kind.LOST
            asyncio.get_running_loop().call_soon(receiver.on_failure, Failure(kind, "the connection was closing"))
            return
        transport.write(data)

    def write(self, data: bytes) -> None:
        """More of the request body."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def pause_reading(self) -> None:
        """Take no more of the answer for now (the client is slow)."""
        if self._reading and self.transport is not None:
            self._reading = False
            with contextlib.suppress(RuntimeError):
                self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on taking the answer."""
        if not self._reading and self.transport is not None:
            self._reading = True
            with contextlib.suppress(RuntimeError):
                self.transport.resume_reading()

    def detach(self) -> None:
        """The receiver wants nothing more: end the exchange and the connection, which aborts it in vLLM."""
        self.receiver = None
        self.abort()

    def usable(self, now: float) -> bool:
        """Whether an idle connection may carry another request: open, young enough and silent.

        Bytes or an end of stream on an idle connection mean that it is dead or poisoned, even if the loop has not
        told us yet.
        """
        if self.closed or self.transport is None or self.transport.is_closing():
            return False
        if now - self.idle_since > self.upstream.idle_limit:
            return False
        return self._poller is None or not self._poller.poll(0)

    def close(self) -> None:
        """Close after what is buffered has been written."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()
