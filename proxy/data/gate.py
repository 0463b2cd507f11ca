"""The gate: new generation requests pass while it is open, and wait here in order while it is closed.

A request waits for one of two things: that the gate opens, or that an engine becomes eligible. Both are announced by
`pump`; nothing here polls. Everything is synchronous: a held request is an object in a queue with one timer.

There are two queues. New requests join the end of the first. One that was let go before and came back (an engine
refused it) is older than all of those, because nobody passes while somebody waits; such requests wait in the second,
by age, and go first.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import chain, islice
from typing import Protocol

from proxy.errors import FleetgateError, HoldQueueFull, HoldTimeout

_log = logging.getLogger("fleetgate.gate")

PUMP_BATCH = 64
"""Held requests let go per turn of the loop, so that a release of thousands does not starve running streams."""


RETRY_AFTER = 5
"""Seconds for Retry-After: a pause usually lasts seconds, so a short wait, yet too long to storm."""
_ABSENT = object()


class Waiter(Protocol):
    """A request that can be held."""

    order: int
    """Its place among all requests, by arrival; unique."""
    held_bytes: int
    """Bytes of body that it keeps in memory."""
    hold_timer: asyncio.TimerHandle | None
    hold_since: float
    """Loop time of the first hold; the limit counts from here, however often it is held again."""
    hold_limit: float
    """Seconds that it may be held in all."""

    def admitted(self) -> bool:
        """Go on; False if it could not and has to stay at the head of the queue."""

    def refused(self, error: FleetgateError) -> None:
        """It cannot be held (any longer)."""

    def crashed(self) -> None:
        """`admitted` raised; called inside the handler. The request must end now. Must not raise."""


def _order(waiter: Waiter) -> int:
    return waiter.order


class Gate:
    """One gate for all engines.

    Args:
        max_requests: requests held at once.
        max_bytes: bytes of bodies held at once.
        can_pass: whether an engine could take a request now (asked only while the gate is open).
    """

    def __init__(self, *, max_requests: int, max_bytes: int, can_pass: Callable[[], bool]) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._can_pass = can_pass
        # A dict keeps insertion order and lets a waiter leave from the middle at once.
        self._queue: dict[Waiter, object] = {}
        self._returned: list[Waiter] = []
        self._pumping: asyncio.Handle | None = None
        self.held_bytes = 0
        self.closed = False
        self.closed_by = ""
        self.closed_since = 0.0
        self.opened_at = 0.0
        """Loop time at which it last opened; what an engine froze for a pause goes on from here."""
        self.on_hold_end: Callable[[float, str], None] | None = None
        """Called with the seconds a request was held and how that ended: ``sent``, ``gone``, or an error code."""
        self.on_change: Callable[[bool], None] | None = None
        """Called with the new value of `closed`."""

    def __repr__(self) -> str:
        return f"<Gate {'closed by ' + self.closed_by if self.closed else 'open'} held={self.held}>"

    @property
    def held(self) -> int:
        """Requests held now."""
        return len(self._queue) + len(self._returned)

    def close(self, by: str) -> None:
        """Hold every new generation request from now on. Closing twice keeps the first time and the last name."""
        self.closed_by = by
        if self.closed:
            return
        self.closed = True
        self.closed_since = asyncio.get_running_loop().time()
        _log.info("gate closed by %s", by)
        if self.on_change is not None:
            self.on_change(True)

    async def settled(self) -> None:
        """Return when the gate is closed wherever requests are let through; here that is at once."""

    def open(self) -> None:
        """Let held requests go, in order, and new ones pass."""
        if not self.closed:
            return
        self.closed = False
        self.opened_at = asyncio.get_running_loop().time()
        seconds = self.opened_at - self.closed_since
        _log.info("gate opened after %.3f s, %d requests held", seconds, self.held)
        self.closed_by = ""
        if self.on_change is not None:
            self.on_change(False)
        self.pump()

    def must_wait(self) -> bool:
        """Whether a new request has to be held: gate closed, nobody to take it, or others are waiting before it."""
        return self.closed or bool(self._queue) or bool(self._returned) or not self._can_pass()

    def hold(self, waiter: Waiter, *, front: bool = False) -> None:
        """Hold a request until `pump` lets it go; past a limit it is refused at once.

        Args:
            waiter: the request.
            front: it was let go before and came back: it keeps its place before newer ones, and the limits by number
                and bytes do not count against it, so that a newer request never costs an older one its place.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        if waiter.hold_since == 0.0:
            waiter.hold_since = now
        remaining = waiter.hold_since + waiter.hold_limit - now
        if remaining <= 0:
            self._refuse(waiter, self._timeout_error(waiter))
            return
        if not front:
            full = self._full_for(waiter)
            if full:
                self._refuse(waiter, HoldQueueFull(full, retry_after=RETRY_AFTER))
                return
        waiter.hold_timer = loop.call_later(remaining, self._expire, waiter)
        if front:
            insort(self._returned, waiter, key=_order)
        else:
            self._queue[waiter] = None
        self.held_bytes += waiter.held_bytes
        # A request that came back must not sleep through an opening that already happened.
        if not self.closed:
            self.pump()

    def _full_for(self, waiter: Waiter) -> str:
        """Which limit a new request would be over, for its client; empty if it is over none."""
        size, most = waiter.held_bytes, self._max_bytes
        if size > most:
            return f"its body of {size} bytes is over the {most} that may be held while {self._why()}; try again later"
        if self.held >= self._max_requests:
            full = f"{self.held} requests"
        elif self.held_bytes + size > most:
            full = f"{self.held_bytes} of {most} bytes of requests"
        else:
            return ""
        return f"{full} are held already while {self._why()}; try again later"

    def _holds(self, waiter: Waiter) -> bool:
        return waiter in self._queue or self._place(waiter) >= 0

    def _place(self, waiter: Waiter) -> int:
        """Index among the returned ones, or -1."""
        if not self._returned:
            return -1
        place = bisect_left(self._returned, waiter.order, key=_order)
        found = place < len(self._returned) and self._returned[place] is waiter
        return place if found else -1

    def leave(self, waiter: Waiter) -> bool:
        """Forget a held request whose client went away; False if it was not held."""
        if not self._holds(waiter):
            return False
        self._take(waiter)
        self._ended(waiter, "gone")
        return True

    def pump(self) -> None:
        """Let held requests go if they can, a batch now and the rest in the loop's next turns."""
        if self._pumping is None and not self.closed and (self._queue or self._returned):
            self._pumping = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = None
        for waiter in list(islice(chain(self._returned, self._queue), PUMP_BATCH)):
            if self.closed or not self._can_pass():
                return
            if not self._holds(waiter):
                continue
            self._take(waiter)
            self._ended(waiter, "sent")
            try:
                if not waiter.admitted():
                    return
            except Exception:
                # One request that cannot go on must not keep those behind it.
                waiter.crashed()
        self.pump()

    def _take(self, waiter: Waiter) -> None:
        if self._queue.pop(waiter, _ABSENT) is _ABSENT:
            del self._returned[self._place(waiter)]
        self.held_bytes -= waiter.held_bytes
        if waiter.hold_timer is not None:
            waiter.hold_timer.cancel()
            waiter.hold_timer = None

    def _expire(self, waiter: Waiter) -> None:
        waiter.hold_timer = None
        self._take(waiter)
        self._refuse(waiter, self._timeout_error(waiter))

    def _refuse(self, waiter: Waiter, error: FleetgateError) -> None:
        self._ended(waiter, error.code)
        waiter.refused(error)

    def _ended(self, waiter: Waiter, how: str) -> None:
        if self.on_hold_end is not None:
            self.on_hold_end(asyncio.get_running_loop().time() - waiter.hold_since, how)

    def _timeout_error(self, waiter: Waiter) -> HoldTimeout:
        message = f"held for {waiter.hold_limit:g} s while {self._why()}; try again later"
        return HoldTimeout(message, retry_after=RETRY_AFTER)

    def _why(self) -> str:
        return f"generation is paused by {self.closed_by}" if self.closed else "no engine could take it"
