"""A control call that came to a worker, passed on to the director and its answer back, byte for byte."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.core.failures import Failure, Kind
from proxy.core.framing import HOP_BY_HOP, RequestHead
from proxy.data.gathered import Gathered
from proxy.data.upstream import ConnectFailedError, Connection, Head, Upstream
from proxy.errors import Conflict
from proxy.tasks import spawn

if TYPE_CHECKING:
    from proxy.data.front import Front

_DROPPED = HOP_BY_HOP | {b"content-length"}


class DirectorUpstream(Upstream):
    """The director's own listener, a Unix socket that only this user can reach."""

    def __init__(self, path: str) -> None:
        super().__init__("http://director:80", idle_limit=0.0)
        self._path = path

    async def connect(self) -> Connection:
        """Open a connection.

        Raises:
            ConnectFailedError: the director does not listen.
        """
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_unix_connection(lambda: Connection(self), self._path)
        except OSError as error:
            raise ConnectFailedError(Failure(Kind.CONNECT, f"no connection to the director: {error}")) from None
        return connection


class Passed(Gathered):
    """One request on its way to the director, and its answer back."""

    def __init__(self, upstream: DirectorUpstream, client: Front, head: RequestHead, *, limit: int) -> None:
        super().__init__(client, head, limit=limit)
        self._upstream = upstream
        self._answering = False
        self._chunked = False
        self._task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None

    # From the client

    def client_writable(self, writable: bool) -> None:
        """Back-pressure."""
        if self._connection is not None:
            if writable:
                self._connection.resume_reading()
            else:
                self._connection.pause_reading()

    def drop(self) -> None:
        """The director goes on with the call and keeps its outcome."""
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.detach()
            self._connection = None

    def pass_on(self, body: bytes) -> None:
        """Connect to the director and send."""
        self._task = spawn(self._send(body), name="pass on")

    async def _send(self, body: bytes) -> None:
        try:
            connection = await self._upstream.connect()
        except ConnectFailedError as error:
            self._task = None
            self.refused(Conflict(error.failure.detail))
            return
        self._task = None
        if self._over:
            connection.abort()
            return
        self._connection = connection
        extra = b"X-Forwarded-For: %b\r\nConnection: close\r\n" % self._client.peer
        connection.send(self, self.plain_request(body, extra), bodyless_answer=self.head.method == b"HEAD")

    # From the director

    def on_head(self, head: Head) -> None:
        """The head of the director's answer."""
        fields = [pair for pair in head.headers if pair[0].lower() not in _DROPPED]
        self._answering = True
        bodyless = head.status in (204, 304) or self.head.method == b"HEAD"
        self._chunked = head.length is None and not bodyless and self.head.http11
        parts = [b"HTTP/1.1 %d " % head.status, head.reason, b"\r\n"]
        for name, value in fields:
            parts += (name, b": ", value, b"\r\n")
        if head.length is not None:
            parts.append(b"Content-Length: %d\r\n" % head.length)
        elif self._chunked:
            parts.append(b"Transfer-Encoding: chunked\r\n")
        if not self._client.keeps_alive(self):
            parts.append(b"Connection: close\r\n")
        parts.append(b"\r\n")
        self._client.answer_begun()
        self._client.write(b"".join(parts))

    def on_data(self, data: bytes, more: bool) -> None:  # noqa: ARG002 - the interface
        """A piece of it."""
        self._client.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def on_end(self) -> None:
        """It is whole."""
        self._connection = None
        self._over = True
        if self._chunked:
            self._client.write(b"0\r\n\r\n")
        self._client.request_done(self)

    def on_failure(self, failure: Failure) -> None:
        """The director went away in the middle."""
        self._connection = None
        if self._answering:
            self._over = True
            self._client.cut(hard=True)
            self._client.request_done(self)
        else:
            self.refused(Conflict(f"the director did not answer: {failure.detail}"))

    def on_crash(self) -> None:
        """A bug in one of these."""
        self.crashed()

    def on_writable(self, writable: bool) -> None:
        """The whole request was given to the socket at once."""
