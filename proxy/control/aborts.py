"""``/abort_requests``: each id goes to the engine that runs it, and the answer is the number that was really running.

vLLM knows a request by an id that it builds from the client's ``X-Request-Id`` and the route, and counts the ids that
it was sent rather than those it found (vllm/entrypoints/rl/online/api_router.py). The proxy knows who runs what.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from proxy.config import Settings
from proxy.control.asked import Asked, Reply, limit_of, reply_json, reply_merged
from proxy.control.fanout import Runner, Shot, fire
from proxy.core import ranks
from proxy.core.abort_ids import candidates, engine_ids
from proxy.core.merge import Leg, merge
from proxy.errors import BadRequest, Conflict
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet

if TYPE_CHECKING:
    from proxy.data.exchange import Exchange
    from proxy.data.plane import Tracker

Fan = Callable[[Asked, Sequence[tuple[Engine, Shot]], Runner], Coroutine[Any, Any, list[Leg]]]


class Aborts:
    """Aborts requests wherever they are.

    Args:
        settings: limits.
        fleet: the engines.
        tracker: which request runs where, or is held.
        fan: runs legs.
    """

    def __init__(self, settings: Settings, fleet: Fleet, tracker: Tracker, fan: Fan) -> None:
        self._settings = settings
        self._fleet = fleet
        self._tracker = tracker
        self._fan = fan

    async def abort(self, asked: Asked) -> Reply:
        """All requests, or those named.

        Raises:
            BadRequest: ``request_ids`` is no list of strings.
            Conflict: no engine is alive.
        """
        await self._tracker.refresh()
        data = ranks.parse(asked.body)
        ids = data.get("request_ids") if isinstance(data, dict) else None
        if ids:
            if not isinstance(ids, list) or not all(isinstance(item, str) for item in ids):
                raise BadRequest("request_ids must be a list of strings")
            return await self._named(asked, ids)
        return await self._all(asked)

    async def _all(self, asked: Asked) -> Reply:
        engines = [engine for engine in self._fleet if engine.alive]
        valid = isinstance(ranks.parse(asked.body), dict)
        held = self._drop_held(self._tracker.all()) if valid else 0
        if not engines:
            if held:
                return reply_json({"status": "aborted", "aborted": held})
            raise Conflict(f"{asked.call.path}: no engine is alive; wait until GET /health answers 200")
        shot = asked.shot(limit_of(self._settings, asked))
        legs = await self._fan(asked, [(engine, shot) for engine in engines], fire)
        merged = merge(asked.call, legs)
        if not merged.ok:
            return reply_merged(asked.call, merged, legs)
        body = orjson.loads(merged.body)
        body["aborted"] += held
        return reply_json(body, legs=legs)

    async def _named(self, asked: Asked, ids: Iterable[str]) -> Reply:
        found: list[Exchange] = []
        wanted: dict[Engine, list[str]] = {}
        for name in dict.fromkeys(ids):
            exact = False
            for request_id in candidates(name):
                for request in self._tracker.find(request_id):
                    known = engine_ids(request.route, request_id, request.prompts)
                    if name != request_id and name not in known:
                        continue
                    exact = True
                    if request in found:
                        continue
                    found.append(request)
                    if request.engine is not None:
                        wanted.setdefault(request.engine, []).extend([name] if name != request_id else known)
                if exact:
                    break
        held = self._drop_held(request for request in found if request.engine is None)
        running = len(found) - held
        if not wanted:
            return reply_json({"status": "aborted", "aborted": held})
        shot = asked.shot(limit_of(self._settings, asked))
        shots = [(engine, shot.with_body(orjson.dumps({"request_ids": names}))) for engine, names in wanted.items()]
        legs = await self._fan(asked, shots, fire)
        merged = merge(asked.call, legs)
        if not merged.ok:
            return reply_merged(asked.call, merged, legs)
        return reply_json({"status": "aborted", "aborted": running + held}, legs=legs)

    @staticmethod
    def _drop_held(requests: Iterable[Exchange]) -> int:
        """Requests that no engine runs are answered with an error by the proxy itself."""
        count = 0
        for request in list(requests):
            if request.engine is None:
                request.abort()
                count += 1
        return count
