"""What can go wrong with one attempt at one engine, before any answer byte went to the client.

The kinds are the alphabet of `proxy.core.retry`; the shells only classify, they never decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How an attempt failed."""

    CONNECT = "connect"
    """No connection was made: refused, unreachable, timed out, TLS failed. The engine saw nothing."""
    STALE = "stale"
    """A reused connection died before any answer byte: most likely the engine had closed it when it was idle."""
    LOST = "lost"
    """A fresh connection died before any answer byte: the engine may have seen the request."""
    TIMEOUT = "timeout"
    """No answer byte within the limit."""
    BROKEN = "broken"
    """What came is not HTTP, or its framing is ambiguous."""
    CUT = "cut"
    """The answer broke off: inside its body, or before the first event of a stream."""
    PAUSED = "paused"
    """The engine refused because generation is paused, in any of the forms vLLM has."""
    BUSY = "busy"
    """The engine refused for load, as a 503 or as the first event of a 200."""
    REMOVED = "removed"
    """The engine was taken out of the fleet, and the proxy ended what it still ran."""
    FAILED = "failed"
    """The engine answered an internal error (500), as a status or as the first event of a 200."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt.

    Attributes:
        kind: how it failed.
        detail: for people; never contains a body.
        retry_after: seconds that the engine asked to wait (``Retry-After``), or None.
    """

    kind: Kind
    detail: str
    retry_after: float | None = None
