"""One connection per engine that only probes use, kept open so that its end tells of a dead process at once."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from proxy.core.failures import Failure, Kind
from proxy.data.upstream import Answer, ConnectFailedError, Connection, FetchError, Upstream

KEPT_LONG_ENOUGH = 4.5
"""Seconds of idling after which a server may close a connection in good order: uvicorn does after 5."""


class Sentinel(Upstream):
    """A pool of one connection, whose loss while it is idle is an event.

    Args:
        url: canonical base URL.
        on_end: called when the idle connection ended although the server had promised to keep it, and sooner than
            servers close idle connections. An answer with ``Connection: close`` promises nothing.
        connect_timeout: seconds.
        ssl_context: for https.
    """

    def __init__(
        self,
        url: str,
        on_end: Callable[[], None],
        *,
        connect_timeout: float,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(url, idle_limit=float("inf"), connect_timeout=connect_timeout, ssl_context=ssl_context)
        self._on_end = on_end
        self._kept: Connection | None = None

    def put_idle(self, connection: Connection) -> None:
        """The probe was answered and the server keeps the connection."""
        if self._kept is not None and self._kept is not connection:
            connection.close()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._kept = connection

    def forget(self, connection: Connection) -> None:
        """A connection is gone: if it was the kept one and idle, that is news."""
        super().forget(connection)
        if connection is not self._kept:
            return
        self._kept = None
        if connection.receiver is None:
            idle = asyncio.get_running_loop().time() - connection.idle_since
            if idle < KEPT_LONG_ENOUGH:
                self._on_end()

    def drop(self) -> None:
        """Close the kept connection without telling anybody."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.abort()

    def close(self) -> None:
        """Close everything without telling anybody."""
        self._kept = None
        super().close()

    async def ask(self, target: str, *, timeout: float) -> Answer:
        """One GET on the kept connection, or on a new one that is kept from then on.

        Raises:
            FetchError: no whole answer; a kept connection that broke is not tried again here.
        """
        connection = self._kept
        if connection is not None and (connection.receiver is not None or not connection.usable(0.0)):
            connection = None
        if connection is None:
            connection = await self._open(timeout)
        connection.reused = connection is self._kept
        try:
            return await self.fetch("GET", target, timeout=timeout, connection=connection)
        except FetchError:
            if connection is self._kept:
                self._kept = None
            raise
        finally:
            if connection is not self._kept:
                connection.abort()

    @property
    def kept(self) -> bool:
        """Whether a connection is open that would tell of the process's end."""
        return self._kept is not None

    async def _open(self, timeout: float) -> Connection:
        try:
            async with asyncio.timeout(timeout):
                return await self.connect()
        except ConnectFailedError as error:
            raise FetchError(error.failure, sent=False) from None
        except TimeoutError:
            raise FetchError(Failure(Kind.TIMEOUT, f"no connection within {timeout:g} s"), sent=False) from None
