"""Update rounds over several engines: start, update, finish, and the label that ends them.

While a round runs its engines get no requests, because their weights are nobody's. What happens to engines when a round
fails is decided here, by how far each of them may have got:

- it refused a start, or was never reached: nothing happened to its weights; it is fenced until it is looked at again;
- anything else inside a round: tainted, until a whole round ends well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import orjson

from proxy.config import Labels, Settings
from proxy.control.admit import Admission
from proxy.control.asked import JSON_HEADERS, Asked, Reply, limit_of, reply_merged
from proxy.control.fanout import Shot, fire
from proxy.control.groups import Fan, Groups
from proxy.core import ranks
from proxy.core.admission import DEFAULT
from proxy.core.calls import CALLS
from proxy.core.lifecycle import Round
from proxy.core.merge import UNCERTAIN, Leg, Merged, Outcome, merge
from proxy.errors import Conflict
from proxy.fleet.engine import Engine
from proxy.fleet.probes import Prober
from proxy.fleet.registry import Fleet

LABEL_TRIES = 3
"""Tries to label one engine after a good update: the call may be repeated, and an unlabelled engine is a fenced one."""

_REPLACED = "its process was replaced meanwhile"

_NOTHING_HAPPENED = frozenset({Outcome.REFUSED, Outcome.MISSING, Outcome.UNREACHABLE})


class Updates:
    """Runs the calls that change weights.

    Args:
        settings: limits and who labels.
        fleet: the engines.
        groups: says who takes part.
        admission: carries out what a call means for each engine.
        prober: keeps the labels.
        fan: runs legs, so that a call can be given up.
    """

    def __init__(
        self, settings: Settings, fleet: Fleet, groups: Groups, admission: Admission, *, prober: Prober, fan: Fan
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._groups = groups
        self._admission = admission
        self._prober = prober
        self._fan = fan
        self._sessions: dict[Engine, int] = {}
        self.round = Round()
        groups.on_init = self._passed_by
        self.on_broken: Callable[[Sequence[Engine]], None] | None = None
        """Called with the engines whose weights are nobody's now."""
        self.half_way = False
        """The engines were paused when the proxy started, and no start was seen since: a round may be open there."""

    def _passed_by(self) -> None:
        self.round.passed_by = True

    def on_restart(self, engine: Engine) -> None:
        """A process was replaced: its group and its round cannot end well."""
        self._sessions.pop(engine, None)
        self._groups.on_restart(engine)
        if self.round.live and engine.id in self.round.members:
            self.break_round(f"{engine.id} restarted")

    # The calls

    async def start(self, asked: Asked) -> Reply:
        """Open a round."""
        call = asked.call
        self.round.check(call)
        engines = self._groups.members(call.path)
        await self._groups.preflight(call.path, engines)
        self.round.open({engine.id: engine.boot for engine in engines})
        self.round.seen_start = True
        self.half_way = False
        self._enter(engines)
        shot = asked.shot(limit_of(self._settings, asked))
        legs = await self._fan(asked, [(engine, shot) for engine in engines], self._start_leg)
        merged = merge(call, legs)
        if merged.passed:
            self.round.clear()
            self._leave(engines)
        elif merged.failed:
            for engine, leg in zip(engines, legs, strict=True):
                if leg.outcome in _NOTHING_HAPPENED and engine not in self._sessions:
                    engine.updating = False
            self.break_round(f"{call.path} failed on {', '.join(leg.engine for leg in merged.failed)}")
            self._groups.fence(call.path, engines, merged.failed, taint=False)
        return reply_merged(call, merged, legs)

    async def _start_leg(self, engine: Engine, shot: Shot) -> Leg:
        """Start, closing a session that a broken round left open there.

        vLLM refuses a second start while a session is open, and only a finish (or a failed update) closes one. What it
        then holds does not matter: it is tainted until this round ends well.
        """
        leg = await fire(engine, shot)
        left_open = self._sessions.get(engine) == engine.boot or b"already active" in leg.body
        if leg.outcome is Outcome.REFUSED and left_open:
            engine.taint()
            await fire(engine, replace(shot, call=CALLS["/finish_weight_update"], target="/finish_weight_update",
                                       headers=(), body=None))  # fmt: skip
            leg = await fire(engine, shot)
        if leg.ok or leg.outcome in UNCERTAIN:
            self._sessions[engine] = engine.boot
        return leg

    async def update(self, asked: Asked) -> Reply:
        """Send weights: one of many inside a round, or a whole one-shot update."""
        call = asked.call
        if not call.one_shot:
            self.round.check(call)
        native = not call.one_shot and ranks.is_native_update(asked.body)
        engines = self._groups.members(call.path)
        await self._groups.preflight(call.path, engines)
        needs = ranks.needs_sizes(asked.body, None) and len(engines) > 1
        sizes = await self._groups.sizes(call.path, engines, refetch=False) if needs else [1] * len(engines)
        bodies = ranks.plan_update(asked.body, sizes) if needs else [asked.body] * len(engines)
        alone = not self.round.live and not (native and self.half_way)
        if alone and not native:
            await self._before_label(call.path, engines, None)
        boots = [(engine, engine.boot) for engine in engines]
        self._enter(engines)
        shot = asked.shot(limit_of(self._settings, asked))
        legs = await self._fan(
            asked, [(engine, shot.with_body(body)) for engine, body in zip(engines, bodies, strict=True)], fire
        )
        merged = merge(call, legs)
        if merged.passed:
            if not self.round.live:
                self._leave(engines)
            return reply_merged(call, merged, legs)
        if alone:
            return await self._whole_update(asked, merged, legs, boots, labelled=not native)
        if merged.failed:
            self._update_failed(call.path, engines, legs, merged)
        else:
            self.round.updated({engine.id: boot for engine, boot in boots})
        return reply_merged(call, merged, legs)

    async def _whole_update(
        self, asked: Asked, merged: Merged, legs: list[Leg], boots: list[tuple[Engine, int]], *, labelled: bool
    ) -> Reply:
        """An update that no start came before is whole by itself: each engine has it, or is out.

        One in vLLM's own form is not labelled, because a finish may belong to it. So where it failed on some, the
        others hold weights that no label names, and are out too.
        """
        path = asked.call.path
        if merged.failed and not labelled:
            self._update_failed(path, [engine for engine, _ in boots], legs, merged)
            return reply_merged(asked.call, merged, legs)
        took = [boot for boot, leg in zip(boots, legs, strict=True) if leg.ok]
        for (engine, _), leg in zip(boots, legs, strict=True):
            engine.updating = False
            if not leg.ok:
                touched = leg.outcome not in (Outcome.UNREACHABLE, Outcome.MISSING)
                if not (leg.outcome is Outcome.MISSING and engine.plain):
                    self._admission.failed(engine, path, f"failed {path}: {leg.said()}", taint=touched)
        if took and labelled:
            reply = await self._complete(asked, merged, legs, took, label=None)
            return reply_merged(asked.call, merged, legs) if merged.failed else reply
        if took:
            self._admission.commit(took, None, by="trainer")
        self._fleet.refresh()
        return reply_merged(asked.call, merged, legs)

    def _update_failed(self, call: str, engines: Sequence[Engine], legs: Sequence[Leg], merged: Merged) -> None:
        names = ", ".join(leg.engine for leg in merged.failed)
        for engine, leg in zip(engines, legs, strict=True):
            if leg.outcome is Outcome.REFUSED:
                self._sessions.pop(engine, None)  # vLLM closes the session of an update that failed
            if leg.outcome in (Outcome.UNREACHABLE, Outcome.MISSING) and engine not in self._sessions:
                engine.updating = False
        self.round.broken(f"{call} failed on {names}")
        self._break(engines, f"{call} failed on {names}")
        self._groups.fence(call, engines, merged.failed, taint=False)

    async def finish(self, asked: Asked) -> Reply:
        """Close a round; if every engine did, the fleet has new weights."""
        call = asked.call
        self.round.check(call)
        engines = self._groups.members(call.path)
        if self.round.live:
            engines = [engine for engine in engines if engine.id in self.round.members] or engines
        await self._groups.preflight(call.path, engines)
        body = ranks.parse(asked.body)
        label = body.get("weight_version") if isinstance(body, dict) else None
        label = None if label is None else str(label)
        await self._before_label(call.path, engines, label)
        known = self.round.live
        boots = [(engine, engine.boot) for engine in engines]
        self._enter(engines)
        shot = asked.shot(limit_of(self._settings, asked))
        legs = await self._fan(asked, [(engine, shot) for engine in engines], fire)
        merged = merge(call, legs)
        for engine, leg in zip(engines, legs, strict=True):
            if leg.ok:
                self._sessions.pop(engine, None)
        if merged.passed:
            if not known:
                self._leave(engines)
            return reply_merged(call, merged, legs)
        if merged.failed:
            if known or any(leg.ok or leg.outcome in UNCERTAIN for leg in legs):
                self._update_failed(call.path, engines, legs, merged)
                for engine, leg in zip(engines, legs, strict=True):
                    if leg.outcome is Outcome.REFUSED:
                        self._sessions[engine] = engine.boot  # vLLM leaves it open when a finish fails
            else:
                self._leave(engines)
                self._groups.fence(call.path, engines, merged.failed, taint=False)
            return reply_merged(call, merged, legs)
        updated = self.round.finished()
        self.half_way = False
        if not updated:
            # No weights came: whoever was unfit before still is, and the label speaks for the others only.
            boots = [(e, boot) for e, boot in boots if not e.tainted and e.epoch == self._fleet.epoch]
            if label is None or not boots:
                self._leave(engines)
                return reply_merged(call, merged, legs)
        return await self._complete(asked, merged, legs, boots, label=label)

    async def _complete(
        self, asked: Asked, merged: Merged, legs: list[Leg], boots: list[tuple[Engine, int]], *, label: str | None
    ) -> Reply:
        """All engines took an update: label it and let them in."""
        engines = [engine for engine, _ in boots]
        wanted = label
        if wanted is None and self._settings.label_updates is Labels.AUTO:
            wanted = self._admission.next_label()
        unlabelled: list[Leg] = []
        if wanted is not None:
            todo = engines if label is None else await self._not_showing(engines, wanted)
            labelled = await self._label_same([pair for pair in boots if pair[0] in todo], wanted, looked=label is None)
            unlabelled = [leg for leg in labelled if not leg.ok and leg.outcome is not Outcome.MISSING]
            if any(leg.outcome is Outcome.MISSING for leg in labelled) and label is None:
                wanted = None  # servers that know no labels: the number of the update has to do
        bad = {leg.engine: leg for leg in unlabelled}
        good = [(engine, boot) for engine, boot in boots if engine.id not in bad]
        for engine in engines:
            engine.updating = False
        self._admission.commit(good, wanted, by="trainer" if label is not None else "auto")
        if not unlabelled:
            return reply_merged(asked.call, merged, legs)
        for engine in engines:
            if engine.id in bad:
                # What runs there would go on with the new weights under the old label.
                self._admission.failed(engine, "/update_weight_version", "its new weights got no label", taint=True)
        if self.on_broken is not None:
            self.on_broken([engine for engine in engines if engine.id in bad])
        merged = Merged(424, b"", failed=tuple(unlabelled))
        note = ". The weights were taken, but not labelled there"
        return reply_merged(asked.call, merged, [bad.get(leg.engine, leg) for leg in legs], note=note)

    async def _before_label(self, call: str, engines: Sequence[Engine], label: str | None) -> None:
        """Where the proxy is going to label, know each process before the weights are final, to compare afterwards.

        Raises:
            Conflict: one was replaced, unnoticed until now.
        """
        if label is not None or self._settings.label_updates is not Labels.AUTO:
            return
        same = await asyncio.gather(*(self._prober.is_same(engine) for engine in engines))
        if not all(same):
            names = ", ".join(engine.id for engine, ok in zip(engines, same, strict=True) if not ok)
            raise Conflict(f"{call}: {names} restarted; {self._groups.advice()}. No engine was called")

    async def _label_same(self, boots: Sequence[tuple[Engine, int]], label: str, *, looked: bool) -> list[Leg]:
        """Label engines, but no process that replaced the one with the weights: it would speak for weights it lacks.

        Args:
            boots: engines that took the update, with the boot that they took it with: a replaced process may have been
                noticed already, and then is "the same" as far as it is known.
            label: theirs now.
            looked: `_before_label` was asked before the weights were final. Otherwise only processes that have been
                known for longer are labelled.
        """
        same = [True] * len(boots)
        if not looked:
            same = await asyncio.gather(*(self._prober.is_same(engine) for engine, _ in boots))
        ready = [(engine, boot) for (engine, boot), ok in zip(boots, same, strict=True) if ok and engine.boot == boot]
        tries = await asyncio.gather(*(self._label_one(engine, label, boot) for engine, boot in ready))
        labelled = await self._take_back(ready, tries)
        legs = {engine: leg for (engine, _), leg in zip(ready, labelled, strict=True)}
        return [legs.get(engine) or Leg(engine.id, Outcome.DIED, detail=_REPLACED) for engine, _ in boots]

    async def _take_back(self, boots: Sequence[tuple[Engine, int]], legs: Sequence[Leg]) -> list[Leg]:
        """Labels that reached a process that replaced the one they were meant for become ``default`` again.

        It would deceive whoever looks after a restart of the proxy. A lost answer may have been to a try that worked.
        """
        same = await asyncio.gather(*(self._prober.is_same(engine) for engine, _ in boots))
        out = []
        for (engine, boot), leg, ok in zip(boots, legs, same, strict=True):
            if ok and engine.boot == boot:
                out.append(leg)
                continue
            if leg.ok or leg.outcome in UNCERTAIN:
                await self._label_one(engine, DEFAULT, engine.boot)
            out.append(Leg(engine.id, Outcome.DIED, seconds=leg.seconds, detail=_REPLACED))
        return out

    async def _not_showing(self, engines: Sequence[Engine], label: str) -> list[Engine]:
        """Engines that finished but do not show the label: older servers ignore it in a finish."""
        shot = Shot(CALLS["/weight_info"], "GET", "/weight_info", timeout=self._settings.control_timeout)
        legs = await asyncio.gather(*(fire(engine, shot) for engine in engines))
        shown = [data.get("weight_version") if isinstance(data := leg.json(), dict) else None for leg in legs]
        return [engine for engine, version in zip(engines, shown, strict=True) if version != label]

    async def _label_one(self, engine: Engine, label: str, boot: int) -> Leg:
        body = orjson.dumps({"new_version": label})
        call = CALLS["/update_weight_version"]
        shot = Shot(call, "POST", call.path, JSON_HEADERS, body, self._settings.control_timeout)
        leg = await fire(engine, shot)
        for _ in range(LABEL_TRIES - 1):
            if leg.ok or leg.outcome is Outcome.MISSING or not engine.alive or engine.boot != boot:
                break
            leg = await fire(engine, shot)
        return leg

    async def label(self, asked: Asked) -> Reply:
        """Set the fleet version by hand of the trainer.

        Engines whose weights are known not to be the fleet's get no label: it would speak for weights they lack, and
        after a restart of the proxy nobody would know.
        """
        call = asked.call
        fleet = self._fleet
        living = self._groups.living()
        engines = [engine for engine in living if engine.plain or self._admission.fits(engine)]
        same = await asyncio.gather(*(self._prober.is_same(engine) for engine in engines))
        engines = [engine for engine, ok in zip(engines, same, strict=True) if ok]
        if not engines:
            why = "; ".join(f"{engine.id}: {engine.reason}" for engine in living) or "no engine is alive"
            raise Conflict(f"{call.path}: no engine holds weights that the label could speak for ({why})")
        boots = [(engine, engine.boot) for engine in engines]
        shot = asked.shot(limit_of(self._settings, asked))
        legs = await self._fan(asked, [(engine, shot) for engine in engines], fire)
        legs = await self._take_back(boots, legs)
        merged = merge(call, legs)
        body = ranks.parse(asked.body)
        version = body.get("new_version") if isinstance(body, dict) else None
        if not merged.failed and not merged.passed and version is not None:
            for engine, boot in boots:
                if engine.boot == boot:
                    self._prober.set_version(engine, str(version))
                    if fleet.pristine:
                        engine.epoch = fleet.epoch
            fleet.tied = ()
            self._admission.voting = False
            self._admission.set_fleet_version(str(version), by="trainer")
            self._admission.review_all()
        self._groups.fence(call.path, engines, merged.failed, taint=False)
        return reply_merged(call, merged, legs)

    # What a call means for each engine

    def _enter(self, engines: Sequence[Engine]) -> None:
        self._fleet.pristine = False
        for engine in engines:
            engine.updating = True
        self._fleet.refresh()

    def _leave(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            engine.updating = False
        self._fleet.refresh()
        self._admission.review_all()

    def break_round(self, why: str) -> None:
        """The round cannot end well any more: whoever is in it holds nobody's weights."""
        if self.round.broken(why):
            self._break([engine for engine in self._fleet if engine.updating], why)

    def _break(self, engines: Sequence[Engine], why: str) -> None:
        hit = [engine for engine in engines if engine.updating]
        for engine in hit:
            engine.updating = False
            engine.taint()
            self._admission.failed(engine, "", f"the weight update broke: {why}", taint=True)
        self._fleet.refresh()
        if self.on_broken is not None:
            self.on_broken(hit)
        self._fleet.emit("round_broken", why=why, engines=[engine.id for engine in hit])
