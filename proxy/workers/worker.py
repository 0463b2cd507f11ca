"""A worker: connections of clients and engines, routed by what the director says. Ends with the director."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections import OrderedDict
from functools import partial
from typing import Any

import uvloop

from proxy.config import Settings
from proxy.core.balancing import Sticky
from proxy.core.failures import Kind
from proxy.core.paths import PathTable
from proxy.data.plane import DataPlane
from proxy.data.upstream import FetchError
from proxy.fleet.engine import Engine
from proxy.fleet.members import make_engine
from proxy.fleet.registry import Fleet
from proxy.observe import logs, tracing
from proxy.server import Server
from proxy.workers.link import Link, Message
from proxy.workers.passing import DirectorUpstream, Passed
from proxy.workers.state import apply_engine, stats_snapshot

_log = logging.getLogger("fleetgate.workers")

STATS_INTERVAL = 0.2
"""Seconds between two reports of counts: the age of what ``/metrics`` and ``/fleet`` say of a worker."""


class RemoteWatch:
    """Tells the director what this worker noticed about an engine, and believes itself until it is heard."""

    def __init__(self, link: Link, fleet: Fleet, settings: Settings) -> None:
        self._link = link
        self._fleet = fleet
        self._timeout = settings.probe_timeout
        self.claims: dict[str, int] = {}

    def _claim(self, engine: Engine) -> int:
        self.claims[engine.id] = claim = self.claims.get(engine.id, 0) + 1
        return claim

    def suspect(self, engine: Engine, why: str) -> None:
        """Its process may be gone or replaced."""
        engine.suspect = True
        self._fleet.refresh()
        self._link.send("suspect", engine=engine.id, why=why, claim=self._claim(engine))

    def lost(self, engine: Engine, kind: Kind) -> None:
        """A connection died under a request; the director knows whether that says anything of this engine."""
        engine.suspect = True
        self._fleet.refresh()
        self._link.send("lost", engine=engine.id, how=kind.value, claim=self._claim(engine))

    def watch_paused(self, engine: Engine) -> None:
        """Somebody else paused it."""
        engine.paused = True
        self._fleet.refresh()
        self._link.send("paused", engine=engine.id, claim=self._claim(engine))

    async def is_dead(self, engine: Engine) -> bool:
        """A quick look whether it still serves."""
        try:
            answer = await engine.upstream.fetch("GET", "/health", timeout=self._timeout)
        except FetchError:
            return True
        return answer.status != 200

    async def is_paused(self, engine: Engine) -> bool:
        """A quick look whether generation is paused there; no answer counts as no."""
        try:
            answer = await engine.upstream.fetch("GET", "/is_paused", timeout=self._timeout)
        except FetchError:
            return False
        return b"true" in answer.body.lower()


class WorkerServer(Server):
    """The main listener of a worker: what is not the data plane's goes to the director."""

    def __init__(self, plane: DataPlane, paths: PathTable, director: DirectorUpstream) -> None:
        super().__init__(plane, None, paths)
        self._director = director

    def handoff(self, front, head) -> Passed:  # type: ignore[no-untyped-def, override]  # noqa: ANN001 - as its base
        """A control call."""
        return Passed(self._director, front, head, limit=self.plane.settings.max_control_body)


