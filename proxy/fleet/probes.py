"""Looks after the engines: who lives, whose process was replaced, who is paused behind the proxy's back.

One task per engine probes ``/health`` and ``/weight_info`` on one kept connection (`proxy.fleet.sentinel`). The end of
that connection, of a busy one, or a word from the data plane makes the engine *suspect* at once: it gets nothing until
its identity has been checked on new connections. So the window in which a restarted engine could be taken for the old
one is a turn of the loop, not a probe interval.

``/health`` decides alone whether an engine lives: ``/weight_info`` and ``/is_paused`` go through vLLM's engine core and
hang while an update runs, ``/health`` does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from proxy.config import Settings
from proxy.core.engine_state import Event, State
from proxy.core.failures import Kind
from proxy.core.history import read
from proxy.core.identity import START_TIME_SLACK, Look, restarted, start_time
from proxy.data.upstream import Answer, FetchError
from proxy.fleet.engine import Engine
from proxy.fleet.pause_watch import PauseWatch
from proxy.fleet.registry import Fleet
from proxy.fleet.said import nothing, paused_of, version_of, world_size_of
from proxy.fleet.sentinel import Sentinel, Watched
from proxy.tasks import spawn

_log = logging.getLogger("fleetgate.probes")

QUICK_INTERVAL = 0.5
"""Seconds between two looks at an engine about which there is doubt: soon enough to matter, too rare to hurt."""

BLIND_LOOKS = 5
"""Looks at a new engine that may miss its ``/metrics``, where its history is: then it is served all the same."""

FLOW_WINDOW = 5.0
"""Seconds for which an answer byte proves an engine alive although its probes time out (its API process is busy)."""


class Prober:
    """Probes every engine and keeps what they said in `Engine`.

    Args:
        settings: intervals and limits.
        fleet: whose states it moves to ``down`` and from there to ``fenced``.
        on_look: called after every look that an engine answered; decides about its admission.
    """

    def __init__(self, settings: Settings, fleet: Fleet, on_look: Callable[[Engine], None]) -> None:
        self._settings = settings
        self._fleet = fleet
        self._on_look = on_look
        self._watched: dict[Engine, Watched] = {}
        self._pauses = PauseWatch(fleet, self._ask_paused, settings.pause_watch_interval)
        self.on_restart: Callable[[Engine], None] | None = None
        """Called when an engine's process was replaced."""

    def __repr__(self) -> str:
        return f"<Prober engines={len(self._watched)}>"

    # Which engines

    def watch(self, engine: Engine) -> None:
        """Begin to look after an engine; its first look starts now."""
        watched = self._add(engine)
        watched.task = spawn(self._loop(watched), name=f"probe {engine.id}")

    def _add(self, engine: Engine) -> Watched:
        sentinel = Sentinel(
            engine.url,
            partial(self.suspect, engine, "its idle connection ended"),
            connect_timeout=self._settings.connect_timeout,
            lasting=self._settings.probe_interval,
            ssl_context=engine.upstream.ssl_context,
        )
        watched = self._watched[engine] = Watched(engine, sentinel)
        engine.upstream.on_lost = partial(self.lost, engine)
        return watched

    async def forget(self, engine: Engine) -> None:
        """Look after it no more."""
        watched = self._watched.pop(engine, None)
        if watched is None:
            return
        engine.upstream.on_lost = None
        await self._pauses.forget(engine)
        for task in (watched.task, watched.check):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        watched.sentinel.close()

    async def stop(self) -> None:
        """Look after nobody any more."""
        for engine in list(self._watched):
            await self.forget(engine)

    # What others ask

    def suspect(self, engine: Engine, why: str) -> None:
        """Its process may be gone or replaced: it gets nothing until it has been looked at, which happens now."""
        watched = self._watched.get(engine)
        if watched is None:
            return
        watched.broken = True
        watched.wake.set()
        if engine.suspect or engine.state is State.DOWN:
            return
        engine.suspect = True
        engine.last_error = why
        self._fleet.refresh()
        self._fleet.emit("engine_suspect", engine=engine.id, why=why)

    def lost(self, engine: Engine, kind: Kind) -> None:
        """A connection died under a request. That of one that had been idle may be no more than the end of that."""
        watched = self._watched.get(engine)
        if watched is not None and not (kind is Kind.STALE and watched.sentinel.closes):
            self.suspect(engine, "a connection died under a request")

    def nudge(self, engine: Engine) -> None:
        """Look at it now rather than at the next interval."""
        watched = self._watched.get(engine)
        if watched is not None:
            watched.wake.set()

    async def is_dead(self, engine: Engine) -> bool:
        """A quick look whether it still serves: used after it answered a 500."""
        answer = await self._get(engine, "/health")
        if answer is None or answer.status != 200:
            self.suspect(engine, "it does not answer /health" if answer is None else f"/health answers {answer.status}")
            return True
        if engine.suspect:
            # It may be another process that is well: `engine.boot` tells as soon as that is known.
            await self.identify(engine)
        return False

    async def is_same(self, engine: Engine) -> bool:
        """Whether the process that answers now is the one that is known; one that shows no start time is trusted."""
        if engine.start_time is None:
            return True
        answer = await self._get(engine, "/metrics")
        found = start_time(answer.body) if answer is not None and answer.status == 200 else None
        if found is None or abs(found - engine.start_time) <= START_TIME_SLACK:
            return True
        self.suspect(engine, "its process start time changed")
        await self.identify(engine)
        return False

    async def replaced(self, engines: Sequence[Engine]) -> list[Engine]:
        """Those whose process was replaced, unnoticed until now."""
        same = await asyncio.gather(*(self.is_same(engine) for engine in engines))
        return [engine for engine, ok in zip(engines, same, strict=True) if not ok]

    async def is_paused(self, engine: Engine) -> bool:
        """A quick look whether generation is paused there; no answer counts as no."""
        return await self._ask_paused(engine) is True

    async def _ask_paused(self, engine: Engine) -> bool | None:
        answer = await self._get(engine, "/is_paused")
        if answer is not None and answer.status in (404, 405):
            # A server without the route cannot say when it goes on: the next request finds out.
            return False
        return paused_of(answer)

    def watch_paused(self, engine: Engine) -> None:
        """Somebody else paused it: keep it out of rotation until it says otherwise."""
        if engine in self._watched:
            self._pauses.watch(engine)

    async def fresh(self, engine: Engine) -> bool:
        """Whether it answers ``/health`` right now and is the process it was: asked before a collective begins."""
        watched = self._watched.get(engine)
        if watched is None or not engine.alive:
            return False
        if engine.suspect:
            return await self.identify(engine) and engine.alive
        return await self._lives(watched)

    async def _lives(self, watched: Watched) -> bool:
        engine = watched.engine
        kept = watched.sentinel.kept
        try:
            answer = await watched.sentinel.ask("/health", timeout=self._settings.probe_timeout)
        except FetchError as error:
            if error.failure.kind is Kind.TIMEOUT:
                self._failed(watched, error.failure.detail)
                return False
            self.suspect(engine, error.failure.detail)
            return await self.identify(engine) and engine.alive
        if answer.status != 200:
            self._failed(watched, f"/health answers {answer.status}")
            return False
        self._good(engine)
        # What no connection watched since the last look may have been replaced meanwhile.
        return kept or (await self.is_same(engine) and not engine.suspect)

    async def identify(self, engine: Engine) -> bool:
        """Find out on new connections whether it lives and which process it is; callers share one look.

        Returns:
            Whether it lives and its identity is known: it is not suspect any more.
        """
        watched = self._watched.get(engine)
        if watched is None:
            return False
        if watched.check is None or watched.check.done():
            watched.check = spawn(self._identify(watched), name=f"identify {engine.id}")
        return await asyncio.shield(watched.check)

    # The loop

    async def _loop(self, watched: Watched) -> None:
        engine = watched.engine
        while True:
            watched.wake.clear()
            try:
                await self._tick(watched)
            except Exception:
                # A bug in one look must not end the looks at this engine for good.
                _log.exception("probe of %s failed", engine.id)
            doubt = engine.suspect or engine.failures or engine.state is State.DOWN
            interval = self._settings.probe_interval
            delay = min(interval, QUICK_INTERVAL) if doubt else interval
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay * random.uniform(0.9, 1.1)):
                    await watched.wake.wait()

    async def _tick(self, watched: Watched) -> None:
        engine = watched.engine
        if engine.suspect or not engine.alive:
            await self.identify(engine)
            return
        loop = asyncio.get_running_loop()
        started = loop.time()
        if not await self._lives(watched):
            return
        self._fleet.emit("probe", engine=engine.id, ok=True, seconds=loop.time() - started, error="")
        if not engine.plain and not engine.busy:
            await self._read_version(watched)
        if not engine.suspect:
            self._on_look(engine)

    async def _read_version(self, watched: Watched) -> None:
        engine = watched.engine
        calls = engine.calls
        try:
            answer = await watched.sentinel.ask("/weight_info", timeout=self._settings.probe_timeout)
        except FetchError as error:
            if error.failure.kind is not Kind.TIMEOUT:
                self.suspect(engine, error.failure.detail)
            return
        if engine.calls != calls or engine.busy:
            return
        version = version_of(answer)
        if answer.status in (404, 405) or (version == "default" and engine.version not in (None, "default")):
            self.suspect(engine, "its weight version went back to the default")
            return
        if version is not None:
            self._fleet.set_version(engine, version)

    def _good(self, engine: Engine) -> None:
        engine.failures = 0
        engine.successes += 1
        engine.probed_at = asyncio.get_running_loop().time()

    def _failed(self, watched: Watched, why: str, *, refused: bool = False) -> None:
        engine = watched.engine
        engine.failures += 1
        engine.successes = 0
        engine.last_error = why
        self._fleet.emit("probe", engine=engine.id, ok=False, seconds=0.0, error=why)
        flowing = asyncio.get_running_loop().time() - engine.last_byte < FLOW_WINDOW and engine.last_byte > 0
        if not refused and (engine.failures < self._settings.probe_fall or flowing):
            return
        watched.sentinel.drop()
        if engine.state is not State.DOWN:
            engine.upstream.drop_idle()
            self._fleet.apply(engine, Event.LOST, why)

    # Identity

    async def _identify(self, watched: Watched) -> bool:
        engine = watched.engine
        loop = asyncio.get_running_loop()
        started = loop.time()
        calls = engine.calls
        watched.broken, broken = False, watched.broken
        # The kept connection comes first: whatever is learned after it holds as long as it stays open.
        watched.sentinel.drop()
        try:
            health = await watched.sentinel.ask("/health", timeout=self._settings.probe_timeout)
            # The engine core answers nothing while an update runs: its questions would only wait out their limit.
            core = nothing if engine.busy else self._get
            weight, paused, metrics, size = await asyncio.gather(
                core(engine, "/weight_info"),
                core(engine, "/is_paused"),
                self._get(engine, "/metrics"),
                self._get(engine, "/get_world_size"),
            )
        except FetchError as error:
            watched.broken = watched.broken or broken
            refused = error.failure.kind is Kind.CONNECT
            watched.refused = watched.refused or (refused and engine.state is not State.STARTING)
            self._failed(watched, error.failure.detail, refused=refused)
            return False
        if health.status != 200:
            watched.broken = watched.broken or broken
            self._failed(watched, f"/health answers {health.status}")
            return False
        quiet = engine.calls == calls and not engine.busy
        now = Look(
            version=version_of(weight) if quiet else None,
            plain=None if weight is None else weight.status in (404, 405),
            paused=paused_of(paused) if quiet else None,
            start_time=start_time(metrics.body) if metrics is not None and metrics.status == 200 else None,
            world_size=world_size_of(size),
        )
        before = Look(engine.version, engine.plain if watched.looked else None, None, engine.start_time)
        same_process = before.start_time is not None and now.start_time is not None
        known = now.version is not None or now.plain is True or (same_process and engine.version is not None)
        # A server without the page says so; one that did not give it may be in the middle of an update.
        unread = metrics is None or metrics.status >= 500
        blind = unread and not watched.looked and watched.blind < BLIND_LOOKS
        if not known or blind or (before.start_time is not None and metrics is None):
            # It lives, but nothing says which process it is: look again soon.
            watched.blind += blind
            watched.broken = watched.broken or broken
            engine.last_error = "it answers /health, but neither its version nor its start time"
            return False
        why = restarted(before, now, refused=watched.refused, broken=broken) if watched.looked else None
        if not watched.looked and metrics is not None and metrics.status == 200:
            engine.history = replace(read(metrics.body), paused=now.paused is not False)
            engine.asleep, engine.counted = engine.history.asleep, engine.history.counted
        if why is not None and same_process:
            watched.sentinel.start_over()
        self._identified(watched, now, why)
        self._fleet.emit("engine_checked", engine=engine.id, seconds=loop.time() - started, ok=True)
        return not engine.suspect

    def _identified(self, watched: Watched, now: Look, why: str | None) -> None:
        engine = watched.engine
        if why is not None:
            self._reset(engine, why)
        watched.looked = True
        watched.refused = False
        engine.start_time = now.start_time if now.start_time is not None else engine.start_time
        engine.world_size = now.world_size if now.world_size is not None else engine.world_size
        engine.weight = engine.whole_weight
        if now.plain is not None:
            engine.plain = now.plain
            engine.was_rl = engine.was_rl or not now.plain
        if now.version is not None:
            self._fleet.set_version(engine, now.version)
        self._good(engine)
        if not watched.broken:
            engine.suspect = False
        if now.paused is not None and not now.paused:
            self._pauses.set(engine, paused=False)
        engine.reported_paused = now.paused if now.paused is not None else engine.reported_paused
        if engine.state is State.DOWN and engine.successes < self._settings.probe_rise:
            # One that flaps has to answer several times in a row before it is looked at again.
            engine.suspect = True
            return
        if engine.state in (State.STARTING, State.DOWN):
            self._fleet.apply(engine, Event.CAME, "it answers")
        elif why is not None:
            self._fleet.apply(engine, Event.FENCE, why)
        self._fleet.refresh()
        self._on_look(engine)

    def _reset(self, engine: Engine, why: str) -> None:
        """Another process: nothing that was known of its weights holds."""
        engine.forget_process()
        engine.upstream.drop_idle()
        self._fleet.emit("engine_restarted", engine=engine.id, boot=engine.boot, why=why)
        _log.warning("engine %s restarted: %s", engine.id, why)
        if self.on_restart is not None:
            self.on_restart(engine)

    async def _get(self, engine: Engine, target: str) -> Answer | None:
        try:
            return await engine.upstream.fetch("GET", target, timeout=self._settings.probe_timeout)
        except FetchError:
            return None
