"""The life-cycle lock: who is at it, and what the fleet is doing. See `proxy.core.lifecycle` for what it means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from proxy.control.asked import Asked, Reply
from proxy.control.fanout import Fanout
from proxy.core.lifecycle import Holder, Phase, phase
from proxy.fleet.registry import Fleet


@dataclass(eq=False, slots=True)
class Running:
    """A life-cycle call that runs.

    Attributes:
        asked: the call.
        key: what a replay of it looks like.
        holder: who is at it.
        task: ends with its reply.
        fanout: its legs, once they were started.
        given_up: /resume came.
    """

    asked: Asked
    key: bytes
    holder: Holder
    task: asyncio.Task[Reply] | None = None
    fanout: Fanout | None = None
    given_up: bool = False


def holder_of(asked: Asked) -> Holder:
    """Who a call's holder is, as others see it."""
    return Holder(asked.call.path, asked.client, asked.request_id, time.time())


class LifecycleLock:
    """One life-cycle call at a time; ``/resume`` has a place of its own beside it.

    Args:
        fleet: told when the phase changes.
        gate_closed: whether generation is paused.
        round_live: whether engines are inside an update round.
    """

    def __init__(self, fleet: Fleet, *, gate_closed: Callable[[], bool], round_live: Callable[[], bool]) -> None:
        self._fleet = fleet
        self._gate_closed = gate_closed
        self._round_live = round_live
        self._phase = Phase.OPEN
        self.current: Running | None = None
        self.resuming: Running | None = None

    def __repr__(self) -> str:
        holder = self.holder
        return f"<LifecycleLock {holder.call if holder is not None else 'free'} {self.phase}>"

    @property
    def holder(self) -> Holder | None:
        """Who holds it."""
        running = self.current or self.resuming
        return running.holder if running is not None else None

    @property
    def phase(self) -> Phase:
        """What the fleet is doing."""
        running = self.current or self.resuming
        kind = running.asked.call.kind if running is not None else None
        return phase(kind, gate_closed=self._gate_closed(), round_live=self._round_live())

    def changed(self) -> None:
        """Tell the fleet's listeners if the phase is another one now."""
        now = self.phase
        if now is not self._phase:
            before, self._phase = self._phase, now
            self._fleet.emit("sync_phase", phase=str(now), before=str(before))
