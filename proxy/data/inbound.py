"""What a client's connection asks of a request, whoever answers it."""

from __future__ import annotations

from typing import Protocol

from proxy.core.framing import RequestHead
from proxy.errors import FleetgateError


class Inbound(Protocol):
    """A request as the connection sees it: an `Exchange`, or one that aiohttp answers."""

    head: RequestHead
    body_done: bool

    def begin(self) -> None:
        """It is this request's turn."""

    def body_data(self, data: bytes) -> None:
        """A piece of the body."""

    def body_end(self) -> None:
        """The body is whole."""

    def client_slow(self) -> None:
        """The body stopped coming."""

    def client_writable(self, writable: bool) -> None:
        """The client takes (no) more of its answer for now."""

    def client_gone(self) -> None:
        """The client went away."""

    def refused(self, error: FleetgateError) -> None:
        """The rest of the request is refused: answer with this error if nothing was answered yet."""

    def stopped(self, error: FleetgateError) -> None:
        """The proxy ends: say so if an answer may still be given, or cut the one that has begun."""

    def crashed(self) -> None:
        """One of the above raised; called inside the handler. The request must end now. Must not raise."""
