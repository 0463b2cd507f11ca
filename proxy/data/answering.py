"""An engine's answer goes to the client: the part of an `proxy.data.exchange.Exchange` after which nothing is mended.

From the first byte on a failure can only be made visible: an error event in the route's own protocol, then the
connection is cut.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.core import routes
from proxy.core.abort_ids import count_streamed
from proxy.core.failures import Failure, Kind
from proxy.core.refusals import refusal_event
from proxy.data.outcome import error_for
from proxy.data.stages import Phase
from proxy.errors import EngineBroken, FleetgateError

if TYPE_CHECKING:
    from proxy.core.framing import RequestHead
    from proxy.data.attempt import Attempt
    from proxy.data.front import Front
    from proxy.data.head import Head
    from proxy.data.plane import DataPlane
    from proxy.data.relay import Relay
    from proxy.fleet.engine import Engine

_ANSWERED = Phase.ANSWERED


class Answering:
    """What `Exchange` does with an answer, and its timer."""

    __slots__ = (
        "_timer",
        "attempt",
        "body",
        "client",
        "head",
        "last_engine",
        "phase",
        "plane",
        "prompts_streamed",
        "relay",
    )

    plane: DataPlane
    client: Front
    head: RequestHead
    relay: Relay
    phase: Phase
    body: list[bytes]
    attempt: Attempt | None
    last_engine: Engine | None
    prompts_streamed: int
    _timer: asyncio.TimerHandle | None

    @abstractmethod
    def _over(self, status: int) -> None:
        """The request ends here."""

    @abstractmethod
    def crashed(self) -> None:
        """A bug in the proxy: the request must end now."""

    def relay_begins(self, head: Head, *, stream: bool, more: bool) -> None:
        """An engine's answer goes to the client from here on, so the request will never be sent again.

        Args:
            head: its head.
            stream: it is an event stream.
            more: a piece of its body, or its end, follows in this turn of the loop.
        """
        self.phase = _ANSWERED
        if stream:
            self.prompts_streamed = count_streamed(self.head.path, self.body)
        self.body = []
        relay = self.relay
        if relay.pinging and not (stream and head.status == 200):
            self._refused_late(head)
            return
        relay.stream = stream
        relay.begin(head, more=more)

    def _refused_late(self, head: Head) -> None:
        """200 went out with the first ping, so that another answer can only be said as an event."""
        attempt = self.attempt
        assert attempt is not None
        if head.status >= 400:
            kind = routes.dialect(self.head.path)
            self.relay.end_with(refusal_event(kind, head.status, b"".join(attempt.gathered)))
            self._over(head.status)
            return
        error = EngineBroken(f"engine {attempt.engine.id} answered status {head.status} and no stream, after pings")
        self.relay.cut(error)
        self._over(error.status)

    def finished(self) -> None:
        """The engine's answer has gone out to its end."""
        attempt = self.attempt
        assert attempt is not None
        assert attempt.head is not None
        if not self.relay.whole():
            self.broke_off(Failure(Kind.CUT, "the engine closed the connection inside its answer"))
            return
        self.relay.end()
        if self.plane.outliers:
            self.plane.outliers.succeeded(attempt.engine.id, self.client.loop.time())
        self._over(attempt.head.status)

    def broke_off(self, failure: Failure) -> None:
        """The answer broke off after bytes went out: make it visible, never let it pass for a whole one."""
        name = self.last_engine.id if self.last_engine is not None else "?"
        error: FleetgateError = EngineBroken(f"engine {name} broke off its answer: {failure.detail}")
        if failure.kind is Kind.REMOVED:
            error = error_for(failure)
        if self.client.in_tunnel:
            self.client.cut(hard=True)
        else:
            if self.last_engine is not None:
                self.plane.broke(self.last_engine, failure)
            self.relay.cut(error)
        self._over(error.status)

    def tunnel_closed(self) -> None:
        """The engine closed a WebSocket's connection."""
        self._over(101)
        self.client.close()

    def _set_timer(self, seconds: float, then: Callable[[], None]) -> None:
        def strike() -> None:
            self._timer = None
            try:
                then()
            except Exception:
                self.crashed()

        self._cancel_timer()
        self._timer = self.client.loop.call_later(seconds, strike)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
