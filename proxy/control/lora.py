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
from proxy.control.fanout import NOT_FOUND, Runner, Shot, fire
from proxy.core import ranks
from proxy.core.calls import Call, Kind, custom
from proxy.core.merge import UNCERTAIN, Leg, Outcome, merge
from proxy.errors import Conflict
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet

Fan = Callable[[Asked, Sequence[tuple[Engine, Shot]], Runner], Coroutine[Any, Any, list[Leg]]]


UNLOAD = "/v1/unload_lora_adapter"
"""Frameworks add loaders of their own to vLLM's server (prime-rl, SkyRL), but unload with vLLM's."""


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
        name = _name(asked.body)
        owing = [] if name is None else [engine for engine in self._fleet if _debt(name) in engine.owed]
        boots = {engine: engine.boot for engine in self._fleet}
        engines, legs = await self._all(asked)
        if name is not None and name not in self._fleet.adapters:
            legs = await self._afresh(asked, engines, legs, name)
        merged = merge(asked.call, legs)
        touched = [(engine, leg) for engine, leg in zip(engines, legs, strict=True) if _may_be_done(leg)]
        if name is None or not touched:
            return reply_merged(asked.call, merged, legs)
        body = asked.body or b""
        if not merged.ok and name not in self._fleet.adapters:
            note = await self._undo_load(asked, touched, name, boots)
            return reply_merged(asked.call, merged, legs, note=note)
        self._fleet.adapters[name] = (asked.call.path, body)
        for engine, leg in zip(engines, legs, strict=True):
            if leg.ok and engine not in owing and engine.boot == boots[engine]:
                engine.adapters[name] = body
                continue
            engine.adapters.pop(name, None)
            if leg.ok:
                # An unload may have been on its way, and nobody knows which was first; or this is another process.
                self._admission.failed(engine, asked.call.path, f"is to load {name!r} once more", taint=False)
            else:
                self._fence(engine, asked.call, leg)
        for engine in owing:
            engine.owed.pop(_debt(name), None)
        return reply_merged(asked.call, merged, legs, note=f". {name!r} was in use, so those engines are fenced")

    async def _afresh(self, asked: Asked, engines: list[Engine], legs: list[Leg], name: str) -> list[Leg]:
        """Some loaded it and the others have it already, from before this proxy: nobody knows whether that is the same.

        So those load it afresh. Where all have it, that is what the trainer is told.
        """
        had = [engine for engine, leg in zip(engines, legs, strict=True) if _has_it(leg)]
        if not had or not all(leg.ok or _has_it(leg) for leg in legs) or len(had) == len(engines):
            return legs
        undo = self._unload_shot(asked, name)
        gone = await self._fan(replace(asked, call=undo.call), [(engine, undo) for engine in had], fire)
        shot = asked.shot(limit_of(self._settings, asked))
        todo = [engine for engine, leg in zip(had, gone, strict=True) if leg.ok]
        again = await self._fan(asked, [(engine, shot) for engine in todo], fire)
        fresh = {leg.engine: leg for leg in (*gone, *again)}
        return [fresh.get(leg.engine, leg) for leg in legs]

    async def _undo_load(
        self, asked: Asked, touched: Sequence[tuple[Engine, Leg]], name: str, boots: dict[Engine, int]
    ) -> str:
        undo = self._unload_shot(asked, name)
        shots = [(engine, undo) for engine, _ in touched]
        undone = await self._fan(replace(asked, call=undo.call), shots, fire)
        left = []
        for (engine, leg), result in zip(touched, undone, strict=True):
            if result.ok or (leg.ok and _gone(result)) or engine.boot != boots[engine]:
                continue
            # What may still be loading is not found now, and is there later. Where the route is missing nothing is
            # ever found. Otherwise "not found" means that the adapter is gone.
            self._owe(engine, name, undo, result, absent_ok=leg.ok and result.outcome is not Outcome.MISSING)
            left.append(engine.id)
        if not left:
            return f". The load was undone where it had succeeded ({len(touched)} engines)"
        return (
            f". The load was undone on {len(touched) - len(left)} of {len(touched)} engines. {', '.join(left)} may "
            f"have {name!r} all the same, now or later: no requests go there until it is unloaded, or loaded "
            "everywhere, or the process restarted"
        )

    async def unload(self, asked: Asked) -> Reply:
        """Unload on all; where only some did, the adapter is loaded there again."""
        engines, legs = await self._all(asked)
        merged = merge(asked.call, legs)
        name = _name(asked.body)
        touched = [(engine, leg) for engine, leg in zip(engines, legs, strict=True) if _may_lack(leg)]
        if name is None or merged.passed or not touched:
            return reply_merged(asked.call, merged, legs)
        known = self._fleet.adapters.get(name)
        if merged.ok or known is None:
            self._fleet.adapters.pop(name, None)
            for engine, leg in zip(engines, legs, strict=True):
                self._unloaded(asked, engine, leg, name)
            note = ". It was loaded behind the proxy's back: not undone; who may still have it is to unload it first"
            return reply_merged(asked.call, merged, legs, note=note)
        path, body = known
        redo = Shot(custom(path, None), "POST", path, _headers(asked), body, self._settings.pause_timeout)
        redone = await self._fan(replace(asked, call=redo.call), [(engine, redo) for engine, _ in touched], fire)
        for (engine, _), result in zip(touched, redone, strict=True):
            if not result.ok and not (result.outcome is Outcome.REFUSED and b"already" in result.body):
                engine.adapters.pop(name, None)
                self._fence(engine, redo.call, result)
        return reply_merged(asked.call, merged, legs, note=f". {name!r} was loaded again where it had been unloaded")

    def _unloaded(self, asked: Asked, engine: Engine, leg: Leg, name: str) -> None:
        if leg.ok:
            engine.adapters.pop(name, None)
            engine.owed.pop(_debt(name), None)
        elif leg.outcome is Outcome.MISSING:
            self._fence(engine, asked.call, leg)
        elif not _gone(leg):
            self._owe(engine, name, self._unload_shot(asked, name), leg, absent_ok=True)

    async def _all(self, asked: Asked) -> tuple[list[Engine], list[Leg]]:
        engines = [engine for engine in self._fleet if engine.alive]
        if not engines:
            raise Conflict(f"{asked.call.path}: no engine is alive; wait until GET /health answers 200")
        shot = asked.shot(limit_of(self._settings, asked))
        return engines, await self._fan(asked, [(engine, shot) for engine in engines], fire)

    def _unload_shot(self, asked: Asked, name: str) -> Shot:
        path = asked.call.path if asked.call.kind is Kind.LORA_UNLOAD else UNLOAD
        body = orjson.dumps({"lora_name": name})
        return Shot(custom(path, None), "POST", path, _headers(asked), body, self._settings.control_timeout)

    def _owe(self, engine: Engine, name: str, shot: Shot, leg: Leg, *, absent_ok: bool) -> None:
        """It is admitted only after it unloaded the adapter."""
        before = engine.owed.get(_debt(name))
        sure = absent_ok and (before is None or before.absent_ok)
        engine.owed[_debt(name)] = replace(shot, absent_ok=sure)
        self._fence(engine, shot.call, leg)

    def _fence(self, engine: Engine, call: Call, leg: Leg) -> None:
        self._admission.failed(engine, call.path, f"failed {call.path}: {leg.said()}", taint=False)


def _has_it(leg: Leg) -> bool:
    return leg.outcome is Outcome.REFUSED and leg.status in NOT_FOUND and b"already" in leg.body


def _may_be_done(leg: Leg) -> bool:
    return leg.ok or leg.outcome in UNCERTAIN


def _may_lack(leg: Leg) -> bool:
    """Whether an engine may be without the adapter after this unload."""
    return _may_be_done(leg) or _gone(leg)


def _gone(leg: Leg) -> bool:
    """Whether an unload found nothing to unload."""
    return leg.outcome is Outcome.REFUSED and leg.status in NOT_FOUND


def _debt(name: str) -> str:
    """Under what an engine owes the unload of an adapter."""
    return f"{UNLOAD} {name}"


def _name(body: bytes | None) -> str | None:
    data = ranks.parse(body)
    name = data.get("lora_name") if isinstance(data, dict) else None
    return name if isinstance(name, str) else None


def _headers(asked: Asked) -> tuple[tuple[bytes, bytes], ...]:
    """The caller's credential goes along with what undoes its call."""
    auth = tuple((name, value) for name, value in asked.headers if name.lower() == b"authorization")
    return JSON_HEADERS + auth
