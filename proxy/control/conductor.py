"""Runs control calls: one life-cycle at a time, replays answered once, ``/resume`` always through.

Every call runs as a task of its own. A trainer that goes away in the middle does not end it, because half a collective
is worse than a whole one that nobody waits for; its outcome is kept for the replay that usually follows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from proxy.config import Settings
from proxy.control.aborts import Aborts
from proxy.control.admit import Admission
from proxy.control.aftermath import Aftermath
from proxy.control.asked import Asked, Reply, reply_error
from proxy.control.everyday import Everyday
from proxy.control.fanout import COLLECTIVE_GRACE, Fanout, Runner, Shot, fire
from proxy.control.groups import Groups
from proxy.control.labels import Labeller
from proxy.control.lock import LifecycleLock, Running, holder_of
from proxy.control.lora import Adapters
from proxy.control.naming import Naming
from proxy.control.pauses import Pauses
from proxy.control.updates import Updates
from proxy.core import ranks
from proxy.core.calls import CALLS, Kind
from proxy.core.lifecycle import Holder
from proxy.core.merge import Leg
from proxy.core.replay import Memory, fingerprint
from proxy.errors import Conflict, FleetgateError, Forbidden, PartialFailure
from proxy.fleet.engine import Engine
from proxy.fleet.probes import Prober
from proxy.fleet.registry import Fleet
from proxy.tasks import spawn

if TYPE_CHECKING:
    from proxy.data.gate import Gate
    from proxy.data.plane import Tracker
    from proxy.observe.spans import Spans

_log = logging.getLogger("fleetgate.control")


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
        self._memory: Memory[Reply] = Memory(settings.replay_window)
        self._fanouts: set[Fanout] = set()
        self.spans: Spans | None = None
        """Makes spans of calls and their legs, where anything does."""
        aftermath = Aftermath(settings, fleet, admission, prober)
        self.groups = Groups(settings, fleet, admission, prober, fan=self.fan, gate_closed=lambda: gate.closed)
        self.labels = Labeller(settings, fleet, prober)
        self.updates = Updates(settings, fleet, self.groups, admission, labels=self.labels, fan=self.fan)
        self._naming = Naming(settings, fleet, self.groups, admission, labels=self.labels, fan=self.fan)
        self.lock = LifecycleLock(fleet, gate_closed=lambda: gate.closed, round_live=lambda: self.updates.round.live)
        self.pauses = Pauses(
            settings, fleet, gate, self.lock, updates=self.updates, prober=prober, admission=admission,
            aftermath=aftermath, fan=self.fan, on_lease_end=self._lease_ended,
        )  # fmt: skip
        self._everyday = Everyday(
            settings, fleet, gate, admission, aftermath=aftermath, labels=self.labels, fan=self.fan
        )
        self._everyday.on_counted = self._counted
        self._adapters = Adapters(settings, fleet, admission, self.fan)
        self._aborts = Aborts(settings, fleet, tracker, self.fan)

    # One call in

    async def handle(self, asked: Asked) -> Reply:
        """Run a call, or join it, or answer it from memory; never raises but for cancellation."""
        if asked.call.kind is Kind.RPC and not self._settings.allow_collective_rpc:
            return reply_error(Forbidden("/collective_rpc runs any method on every worker; allow it with "
                                         "--allow-collective-rpc"))  # fmt: skip
        if asked.call.kind is Kind.RESUME:
            return await self._resume(asked)
        if not asked.call.locks:
            return await asyncio.shield(spawn(self._run(asked), name=f"control {asked.call.path}"))
        key = fingerprint(asked.method, asked.call.path, asked.query.encode("latin-1"), asked.body)
        for running in (self.lock.current, self.lock.resuming):
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
        running = Running(asked, key, holder_of(asked))
        self.lock.current = running
        running.task = spawn(self._locked(running), name=f"control {asked.call.path}")
        return await asyncio.shield(running.task)

    async def _resume(self, asked: Asked) -> Reply:
        """/resume waits for nobody; a second one joins the first."""
        resuming = self.lock.resuming
        if resuming is not None and resuming.task is not None:
            self._fleet.emit("control_replayed", call=asked.call.name, status=0, running=True)
            return await asyncio.shield(resuming.task)
        self._memory.forget()
        running = Running(asked, b"/resume", holder_of(asked))
        self.lock.resuming = running
        running.task = spawn(self._beside(running), name="control /resume")
        return await asyncio.shield(running.task)

    async def _beside(self, running: Running) -> Reply:
        try:
            return await self._run(running.asked)
        finally:
            self.lock.resuming = None
            self.lock.changed()

    def _lease_ended(self) -> None:
        asked = Asked(CALLS["/resume"], "POST", "/resume", client="the pause lease")
        spawn(self._resume(asked), name="pause lease")

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
            reply = await self._run(running.asked)
        finally:
            self.lock.current = None
            self._fleet.emit("lifecycle", holder=None)
            self.lock.changed()
        # What was refused before any engine was called may be asked again at once: things may have changed. It is not
        # what happened last to the engines either, so the call before it stays the one that must not run twice.
        if reply.legs:
            self._memory.keep(running.key, reply, asyncio.get_running_loop().time())
        elif running.fanout is not None:
            self._memory.forget()
        return reply

    async def _run(self, asked: Asked) -> Reply:
        if self.spans is None:
            return await self._answer(asked)
        with self.spans.call(asked) as span:
            reply = await self._answer(asked)
            span.answered(reply)
            return reply

    async def _answer(self, asked: Asked) -> Reply:
        started = perf_counter()
        self.lock.changed()
        try:
            reply = await self._dispatch(asked)
        except FleetgateError as error:
            reply = reply_error(error)
            self._fleet.emit("control_refused", call=asked.call.name, status=error.status, code=error.code, holder=None)
        except Exception as error:
            # A bug must reach the trainer as a failure that no client re-sends, never as a 500.
            _log.exception("control call %s failed", asked.call.path)
            reply = reply_error(PartialFailure(f"{asked.call.path}: {type(error).__name__}: {error}", engines={}))
        self._report(asked, reply, perf_counter() - started)
        return reply

    def _report(self, asked: Asked, reply: Reply, seconds: float) -> None:
        if not reply.legs:
            return
        slowest = max(leg.seconds for leg in reply.legs)
        self._fleet.emit(
            "control_call",
            call=asked.call.name,
            # Only of vLLM's own calls: nobody knows what the query of a configured path carries.
            query=asked.query if asked.call.path in CALLS else "",
            status=reply.status,
            seconds=seconds,
            overhead_seconds=max(0.0, seconds - slowest),
            legs={leg.engine: (leg.status, leg.seconds, str(leg.outcome)) for leg in reply.legs},
            client=asked.client,
            request_id=asked.request_id,
        )

    async def _dispatch(self, asked: Asked) -> Reply:
        match asked.call.kind:
            case Kind.PAUSE:
                return await self.pauses.pause(asked)
            case Kind.RESUME:
                return await self.pauses.resume(asked)
            case Kind.INIT:
                return await self.groups.init(asked)
            case Kind.SHUTDOWN:
                return await self.groups.shutdown(asked)
            case Kind.START:
                return await self.updates.start(asked)
            case Kind.UPDATE:
                return await self.updates.update(asked)
            case Kind.FINISH:
                return await self.updates.finish(asked)
            case Kind.LABEL:
                return await self._naming.label(asked)
            case Kind.LORA_LOAD:
                return await self._adapters.load(asked)
            case Kind.LORA_UNLOAD:
                return await self._adapters.unload(asked)
            case Kind.ABORT:
                return await self._aborts.abort(asked)
            case Kind.READ:
                return await self._everyday.read(asked)
            case _:
                return await self._everyday.plain(asked)

    # Legs

    async def fan(self, asked: Asked, shots: Sequence[tuple[Engine, Shot]], runner: Runner = fire) -> list[Leg]:
        """Run legs so that they can be given up, and emit what comes too late."""
        grace = COLLECTIVE_GRACE if is_collective(asked) else None
        if self.spans is not None:
            runner = self.spans.legs(runner)
        fanout = Fanout(shots, runner, grace=grace)
        running = self.lock.current
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
            self.pauses.undo(engine)

    async def stop(self) -> None:
        """End all legs."""
        self.pauses.stop()
        self.labels.stop()
        for fanout in list(self._fanouts):
            fanout.cancel()

    def _counted(self, engines: list[Engine]) -> None:
        self.groups.counted = engines

    def on_down(self, engine: Engine) -> None:
        """Its probes say that it is gone: no call waits for it any longer."""
        for fanout in list(self._fanouts):
            fanout.lose(engine)


def is_collective(asked: Asked) -> bool:
    """Whether the engines wait for each other in it, so that one that failed keeps all others from ending."""
    if asked.call.kind is Kind.UPDATE:
        return not asked.call.one_shot and ranks.is_native_update(asked.body)
    return asked.call.kind is Kind.INIT
