"""Calls without a life of their own: caches, profiles, sleep, checks, remote calls, reads."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from proxy.config import Settings
from proxy.control.admit import Admission
from proxy.control.aftermath import Aftermath, that_count
from proxy.control.asked import Asked, Reply, limit_of, reply_json, reply_merged
from proxy.control.fanout import Runner, Shot, fire
from proxy.control.labels import Labeller
from proxy.core.calls import Kind, Merge
from proxy.core.marks import read_label
from proxy.core.merge import UNCERTAIN, Leg, Outcome, checksums_of, merge, version_body
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet

if TYPE_CHECKING:
    from proxy.data.gate import Gate

Fan = Callable[[Asked, Sequence[tuple[Engine, Shot]], Runner], Coroutine[Any, Any, list[Leg]]]


class Everyday:
    """Runs them.

    Args:
        settings: limits.
        fleet: the engines.
        gate: closed while generation is paused.
        admission: looks again at engines whose weights or sleep changed.
        aftermath: fences who failed.
        labels: marks engines before their weights are taken away.
        fan: runs legs.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        gate: Gate,
        admission: Admission,
        *,
        aftermath: Aftermath,
        labels: Labeller,
        fan: Fan,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._gate = gate
        self._admission = admission
        self._aftermath = aftermath
        self._labels = labels
        self._fan = fan
        self.on_counted: Callable[[list[Engine]], None] | None = None
        """Called with the engines whose world sizes were added up."""

    async def plain(self, asked: Asked) -> Reply:
        """A call that every engine gets as it came.

        Raises:
            Conflict: no engine is alive.
        """
        call = asked.call
        engines = self._aftermath.targets(asked)
        shot = asked.shot(limit_of(self._settings, asked))
        if call.kind is Kind.RPC or (call.kind is Kind.CHECK and b"reset" in (asked.body or b"")):
            # Weights may be others now under the same label: nothing that was known of them holds.
            self._fleet.pristine = False
            self._fleet.checksums.clear()
        wipes = _wipes(asked)
        if wipes and self._labels.automatic:
            await self._labels.ahead([(engine, engine.boot) for engine in engines if not engine.plain], None)
        before = (self._fleet.version, self._fleet.epoch)
        legs = await self._fan(asked, [(engine, shot) for engine in engines], fire)
        merged = merge(call, that_count(legs))
        if wipes:
            await self._wiped(engines, legs)
        if call.kind is not Kind.CHECK:
            self._aftermath.missed(asked, shot)
            self._aftermath.settle(asked, shot, engines, legs, merged)
        self._side_effects(asked, engines, legs)
        if call.kind is Kind.CHECK and before == (self._fleet.version, self._fleet.epoch):
            found = [(engine, checksums_of(leg)) for engine, leg in zip(engines, legs, strict=True)]
            self._admission.checksums.record([(engine, sums) for engine, sums in found if sums is not None])
        self._fleet.refresh()
        self._admission.review_all()
        return reply_merged(call, merged, legs)

    async def _wiped(self, engines: Sequence[Engine], legs: Sequence[Leg]) -> None:
        """Whoever may have lost its weights is tainted, also where the answer was lost; the others keep their label."""
        kept = []
        for engine, leg in zip(engines, legs, strict=True):
            if leg.ok or leg.outcome in UNCERTAIN:
                self._fleet.taint(engine)
            else:
                kept.append(engine)
        await self._labels.back(engine for engine in kept if engine.marked)

    def _side_effects(self, asked: Asked, engines: Sequence[Engine], legs: Sequence[Leg]) -> None:
        kind = asked.call.kind
        for engine, leg in zip(engines, legs, strict=True):
            if not leg.ok:
                continue
            if kind is Kind.SLEEP:
                engine.asleep = frozenset({"weights", "kv_cache"})
            elif kind is Kind.WAKE:
                self._woke(asked, engine, leg)

    def _woke(self, asked: Asked, engine: Engine, leg: Leg) -> None:
        data = leg.json()
        tags = [part[5:] for part in asked.query.split("&") if part.startswith("tags=")]
        if not tags or (isinstance(data, dict) and data.get("status") == "awake"):
            engine.asleep = frozenset()
        else:
            engine.asleep -= set(tags)

    async def read(self, asked: Asked) -> Reply:
        """A look at every engine; one that is busy in an update answers from what is known, so it never waits."""
        call = asked.call
        if call.merge is Merge.ANY_PAUSED and self._gate.closed:
            known = [_known(engine, call.merge) for engine in self._fleet if engine.alive]
            return reply_json({"is_paused": True}, legs=[leg for leg in known if leg is not None])
        engines = self._aftermath.targets(asked)
        shot = asked.shot(limit_of(self._settings, asked))
        legs = await self._fan(asked, [(engine, shot) for engine in engines], self._read_leg)
        if call.merge is Merge.WORLD_SIZE and self.on_counted is not None:
            self.on_counted([engine for engine, leg in zip(engines, legs, strict=True) if leg.ok])
        legs = that_count(legs)
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
            if leg.ok and shot.call.merge is Merge.VERSION:
                return _without_mark(leg)
        if leg.ok and shot.call.merge is Merge.WORLD_SIZE and "?" not in shot.target:
            data = leg.json()
            size = data.get("world_size") if isinstance(data, dict) else None
            if isinstance(size, int) and size > 0:
                engine.world_size, engine.weight = size, float(size)
        return leg


def _wipes(asked: Asked) -> bool:
    """Whether it takes the weights away."""
    if asked.call.kind is Kind.SLEEP:
        return "level=2" in asked.query.split("&")
    return asked.call.kind is Kind.CHECK and b'"reset"' in (asked.body or b"")


def _without_mark(leg: Leg) -> Leg:
    """The version of an engine's last whole weights: that it may hold others is for proxies to know."""
    data = leg.json()
    text = data.get("weight_version") if isinstance(data, dict) else None
    label = read_label(text) if isinstance(text, str) else None
    if label is None or not label.unfinished:
        return leg
    return replace(leg, body=orjson.dumps(version_body({leg.engine: label.version})))


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
