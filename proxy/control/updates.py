"""Update rounds over several engines: start, update, finish, and the label that ends them.

While a round runs its engines get no requests, because their weights are nobody's. What happens to engines when a round
fails is decided here, by how far each of them may have got:

- it refused a start, or was never reached: nothing happened to its weights; it is fenced until it is looked at again;
- anything else inside a round: tainted, until a whole round ends well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from proxy.config import Settings
from proxy.control.admit import Admission
from proxy.control.asked import Asked, Reply, limit_of, reply_merged
from proxy.control.fanout import Shot, fire
from proxy.control.groups import Fan, Groups, Shots
from proxy.control.labels import Boots, Labeller
from proxy.core import ranks
from proxy.core.calls import CALLS, Call, Kind
from proxy.core.lifecycle import Round, RoundState
from proxy.core.merge import UNCERTAIN, Leg, Merged, Outcome, merge
from proxy.errors import Conflict
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet

_NOTHING_HAPPENED = frozenset({Outcome.REFUSED, Outcome.MISSING, Outcome.UNREACHABLE})

Silent = dict[Engine, Leg]
"""Engines that took no label before a step and are left out of it, with what they said."""

_GONE = frozenset({Outcome.UNREACHABLE, Outcome.DIED})
"""No process answers that could be labelled later."""


class Updates:
    """Runs the calls that change weights.

    Args:
        settings: limits and who labels.
        fleet: the engines.
        groups: says who takes part.
        admission: carries out what a call means for each engine.
        labels: writes the labels.
        fan: runs legs, so that a call can be given up.
    """

    def __init__(
        self, settings: Settings, fleet: Fleet, groups: Groups, admission: Admission, *, labels: Labeller, fan: Fan
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._groups = groups
        self._admission = admission
        self._labels = labels
        self._fan = fan
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
        self._fleet.coming = ""
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
                if leg.outcome in _NOTHING_HAPPENED and engine.session is False:
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
        left_open = engine.session is not False or b"already active" in leg.body
        if leg.outcome is Outcome.REFUSED and left_open:
            self._fleet.taint(engine)
            if self._labels.automatic:
                await self._labels.ahead([(engine, engine.boot)], None)
            await fire(engine, replace(shot, call=CALLS["/finish_weight_update"], target="/finish_weight_update",
                                       headers=(), body=None))  # fmt: skip
            leg = await fire(engine, shot)
        if leg.ok or leg.outcome in UNCERTAIN:
            engine.session = True if leg.ok else None
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
        # A part of what another proxy began, or of a round that is broken, is no whole update.
        part = native and (self.half_way or any(engine.session is not False for engine in engines))
        alone = not self.round.live and not part
        labelled = alone and not native and self._labels.automatic
        if labelled:
            await self._groups.none_replaced(call.path, engines)
        boots = [(engine, engine.boot) for engine in engines]
        self._enter(engines)
        await self._labels.settle(engines)
        silent = await self._labels.ahead(boots, None) if labelled else {}
        shot = asked.shot(limit_of(self._settings, asked))
        shots = [(engine, shot.with_body(body)) for engine, body in zip(engines, bodies, strict=True)]
        called = await self._send(asked, [(engine, each) for engine, each in shots if engine not in silent])
        legs = [silent.get(engine) or called.pop(0) for engine in engines]
        merged = merge(call, legs)
        if silent:
            merged = Merged(424, b"", failed=tuple(leg for leg in legs if not leg.ok))
        if merged.passed:
            await self._labels.back(engine for engine in engines if engine.marked)
            if not self.round.live:
                self._leave(engines)
            return reply_merged(call, merged, legs)
        if alone:
            return await self._whole_update(asked, merged, legs, boots, silent=silent, native=native)
        if merged.failed:
            self._step_failed(call, engines, legs, merged)
        else:
            self.round.updated({engine.id: boot for engine, boot in boots})
        return reply_merged(call, merged, legs)

    async def _whole_update(
        self, asked: Asked, merged: Merged, legs: list[Leg], boots: Boots, *, silent: Silent, native: bool
    ) -> Reply:
        """An update that no start came before is whole by itself: each engine has it, or is out.

        One in vLLM's own form is not labelled, because a finish may belong to it. So where it failed on some, the
        others hold weights that no label names, and are out too.
        """
        path = asked.call.path
        if merged.failed and native:
            self._step_failed(asked.call, [engine for engine, _ in boots], legs, merged)
            return reply_merged(asked.call, merged, legs)
        took = [boot for boot, leg in zip(boots, legs, strict=True) if leg.ok]
        for (engine, _), leg in zip(boots, legs, strict=True):
            if not leg.ok:
                engine.updating = False  # that of the others ends with their label
                touched = engine not in silent and leg.outcome not in (Outcome.UNREACHABLE, Outcome.MISSING)
                if not (leg.outcome is Outcome.MISSING and engine.plain):
                    self._admission.failed(engine, path, f"failed {path}: {leg.said()}", taint=touched)
        missed = [engine for (engine, _), leg in zip(boots, legs, strict=True) if not leg.ok and not engine.tainted]
        await self._labels.back(engine for engine in missed if engine.marked or engine in silent)
        note = f". Who took no mark before was left out of {path}" if silent else ""
        if took and native:
            self._admission.commit(took, None, by="trainer")
        elif took:
            wanted = self._admission.next_label() if self._labels.automatic else None
            told = [leg for leg in legs if leg.ok]
            reply = await self._complete(asked, told, took, label=None, wanted=wanted, silent={})
            return reply_merged(asked.call, merged, legs, note=note) if merged.failed else reply
        self._fleet.refresh()
        return reply_merged(asked.call, merged, legs, note=note)

    def _step_failed(self, call: Call, engines: Sequence[Engine], legs: Sequence[Leg], merged: Merged) -> None:
        names = ", ".join(leg.engine for leg in merged.failed)
        for engine, leg in zip(engines, legs, strict=True):
            if leg.outcome is Outcome.REFUSED and call.kind is not Kind.FINISH:
                engine.session = False  # vLLM closes the session of an update that failed, not that of a finish
            elif leg.outcome in UNCERTAIN and engine.session:
                engine.session = None
            if leg.outcome in (Outcome.UNREACHABLE, Outcome.MISSING) and engine.session is False:
                engine.updating = False
        self.round.broken(f"{call.path} failed on {names}")
        self._break(engines, f"{call.path} failed on {names}")
        self._groups.fence(call.path, engines, merged.failed, taint=False)

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
        label = wanted = None if label is None else str(label)
        known = self.round.live
        boots = [(engine, engine.boot) for engine in engines]
        silent: Silent = {}
        ours = label is None and self._labels.automatic
        if ours:
            await self._groups.none_replaced(call.path, engines)
            self.round.check(call)
        self._enter(engines)
        await self._labels.settle(engines)
        if ours and self.round.brought:
            wanted = self._fleet.coming or self._admission.next_label()
            # While its session is open, an engine's label says nothing yet.
            inside = [(engine, boot) for engine, boot in boots if known or engine.session is not False]
            if inside:
                self._fleet.coming = wanted
                silent = await self._labels.ahead(inside, wanted)
            if known and not self.round.live:
                await self._labels.back(engines)
                self.round.check(call)
            if len(silent) == len(engines) or any(leg.outcome in _GONE for leg in silent.values()):
                return await self._not_finished(asked, engines, silent)
        boots = [(engine, boot) for engine, boot in boots if engine not in silent]
        shot = asked.shot(limit_of(self._settings, asked))
        legs = await self._send(asked, [(engine, shot) for engine, _ in boots])
        merged = merge(call, legs)
        for (engine, _), leg in zip(boots, legs, strict=True):
            if leg.ok:
                engine.session = False
        if not merged.ok:
            return await self._finish_failed(asked, merged, legs, [engine for engine, _ in boots], known=known)
        self.half_way = False
        if not self.round.finished():
            # No weights came: whoever was unfit before still is, and the label speaks for the others only.
            boots = [(e, boot) for e, boot in boots if not e.tainted and e.epoch == self._fleet.epoch]
            if label is None or not boots:
                self._leave(engines)
                return reply_merged(call, merged, legs)
        return await self._complete(asked, legs, boots, label=label, wanted=wanted, silent=silent)

    async def _not_finished(self, asked: Asked, engines: Sequence[Engine], silent: Silent) -> Reply:
        """An engine died before the finish was sent, or none could be labelled: the round cannot end well."""
        legs = list(silent.values())
        merged = Merged(424, b"", failed=tuple(legs))
        why = f"{asked.call.path} failed on {', '.join(leg.engine for leg in legs)}"
        self.round.broken(why)
        self._break(engines, why)
        self._groups.fence(asked.call.path, engines, legs, taint=False)
        await self._labels.back(engine for engine in engines if engine not in silent)
        return reply_merged(asked.call, merged, legs, note=". No engine was finished: the label comes first")

    async def _finish_failed(
        self, asked: Asked, merged: Merged, legs: list[Leg], engines: list[Engine], *, known: bool
    ) -> Reply:
        began = known or any(leg.ok or leg.outcome in UNCERTAIN for leg in legs)
        if merged.failed and began:
            self._step_failed(asked.call, engines, legs, merged)
        elif not known:
            self._leave(engines)
            self._groups.fence(asked.call.path, engines, merged.failed, taint=False)
        if self._fleet.coming:
            await self._labels.back(engines)
        return reply_merged(asked.call, merged, legs)

    async def _complete(
        self,
        asked: Asked,
        legs: Sequence[Leg],
        boots: Boots,
        *,
        label: str | None,
        wanted: str | None,
        silent: Silent,
    ) -> Reply:
        """All engines took an update: see that each has its label, and let them in.

        Args:
            asked: the call that ended it.
            legs: what those said that took it.
            boots: those that took it.
            label: the trainer's, or None.
            wanted: the label that they should have; None leaves it as it is.
            silent: those that were left out because they could not be labelled.
        """
        engines = [engine for engine, _ in boots]
        bad = dict(silent)
        if wanted is not None:
            todo = await self._labels.not_showing(engines, wanted)
            tries = await self._labels.put([pair for pair in boots if pair[0] in todo], wanted)
            bad |= {
                e: leg for e, leg in zip(todo, tries, strict=True) if not leg.ok and leg.outcome is not Outcome.MISSING
            }
            if label is None and len(tries) == len(engines) and all(leg.outcome is Outcome.MISSING for leg in tries):
                wanted = None  # servers that know no labels: the number of the update has to do
        for engine in (*engines, *silent):
            engine.updating = False
        good = [(engine, boot) for engine, boot in boots if engine not in bad]
        self._admission.commit(good, wanted, by="trainer" if label is not None else "auto")
        if not bad:
            return reply_merged(asked.call, merge(asked.call, legs), legs)
        for engine in bad:
            # What runs there would go on with the new weights under the old label.
            self._admission.failed(engine, "/update_weight_version", "its new weights got no label", taint=True)
        if self.on_broken is not None:
            self.on_broken(list(bad))
        by_id = {engine.id: leg for engine, leg in bad.items()}
        merged = Merged(424, b"", failed=tuple(bad.values()))
        said = {leg.engine: leg for leg in legs} | by_id
        note = ". The weights were taken, but not labelled there"
        if silent:
            note = ". Who took no label was left out of the finish, and holds no whole weights"
        return reply_merged(asked.call, merged, list(said.values()), note=note)

    async def _send(self, asked: Asked, shots: Shots) -> list[Leg]:
        """The legs of an update or a finish.

        Raises:
            Conflict: ``/resume`` came before any engine was called.
        """
        try:
            return await self._fan(asked, shots, fire)
        except Conflict:
            engines = [engine for engine, _ in shots]
            await self._labels.back(engine for engine in engines if engine.marked or self._fleet.coming)
            self._leave(engines)
            raise

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
        if self.round.state is RoundState.NONE and any(e.alive and e.session is not False for e in self._fleet):
            self.round.state, self.round.why = RoundState.BROKEN, why  # another proxy began it
        if self.round.broken(why):
            self._break([engine for engine in self._fleet if engine.updating], why)

    def _break(self, engines: Sequence[Engine], why: str) -> None:
        hit = [engine for engine in engines if engine.updating]
        for engine in hit:
            engine.updating = False
            self._fleet.taint(engine)
            self._admission.failed(engine, "", f"the weight update broke: {why}", taint=True)
        self._fleet.refresh()
        if self.on_broken is not None:
            self.on_broken(hit)
        self._fleet.emit("round_broken", why=why, engines=[engine.id for engine in hit])
