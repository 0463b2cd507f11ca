"""The connections to one engine: opened, kept idle for a moment, reused, closed.

aiohttp's client is not used on this way: it re-sends GETs silently, takes bytes that arrive on an idle connection for
the next answer, and costs more than the rest of the proxy (docs/adr/0002).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.core.failures import Failure, Kind
from proxy.data.connection import Connection
from proxy.data.head import Head

__all__ = ["Answer", "ConnectFailedError", "Connection", "FetchError", "Head", "Upstream"]


class Upstream:
    """The connections to one engine.

    Args:
        url: canonical base URL (`proxy.core.addresses.parse_engine_url`).
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
        self.on_lost: Callable[[Kind], None] | None = None
        """Called when a connection died under a running exchange, with how: the engine's process may be gone."""
        self._idle: deque[Connection] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
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
        loop = self._loop
        if loop is None:
            # Kept, because uvloop's get_running_loop() asks the kernel for the process id each time.
            loop = self._loop = asyncio.get_running_loop()
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

    def lost_busy(self, kind: Kind) -> None:
        """A connection died under a running exchange."""
        if self.on_lost is not None:
            self.on_lost(kind)

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
        except (OSError, ValueError) as error:
            # ValueError: a host name that cannot be encoded. ssl.SSLError is an OSError.
            detail = f"no connection to {self.url}: {getattr(error, 'strerror', None) or error}"
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
        repeatable: bool = False,
    ) -> Answer:
        """One whole exchange on a connection of its own, for control calls and probes. Never re-sent, unless it may be.

        Args:
            method: HTTP method.
            target: path and query, without this upstream's prefix.
            headers: end-to-end fields; Host and framing are added here.
            body: None for no body at all (no Content-Length), else the body.
            timeout: seconds for everything; None for no limit.
            limit: bytes of the answer's body.
            connection: an idle connection to use; otherwise a new one is opened and closed.
            repeatable: the engine may get it twice, so an idle connection of the pool will do, which saves half of the
                work of a leg; where the engine had just closed that one, it is sent again on a new one.

        Raises:
            FetchError: no whole answer; its ``failure`` says how, its ``sent`` whether the engine may have seen it.
        """
        sent = False
        own: Connection | None = None
        collector: _Collector | None = None
        data = self.request_head(method.encode("ascii"), target.encode("ascii"), headers, body) + (body or b"")
        try:
            async with asyncio.timeout(timeout):
                if connection is None and repeatable:
                    connection = self.take_idle(asyncio.get_running_loop().time())
                while True:
                    if connection is None:
                        connection = own = await self.connect()
                        own.dedicated = not repeatable
                    collector = _Collector(connection, limit)
                    sent = True
                    connection.send(collector, data, bodyless_answer=method == "HEAD")
                    try:
                        return await collector.done
                    except FetchError as error:
                        if not repeatable or error.failure.kind is not Kind.STALE:
                            raise
                        connection = None
        except ConnectFailedError as error:
            raise FetchError(error.failure, sent=False) from None
        except TimeoutError:
            raise FetchError(Failure(Kind.TIMEOUT, f"no answer within {timeout:g} s"), sent=sent) from None
        finally:
            if own is not None and own.dedicated:
                own.receiver = None
                own.abort()
            elif connection is not None and collector is not None and connection.receiver is collector:
                # Only this exchange may be ended: once it is over, the next one may be on the connection already.
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

    def on_data(self, data: bytes, more: bool) -> None:  # noqa: ARG002 - the interface
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

    def on_crash(self) -> None:
        self.on_failure(Failure(Kind.BROKEN, "the answer could not be taken"))
