"""The director: one control plane for several workers that share the port.

It owns the engines' states, the gate, the life-cycle lock and the metrics. Workers own connections: clients', held
requests, and those to engines. A pause closes the gate of every worker, and has heard from each of them, before the
first engine is called. A worker that does not say so in time is ended, which closes its connections: a client that
sees its connection cut may send again, a request that slipped through a closed gate may not be answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from proxy.config import Settings
from proxy.core.balancing import Balancer
from proxy.core.failures import Kind
from proxy.data.gate import Gate
from proxy.fleet.probes import Prober
from proxy.fleet.registry import Fleet
from proxy.observe.stats import DataStats
from proxy.tasks import spawn
from proxy.workers.link import Link, LinkLostError, Message
from proxy.workers.remote import FleetGate, RemoteSessions, RemoteTracker
from proxy.workers.state import Snapshot, dump_settings, fleet_snapshot, merge_stats, retired, worker_settings

_log = logging.getLogger("fleetgate.workers")

ACK_TIMEOUT = 5.0
"""Seconds a worker has to say that its gate is closed; its loop turns in milliseconds unless it is stuck."""
START_TIMEOUT = 60.0
"""Seconds a new worker has to listen."""
RESPAWN_DELAY = 0.5
"""Seconds before a worker that died is replaced, so that one that cannot start does not spin."""


class DirectorPlane:
    """What the control plane and the pages know as the data plane."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self.settings = settings
        self.fleet = fleet
        self.stats = DataStats()
        self.workers = Workers(settings, fleet, self.stats)
        self.gate = FleetGate(self.workers)
        self.tracker = RemoteTracker(self.workers, fleet)
        self.balancer: Balancer = RemoteSessions(self.workers)  # type: ignore[assignment]
        self.workers.sessions = self.balancer  # type: ignore[assignment]
        self.workers.gate = self.gate
        self.draining = False


class Worker:
    """One worker process, seen from the director."""

    def __init__(self, number: int, workers: Workers) -> None:
        self.number = number
        self.told: Snapshot = {}
        self.acks: dict[str, int] = {}
        self.sent: Snapshot | None = None
        self.ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.process: asyncio.subprocess.Process | None = None
        self.link = Link(lambda message: workers.heard(self, message), lambda: workers.lost(self))

    def __repr__(self) -> str:
        pid = self.process.pid if self.process is not None else None
        return f"<Worker {self.number} pid={pid}>"