class WorkerProcess:
    """Everything of one worker."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.fleet = Fleet(self.loop.time)
        self.link = Link(self._heard, self.ended.set)
        self.plane: DataPlane | None = None
        self.server: WorkerServer | None = None
        self.watch: RemoteWatch | None = None
        self._director: DirectorUpstream | None = None
        self._told: OrderedDict[bytes, str] = OrderedDict()
        self._stopping = asyncio.Event()
        self.fleet.listeners.append(self._happened)

    def _happened(self, kind: str, details: dict[str, Any]) -> None:
        """Only a worker sees requests break; the rest the director knows first."""
        if kind == "engine_left_out":
            self.link.send("left_out", details=details)

    def _heard(self, message: Message) -> Message | None:
        match message["t"]:
            case "hello":
                self._hello(message)
            case "fleet":
                self._fleet(message["fleet"])
            case "close":
                assert self.plane is not None
                self.plane.gate.close(message["by"])
            case "open":
                assert self.plane is not None
                self.plane.gate.open()
            case "running":
                return {"requests": self._running()}
            case "abort":
                self._abort(message["order"])
            case "event":
                self.fleet.emit(message["event"], **message["details"])
            case "session":
                self._adopt(message["key"], message["engine"])
            case "finish_session":
                assert self.plane is not None
                self.plane.balancer.finish(message["key"].encode("latin-1"))
            case "forget":
                assert self.plane is not None
                self.plane.balancer.forget(message["engine"])
            case "stop":
                if self._stopping.is_set() and self.server is not None:
                    self.server.hurry()
                self._stopping.set()
        return None

    def _hello(self, message: Message) -> None:
        settings = Settings(**message["settings"])
        logs.configure(settings.log_format, settings.log_level)
        self.plane = DataPlane(settings, self.fleet)
        spans = tracing.start(settings)
        if spans is not None:
            self.plane.trace(spans)
        self.plane.watch = self.watch = RemoteWatch(self.link, self.fleet, settings)
        self.plane.on_session = self._placed
        self._director = DirectorUpstream(message["control"])
        if message["closed_by"] is not None:
            self.plane.gate.close(message["closed_by"])
        for key, engine in message["sessions"].items():
            self._adopt(key, engine)

    def _fleet(self, told: Message) -> None:
        assert self.plane is not None
        assert self.watch is not None
        self.fleet.version = told["version"]
        wanted = {item["id"] for item in told["engines"]}
        for engine in [engine for engine in self.fleet if engine.id not in wanted]:
            self.fleet.remove(engine)
            engine.upstream.close()
        for item in told["engines"]:
            engine = self.fleet.engines.get(item["id"]) or self._join(item["url"])
            if engine.version is not None and item["suspect"] and not engine.suspect:
                # What an idle connection leads to is not known any more.
                engine.upstream.drop_idle()
            before = engine.state
            apply_engine(engine, item, self.watch.claims.get(engine.id, 0))
            if engine.state is not before:
                engine.since = self.loop.time()
                self.fleet.emit(
                    "engine_state",
                    engine=engine.id,
                    before=str(before),
                    state=str(engine.state),
                    reason=engine.reason,
                )
        self.fleet.refresh()
        if self.server is None:
            self.server = WorkerServer(
                self.plane,
                PathTable(item.path for item in self.plane.settings.fanout_paths),
                self._need(self._director),
            )
            self.loop.create_task(self._listen())

    @staticmethod
    def _need(director: DirectorUpstream | None) -> DirectorUpstream:
        assert director is not None
        return director

    def _join(self, url: str) -> Engine:
        assert self.plane is not None
        assert self.watch is not None
        watch = self.watch
        engine = make_engine(url, self.plane.settings)
        engine.upstream.on_lost = partial(watch.lost, engine)
        self.fleet.add(engine)
        return engine

    async def _listen(self) -> None:
        assert self.server is not None
        try:
            await self.server.start(reuse_port=True)
        except OSError as error:
            self.link.send("failed", why=str(error))
            return
        self.link.send("ready", pid=os.getpid())

    # Requests and sessions

    def _running(self) -> list[Message]:
        assert self.plane is not None
        return [
            {
                "id": request.request_id,
                "route": request.route,
                "prompts": request.prompts,
                "engine": request.engine.id if request.engine is not None else None,
                "order": request.order,
            }
            for request in self.plane.tracker.all()
        ]

    def _abort(self, order: int) -> None:
        assert self.plane is not None
        for request in self.plane.tracker.all():
            if request.order == order and request.engine is None:
                request.abort()

    def _placed(self, key: bytes, engine: str) -> None:
        """A session got an engine here: the other workers keep it there."""
        if self._told.get(key) != engine:
            self._told[key] = engine
            if self.plane is not None and len(self._told) > self.plane.settings.max_sessions:
                self._told.popitem(last=False)
            self.link.send("session", key=key.decode("latin-1"), engine=engine)

    def _adopt(self, name: str, engine: str) -> None:
        assert self.plane is not None
        key = name.encode("latin-1")
        self._told[key] = engine
        if isinstance(self.plane.balancer, Sticky):
            self.plane.balancer.adopt(key, engine, self.loop.time())

    # Life

    async def run(self, sock: socket.socket) -> None:
        """Serve until the director says stop or is gone."""
        await self.link.open(sock)
        ended = asyncio.ensure_future(self.ended.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        while not (ended.done() or stopping.done()):
            await asyncio.wait({ended, stopping}, timeout=STATS_INTERVAL, return_when=asyncio.FIRST_COMPLETED)
            self._report()
        ended.cancel()
        if self.server is not None and stopping.done():
            stop = asyncio.ensure_future(self.server.stop())
            while not stop.done():
                await asyncio.wait({stop}, timeout=STATS_INTERVAL)
                self._report()
            stop.result()
        stopping.cancel()
        if self.plane is not None and self.plane.spans is not None:
            await self.plane.spans.stop()
        self.link.close()

    def _report(self) -> None:
        plane = self.plane
        if plane is None:
            return
        gate = plane.gate
        stats = stats_snapshot(
            plane.stats, self.fleet, held=gate.held, held_bytes=gate.held_bytes, now=self.loop.time()
        )
        self.link.send("stats", stats=stats)


async def _main(descriptor: int) -> None:
    # The director is told to stop and tells the workers; a terminal's Ctrl-C reaches all of them at once.
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: None)
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    await WorkerProcess().run(sock)


def main() -> None:
    """``python -m proxy.workers.worker FD``: started by the director only."""
    from proxy.app import GC_THRESHOLD, raise_file_limit  # noqa: PLC0415 - the app imports this package

    raise_file_limit()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
    gc.freeze()
    uvloop.run(_main(int(sys.argv[1])))


if __name__ == "__main__":
    main()
