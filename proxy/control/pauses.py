"""Pause and resume: the gate closes before the first engine is called and opens after the last one answered.

What is decided when engines disagree, and why, is in docs/adr/0005.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_result,
    stop_after_attempt,
    stop_before_delay,
    wait_exponential,
)

from proxy.config import Settings
from proxy.control.admit import Admission
from proxy.control.aftermath import Aftermath, that_count
from proxy.control.asked import JSON_HEADERS, Asked, Reply, limit_of, reply_error, reply_merged
from proxy.control.fanout import Runner, Shot, fire
from proxy.control.lock import LifecycleLock
from proxy.control.updates import Updates
from proxy.core.calls import CALLS, Kind
from proxy.core.merge import Leg, Outcome, merge
from proxy.errors import PartialFailure
from proxy.fleet.engine import Engine
from proxy.fleet.probes import Prober
from proxy.fleet.registry import Fleet
from proxy.tasks import spawn

if TYPE_CHECKING:
    from proxy.data.gate import Gate

_log = logging.getLogger("fleetgate.control")

Fan = Callable[[Asked, Sequence[tuple[Engine, Shot]], Runner], Coroutine[Any, Any, list[Leg]]]

RESUME_TRIES = 5
"""Tries of one leg of /resume: a lost one leaves an engine paused for ever."""
RESUME_BACKOFF = 0.1
"""Seconds before the second try; doubles."""
RESUME_TRY = 10.0
"""Seconds for one try of /resume. vLLM answers it in milliseconds, so a silent one is worth another try."""
HUNG_RESUME = 10.0
"""Seconds for /resume at an engine that hangs in a weight update: its core answers nothing until that ends."""

_GIVEN_UP = frozenset({Kind.PAUSE, Kind.SLEEP, Kind.INIT, Kind.START, Kind.UPDATE, Kind.FINISH, Kind.CUSTOM, Kind.RPC})
"""Running calls that /resume stops waiting for."""


class Pauses:
    """Closes and opens the gate around what the engines do.

    Args:
        settings: limits.
        fleet: the engines.
        gate: holds generation requests while it is closed.
        lock: which life-cycle call runs.
        updates: the update round, which a resume breaks.
        prober: watches engines that stay paused.
        admission: looks again at engines once the gate is open.
        aftermath: fences who failed.
        fan: runs legs.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        gate: Gate,
        lock: LifecycleLock,
        *,
        updates: Updates,
        prober: Prober,
        admission: Admission,
        aftermath: Aftermath,
        fan: Fan,
        on_lease_end: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._gate = gate
        self._lock = lock
        self._updates = updates
        self._prober = prober
        self._admission = admission
        self._aftermath = aftermath
        self._fan = fan
        self._on_lease_end = on_lease_end
        updates.on_broken = self._broken
        self._alarm: asyncio.TimerHandle | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None
        self._told = False

    async def pause(self, asked: Asked) -> Reply:
        """Close the gate, then pause every engine."""
        self._told = True
        running = self._lock.current
        gate = self._gate
        was_closed = gate.closed
        who = f"/pause of {asked.client}" + (f" ({asked.request_id})" if asked.request_id else "")
        gate.close(who)
        self._updates.round.passed_by = True
        if not was_closed:
            self._closed(who)
        self._renew_lease(who)
        self._lock.changed()
        await gate.settled()
        shot = asked.shot(limit_of(self._settings, asked))
        engines = self._living()
        self._aftermath.missed(asked, shot)
        if not engines:
            message = "/pause: the gate is closed and requests are held, but no engine is alive to be paused"
            return reply_error(PartialFailure(message, engines={}))
        legs = await self._fan(asked, [(engine, shot) for engine in engines], fire)
        merged = merge(asked.call, that_count(legs))
        if merged.passed:
            if not was_closed and not (running is not None and running.given_up):
                self._open(asked.client)
            return reply_merged(asked.call, merged, legs)
        for engine, leg in zip(engines, legs, strict=True):
            if leg.ok:
                engine.owed.pop("/resume", None)
                engine.reported_paused = True
        self._aftermath.settle(asked, shot, engines, legs, merged)
        note = "" if running is not None and running.given_up else ". The gate stays closed: /pause again, or /resume"
        return reply_merged(asked.call, merged, legs, note=note)

    async def resume(self, asked: Asked) -> Reply:
        """Resume every engine, give up what hangs, then open the gate."""
        self._told = True
        self._lock.changed()
        shot = asked.shot(limit_of(self._settings, asked))
        engines = self._living()
        self._aftermath.missed(asked, shot)
        other = self._lock.current
        hung = set(other.fanout.pending) if other is not None and other.fanout is not None else set()
        shots = [
            (engine, replace(shot, timeout=min(HUNG_RESUME, shot.timeout or HUNG_RESUME)) if engine in hung else shot)
            for engine in engines
        ]
        legs = await self._fan(asked, shots, self._resume_leg)
        await self._give_up()
        self._updates.half_way = False
        self._updates.break_round("/resume came before its finish")
        if not engines:
            self._open(asked.client)
            message = "/resume: the gate is open, but no engine is alive; requests are held until one is"
            return reply_error(PartialFailure(message, engines={}))
        merged = merge(asked.call, that_count(legs))
        for engine, leg in zip(engines, legs, strict=True):
            if leg.ok:
                engine.owed.pop("/pause", None)
                engine.reported_paused = False
        self._aftermath.settle(asked, shot, engines, legs, merged)
        self._open(asked.client)
        self._admission.review_all()
        if other is not None and other.asked.call.kind is Kind.PAUSE:
            for engine in hung:
                self.undo(engine)
        return reply_merged(asked.call, merged, legs)

    async def _resume_leg(self, engine: Engine, shot: Shot) -> Leg:
        """/resume is safe to repeat, and a lost one is the costliest of all: try again within its limit."""
        started = perf_counter()
        left = limit = shot.timeout or self._settings.resume_timeout
        if (engine.tainted or engine.updating) and engine.inflight:
            aborted = await self.abort_running(engine, limit)
            if not aborted.ok and aborted.outcome is not Outcome.MISSING:
                why = f"it stays paused, because its running requests could not be aborted: {aborted.said()}"
                seconds = perf_counter() - started
                return Leg(engine.id, Outcome.DIED, seconds=seconds, detail=why)
            left = limit - (perf_counter() - started)
        deadline = perf_counter() + left

        def again(leg: Leg) -> bool:
            wrong = leg.outcome is Outcome.REFUSED and leg.status is not None and leg.status < 500
            return engine.alive and not (leg.ok or wrong or leg.outcome is Outcome.MISSING)

        async def once() -> Leg:
            return await fire(engine, replace(shot, timeout=max(0.001, min(deadline - perf_counter(), RESUME_TRY))))

        retrying = AsyncRetrying(
            retry=retry_if_result(again),
            stop=stop_after_attempt(RESUME_TRIES) | stop_before_delay(left),
            wait=wait_exponential(multiplier=RESUME_BACKOFF),
            retry_error_callback=_last,
        )
        leg: Leg = await retrying(once)
        return replace(leg, seconds=perf_counter() - started)

    async def abort_running(self, engine: Engine, limit: float | None = None) -> Leg:
        """End what runs at an engine whose weights are nobody's: it must not go on with them under the old label.

        The clients get what was generated before, with ``finish_reason: "abort"``.
        """
        call = CALLS["/abort_requests"]
        timeout = min(limit or self._settings.control_timeout, self._settings.control_timeout)
        leg = await fire(engine, Shot(call, "POST", call.path, JSON_HEADERS, b"{}", timeout))
        _log.warning("aborted what ran at %s, because a weight update broke there: %s", engine.id, leg.said())
        return leg

    def _broken(self, engines: Sequence[Engine]) -> None:
        """A round broke: where generation is not paused, what runs there ends now; where it is, at the resume."""
        if self._gate.closed:
            return
        for engine in engines:
            if engine.inflight and engine.alive:
                spawn(self.abort_running(engine), name=f"abort at {engine.id}")

    async def _give_up(self) -> None:
        """Stop waiting for a life-cycle call that still runs, and let it say what that means for its engines."""
        running = self._lock.current
        if running is None or running.asked.call.kind not in _GIVEN_UP:
            return
        running.given_up = True
        if running.fanout is not None:
            running.fanout.abandon()
            if running.task is not None:
                await asyncio.wait({running.task}, timeout=self._settings.probe_timeout)

    def _cancel_timers(self) -> None:
        for timer in (self._alarm, self._lease):
            if timer is not None:
                timer.cancel()

    def _open(self, by: str) -> None:
        self._cancel_timers()
        if not self._gate.closed:
            return
        seconds = asyncio.get_running_loop().time() - self._gate.closed_since
        self._gate.open()
        self._fleet.emit("gate_opened", by=by, seconds=seconds)
        self._lock.changed()

    def _living(self) -> list[Engine]:
        return [engine for engine in self._fleet if engine.alive]

    # Pauses that last

    def _closed(self, by: str) -> None:
        self._fleet.emit("gate_closed", by=by)
        self._alarm = asyncio.get_running_loop().call_later(self._settings.pause_warn, self._overdue, by)

    def _renew_lease(self, by: str) -> None:
        """Each pause has a lease of its own: that of an earlier one must not end a later trainer's."""
        if self._lease is not None:
            self._lease.cancel()
        if self._settings.max_pause:
            loop = asyncio.get_running_loop()
            self._lease = loop.call_later(self._settings.max_pause, self._lease_ended, by)

    def _overdue(self, by: str) -> None:
        seconds = asyncio.get_running_loop().time() - self._gate.closed_since
        _log.warning("generation has been paused for %.0f s by %s; POST /resume ends it", seconds, by)
        self._fleet.emit("pause_overdue", by=by, seconds=seconds)
        self._alarm = asyncio.get_running_loop().call_later(self._settings.pause_warn, self._overdue, by)

    def _lease_ended(self, by: str) -> None:
        seconds = asyncio.get_running_loop().time() - self._gate.closed_since
        _log.warning("the pause of %s ended by itself after %.0f s (max_pause)", by, seconds)
        self._fleet.emit("pause_lease_ended", by=by, seconds=seconds)
        self._on_lease_end()

    def recover(self) -> bool:
        """The proxy started while the engines were paused: so is the gate, until /resume or until they all go on.

        Returns:
            Whether that is settled: an engine said so, or somebody paused or resumed since.
        """
        engines = [engine for engine in self._living() if not engine.plain and engine.reported_paused is not None]
        if not engines or self._told:
            return self._told
        paused = [engine for engine in engines if engine.reported_paused]
        if not paused:
            return True
        if len(paused) < len(engines):
            for engine in paused:
                self._prober.watch_paused(engine)
            return True
        who = "a pause found at start"
        # Where they count their answers, an open session has told.
        self._updates.half_way = not all(engine.counted for engine in engines)
        self._gate.close(who)
        self._closed(who)
        self._renew_lease(who)
        self._lock.changed()
        self._watching = spawn(self._until_resumed(), name="watch the recovered pause")
        return True

    async def _until_resumed(self) -> None:
        since = self._gate.closed_since
        while self._gate.closed and self._gate.closed_since == since:
            await asyncio.sleep(self._settings.pause_watch_interval)
            engines = [engine for engine in self._living() if not engine.plain]
            if not engines or self._lock.current is not None or not self._gate.closed_by.endswith("at start"):
                continue
            paused = await asyncio.gather(*(self._prober.is_paused(engine) for engine in engines))
            if any(paused) or not self._gate.closed or self._lock.current is not None:
                continue
            for engine in engines:
                engine.reported_paused = False
            self._open("the engines, which all go on")

    def undo(self, engine: Engine) -> None:
        """A pause may have been overtaken by a resume there: look, and resume it again if so."""
        spawn(self._undo_pause(engine), name=f"undo late pause {engine.id}")

    async def _undo_pause(self, engine: Engine) -> None:
        """A pause was overtaken by a resume: whichever came last there, the engine must not stay paused."""
        if self._gate.closed or not await self._prober.is_paused(engine) or self._gate.closed:
            return
        self._prober.watch_paused(engine)
        await self._resume_leg(
            engine, Shot(CALLS["/resume"], "POST", "/resume", timeout=self._settings.control_timeout)
        )

    def stop(self) -> None:
        """End timers and watches."""
        self._cancel_timers()
        if self._watching is not None:
            self._watching.cancel()


def _last(state: RetryCallState) -> Leg:
    """The last try's leg, where trying again ended without success."""
    assert state.outcome is not None
    leg: Leg = state.outcome.result()
    return leg
