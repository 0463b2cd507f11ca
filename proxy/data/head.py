"""The head of an engine's answer, and who gets an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from proxy.core.answers import Fields, read_fields
from proxy.core.failures import Failure

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class Head:
    """The head of an engine's answer.

    Attributes:
        status: HTTP status code, never an interim 1xx other than 101.
        reason: reason phrase as sent.
        headers: fields in order and case as sent.
        length: value of Content-Length, or None.
        chunked: the body ends with a zero chunk.
        keep_alive: the engine keeps the connection.
        said: what its fields say, from one pass over them (`fields`).
    """

    status: int
    reason: bytes
    headers: Headers
    length: int | None
    chunked: bool
    keep_alive: bool
    said: Fields | None = None

    def fields(self) -> Fields:
        """What its fields say."""
        if self.said is None:
            self.said = read_fields(self.headers)
        return self.said

    def get(self, name: bytes) -> bytes | None:
        """The first field of this (lower-case) name."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None


class Receiver(Protocol):
    """Who gets the answer of one exchange."""

    def on_head(self, head: Head) -> None:
        """The head is complete. Called once, before any data."""

    def on_data(self, data: bytes, more: bool) -> None:
        """A piece of the body, without framing; ``more``: the answer's end follows in the same turn of the loop."""

    def on_end(self) -> None:
        """The answer is whole."""

    def on_failure(self, failure: Failure) -> None:
        """The exchange is over and its answer is not whole. Nothing follows."""

    def on_writable(self, writable: bool) -> None:
        """The engine takes (no) more of the request body for now."""

    def on_crash(self) -> None:
        """One of the above raised; called inside the handler. The request must end now. Must not raise."""
