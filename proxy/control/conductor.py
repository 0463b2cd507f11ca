"""Runs control calls: one life-cycle at a time, replays answered once, ``/resume`` always through.

Every call runs as a task of its own. A trainer that goes away in the middle does not end it, because half a collective
is worse than a whole one that nobody waits for; its outcome is kept for the replay that usually follows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import orjson

from proxy.config import Settings
from proxy.control.aborts import Aborts
from proxy.control.admit import KIND_OWED, Admission, checksums_of
from proxy.control.asked import Asked, Reply, limit_of, reply_error, reply_json, reply_merged
from proxy.control.fanout import Fanout, Runner, Shot, fire
from proxy.control.lora import Adapters
from proxy.control.updates import Updates
from proxy.core.calls import CALLS, Kind, Merge
from proxy.core.engine_state import State
from proxy.core.lifecycle import Holder, Phase, phase
from proxy.core.merge import Leg, Merged, Outcome, merge, report, version_body
from proxy.core.replay import Memory, fingerprint
from proxy.errors import Conflict, FleetgateError, Forbidden, PartialFailure
from proxy.fleet.engine import Engine
from proxy.fleet.probes import Prober
from proxy.fleet.registry import Fleet
from proxy.tasks import spawn

if TYPE_CHECKING:
    from proxy.data.gate import Gate
    from proxy.data.plane import Tracker

_log = logging.getLogger("fleetgate.control")

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


class Conductor:
    """The way of every control call, behind the web framework.

    Args:
        settings: limits.
        fleet: the engines.
        gate: closed by a pause, opened by a resume.
        tracker: which request runs where.
        prober: looks at engines.
        admission: decides who may answer clients.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        gate: Gate,
        tracker: Tracker,
        *,
        prober: Prober,
        admission: Admission,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._gate = gate
        self._prober = prober
        self._admission = admission
        self._memory: Memory[Reply] = Memory(settings.replay_window)
        self._running: Running | None = None
        self._resuming: Running | None = None
        self._fanouts: set[Fanout] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._watching: asyncio.Task[None] | None = None
        self._phase = Phase.OPEN
        self.updates = Updates(settings, fleet, admission, prober, fan=self.fan, gate_closed=lambda: gate.closed)
        self._adapters = Adapters(settings, fleet, admission, self.fan)
        self._aborts = Aborts(settings, fleet, tracker, self.fan)

    @property
    def holder(self) -> Holder | None:
        """Who holds the life-cycle lock."""
        running = self._running or self._resuming
        return running.holder if running is not None else None

    @property
    def phase(self) -> Phase:
        """What the fleet is doing."""
        running = self._running or self._resuming
        kind = running.asked.call.kind if running is not None else None
        return phase(kind, gate_closed=self._gate.closed, round_live=self.updates.round.live)

    def _changed(self) -> None:
        now = self.phase
        if now is not self._phase:
            before, self._phase = self._phase, now
            self._fleet.emit("sync_phase", phase=str(now), before=str(before))

    # One call in

    async def handle(self, asked: Asked) -> Reply:
        """Run a call, or join it, or answer it from memory; never raises but for cancellation."""
        if asked.call.kind is Kind.RPC and not self._settings.allow_collective_rpc:
            return reply_error(Forbidden("/collective_rpc runs any method on every worker; allow it with "
                                         "--allow-collective-rpc"))  # fmt: skip
        if asked.call.kind is Kind.RESUME:
            return await self._resume(asked)
        if not asked.call.locks:
            return await asyncio.shield(spawn(self._run(asked, None), name=f"control {asked.call.path}"))
        key = fingerprint(asked.method, asked.call.path, asked.query.encode("latin-1"), asked.body)
        for running in (self._running, self._resuming):
            if running is None:
                continue
            if running.key == key and running.task is not None and not running.given_up:
                self._fleet.emit("control_replayed", call=asked.call.name, status=0, running=True)
                return await asyncio.shield(running.task)
            return self._refuse(asked, running.holder)
        now = asyncio.get_running_loop().time()
        kept = self._memory.answer(asked.call, key, now)
        if kept is not None:
            self._fleet.emit("control_replayed", call=asked.call.name, status=kept.status, running=False)
            return kept
        self._memory.forget()
        running = Running(asked, key, self._holder(asked))
        self._running = running
        running.task = spawn(self._locked(running), name=f"control {asked.call.path}")
        return await asyncio.shield(running.task)

    def _holder(self, asked: Asked) -> Holder:
        return Holder(asked.call.path, asked.client, asked.request_id, time.time())

    def _refuse(self, asked: Asked, holder: Holder) -> Reply:
        error = Conflict(
            f"{asked.call.path}: another life-cycle call is running: {holder.describe(time.time())}. "
            "No engine was called; try again when it has ended"
        )
        self._fleet.emit(
            "control_refused", call=asked.call.name, status=error.status, code=error.code, holder=holder.as_json()
        )
        return reply_error(error, holder=holder)

    async def _locked(self, running: Running) -> Reply:
        self._fleet.emit("lifecycle", holder=running.holder.as_json())
        try:
            reply = await self._run(running.asked, running)
        finally:
            self._running = None
            self._fleet.emit("lifecycle", holder=None)
            self._changed()
        # What was refused before any engine was called may be asked again at once: things may have changed.
        if reply.legs:
            self._memory.keep(running.key, reply, asyncio.get_running_loop().time())
        return reply

    async def _run(self, asked: Asked, running: Running | None) -> Reply:
        started = asyncio.get_running_loop().time()
        self._changed()
        try:
            reply = await self._dispatch(asked, running)
        except FleetgateError as error:
            reply = reply_error(error)
            self._fleet.emit("control_refused", call=asked.call.name, status=error.status, code=error.code, holder=None)
        except Exception as error:
            # A bug must reach the trainer as a failure that no client re-sends, never as a 500.
            _log.exception("control call %s failed", asked.call.path)
            reply = reply_error(PartialFailure(f"{asked.call.path}: {type(error).__name__}: {error}", engines={}))
        self._report(asked, reply, asyncio.get_running_loop().time() - started)
        return reply

    def _report(self, asked: Asked, reply: Reply, seconds: float) -> None:
        if not reply.legs:
            return
        slowest = max(leg.seconds for leg in reply.legs)
        self._fleet.emit(
            "control_call",
            call=asked.call.name,
            status=reply.status,
            seconds=seconds,
            overhead_seconds=max(0.0, seconds - slowest),
            legs={leg.engine: (leg.status, leg.seconds, str(leg.outcome)) for leg in reply.legs},
        )
        level = logging.INFO if reply.status < 400 else logging.WARNING
        if asked.call.kind is not Kind.READ or reply.status >= 400:
            _log.log(level, "%s by %s: %d in %.3f s", asked.call.path, asked.client, reply.status, seconds)

    async def _dispatch(self, asked: Asked, running: Running | None) -> Reply:
        match asked.call.kind:
            case Kind.PAUSE:
                return await self._pause(asked, running)
            case Kind.INIT:
                return await self.updates.init(asked)
            case Kind.SHUTDOWN:
                return await self.updates.shutdown(asked)
            case Kind.START:
                return await self.updates.start(asked)
            case Kind.UPDATE:
                return await self.updates.update(asked)
            case Kind.FINISH:
                return await self.updates.finish(asked)
            case Kind.LABEL:
                return await self.updates.label(asked)
            case Kind.LORA_LOAD:
                return await self._adapters.load(asked)
            case Kind.LORA_UNLOAD:
                return await self._adapters.unload(asked)
            case Kind.ABORT:
                return await self._aborts.abort(asked)
            case Kind.READ:
                return await self._read(asked)
            case _:
                return await self._plain(asked)

    # Legs

    async def fan(self, asked: Asked, shots: Sequence[tuple[Engine, Shot]], runner: Runner = fire) -> list[Leg]:
        """Run legs so that they can be given up, and emit what comes too late."""
        fanout = Fanout(shots, runner)
        running = self._running
        if running is not None and running.asked is asked:
            running.fanout = fanout
            if running.given_up:
                raise Conflict(f"{asked.call.path}: given up because /resume came. No engine was called")

        def late(engine: Engine, leg: Leg) -> None:
            self._late(asked, engine, leg)

        fanout.on_late = late
        self._fanouts.add(fanout)
        try:
            return await fanout.run()
        finally:
            self._fanouts.discard(fanout)

    def _late(self, asked: Asked, engine: Engine, leg: Leg) -> None:
        """An answer that nobody waits for: it changes nothing, except that a pause must not outlive its resume."""
        self._fleet.emit("leg_late", call=asked.call.name, engine=engine.id, status=leg.status, seconds=leg.seconds)
        if asked.call.kind is Kind.PAUSE and leg.ok:
            spawn(self._undo_pause(engine), name=f"undo late pause {engine.id}")

    async def _undo_pause(self, engine: Engine) -> None:
        """A pause was overtaken by a resume: whichever came last there, the engine must not stay paused."""
        if self._gate.closed or not await self._prober.is_paused(engine) or self._gate.closed:
            return
        self._prober.watch_paused(engine)
        await self._resume_leg(engine, self._resume_shot())

    def _resume_shot(self) -> Shot:
        return Shot(CALLS["/resume"], "POST", "/resume", timeout=self._settings.control_timeout)

    def _targets(self, asked: Asked, *, or_fail: bool = True) -> list[Engine]:
        engines = self.updates.living()
        if not engines and or_fail:
            raise Conflict(f"{asked.call.path}: no engine is alive; wait until GET /health answers 200")
        return engines

    def _missed(self, asked: Asked, shot: Shot) -> None:
        """Engines that are down missed the call: not a failure, but they catch up before they are let in."""
        for engine in self._fleet:
            if not engine.alive and engine.state is State.DOWN:
                engine.failed_call = asked.call.path
                if KIND_OWED.get(asked.call.kind):
                    self._owe(engine, shot)

    def _owe(self, engine: Engine, shot: Shot) -> None:
        opposite = {"/pause": "/resume", "/resume": "/pause"}.get(shot.call.path)
        if opposite is not None:
            engine.owed.pop(opposite, None)
        engine.owed[shot.call.path] = replace(shot, timeout=shot.timeout or self._settings.pause_timeout)

    def _after(self, asked: Asked, shot: Shot, engines: Sequence[Engine], legs: Sequence[Leg], merged: Merged) -> None:
        """Fence who failed an idempotent call, note who did it."""
        if merged.passed:
            return
        for engine, leg in zip(engines, legs, strict=True):
            path = asked.call.path
            if leg.ok:
                engine.owed.pop(path, None)
            elif leg.outcome in (Outcome.ABANDONED, Outcome.MISSING) or leg not in merged.failed:
                continue
            else:
                if KIND_OWED.get(asked.call.kind):
                    self._owe(engine, shot)
                self._admission.failed(engine, path, f"failed {path}: {leg.said()}", taint=False)

    def _drop_dead(self, engines: Sequence[Engine], legs: Sequence[Leg]) -> list[Leg]:
        """Legs that count: an engine that refused the connection is down already, which is not a failure."""
        for engine, leg in zip(engines, legs, strict=True):
            if leg.outcome is Outcome.UNREACHABLE:
                self._prober.suspect(engine, leg.detail)
        return [leg for leg in legs if leg.outcome is not Outcome.UNREACHABLE] or list(legs)

    # Calls without a life of their own

    async def _plain(self, asked: Asked) -> Reply:
        call = asked.call
        engines = self._targets(asked)
        shot = asked.shot(limit_of(self._settings, asked))
        if call.kind is Kind.RPC or (call.kind is Kind.CHECK and b"reset" in (asked.body or b"")):
            self._fleet.pristine = False
        legs = await self.fan(asked, [(engine, shot) for engine in engines])
        counted = self._drop_dead(engines, legs)
        merged = merge(call, counted)
        if call.kind is not Kind.CHECK:
            self._missed(asked, shot)
            self._after(asked, shot, engines, legs, merged)
        self._side_effects(asked, engines, legs)
        return reply_merged(call, merged, legs)

    def _side_effects(self, asked: Asked, engines: Sequence[Engine], legs: Sequence[Leg]) -> None:
        kind = asked.call.kind
        for engine, leg in zip(engines, legs, strict=True):
            if not leg.ok:
                continue
            if kind is Kind.SLEEP:
                engine.asleep = frozenset({"weights", "kv_cache"})
                if "level=2" in asked.query.split("&"):
                    engine.taint()
            elif kind is Kind.WAKE:
                self._woke(asked, engine, leg)
            elif kind is Kind.CHECK and b'"reset"' in (asked.body or b"") and b'"status"' in leg.body:
                engine.taint()
        if kind is Kind.CHECK:
            found = [(engine, checksums_of(leg)) for engine, leg in zip(engines, legs, strict=True)]
            self._admission.record([(engine, sums) for engine, sums in found if sums is not None])
        self._fleet.refresh()
        self._admission.review_all()

    def _woke(self, asked: Asked, engine: Engine, leg: Leg) -> None:
        data = leg.json()
        tags = [part[5:] for part in asked.query.split("&") if part.startswith("tags=")]
        if not tags or (isinstance(data, dict) and data.get("status") == "awake"):
            engine.asleep = frozenset()
        else:
            engine.asleep -= set(tags)

    async def _read(self, asked: Asked) -> Reply:
        """A look at every engine; one that is busy in an update answers from what is known, so it never waits."""
        call = asked.call
        if call.merge is Merge.ANY_PAUSED and self._gate.closed:
            return reply_json({"is_paused": True}, legs=[Leg("gate", Outcome.ANSWERED, 200, b'{"is_paused":true}')])
        engines = self._targets(asked)
        shot = asked.shot(limit_of(self._settings, asked))
        legs = await self.fan(asked, [(engine, shot) for engine in engines], self._read_leg)
        legs = self._drop_dead(engines, legs)
        merged = merge(call, legs, gate_closed=self._gate.closed)
        return reply_merged(call, merged, legs)

    async def _read_leg(self, engine: Engine, shot: Shot) -> Leg:
        known = _known(engine, shot.call.merge)
        if known is None:
            leg = await fire(engine, shot)
        elif engine.busy:
            return known
        else:
            leg = await fire(engine, shot)
            if leg.outcome is Outcome.TIMED_OUT and engine.alive:
                return known
        if leg.ok and shot.call.merge is Merge.WORLD_SIZE and "?" not in shot.target:
            data = leg.json()
            size = data.get("world_size") if isinstance(data, dict) else None
            if isinstance(size, int) and size > 0:
                engine.world_size, engine.weight = size, float(size)
        return leg

    # Pause and resume

    async def _pause(self, asked: Asked, running: Running | None) -> Reply:
        gate = self._gate
        was_closed = gate.closed
        who = f"/pause of {asked.client}" + (f" ({asked.request_id})" if asked.request_id else "")
        gate.close(who)
        self.updates.round.passed_by = True
        if not was_closed:
            self._fleet.emit("gate_closed", by=who)
            self._set_timers(who)
        self._changed()
        shot = asked.shot(limit_of(self._settings, asked))
        engines = self.updates.living()
        self._missed(asked, shot)
        if not engines:
            message = "/pause: the gate is closed and requests are held, but no engine is alive to be paused"
            return reply_error(PartialFailure(message, engines={}))
        legs = await self.fan(asked, [(engine, shot) for engine in engines])
        counted = self._drop_dead(engines, legs)
        merged = merge(asked.call, counted)
        if merged.passed:
            if not was_closed and not (running is not None and running.given_up):
                self._open(asked.client)
            return reply_merged(asked.call, merged, legs)
        for engine, leg in zip(engines, legs, strict=True):
            if leg.ok:
                engine.owed.pop("/resume", None)
                engine.reported_paused = True
        self._after(asked, shot, engines, legs, merged)
        note = "" if running is not None and running.given_up else ". The gate stays closed: /pause again, or /resume"
        return reply_merged(asked.call, merged, legs, note=note)

    async def _resume(self, asked: Asked) -> Reply:
        if self._resuming is not None and self._resuming.task is not None:
            self._fleet.emit("control_replayed", call=asked.call.name, status=0, running=True)
            return await asyncio.shield(self._resuming.task)
        self._memory.forget()
        running = Running(asked, b"/resume", self._holder(asked))
        self._resuming = running
        running.task = spawn(self._resume_task(running), name="control /resume")
        return await asyncio.shield(running.task)

    async def _resume_task(self, running: Running) -> Reply:
        try:
            return await self._run_resume(running.asked)
        finally:
            self._resuming = None
            self._changed()

    async def _run_resume(self, asked: Asked) -> Reply:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._changed()
        shot = asked.shot(limit_of(self._settings, asked))
        engines = self.updates.living()
        self._missed(asked, shot)
        other = self._running
        hung = set(other.fanout.pending) if other is not None and other.fanout is not None else set()
        shots = [
            (engine, replace(shot, timeout=min(HUNG_RESUME, shot.timeout or HUNG_RESUME)) if engine in hung else shot)
            for engine in engines
        ]
        legs = await self.fan(asked, shots, self._resume_leg)
        await self._give_up()
        self.updates.half_way = False
        self.updates.break_round("/resume came before its finish")
        if not engines:
            self._open(asked.client)
            message = "/resume: the gate is open, but no engine is alive; requests are held until one is"
            return reply_error(PartialFailure(message, engines={}))
        counted = self._drop_dead(engines, legs)
        merged = merge(asked.call, counted)
        for engine, leg in zip(engines, legs, strict=True):
            if leg.ok:
                engine.owed.pop("/pause", None)
                engine.reported_paused = False
        self._after(asked, shot, engines, legs, merged)
        self._open(asked.client)
        self._admission.review_all()
        if other is not None and other.asked.call.kind is Kind.PAUSE:
            for engine in hung:
                spawn(self._undo_pause(engine), name=f"undo late pause {engine.id}")
        reply = reply_merged(asked.call, merged, legs)
        self._report(asked, reply, loop.time() - started)
        return reply

    async def _resume_leg(self, engine: Engine, shot: Shot) -> Leg:
        """/resume is safe to repeat, and a lost one is the costliest of all: try again within its limit."""
        loop = asyncio.get_running_loop()
        limit = shot.timeout or self._settings.resume_timeout
        started = loop.time()
        delay = RESUME_BACKOFF
        leg = await fire(engine, replace(shot, timeout=min(limit, RESUME_TRY)))
        for _ in range(RESUME_TRIES - 1):
            wrong = leg.outcome is Outcome.REFUSED and leg.status is not None and leg.status < 500
            left = limit - (loop.time() - started) - delay
            if leg.ok or wrong or leg.outcome is Outcome.MISSING or left <= 0 or not engine.alive:
                break
            await asyncio.sleep(delay)
            delay *= 2
            leg = await fire(engine, replace(shot, timeout=min(left, RESUME_TRY)))
        return replace(leg, seconds=loop.time() - started)

    async def _give_up(self) -> None:
        """Stop waiting for a life-cycle call that still runs, and let it say what that means for its engines."""
        running = self._running
        if running is None or running.asked.call.kind not in _GIVEN_UP:
            return
        running.given_up = True
        if running.fanout is not None:
            running.fanout.abandon()
            if running.task is not None:
                await asyncio.wait({running.task}, timeout=self._settings.probe_timeout)

    def _open(self, by: str) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if not self._gate.closed:
            return
        seconds = asyncio.get_running_loop().time() - self._gate.closed_since
        self._gate.open()
        self._fleet.emit("gate_opened", by=by, seconds=seconds)
        self._changed()

    # Pauses that last

    def _set_timers(self, by: str) -> None:
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(self._settings.pause_warn, self._overdue, by))
        if self._settings.max_pause:
            self._timers.append(loop.call_later(self._settings.max_pause, self._lease_ended, by))

    def _overdue(self, by: str) -> None:
        seconds = asyncio.get_running_loop().time() - self._gate.closed_since
        _log.warning("generation has been paused for %.0f s by %s; POST /resume ends it", seconds, by)
        self._fleet.emit("pause_overdue", by=by, seconds=seconds)
        self._timers.append(asyncio.get_running_loop().call_later(self._settings.pause_warn, self._overdue, by))

    def _lease_ended(self, by: str) -> None:
        seconds = asyncio.get_running_loop().time() - self._gate.closed_since
        _log.warning("the pause of %s ended by itself after %.0f s (max_pause)", by, seconds)
        self._fleet.emit("pause_lease_ended", by=by, seconds=seconds)
        asked = Asked(CALLS["/resume"], "POST", "/resume", client="the pause lease")
        spawn(self._resume(asked), name="pause lease")

    def recover(self) -> None:
        """The proxy started while the engines were paused: so is the gate, until /resume or until they all go on."""
        engines = [engine for engine in self.updates.living() if not engine.plain]
        paused = [engine for engine in engines if engine.reported_paused]
        if not paused:
            return
        if len(paused) < len(engines):
            for engine in paused:
                self._prober.watch_paused(engine)
            return
        who = "a pause found at start"
        self.updates.half_way = True
        self._gate.close(who)
        self._fleet.emit("gate_closed", by=who)
        self._set_timers(who)
        self._changed()
        self._watching = spawn(self._until_resumed(), name="watch the recovered pause")

    async def _until_resumed(self) -> None:
        since = self._gate.closed_since
        while self._gate.closed and self._gate.closed_since == since:
            await asyncio.sleep(self._settings.pause_watch_interval)
            engines = [engine for engine in self.updates.living() if not engine.plain]
            if not engines or self._running is not None or not self._gate.closed_by.endswith("at start"):
                continue
            paused = await asyncio.gather(*(self._prober.is_paused(engine) for engine in engines))
            if any(paused) or not self._gate.closed or self._running is not None:
                continue
            for engine in engines:
                engine.reported_paused = False
            self._open("the engines, which all go on")

    async def stop(self) -> None:
        """End all legs."""
        for timer in self._timers:
            timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        for fanout in list(self._fanouts):
            fanout.cancel()


def _known(engine: Engine, rule: Merge) -> Leg | None:
    """What an engine would say, from what it said last."""
    if rule is Merge.VERSION and engine.version is not None:
        body = version_body({engine.id: engine.version})
    elif rule is Merge.ANY_PAUSED:
        body = {"is_paused": engine.paused or engine.reported_paused is True}
    elif rule is Merge.ANY_SLEEPING:
        body = {"is_sleeping": bool(engine.asleep)}
    elif rule is Merge.WORLD_SIZE and engine.world_size is not None:
        body = {"world_size": engine.world_size}
    else:
        return None
    return Leg(engine.id, Outcome.ANSWERED, 200, orjson.dumps(body), "application/json", 0.0, "as last known")


__all__ = ["Conductor", "Running", "report"]
