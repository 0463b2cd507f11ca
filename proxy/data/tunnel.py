"""A client connection that may become a WebSocket: bytes of another protocol, both ways, once an engine took it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.data.client import ClientConnection

if TYPE_CHECKING:
    from proxy.data.inbound import Inbound
    from proxy.server import Server


class TunnelConnection(ClientConnection):
    """What of a `proxy.data.front.Front` has to do with upgrades.

    Attributes:
        _active: the request whose turn it is.
        _queue: those that came after it.
        _deaf: what still comes is dropped.
        _tunnel: takes every further byte of the client.
        _tunnel_early: bytes that came before the engine took the upgrade; None without one.
    """

    __slots__ = ("_active", "_deaf", "_queue", "_tunnel", "_tunnel_early")

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._active: Inbound | None = None
        self._queue: list[Inbound] = []
        self._deaf = False
        self._tunnel: Callable[[bytes], None] | None = None
        self._tunnel_early: bytes | None = None

    @property
    def in_tunnel(self) -> bool:
        """The connection carries another protocol."""
        return self._tunnel is not None

    def _upgrade(self, rest: bytes) -> None:
        """The request asks for an upgrade.

        Only a WebSocket that an engine accepts becomes a tunnel; bytes that follow any other kind are never read as a
        request (CVE-2026-2833 in another proxy).
        """
        active = self._active
        if active is None or self._queue:
            # It was answered already, or waits behind another request: then it is answered like any other.
            self._deaf = True
            if active is None:
                self.linger()
        elif active.head.websocket:
            self._tunnel_early = b""
            self._early(rest)
        else:
            active.head.keep_alive = False
            self._deaf = True

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
