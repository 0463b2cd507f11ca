"""``/fleet``: what the proxy knows, as JSON and as a stream of events, and the operator's writes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from proxy.core.engine_state import State
from proxy.core.lifecycle import RoundState
from proxy.errors import BadRequest, Conflict
from proxy.fleet.engine import Engine
from proxy.tasks import spawn

if TYPE_CHECKING:
    from proxy.control.plane import ControlPlane

EVENT_BACKLOG = 1024
"""Events kept for a reader of ``/fleet/events`` that is slow; past that it is cut off and may connect again."""
EVENT_PING = 15.0
"""Seconds between comments on a silent event stream, so that neither side takes it for dead."""
QUIET_EVENTS = frozenset({"probe"})
"""Left out of the stream: they come every two seconds from each engine and change nothing."""


def engine_json(engine: Engine, now: float) -> dict[str, Any]:
    """One engine as ``/fleet`` shows it; ``now`` is loop time."""
    return {
        "id": engine.id,
        "url": engine.url,
        "state": str(engine.state),
        "reason": engine.reason,
        "since_seconds": round(now - engine.since, 3),
        "eligible": engine.eligible,
        "weight_version": engine.version,
        "inflight": engine.inflight,
        "paused": engine.paused or engine.reported_paused is True,
        "suspect": engine.suspect,
        "plain": engine.plain,
        "updating": engine.updating,
        "tainted": engine.tainted,
        "asleep": sorted(engine.asleep),
        "world_size": engine.world_size,
        "restarts": engine.boot,
        "process_start_time": engine.start_time,
        "owes": sorted(engine.owed),
        "adapters": sorted(engine.adapters),
        "last_error": engine.last_error,
    }


def fleet_json(plane: ControlPlane) -> dict[str, Any]:
    """The whole fleet as ``GET /fleet`` shows it."""
    fleet, gate, conductor = plane.fleet, plane.gate, plane.conductor
    now = asyncio.get_running_loop().time()
    holder = conductor.lock.holder
    group = conductor.groups.group
    update = conductor.updates.round
    return {
        "weight_version": fleet.version,
        "versions": fleet.versions(),
        "tied": list(fleet.tied),
        "updates": fleet.epoch,
        "phase": str(conductor.lock.phase),
        "paused": gate.closed,
        "gate": {
            "closed": gate.closed,
            "by": gate.closed_by or None,
            "seconds": round(now - gate.closed_since, 3) if gate.closed else 0.0,
            "held_requests": gate.held,
            "held_bytes": gate.held_bytes,
        },
        "lifecycle": holder.as_json() if holder is not None else None,
        "round": {"state": str(update.state), "why": update.why or None}
        if update.state is not RoundState.NONE
        else None,
        "group": {
            "members": [engine.id for engine in group.members],
            "first_ranks": group.first_ranks,
            "lost": group.lost or None,
        }
        if group is not None
        else None,
        "adapters": sorted(fleet.adapters),
        "ready": sum(engine.eligible for engine in fleet),
        "problem": problem(plane),
        "engines": [engine_json(engine, now) for engine in fleet],
    }


def problem(plane: ControlPlane) -> str | None:
    """Why the fleet does not serve, in words; None if it does."""
    fleet, gate = plane.fleet, plane.gate
    ready = sum(engine.eligible for engine in fleet)
    if plane.draining:
        return "the proxy stops"
    if fleet.tied:
        return f"engines hold {' and '.join(map(repr, fleet.tied))} and neither has a majority; run a sync or admit one"
    if gate.closed:
        return f"paused by {gate.closed_by}"
    if ready < plane.settings.min_engines:
        why = "; ".join(f"{engine.id}: {engine.state} ({engine.reason})" for engine in fleet if not engine.eligible)
        return f"{ready} of {plane.settings.min_engines} engines are ready. {why}".strip()
    return None


class FleetApi:
    """Handlers of ``/fleet`` and of what belongs to it.

    Args:
        plane: the control plane.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        plane.fleet.listeners.append(self._on_event)

    # Reads

    async def show(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """``GET /fleet``."""
        return _json(fleet_json(self._plane))

    async def health(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """``GET /health``: 200 while an engine lives, paused or not."""
        living = sum(engine.alive for engine in self._plane.fleet)
        total = len(self._plane.fleet)
        body = {"status": "ok" if living else "no engine is alive", "living": living, "engines": total}
        return _json(body, status=200 if living else 503)

    async def ready(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """``GET /ready``: 200 only if requests would be served now."""
        why = problem(self._plane)
        ready = sum(engine.eligible for engine in self._plane.fleet)
        return _json({"ready": why is None, "engines": ready, "problem": why}, status=200 if why is None else 503)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """``GET /fleet/events``: a snapshot, then each event as it happens."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        if request.method == "HEAD":
            # A body here would be read as the next answer on the connection.
            return response
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(EVENT_BACKLOG)
        self._queues.add(queue)
        try:
            await response.write(_event("snapshot", fleet_json(self._plane)))
            while True:
                try:
                    async with asyncio.timeout(EVENT_PING):
                        item = await queue.get()
                except TimeoutError:
                    item = b": still here\n\n"
                if item is None:
                    break
                await response.write(item)
        except ConnectionResetError:
            pass
        finally:
            self._queues.discard(queue)
        with contextlib.suppress(ConnectionResetError):
            await response.write_eof()
        return response

    def _on_event(self, kind: str, details: dict[str, Any]) -> None:
        if not self._queues or kind in QUIET_EVENTS:
            return
        data = _event(kind, details)
        for queue in list(self._queues):
            if queue.full():
                self._queues.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(data)

    def close(self) -> None:
        """End the event streams."""
        for queue in list(self._queues):
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    # Writes

    async def add(self, request: web.Request) -> web.Response:
        """``POST /fleet/engines {"url"}``."""
        body = await request.read()
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError:
            raise BadRequest('send JSON: {"url": "http://host:port"}') from None
        engine = self._plane.members.add_asked(data.get("url") if isinstance(data, dict) else None)
        return _json(engine_json(engine, self._now()), status=201)

    async def remove(self, request: web.Request) -> web.Response:
        """``DELETE /fleet/engines/ID?drain=SECONDS``: at once without ``drain``."""
        engine = self._plane.members.find(request.match_info["engine"])
        raw = request.query.get("drain", "0")
        try:
            seconds = float(raw)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise BadRequest(f"drain={raw!r} must be seconds, such as drain=30")
        removal = spawn(self._plane.members.remove(engine, drain=seconds), name=f"remove {engine.id}")
        idle = await asyncio.shield(removal)
        if idle is None:
            raise Conflict(f"engine {engine.id} was added again while it drained; it stays")
        return _json({"removed": engine.id, "idle": idle})

    async def act(self, request: web.Request) -> web.Response:
        """``POST /fleet/engines/ID/{drain,admit,fence}``."""
        plane = self._plane
        engine = plane.members.find(request.match_info["engine"])
        action = request.match_info["action"]
        by = f"by hand from {request.remote}"
        if action == "drain":
            plane.members.drain(engine, f"drained {by}")
        elif action == "fence":
            if not engine.alive:
                raise Conflict(f"engine {engine.id} is {engine.state}; it comes back fenced anyway")
            engine.by_hand = False
            plane.admission.review(engine)
        else:
            self._admit(engine)
        return _json(engine_json(engine, self._now()))

    def _admit(self, engine: Engine) -> None:
        plane = self._plane
        fleet = plane.fleet
        if engine.state not in (State.FENCED, State.DRAINING, State.READY) or engine.suspect:
            raise Conflict(f"engine {engine.id} is {engine.state}; only one that answers can be admitted")
        if engine.updating:
            raise Conflict(f"engine {engine.id} is inside a weight update; finish it or /resume first")
        if engine.leaving:
            raise Conflict(f"engine {engine.id} is being removed; POST /fleet/engines with its URL keeps it")
        engine.drained = False
        engine.tainted = False
        engine.failed_call = ""
        engine.owed.clear()
        engine.by_hand = True
        engine.epoch = fleet.epoch
        if (fleet.tied or fleet.version is None) and engine.version is not None:
            fleet.tied = ()
            plane.admission.voting = False
            plane.admission.decide(engine.version, by="admit")
        plane.admission.admit(engine, "admitted by hand")
        if engine.marked:
            spawn(plane.conductor.labels.back([engine]), name=f"unmark {engine.id}")
        plane.admission.review_all()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _event(kind: str, details: dict[str, Any]) -> bytes:
    body = orjson.dumps({"time": time.time(), **details}, default=str, option=orjson.OPT_NON_STR_KEYS)
    return b"event: " + kind.encode("ascii") + b"\ndata: " + body + b"\n\n"


def _json(data: Any, *, status: int = 200) -> web.Response:
    body = orjson.dumps(data, default=str, option=orjson.OPT_NON_STR_KEYS)
    return web.Response(status=status, body=body, content_type="application/json")
