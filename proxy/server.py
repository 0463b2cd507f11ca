"""The main port: takes connections, routes requests to the data plane or to aiohttp, drains before it stops."""

from __future__ import annotations

import asyncio
import logging
import ssl

from proxy.config import Settings
from proxy.core import routes
from proxy.core.framing import RequestHead
from proxy.core.paths import PathTable, Route
from proxy.data.client import ClientConnection
from proxy.data.connection import watch_peer
from proxy.data.front import Front
from proxy.data.handoff import Handed, WebSide
from proxy.data.plane import DataPlane
from proxy.errors import FleetgateError, ShuttingDown, TooManyConnections

_log = logging.getLogger("fleetgate.server")

GONE_CHECK = 0.5
"""Seconds between looks at clients whose bytes are left in the socket; a client that went away must be noticed
within one second."""
MAX_KNOWN_PATHS = 1024
"""Paths whose owner is remembered; strangers cannot grow the table further."""
BACKLOG = 4096
"""Connections that wait for accept. Trainers that open a connection for each request come in bursts."""

LAST_WORDS = 1.0
"""Seconds that the last bytes to clients get to leave when the proxy ends with requests still under way."""


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """TLS of a listener, if a certificate is set."""
    if settings.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
    return context


class Server:
    """The main listener.

    Args:
        plane: the data plane.
        web_side: answers everything that is not the data plane's.
        paths: says whose a path is.
    """

    def __init__(self, plane: DataPlane, web_side: WebSide | None, paths: PathTable) -> None:
        self.plane = plane
        self.loop = asyncio.get_running_loop()
        self._paths = paths
        self._owners: dict[bytes, Route] = {}
        self._web = web_side
        self._fronts: set[Front] = set()
        self._unread: set[ClientConnection] = set()
        self._check: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        self._hurried = asyncio.Event()
        self.stopping = ShuttingDown("the proxy stops; send the request again when it is back")
        """What who asks for a request hears from the begin of the drain on."""
        settings = plane.settings
        self.ssl_context = server_context(settings)
        self.tick = min(settings.header_timeout, settings.body_timeout, settings.client_idle) / 2
        self.max_head = plane.limits.head

    async def start(self, *, reuse_port: bool = False) -> tuple[str, int]:
        """Listen; returns the address and port.

        Args:
            reuse_port: several workers share the port.

        Raises:
            OSError: the address cannot be bound.
        """
        settings = self.plane.settings
        self._server = await self.loop.create_server(
            lambda: Front(self),
            settings.host,
            settings.port,
            backlog=BACKLOG,
            ssl=self.ssl_context,
            reuse_port=reuse_port or None,
        )
        for sock in self._server.sockets:
            # Accepted sockets inherit these options, so they cost nothing per connection.
            watch_peer(sock)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    def owner(self, path: bytes) -> Route:
        """Whose a path is. Paths repeat, so the answer is remembered within a bound."""
        known = self._owners.get(path)
        if known is None:
            known = self._paths.classify(path)
            if path in routes.GENERATION or len(self._owners) < MAX_KNOWN_PATHS:
                self._owners[path] = known
        return known

    def handoff(self, front: Front, head: RequestHead) -> Handed:
        """A request that aiohttp answers."""
        assert self._web is not None
        return Handed(self._web, front, head, limit=self.plane.settings.max_control_body)

    def opened(self, front: Front) -> FleetgateError | None:
        """A connection came; an error if there are too many."""
        self._fronts.add(front)
        self.plane.stats.connections = len(self._fronts)
        limit = self.plane.settings.max_connections
        if len(self._fronts) > limit:
            return TooManyConnections(f"over {limit} connections are open (max-connections)", retry_after=1)
        return None

    def closed(self, front: Front) -> None:
        """A connection went."""
        self._fronts.discard(front)
        self._unread.discard(front)
        self.plane.stats.connections = len(self._fronts)

    def reading_paused(self, front: ClientConnection) -> None:
        """Nobody reads this connection for now, so its end has to be asked for."""
        self._unread.add(front)
        if self._check is None:
            self._check = self.loop.call_later(GONE_CHECK, self._look)

    def reading_resumed(self, front: ClientConnection) -> None:
        """The loop will tell of its end again."""
        self._unread.discard(front)

    def _look(self) -> None:
        self._check = None
        for front in list(self._unread):
            if front.peer_closed():
                front.abort()
        if self._unread:
            self._check = self.loop.call_later(GONE_CHECK, self._look)

    def hurry(self) -> None:
        """Wait no longer for running requests: `stop` goes on at once."""
        self._hurried.set()

    async def stop(self) -> None:
        """Take no more requests, let running ones end within the limit, then tell and cut the rest.

        Until then the port stays open for control calls and probes: without a resume, what a pause holds cannot end.
        """
        self.plane.draining = True
        for front in list(self._fronts):
            front.close_if_idle()
        limit = self.plane.settings.drain_timeout
        began = self.loop.time()
        drained = asyncio.ensure_future(self.plane.drain(limit, self._controlled))
        hurried = asyncio.ensure_future(self._hurried.wait())
        await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        hurried.cancel()
        if self._server is not None:
            self._server.close()
        left = len(self.plane.tracker)
        if left:
            _log.warning("%d requests still ran after %.1f s; they are cut", left, self.loop.time() - began)
        await self._end()
        if self._check is not None:
            self._check.cancel()

    def _controlled(self) -> bool:
        return any(front.controlled for front in self._fronts)

    async def _end(self) -> None:
        # Those without an engine first: a slot that another one frees must not bring them to one.
        for exchange in sorted(self.plane.tracker.all(), key=lambda one: one.engine is not None):
            exchange.client.stop(self.stopping)
        for front in list(self._fronts):
            front.stop(self.stopping)
        deadline = self.loop.time() + LAST_WORDS
        while self._fronts and self.loop.time() < deadline:  # noqa: ASYNC110 - only at a stop; not worth an event
            await asyncio.sleep(0.01)
        for front in list(self._fronts):
            front.abort()
