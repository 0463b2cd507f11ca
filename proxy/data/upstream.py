"""Connections to one engine: open, reuse, one exchange at a time, bytes in and out.

aiohttp's client is not used on this way: it re-sends GETs silently, takes bytes that arrive on an idle connection for
the next answer, and costs more than the rest of the proxy (docs/adr). Framing is parsed by llhttp (`httptools`).

This is the seam at which foreign exceptions become a `Failure`.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from proxy.core.failures import Failure, Kind

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an engine's answer.

    Attributes:
        status: HTTP status code, never an interim 1xx other than 101.
        reason: reason phrase as sent.
        headers: fields in order and case as sent.
        length: value of Content-Length, or None.
        chunked: the body ends with a zero chunk.
        keep_alive: the engine keeps the connection.
    """

    status: int
    reason: bytes
    headers: Headers
    length: int | None
    chunked: bool
    keep_alive: bool

    def get(self, name: bytes) -> bytes | None:
        """The first field of this (lower-case) name."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None


class Receiver(Protocol):
    """Who gets the answer of one exchange. None of these may raise."""

    def on_head(self, head: Head) -> None:
        """The head is complete. Called once, before any data."""

    def on_data(self, data: bytes) -> None:
        """A piece of the body, without framing."""

    def on_end(self) -> None:
        """The answer is whole."""

    def on_failure(self, failure: Failure) -> None:
        """The exchange is over and its answer is not whole. Nothing follows."""

    def on_writable(self, writable: bool) -> None:
        """The engine takes (no) more of the request body for now."""


class Connection(asyncio.Protocol):
    """One connection to an engine. Either idle in the pool, or busy with one `Receiver`."""

    __slots__ = (
        "_body",
        "_bodyless",
        "_complete",
        "_dirty",
        "_fields",
        "_head",
        "_head_bytes",
        "_head_done",
        "_parser",
        "_poller",
        "_reason",
        "closed",
        "idle_since",
        "receiver",
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
        self.idle_since = 0.0
        self.tunnel: Callable[[bytes], None] | None = None
        self._poller: select.poll | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._fields: Headers = []
        self._reason = b""
        self._body: list[bytes] = []
        self._head: Head | None = None
        self._head_bytes = 0
        self._head_done = False
        self._complete = False
        self._dirty = False
        self._bodyless = False

    # The loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport and a poller that tells whether an idle connection holds bytes."""
        # uvloop's transports have the interface of asyncio.Transport without being one.
        self.transport = cast("asyncio.Transport", transport)
        self.upstream.connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            self._poller = select.poll()
            self._poller.register(sock.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the receiver what that means for its exchange."""
        self.closed = True
        self.transport = None
        self.upstream.forget(self)
        if self.tunnel is not None:
            tunnel, self.tunnel = self.tunnel, None
            tunnel(b"")
            return
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        self.upstream.lost_busy(self)
        receiver.on_failure(self._why_lost(exc))

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
        """An answer that is delimited by the end of the connection ends here (RFC 9112 section 6.3)."""
        head = self._head
        if head is not None and self.receiver is not None and head.length is None and not head.chunked:
            self._complete = True
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
        if self.tunnel is not None:
            self.tunnel(data)
            return
        if self.receiver is None:
            # Nobody asked: these bytes must never become the next request's answer.
            self.abort()
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
        length: int | None = None
        chunked = False
        for name, value in self._fields:
            size = len(name)
            if size == 14 and name.lower() == b"content-length":
                length = int(value)
            elif size == 17 and name.lower() == b"transfer-encoding":
                chunked = value.lower().endswith(b"chunked")
        bodyless = self._bodyless or status in (204, 304)
        if bodyless:
            length = 0 if length is None else length
        self._head = Head(status, self._reason, self._fields, length, chunked, self._parser.should_keep_alive())
        if self._bodyless and (length or chunked):
            # llhttp cannot be told that an answer to HEAD has no body; this connection ends with it.
            self._complete = True
            self._dirty = True

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if not self._complete:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """The end, unless it was an interim answer."""
        if self._head_done:
            self._complete = True
        else:
            self._fields = []
            self._reason = b""

    # Our side

    def _deliver(self) -> None:
        receiver = self.receiver
        if receiver is None:
            return
        head = self._head
        if head is not None and self._head_bytes > 0:
            self._head_bytes = -1
            receiver.on_head(head)
        if self._body and self.receiver is receiver:
            parts = self._body
            self._body = []
            receiver.on_data(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._complete and self.receiver is receiver:
            self.receiver = None
            self._release()
            receiver.on_end()

    def _release(self) -> None:
        head = self._head
        if self._dirty or head is None or not head.keep_alive or self.closed:
            self.close()
        else:
            self._reset()
            self.upstream.put_idle(self)

    def _fail(self, failure: Failure) -> None:
        receiver, self.receiver = self.receiver, None
        self.abort()
        if receiver is not None:
            receiver.on_failure(failure)

    def _switch(self, rest: bytes) -> None:
        """101: from here on bytes are the other protocol's. The receiver sets `tunnel` inside `on_head`."""
        receiver = self.receiver
        if receiver is not None and self._head is not None:
            self._head_bytes = -1
            receiver.on_head(self._head)
        if self.tunnel is None:
            self.abort()
        elif rest:
            self.tunnel(rest)

    def send(self, receiver: Receiver, data: bytes, *, bodyless_answer: bool = False) -> None:
        """Begin an exchange: write the head (and as much of the body as is there) and wait for the answer.

        Args:
            receiver: gets the answer.
            data: bytes to write.
            bodyless_answer: the request is a HEAD.
        """
        assert self.receiver is None
        self.receiver = receiver
        self._bodyless = bodyless_answer
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
        if self.transport is not None:
            with contextlib.suppress(RuntimeError):
                self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on taking the answer."""
        if self.transport is not None:
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


class Upstream:
    """The connections to one engine.

    Args:
        url: canonical base URL (`proxy.config.parse_engine_url`).
        idle_limit: seconds that an idle connection may be reused for; vLLM closes its own after 5.
        connect_timeout: seconds.
        header_limit: bytes of an answer's head.
        ssl_context: for https.
    """

    def __init__(
        self,
        url: str,
        *,
        idle_limit: float = 2.0,
        connect_timeout: float = 5.0,
        header_limit: int = 65_536,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.encode("ascii")
        self.host_header = parts.netloc.encode("ascii")
        self.idle_limit = idle_limit
        self.connect_timeout = connect_timeout
        self.header_limit = header_limit
        self.connections: set[Connection] = set()
        self.on_lost: Callable[[], None] | None = None
        """Called when a connection died under a running exchange: the engine's process may be gone."""
        self._idle: deque[Connection] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self.ssl_context = (ssl_context or ssl.create_default_context()) if parts.scheme == "https" else None

    def __repr__(self) -> str:
        return f"<Upstream {self.url} open={len(self.connections)} idle={len(self._idle)}>"

    def take_idle(self, now: float) -> Connection | None:
        """An idle connection that may be reused, or None. The youngest first, so that old ones expire."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable(now):
                connection.reused = True
                return connection
            connection.abort()
        return None

    def put_idle(self, connection: Connection) -> None:
        """Keep a connection for the next request."""
        if self.idle_limit <= 0:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self.idle_limit, self._expire)

    def _expire(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._idle and now - self._idle[0].idle_since >= self.idle_limit:
            self._idle.popleft().close()
        if self._idle:
            oldest = self._idle[0].idle_since
            self._sweep = loop.call_later(max(0.01, oldest + self.idle_limit - now), self._expire)

    def forget(self, connection: Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if connection.receiver is None:
            with contextlib.suppress(ValueError):
                self._idle.remove(connection)

    def lost_busy(self, connection: Connection) -> None:  # noqa: ARG002 - the signature of an event
        """A connection died under a running exchange."""
        if self.on_lost is not None:
            self.on_lost()

    async def connect(self) -> Connection:
        """Open a connection.

        Raises:
            ConnectFailedError: it could not be opened within the limit.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self.host, self.port, ssl=self.ssl_context
                )
        except TimeoutError:
            detail = f"no connection to {self.url} within {self.connect_timeout:g} s"
            raise ConnectFailedError(Failure(Kind.CONNECT, detail)) from None
        except (OSError, ssl.SSLError) as error:
            detail = f"no connection to {self.url}: {error.strerror or error}"
            raise ConnectFailedError(Failure(Kind.CONNECT, detail)) from None
        return connection

    def drop_idle(self) -> None:
        """Close all idle connections: the process behind them was replaced or is to be left alone."""
        while self._idle:
            self._idle.pop().abort()

    def close(self) -> None:
        """Close everything; running exchanges fail as lost."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in list(self.connections):
            connection.abort()
        self._idle.clear()

    async def fetch(
        self,
        method: str,
        target: str,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes | None = None,
        timeout: float | None = None,
        limit: int = 256 << 20,
        connection: Connection | None = None,
    ) -> Answer:
        """One whole exchange on a connection of its own, for control calls and probes. Never re-sent.

        Args:
            method: HTTP method.
            target: path and query, without this upstream's prefix.
            headers: end-to-end fields; Host and framing are added here.
            body: None for no body at all (no Content-Length), else the body.
            timeout: seconds for everything; None for no limit.
            limit: bytes of the answer's body.
            connection: an idle connection to use; otherwise a new one is opened and closed.

        Raises:
            FetchError: no whole answer; its ``failure`` says how, its ``sent`` whether the engine may have seen it.
        """
        sent = False
        own: Connection | None = None
        try:
            async with asyncio.timeout(timeout):
                if connection is None:
                    connection = own = await self.connect()
                collector = _Collector(connection, limit)
                sent = True
                connection.send(
                    collector,
                    self.request_head(method.encode("ascii"), target.encode("ascii"), headers, body) + (body or b""),
                    bodyless_answer=method == "HEAD",
                )
                return await collector.done
        except ConnectFailedError as error:
            raise FetchError(error.failure, sent=False) from None
        except TimeoutError:
            raise FetchError(Failure(Kind.TIMEOUT, f"no answer within {timeout:g} s"), sent=sent) from None
        finally:
            if own is not None:
                own.receiver = None
                own.abort()
            elif connection is not None and connection.receiver is not None:
                connection.detach()

    def request_head(
        self, method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes | None
    ) -> bytes:
        """A request head with Host first and the framing of ``body``."""
        parts = [method, b" ", self.prefix, target, b" HTTP/1.1\r\nHost: ", self.host_header, b"\r\n"]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if body is not None:
            parts += (b"Content-Length: ", str(len(body)).encode("ascii"), b"\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)


class ConnectFailedError(Exception):
    """No connection could be opened."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class FetchError(Exception):
    """No whole answer came.

    Attributes:
        failure: how it failed.
        sent: whether the engine may have seen the request.
    """

    def __init__(self, failure: Failure, *, sent: bool) -> None:
        super().__init__(failure.detail)
        self.failure = failure
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    head: Head
    body: bytes

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.head.status


class _Collector:
    """Gathers one answer for `Upstream.fetch`."""

    def __init__(self, connection: Connection, limit: int) -> None:
        self._connection = connection
        self._limit = limit
        self._head: Head | None = None
        self._body = bytearray()
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def on_head(self, head: Head) -> None:
        self._head = head

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._limit:
            self._connection.detach()
            self.on_failure(Failure(Kind.BROKEN, f"the answer is over {self._limit} bytes"))

    def on_end(self) -> None:
        if not self.done.done() and self._head is not None:
            self.done.set_result(Answer(self._head, bytes(self._body)))

    def on_failure(self, failure: Failure) -> None:
        if not self.done.done():
            self.done.set_exception(FetchError(failure, sent=True))

    def on_writable(self, writable: bool) -> None:
        """The whole body was given to the transport at once."""
