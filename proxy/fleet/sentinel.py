"""One connection per engine that only probes use, kept open so that its end tells of a dead process at once.

A server may end an idle connection whenever it likes (RFC 9112 section 9.3): uvicorn with a keep-alive of 0 does so
after each answer. Its end then tells nothing, so such an engine is watched by a second connection that never carries a
request: a keep-alive limit counts from an answer, and uvicorn has none for a first request. Where the server does not
leave that one open either, ends are no news any more until one has lasted. The prober must then ask each time which
process answers, and one that is replaced between two probes, with no request at it or in between, shows at the second.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.core.failures import Failure, Kind
from proxy.data.upstream import Answer, ConnectFailedError, Connection, FetchError, Upstream
from proxy.fleet.engine import Engine

KEPT_LONG_ENOUGH = 4.5
"""Seconds of idling after which a server may close a connection in good order: uvicorn does after 5."""


class Sentinel(Upstream):
    """A pool of one connection, whose loss while it is idle is an event.

    Args:
        url: canonical base URL.
        on_end: called when the idle connection ended although the server had promised to keep it, and sooner than
            servers close idle connections; or when the silent one ended.
        connect_timeout: seconds.
        lasting: seconds after which a silent connection counts as one that the server keeps: those that end sooner
            time after time are not told of, so they cause no more looks than one in this time.
        ssl_context: for https.
    """

    def __init__(
        self,
        url: str,
        on_end: Callable[[], None],
        *,
        connect_timeout: float,
        lasting: float = 2.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(url, idle_limit=float("inf"), connect_timeout=connect_timeout, ssl_context=ssl_context)
        self._on_end = on_end
        self._lasting = lasting
        self._kept: Connection | None = None
        self._silent: Connection | None = None
        self.closes = False
        """The server ends idle connections sooner than others do: their ends say nothing of its process."""
        self._in_vain = False

    def put_idle(self, connection: Connection) -> None:
        """The probe was answered and the server keeps the connection."""
        if self.closes or (self._kept is not None and self._kept is not connection):
            connection.close()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._kept = connection
        self._drop_silent()

    def forget(self, connection: Connection) -> None:
        """A connection is gone: if it was the kept one and idle, or the silent one, that is news."""
        super().forget(connection)
        if connection is not self._kept and connection is not self._silent:
            return
        lived = asyncio.get_running_loop().time() - connection.idle_since
        if connection is self._silent:
            self._silent = None
            before, self._in_vain = self._in_vain, lived < self._lasting
            news = not (before and self._in_vain)
        else:
            self._kept = None
            if connection.receiver is not None:
                return
            self.closes = True
            news = lived < KEPT_LONG_ENOUGH
        if news:
            self._on_end()

    def drop(self) -> None:
        """Close what is kept without telling anybody."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.abort()
        self._drop_silent()

    def _drop_silent(self) -> None:
        silent, self._silent = self._silent, None
        if silent is not None:
            silent.abort()

    def close(self) -> None:
        """Close everything without telling anybody."""
        self._kept = self._silent = None
        super().close()

    def start_over(self) -> None:
        """Another process answers: the connection that ended was ended by the one before."""
        self.closes = self._in_vain = False

    async def ask(self, target: str, *, timeout: float) -> Answer:
        """One GET on the kept connection, or on a new one that is kept from then on.

        Raises:
            FetchError: no whole answer; a kept connection that broke is not tried again here.
        """
        if self.closes and self._silent is None:
            silent = await self._open(timeout)
            # Another question may have opened one meanwhile.
            self._drop_silent()
            silent.idle_since = asyncio.get_running_loop().time()
            self._silent = silent
        connection = self._kept
        if connection is not None and (connection.receiver is not None or not connection.usable(0.0)):
            connection = None
        if connection is None:
            connection = await self._open(timeout)
        connection.reused = connection is self._kept
        try:
            answer = await self.fetch("GET", target, timeout=timeout, connection=connection)
        except FetchError:
            if connection is self._kept:
                self._kept = None
            raise
        else:
            self.closes = self.closes or not answer.head.keep_alive
            return answer
        finally:
            if connection is not self._kept:
                connection.abort()

    @property
    def kept(self) -> bool:
        """Whether a connection is open that would tell of the process's end."""
        return self._kept is not None or self._silent is not None

    async def _open(self, timeout: float) -> Connection:
        try:
            async with asyncio.timeout(timeout):
                return await self.connect()
        except ConnectFailedError as error:
            raise FetchError(error.failure, sent=False) from None
        except TimeoutError:
            raise FetchError(Failure(Kind.TIMEOUT, f"no connection within {timeout:g} s"), sent=False) from None


@dataclass(eq=False, slots=True)
class Watched:
    """What the prober keeps for one engine."""

    engine: Engine
    sentinel: Sentinel
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    check: asyncio.Task[bool] | None = None
    refused: bool = False
    broken: bool = False
    looked: bool = False
    blind: int = 0
