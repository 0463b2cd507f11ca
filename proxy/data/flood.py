"""Streams whose pieces come faster than anybody reads tokens: what comes within a millisecond leaves together.

A write to a socket costs the kernel ten times what the proxy spends on an event, so a flood of single events is mostly
system calls. Streams of a usual pace, and the first events of any stream, never wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.data.relay import Relay

BURST = 8
"""Pieces that may follow each other within the window before one waits: a role, the first token and what a speculating
engine adds to it come at once."""


class Flood:
    """Writes what relays hold back, all of them with one timer.

    Args:
        window: seconds that a piece may wait; 0 turns waiting off.
    """

    __slots__ = ("_waiting", "window")

    def __init__(self, window: float) -> None:
        self.window = window
        self._waiting: list[Relay] = []

    def later(self, relay: Relay, loop: asyncio.AbstractEventLoop) -> None:
        """Flush a relay when the window is over."""
        if not self._waiting:
            loop.call_later(self.window, self._flush)
        self._waiting.append(relay)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for relay in waiting:
            relay.flush()
