"""A request whose body is gathered whole before somebody else answers it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from proxy.errors import BodyTooLarge, SlowClient

if TYPE_CHECKING:
    from proxy.core.framing import RequestHead
    from proxy.data.front import Front
    from proxy.errors import FleetgateError

_log = logging.getLogger("fleetgate.front")


class Gathered:
    """The half of `proxy.data.front.Inbound` that control calls share, whoever answers them.

    Args:
        client: the connection it came on.
        head: its head.
        limit: bytes of its body.
    """

    def __init__(self, client: Front, head: RequestHead, *, limit: int) -> None:
        self.head = head
        self.body_done = not head.has_body
        self._client = client
        self._limit = limit
        self._body: list[bytes] = []
        self._size = 0
        self._begun = False
        self._passed = False
        self._over = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.head.method.decode()} {self.head.path.decode('latin-1')}>"

    def begin(self) -> None:
        """It is this request's turn."""
        self._begun = True
        self._go()

    def body_data(self, data: bytes) -> None:
        """A piece of the body.

        Raises:
            BodyTooLarge: it is over the limit.
        """
        if self._over:
            return
        self._size += len(data)
        if self._size > self._limit:
            raise BodyTooLarge(f"the body of a control call is over {self._limit} bytes")
        self._body.append(data)

    def body_end(self) -> None:
        """The body is whole."""
        self.body_done = True
        self._go()

    def _go(self) -> None:
        if self._begun and self.body_done and not self._passed and not self._over:
            self._passed = True
            body = b"".join(self._body)
            self._body = []
            self.pass_on(body)

    def client_slow(self) -> None:
        """The body stopped coming."""
        self.refused(SlowClient("the body of a control call did not arrive in time"))

    def refused(self, error: FleetgateError) -> None:
        """It is refused by the proxy itself; nothing of an answer has gone out."""
        if not self._over:
            self._over = True
            self.drop()
            self._client.send_error(error, self)
            self._client.request_done(self)

    def stopped(self, error: FleetgateError) -> None:
        """The proxy ends: a call that is under way is cut, for nobody can say yet what comes of it."""
        if self._passed:
            self._client.abort()
        else:
            self.refused(error)

    def crashed(self) -> None:
        """A bug: the client gets a cut, never silence."""
        _log.exception("a control call could not be answered")
        self._over = True
        self.drop()
        self._client.abort()

    def client_gone(self) -> None:
        """The client went away."""
        self._over = True
        self.drop()

    def client_writable(self, writable: bool) -> None:
        """The client takes (no) more of its answer for now."""
        raise NotImplementedError

    def pass_on(self, body: bytes) -> None:
        """The request is whole and it is its turn."""
        raise NotImplementedError

    def drop(self) -> None:
        """Let go of whoever answers; may be called at any time, more than once."""
        raise NotImplementedError

    def plain_request(self, body: bytes, extra: bytes = b"", version: bytes = b"1.1") -> bytes:
        """The request as one plain message: framing made anew, a request without a body stays without."""
        head = self.head
        lines = [head.method, b" ", head.target, b" HTTP/", version, b"\r\nHost: ", head.host or b"localhost", b"\r\n"]
        for name, value in head.fields:
            lines += (name, b": ", value, b"\r\n")
        lines.append(extra)
        if head.chunked or head.length is not None:
            lines.append(b"Content-Length: %d\r\n" % len(body))
        lines += (b"\r\n", body)
        return b"".join(lines)