class Workers:
    """Starts workers, tells them what changed, replaces those that die.

    Args:
        settings: of the fleet; each worker gets its share of the limits.
        fleet: the director's.
        stats: kept at the sum of what workers counted.
    """

    def __init__(self, settings: Settings, fleet: Fleet, stats: DataStats) -> None:
        self._settings = settings
        self._fleet = fleet
        self._stats = stats
        self._base: list[Snapshot] = []
        self._pushing: asyncio.Handle | None = None
        self._closing: list[asyncio.Task[None]] = []
        self._stopping = False
        self._control_path = ""
        self._port = 0
        self._reserved: socket.socket | None = None
        self.living: list[Worker] = []
        self.gate: Gate | None = None
        self.sessions: RemoteSessions | None = None
        self.prober: Prober | None = None
        fleet.on_change.append(self.push)
        fleet.listeners.append(self._on_event)

    # Life

    def reserve(self) -> tuple[str, int]:
        """Bind the port that workers will share, without listening on it.

        Raises:
            OSError: somebody else has it.
        """
        host = self._settings.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind((host, self._settings.port))
        except OSError:
            sock.close()
            raise
        self._reserved = sock
        address, self._port = sock.getsockname()[:2]
        return address, self._port

    async def start(self, control_path: str) -> None:
        """Start all workers and wait until they listen.

        Args:
            control_path: Unix socket on which the director answers control calls.
        """
        self._control_path = control_path
        await asyncio.gather(*(self._spawn(number) for number in range(self._settings.workers)))

    async def _spawn(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        worker = Worker(number, self)
        with theirs:
            worker.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "proxy.workers.worker", str(theirs.fileno()), pass_fds=(theirs.fileno(),)
            )  # fmt: skip
        ours.setblocking(False)
        await worker.link.open(ours)
        settings = worker_settings(self._settings, self._settings.workers).model_copy(update={"port": self._port})
        gate = self.gate
        worker.link.send(
            "hello", settings=dump_settings(settings), control=self._control_path, number=number,
            closed_by=gate.closed_by if gate is not None and gate.closed else None,
            sessions=self.sessions.known if self.sessions is not None else {},
        )  # fmt: skip
        self.living.append(worker)
        self._push_to(worker)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await worker.ready
        except TimeoutError:
            _log.error("worker %d does not listen after %g s", number, START_TIMEOUT)
            self._end(worker)

    def lost(self, worker: Worker) -> None:
        """A worker is gone: its connections are lost, its counts stay, another one takes its place."""
        if worker not in self.living:
            return
        self.living.remove(worker)
        if worker.told:
            self._base.append(retired(worker.told))
            self._base = [_sum(self._base)]
        self._merge()
        if not worker.ready.done():
            worker.ready.set_exception(LinkLostError(f"worker {worker.number} ended before it listened"))
        if not self._stopping:
            _log.error("%r died; its connections are lost, another one takes its place", worker)
            spawn(self._replace(worker), name=f"replace worker {worker.number}")

    async def _replace(self, worker: Worker) -> None:
        self._end(worker)
        if worker.process is not None:
            await worker.process.wait()
        await asyncio.sleep(RESPAWN_DELAY)
        if not self._stopping:
            with contextlib.suppress(LinkLostError):
                await self._spawn(worker.number)

    def _end(self, worker: Worker) -> None:
        if worker.process is not None and worker.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()

    async def stop(self, seconds: float) -> None:
        """Let workers drain, at most so long, then end them."""
        self._stopping = True
        workers = list(self.living)
        for worker in workers:
            worker.link.send("stop")
        waits = [worker.process.wait() for worker in workers if worker.process is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + ACK_TIMEOUT):
                await asyncio.gather(*waits)
        for worker in workers:
            self._end(worker)
            worker.link.close()
            if worker.process is not None:
                await worker.process.wait()
        if self._reserved is not None:
            self._reserved.close()

    def hurry(self) -> None:
        """Workers drain no longer: the second word says so."""
        for worker in self.living:
            worker.link.send("stop")

    # The gate

    def close_gates(self, by: str) -> None:
        """Tell every worker to hold; `acknowledged` waits for their word."""
        self._closing = [spawn(self._close_gate(worker, by), name="close a gate") for worker in self.living]

    async def _close_gate(self, worker: Worker, by: str) -> None:
        try:
            await worker.link.ask("close", timeout=ACK_TIMEOUT, by=by)
        except LinkLostError as error:
            if worker in self.living:
                _log.error("%r did not close its gate (%s); it is ended", worker, error)
            self._end(worker)

    async def acknowledged(self) -> None:
        """Every worker holds, or is gone."""
        closing, self._closing = self._closing, []
        if closing:
            await asyncio.gather(*closing)

    # Telling

    def push(self) -> None:
        """Something about the fleet changed: tell every worker in this turn of the loop."""
        if self._pushing is None:
            self._pushing = asyncio.get_running_loop().call_soon(self._push)

    def _push(self) -> None:
        self._pushing = None
        for worker in self.living:
            self._push_to(worker)

    def _push_to(self, worker: Worker) -> None:
        snapshot = fleet_snapshot(self._fleet, worker.acks)
        if snapshot != worker.sent:
            worker.sent = snapshot
            worker.link.send("fleet", fleet=snapshot)

    def _on_event(self, kind: str, details: dict[str, Any]) -> None:
        self.push()
        if kind in ("engine_restarted", "control_call"):
            told = dict(details)
            if "legs" in told:
                told["legs"] = dict.fromkeys(told["legs"], 0)
            for worker in self.living:
                worker.link.send("event", event=kind, details=told)

    async def ask_all(self, kind: str) -> list[tuple[Worker, Message]]:
        """The answers of all workers that give one."""

        async def one(worker: Worker) -> tuple[Worker, Message] | None:
            try:
                return worker, await worker.link.ask(kind, timeout=ACK_TIMEOUT)
            except LinkLostError:
                return None

        answers = await asyncio.gather(*(one(worker) for worker in list(self.living)))
        return [answer for answer in answers if answer is not None]

    # Hearing

    def heard(self, worker: Worker, message: Message) -> Message | None:
        """A worker says something."""
        handler: Callable[[Worker, Message], None] = getattr(self, f"_on_{message['t']}")
        handler(worker, message)
        return None

    def _on_ready(self, worker: Worker, message: Message) -> None:
        if not worker.ready.done():
            worker.ready.set_result(message["pid"])

    def _on_failed(self, worker: Worker, message: Message) -> None:
        if not worker.ready.done():
            worker.ready.set_exception(OSError(message["why"]))

    def _on_suspect(self, worker: Worker, message: Message) -> None:
        engine = self._fleet.engines.get(message["engine"])
        worker.acks[message["engine"]] = message["claim"]
        if engine is not None and self.prober is not None:
            self.prober.suspect(engine, message["why"])
        self.push()

    def _on_lost(self, worker: Worker, message: Message) -> None:
        engine = self._fleet.engines.get(message["engine"])
        worker.acks[message["engine"]] = message["claim"]
        if engine is not None and self.prober is not None:
            self.prober.lost(engine, Kind(message["how"]))
        self.push()

    def _on_paused(self, worker: Worker, message: Message) -> None:
        engine = self._fleet.engines.get(message["engine"])
        worker.acks[message["engine"]] = message["claim"]
        if engine is not None and self.prober is not None:
            self.prober.watch_paused(engine)
        self.push()

    def _on_left_out(self, worker: Worker, message: Message) -> None:  # noqa: ARG002 - a handler
        self._fleet.emit("engine_left_out", **message["details"])

    def _on_session(self, worker: Worker, message: Message) -> None:
        if self.sessions is not None:
            self.sessions.placed(message["key"], message["engine"], worker)

    def _on_stats(self, worker: Worker, message: Message) -> None:
        worker.told = message["stats"]
        self._merge()

    def _merge(self) -> None:
        told = [worker.told for worker in self.living if worker.told]
        merge_stats(self._stats, [*self._base, *told])
        if self.gate is not None:
            self.gate.held_bytes = sum(item["held_bytes"] for item in told)
        now = self._fleet.clock()
        for engine in self._fleet:
            seen = [item["engines"][engine.id] for item in told if engine.id in item["engines"]]
            engine.inflight = sum(item[0] for item in seen)
            ages = [item[1] for item in seen if item[1] >= 0]
            if ages:
                engine.last_byte = max(engine.last_byte, now - min(ages))


def _sum(snapshots: list[Snapshot]) -> Snapshot:
    """Counts of several ended workers as one, so that the list does not grow with every death."""
    from proxy.workers.state import stats_snapshot  # noqa: PLC0415 - only when a worker died

    stats = DataStats()
    merge_stats(stats, snapshots)
    return stats_snapshot(stats, (), held=0, held_bytes=0, now=0.0)


def private_directory() -> str:
    """A directory for the director's socket that only this user can enter."""
    import tempfile  # noqa: PLC0415 - only with several workers

    path = tempfile.mkdtemp(prefix="fleetgate-")
    os.chmod(path, 0o700)  # noqa: PTH101 - the path is a string of tempfile
    return path
