"""How far a request is on its way, and an attempt of it at one engine."""

from __future__ import annotations

from enum import IntEnum, auto


class Phase(IntEnum):
    """Where a request is on its way."""

    BODY = auto()
    """Its body is still coming and all of it fits the replay buffer."""
    HELD = auto()
    BACKOFF = auto()
    SENT = auto()
    """An attempt is under way; nothing went to the client."""
    ANSWERED = auto()
    """Bytes of an answer went to the client."""
    DONE = auto()


class Stage(IntEnum):
    """How far an attempt is."""

    CONNECTING = auto()
    WAITING = auto()
    """Sent; no head of an answer yet."""
    PEEKING = auto()
    """A stream has begun; its first event is not whole yet."""
    COLLECTING = auto()
    """An error answer is being gathered."""
    JUDGING = auto()
    """The engine is being looked at to find out what its error means."""
    RELAYING = auto()
    """The answer goes to the client as it comes."""
    TUNNEL = auto()
    OVER = auto()
