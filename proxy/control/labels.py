"""Labels that the proxy gives to engines: the automatic ones, and marks on those whose weights are nobody's.

Engines outlive the proxy, and their labels are all that the next one has to go by. So a label is written *before* the
step that makes it true, while something else still says that it is not yet: the session that a finish closes, or a mark
(`proxy.core.marks`). A proxy that is killed in between leaves no engine whose label names weights that it lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from proxy.config import Labels, Settings
from proxy.control.asked import JSON_HEADERS
from proxy.control.fanout import Shot, fire
from proxy.core.admission import DEFAULT
from proxy.core.calls import CALLS
from proxy.core.marks import Label
from proxy.core.merge import UNCERTAIN, Leg, Outcome
from proxy.fleet.engine import Engine
from proxy.fleet.probes import Prober
from proxy.fleet.registry import Fleet
from proxy.tasks import spawn

LABEL_TRIES = 3
"""Tries to label one engine: the call may be repeated, and an engine without its label is a fenced one."""

Boots = Sequence[tuple[Engine, int]]
"""Engines, and which process of each is meant (`Engine.boot`): a label on another would speak for weights it lacks."""

_CALL = CALLS["/update_weight_version"]
_REPLACED = "its process was replaced meanwhile"


def label_shot(label: str, settings: Settings) -> Shot:
    """The call that gives an engine a label."""
    body = orjson.dumps({"new_version": label})
    return Shot(_CALL, "POST", _CALL.path, JSON_HEADERS, body, settings.control_timeout)


def mark_of(engine: Engine) -> Label:
    """The label that says that its weights are nobody's."""
    return Label(engine.version or DEFAULT, unfinished=True)


async def again(engine: Engine, shot: Shot, boot: int | None = None) -> Leg:
    """A leg that labels, tried again at the same process where it failed."""
    boot = engine.boot if boot is None else boot
    leg = await fire(engine, shot)
    for _ in range(LABEL_TRIES - 1):
        wrong = leg.outcome is Outcome.REFUSED and leg.status is not None and leg.status < 500
        if leg.ok or wrong or leg.outcome is Outcome.MISSING or not engine.alive or engine.boot != boot:
            break
        leg = await fire(engine, shot)
    return leg


