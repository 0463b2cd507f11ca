"""LoRA adapters are the same on every engine: a load or unload happens on all of them or is undone.

A reload under a name that is in use replaces the adapter in place; where that fails on some engines there is no way
back, so those that failed are fenced.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import orjson

from proxy.config import Settings
from proxy.control.admit import Admission
from proxy.control.asked import JSON_HEADERS, Asked, Reply, limit_of, reply_merged
from proxy.control.fanout import Runner, Shot, fire
from proxy.core import ranks
from proxy.core.calls import Call, custom
from proxy.core.merge import UNCERTAIN, Leg, Outcome, merge
from proxy.errors import Conflict
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet

Fan = Callable[[Asked, Sequence[tuple[Engine, Shot]], Runner], Coroutine[Any, Any, list[Leg]]]


class Adapters:
    """Loads and unloads adapters.

    Args:
        settings: limits.
        fleet: remembers what every engine has.
        admission: fences who differs.
        fan: runs legs.
    """

    def __init__(self, settings: Settings, fleet: Fleet, admission: Admission, fan: Fan) -> None:
        self._settings = settings
        self._fleet = fleet
        self._admission = admission
        self._fan = fan

    async def load(self, asked: Asked) -> Reply:
        """Load on all; what a partial failure left behind is unloaded again."""
        engines, legs = await self._all(asked)
        merged = merge(asked.call, legs)
        name = _name(asked.body)
        if name is None or merged.passed:
            return reply_merged(asked.call, merged, legs)
        body = asked.body or b""
        if not merged.failed:
            self._fleet.adapters[name] = (asked.call.path, body)
            for engine in engines:
                engine.adapters[name] = body
            return reply_merged(asked.call, merged, legs)
        if name in self._fleet.adapters:
            self._fleet.adapters[name] = (asked.call.path, body)
            for engine, leg in zip(engines, legs, strict=True):
                if leg.ok:
                    engine.adapters[name] = body
                else:
                    engine.adapters.pop(name, None)
                    self._fence(engine, asked.call, leg)
            return reply_merged(asked.call, merged, legs, note=f". {name!r} was in use, so those engines are fenced")
        note = await self._undo_load(asked, engines, legs, name)
        return reply_merged(asked.call, merged, legs, note=note)

    async def _undo_load(self, asked: Asked, engines: Sequence[Engine], legs: Sequence[Leg], name: str) -> str:
        # Frameworks add loaders of their own to vLLM's server (prime-rl, SkyRL), but unload with vLLM's.
        path = "/v1/unload_lora_adapter"
        body = orjson.dumps({"lora_name": name})
        undo = Shot(custom(path, None), "POST", path, _headers(asked), body, self._settings.control_timeout)
        touched = [
            (engine, leg) for engine, leg in zip(engines, legs, strict=True) if leg.ok or leg.outcome in UNCERTAIN
        ]
        undone = await self._fan(replace(asked, call=undo.call), [(engine, undo) for engine, _ in touched], fire)
        for (engine, leg), result in zip(touched, undone, strict=True):
            absent = result.status in (400, 404)
            if not result.ok and not (absent and leg.outcome in UNCERTAIN):
                self._fence(engine, undo.call, result)
        return f". The load was undone where it had succeeded ({len(touched)} engines)"

    async def unload(self, asked: Asked) -> Reply:
        """Unload on all; where only some did, the adapter is loaded there again."""
        engines, legs = await self._all(asked)
        merged = merge(asked.call, legs)
        name = _name(asked.body)
        if name is None or merged.passed:
            return reply_merged(asked.call, merged, legs)
        if not merged.failed:
            self._fleet.adapters.pop(name, None)
            for engine in engines:
                engine.adapters.pop(name, None)
            return reply_merged(asked.call, merged, legs)
        known = self._fleet.adapters.get(name)
        touched = [engine for engine, leg in zip(engines, legs, strict=True) if leg.ok or leg.outcome in UNCERTAIN]
        if known is None:
            for engine, leg in zip(engines, legs, strict=True):
                if not leg.ok:
                    self._fence(engine, asked.call, leg)
            return reply_merged(asked.call, merged, legs, note=". It was loaded behind the proxy's back: not undone")
        path, body = known
        redo = Shot(custom(path, None), "POST", path, _headers(asked), body, self._settings.pause_timeout)
        redone = await self._fan(replace(asked, call=redo.call), [(engine, redo) for engine in touched], fire)
        for engine, result in zip(touched, redone, strict=True):
            if not result.ok and not (result.outcome is Outcome.REFUSED and b"already" in result.body):
                engine.adapters.pop(name, None)
                self._fence(engine, redo.call, result)
        return reply_merged(asked.call, merged, legs, note=f". {name!r} was loaded again where it had been unloaded")

    async def _all(self, asked: Asked) -> tuple[list[Engine], list[Leg]]:
        engines = [engine for engine in self._fleet if engine.alive]
        if not engines:
            raise Conflict(f"{asked.call.path}: no engine is alive; wait until GET /health answers 200")
        shot = asked.shot(limit_of(self._settings, asked))
        return engines, await self._fan(asked, [(engine, shot) for engine in engines], fire)

    def _fence(self, engine: Engine, call: Call, leg: Leg) -> None:
        self._admission.failed(engine, call.path, f"failed {call.path}: {leg.said()}", taint=False)


def _name(body: bytes | None) -> str | None:
    data = ranks.parse(body)
    name = data.get("lora_name") if isinstance(data, dict) else None
    return name if isinstance(name, str) else None


def _headers(asked: Asked) -> tuple[tuple[bytes, bytes], ...]:
    """The caller's credential goes along with what undoes its call."""
    auth = tuple((name, value) for name, value in asked.headers if name.lower() == b"authorization")
    return JSON_HEADERS + auth
