"""A client connection that may become a WebSocket: bytes of another protocol, both ways, once an engine took it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httptools

from proxy.data.client import ClientConnection
from proxy.data.gathered import Gathered

if TYPE_CHECKING:
    from proxy.core.framing import RequestHead
    from proxy.data.inbound import Inbound
    from proxy.errors import FleetgateError
    from proxy.server import Server


class TunnelConnection(ClientConnection):
    """What of a `proxy.data.front.Front` has to do with upgrades.

    Attributes:
        _active: the request whose turn it is.
        _queue: those that came after it.
        _deaf: what still comes is dropped.
        _tunnel: takes every further byte of the client.
        _tunnel_early: bytes that came before the engine took the upgrade; None without one.
        _arriving: the request whose body is still coming.
        _controls: control calls come on it.
        _parser: splits what comes.
    """

    __slots__ = ("_active", "_arriving", "_controls", "_deaf", "_parser", "_queue", "_tunnel", "_tunnel_early")

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._active: Inbound | None = None
        self._queue: list[Inbound] = []
        self._deaf = False
        self._tunnel: Callable[[bytes], None] | None = None
        self._tunnel_early: bytes | None = None
        self._arriving: Inbound | None = None
        self._controls = False
        self._parser = httptools.HttpRequestParser(self)

    def close_if_idle(self) -> None:
        """The proxy drains: a client's idle connection is closed, its other one after its answer.

        A trainer's stays, for it may have to resume what is to end.
        """
        if self._active is None and not self._controls:
            self.close()

    @property
    def controlled(self) -> bool:
        """Whether a control call that may change something is under way."""
        active = self._active
        return isinstance(active, Gathered) and active.head.method not in (b"GET", b"HEAD")

    def stop(self, error: FleetgateError) -> None:
        """The proxy ends now: whoever waits for an answer is told so, every connection is closed."""
        active = self._active
        if active is None:
            self.close()
            return
        try:
            active.stopped(error)
        except Exception:
            active.crashed()

    @property
    def in_tunnel(self) -> bool:
        """The connection carries another protocol."""
        return self._tunnel is not None

    def _judge_upgrade(self, head: RequestHead) -> None:
        """A head with an ``Upgrade`` field: only the parser knows whether ``Connection`` names it, as it must.

        Any but a WebSocket's is ignored (RFC 9110 section 7.8), and nothing is read after its request.
        """
        if not self._parser.should_upgrade():
            head.websocket = False
        elif not head.websocket:
            head.keep_alive = False

    def _body_skipped(self, head: RequestHead) -> bool:
        """Whether the parser only believes that the request is whole: it takes its body for another protocol."""
        return head.upgrade and head.has_body and self._parser.should_upgrade()

    def _read_body(self, head: RequestHead, rest: bytes) -> None:
        """The request goes on as a plain one: a parser that never saw the upgrade reads its body."""
        took = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
        self._parser = httptools.HttpRequestParser(took)
        framing = b"Transfer-Encoding: chunked" if head.chunked else b"Content-Length: %d" % (head.length or 0)
        self._parser.feed_data(b"POST / HTTP/1.1\r\nConnection: close\r\n%b\r\n\r\n" % framing)
        if rest:
            self.data_received(rest)

    def on_body(self, data: bytes) -> None:
        """A piece of a body."""
        raise NotImplementedError

    def on_message_complete(self) -> None:
        """The request is whole."""
        raise NotImplementedError

    def _upgrade(self, rest: bytes) -> None:
        """The request asks for an upgrade.

        Only a WebSocket that an engine accepts becomes a tunnel; bytes that follow any other kind are never read as a
        request (CVE-2026-2833 in another proxy).
        """
        active = self._active
        if self._arriving is not None:
            self._read_body(self._arriving.head, rest)
        elif active is None or self._queue:
            # It was answered already, or waits behind another request: then it is answered like any other.
            self._deaf = True
            if active is None:
                self.linger()
            else:
                self._queue[-1].head.websocket = False
        elif active.head.websocket:
            self._tunnel_early = b""
            self._early(rest)
        else:
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