class Labeller:
    """Labels engines and marks them.

    Args:
        settings: limits, and whether the proxy may label at all.
        fleet: says who was tainted.
        prober: tells whether a process is still the one that is meant.
    """

    def __init__(self, settings: Settings, fleet: Fleet, prober: Prober) -> None:
        self._settings = settings
        self._fleet = fleet
        self._prober = prober
        self._marking: dict[Engine, asyncio.Task[None]] = {}
        fleet.listeners.append(self._on_event)

    @property
    def automatic(self) -> bool:
        """Whether updates without a label get one from the proxy, and engines may be marked."""
        return self._settings.label_updates is Labels.AUTO

    async def still(self, boots: Boots) -> Boots:
        """Those whose process is the one that is meant, looked at now."""
        gone = await self._prober.replaced([engine for engine, _ in boots])
        return [(engine, boot) for engine, boot in boots if engine.boot == boot and engine not in gone]

    # Labels of updates

    async def put(self, boots: Boots, label: str) -> list[Leg]:
        """Label engines, but no process that replaced the one that is meant.

        Returns:
            A leg for each; ``DIED`` where it was replaced, and ``default`` again if the label reached the new one.
        """
        ready = await self.still(boots)
        tries = await asyncio.gather(*(self.one(engine, label, boot) for engine, boot in ready))
        labelled = await self.take_back(ready, tries)
        legs = {engine: leg for (engine, _), leg in zip(ready, labelled, strict=True)}
        return [legs.get(engine) or Leg(engine.id, Outcome.DIED, detail=_REPLACED) for engine, _ in boots]

    async def take_back(self, boots: Boots, legs: Sequence[Leg]) -> list[Leg]:
        """Labels that reached a process that replaced the one they were meant for become ``default`` again.

        A lost answer may have been to a try that worked.
        """
        same = {engine for engine, _ in await self.still(boots)}
        out = []
        for (engine, _), leg in zip(boots, legs, strict=True):
            if engine in same:
                out.append(leg)
                continue
            if leg.ok or leg.outcome in UNCERTAIN:
                await self.one(engine, DEFAULT, engine.boot)
            out.append(Leg(engine.id, Outcome.DIED, seconds=leg.seconds, detail=_REPLACED))
        return out

    async def not_showing(self, engines: Sequence[Engine], label: str) -> list[Engine]:
        """Engines that do not show the label: older servers ignore it in a finish, a new process has none."""
        shot = Shot(CALLS["/weight_info"], "GET", "/weight_info", timeout=self._settings.control_timeout)
        legs = await asyncio.gather(*(fire(engine, shot) for engine in engines))
        shown = [data.get("weight_version") if isinstance(data := leg.json(), dict) else None for leg in legs]
        return [engine for engine, version in zip(engines, shown, strict=True) if version != label]

    async def one(self, engine: Engine, label: str, boot: int) -> Leg:
        """Label one engine."""
        return await again(engine, label_shot(label, self._settings), boot)

    async def back(self, engines: Iterable[Engine]) -> None:
        """The step was not taken, or not by all: no engine may go on with the label of weights that are not published.

        It gets the one of before again, or the mark of it where its weights are nobody's and no session tells.
        """
        tasks = []
        for engine in engines:
            if engine.alive and engine.version is not None:
                label = Label(engine.version, unfinished=engine.tainted and engine.session is not True)
                tasks.append(self._marking.get(engine) or self._write(engine, label))
        if tasks:
            await asyncio.wait(tasks, timeout=self._settings.probe_timeout)

    # Marks

    async def ahead(self, boots: Boots, label: str | None) -> dict[Engine, Leg]:
        """Write what the engines will be, before the step that makes it so.

        Args:
            boots: engines that are going to take the step.
            label: of their new weights, while a session is open that the step closes; None marks them instead.

        Returns:
            The engines that must not take the step, with what they said: their old label would outlive their old
            weights. A server without labels may take it.
        """
        for engine, _ in boots:
            # Whoever sees the mark meanwhile knows of it.
            engine.marked = engine.marked or label is None
        legs = await asyncio.gather(*(self.one(engine, label or mark_of(engine).text, boot) for engine, boot in boots))
        legs = await self.take_back(boots, legs)
        if label is not None:
            self._fleet.labels_seen.add(label)
        for (engine, _), leg in zip(boots, legs, strict=True):
            engine.marked = label is None and (leg.ok or engine.tainted)
        return {
            engine: leg
            for (engine, _), leg in zip(boots, legs, strict=True)
            if not leg.ok and leg.outcome is not Outcome.MISSING
        }

    def _on_event(self, kind: str, details: dict[str, Any]) -> None:
        if kind == "engine_tainted":
            engine = self._fleet.engines.get(details["engine"])
            if engine is not None:
                self.mark(engine)

    def mark(self, engine: Engine) -> None:
        """Let a tainted engine say so itself, unless an open session does (`proxy.core.history`); never waits.

        One whose mark of before its last whole update came late gets its label back.
        """
        if engine.late_mark and not engine.tainted and engine.version and engine not in self._marking:
            self._write(engine, Label(engine.version))
            return
        told = any(each.session is True and each.alive for each in self._fleet)
        wanted = engine.tainted and not (engine.marked or engine.updating or engine.plain or told)
        if wanted and self.automatic and engine.alive and engine not in self._marking:
            self._write(engine, mark_of(engine))

    async def leave(self, engine: Engine) -> None:
        """It goes out of this proxy's sight: what is known of it here has to be known where it turns up next."""
        task = self._marking.get(engine)
        untold = engine.tainted and not engine.marked and engine.session is not True
        if task is None and untold and self.automatic and engine.alive:
            task = self._write(engine, mark_of(engine))
        if task is not None:
            await asyncio.wait({task}, timeout=self._settings.probe_timeout)

    def _write(self, engine: Engine, label: Label) -> asyncio.Task[None]:
        task = self._marking[engine] = spawn(self._keep(engine, engine.boot, label), name=f"label {engine.id}")
        task.add_done_callback(lambda _: self._marking.pop(engine, None))
        return task

    async def _keep(self, engine: Engine, boot: int, label: Label) -> None:
        leg = await self.one(engine, label.text, boot)
        leg, *_ = await self.take_back([(engine, boot)], [leg])
        if leg.ok:
            engine.marked, engine.late_mark = label.unfinished, False
            if label.unfinished and not engine.tainted:
                await self.one(engine, label.version, boot)
                engine.marked = False

    async def settle(self, engines: Iterable[Engine]) -> None:
        """Wait for marks that are on their way: one that arrives after the next whole update would deny it.

        One that hangs is given up, so that a trainer does not wait for it.
        """
        tasks = [self._marking[engine] for engine in engines if engine in self._marking]
        if tasks:
            _, hung = await asyncio.wait(tasks, timeout=self._settings.probe_timeout)
            for task in hung:
                task.cancel()

    def stop(self) -> None:
        """End what is on its way."""
        for task in list(self._marking.values()):
            task.cancel()
