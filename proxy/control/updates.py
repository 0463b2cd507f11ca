"""Transfer groups and update rounds over several engines.

A group (members and their ranks) is made by an init and stays as it is until the next one. A round is start, update,
finish; while it runs its engines get no requests, because their weights are nobody's. What happens to engines when a
round fails is decided here, by how far each of them may have got:

- it refused a start, or was never reached: nothing happened to its weights; it is fenced until it is looked at again;
- anything else inside a round: tainted, until a whole round ends well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from proxy.config import Labels, Settings
from proxy.control.admit import Admission
from proxy.control.asked import JSON_HEADERS, Asked, Reply, limit_of, reply_error, reply_merged
from proxy.control.fanout import Runner, Shot, fire
from proxy.core import ranks
from proxy.core.calls import CALLS
from proxy.core.lifecycle import Round, RoundState
from proxy.core.merge import UNCERTAIN, Leg, Merged, Outcome, merge
from proxy.errors import Conflict
from proxy.fleet.engine import Engine
from proxy.fleet.probes import Prober
from proxy.fleet.registry import Fleet

Shots = list[tuple[Engine, Shot]]
Fan = Callable[[Asked, Shots, Runner], Coroutine[Any, Any, list[Leg]]]

LABEL_TRIES = 3
"""Tries to label one engine after a good update: the call may be repeated, and an unlabelled engine is a fenced one."""

TRAINER_RANKS = 1
"""Ranks that a trainer keeps for itself in the advice how large the next group must be (vLLM's trainers keep one)."""

_NOTHING_HAPPENED = frozenset({Outcome.REFUSED, Outcome.MISSING, Outcome.UNREACHABLE})


@dataclass(slots=True)
class Group:
    """The transfer group of the last init.

    Attributes:
        members: boot number of each engine at init.
        first_ranks: first rank of each engine, where the init had ranks.
        base: the first engine rank, as the trainer sent it; its own ranks are before it.
        lost: why it can take part in no collective any more, or empty.
    """

    members: dict[Engine, int] = field(default_factory=dict)
    first_ranks: dict[str, int] = field(default_factory=dict)
    base: int | None = None
    lost: str = ""


class Updates:
    """Runs the calls that change weights.

    Args:
        settings: limits and who labels.
        fleet: the engines.
        admission: carries out what a call means for each engine.
        prober: looks at members before a collective begins.
        fan: runs legs, so that a call can be given up.
        gate_closed: whether generation is paused.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        admission: Admission,
        prober: Prober,
        *,
        fan: Fan,
        gate_closed: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._admission = admission
        self._prober = prober
        self._fan = fan
        self._gate_closed = gate_closed
        self._sessions: dict[Engine, int] = {}
        self.group: Group | None = None
        self.round = Round()
        self.half_way = False
        """The engines were paused when the proxy started, and no start was seen since: a round may be open there."""

    # Who takes part

    def living(self) -> list[Engine]:
        """Engines that a call goes to."""
        return [engine for engine in self._fleet if engine.alive]

    def on_restart(self, engine: Engine) -> None:
        """A process was replaced: its group and its round cannot end well."""
        self._sessions.pop(engine, None)
        group = self.group
        if group is not None and engine in group.members and not group.lost:
            group.lost = f"{engine.id} restarted"
        if self.round.live and engine.id in self.round.members:
            self.break_round(f"{engine.id} restarted")

    def advice(self) -> str:
        """What a trainer should do to get a group again."""
        living = self.living()
        base = self.group.base if self.group is not None and self.group.base is not None else TRAINER_RANKS
        workers = sum(engine.world_size or 1 for engine in living)
        return (
            f"call /init_weight_transfer_engine again with world_size {workers + base} "
            f"({workers} workers on {len(living)} living engines + {base} of the trainer)"
        )

    def _members(self, call: str) -> list[Engine]:
        """The engines of a collective, in rank order.

        Raises:
            Conflict: a member of the group is not what it was, so nobody may be called.
        """
        group = self.group
        if group is None:
            return self.living()
        lost = [
            engine
            for engine, boot in group.members.items()
            if engine.boot != boot or not engine.alive or self._fleet.engines.get(engine.id) is not engine
        ]
        if lost and not group.lost:
            group.lost = ", ".join(engine.id for engine in lost) + " was restarted or lost"
        if group.lost:
            raise Conflict(
                f"{call}: the transfer group is broken ({group.lost}); {self.advice()}. No engine was called"
            )
        return list(group.members)

    async def _preflight(self, call: str, engines: Sequence[Engine]) -> None:
        """Look at every engine before a collective begins: one that never joins would hang all others.

        Raises:
            Conflict: an engine does not answer, or its weights are not in memory.
        """
        if not engines:
            raise Conflict(f"{call}: no engine is alive; wait until GET /health answers 200")
        asleep = [engine.id for engine in engines if "weights" in engine.asleep]
        if asleep:
            raise Conflict(f"{call}: {', '.join(asleep)} is asleep; send /wake_up (at least ?tags=weights) first")
        if self._settings.require_pause and not self._gate_closed():
            raise Conflict(f"{call}: generation is not paused; send /pause first (setting require_pause)")
        boots = {engine: engine.boot for engine in engines}
        fresh = await asyncio.gather(*(self._prober.fresh(engine) for engine in engines))
        bad = [engine for engine, ok in zip(engines, fresh, strict=True) if not ok or engine.boot != boots[engine]]
        if bad:
            why = "; ".join(f"{engine.id}: {engine.last_error or 'restarted'}" for engine in bad)
            raise Conflict(f"{call}: an engine is not ready for it ({why}). No engine was called; {self._next(bad)}")

    def _next(self, bad: Sequence[Engine]) -> str:
        if self.group is not None and any(engine in self.group.members for engine in bad):
            return self.advice()
        return "try again when it answers, or when GET /fleet shows it as down"

    async def _sizes(self, call: str, engines: Sequence[Engine], *, refetch: bool) -> list[int]:
        """World size of each engine.

        Raises:
            Conflict: one does not say.
        """
        ask = [engine for engine in engines if refetch or engine.world_size is None]
        shot = Shot(CALLS["/get_world_size"], "GET", "/get_world_size", timeout=self._settings.control_timeout)
        legs = await asyncio.gather(*(fire(engine, shot) for engine in ask))
        for engine, leg in zip(ask, legs, strict=True):
            data = leg.json() if leg.ok else None
            size = data.get("world_size") if isinstance(data, dict) else None
            if isinstance(size, int) and size > 0:
                engine.world_size, engine.weight = size, float(size)
            elif engine.world_size is None:
                raise Conflict(
                    f"{call}: {engine.id} does not say its world size ({leg.said()}), so ranks cannot be given out; "
                    "start it with VLLM_SERVER_DEV_MODE=1. No engine was called"
                )
        return [engine.world_size or 1 for engine in engines]

    # The calls

    async def init(self, asked: Asked) -> Reply:
        """Make a transfer group of all living engines, each with its own ranks."""
        call = asked.call
        engines = self.living()
        await self._preflight(call.path, engines)
        needs = ranks.needs_sizes(asked.body, call.rank_field)
        sizes = (
            await self._sizes(call.path, engines, refetch=True)
            if needs and len(engines) > 1
            else [engine.world_size or 1 for engine in engines]
        )
        plan = ranks.plan_init(asked.body, call.rank_field, sizes)
        self._check_absent(call.path, plan, sizes)
        self.round.passed_by = True
        before, self.group = self.group, Group(dict.fromkeys(engines, 0), lost="its init did not end")
        boots = {engine: engine.boot for engine in engines}
        shot = asked.shot(limit_of(self._settings, asked))
        legs = await self._fan(
            asked, [(engine, shot.with_body(body)) for engine, body in zip(engines, plan.bodies, strict=True)], fire
        )
        merged = merge(call, legs)
        if merged.passed:
            self.group = before
        elif merged.failed:
            names = ", ".join(leg.engine for leg in merged.failed)
            self.group.lost = f"its init failed on {names}"
            self._fence(call.path, engines, merged.failed, taint=False)
        else:
            first_ranks = dict(zip((engine.id for engine in engines), plan.offsets, strict=False))
            self.group = Group(boots, first_ranks, plan.base)
            members = {engine.id: first_ranks.get(engine.id) for engine in engines}
            self._fleet.emit("group", members=members, world_size=plan.world_size, base=plan.base)
        return reply_merged(call, merged, legs)

    def _check_absent(self, call: str, plan: ranks.InitPlan, sizes: Sequence[int]) -> None:
        """Refuse a group whose size counts engines that are down: the others would wait for them for ever.

        Raises:
            Conflict: with the size that fits.
        """
        absent = [engine for engine in self._fleet if not engine.alive]
        if plan.world_size is None or plan.base is None or not absent:
            return
        missing = plan.world_size - plan.base - sum(sizes)
        if missing > 0 and missing <= sum(engine.world_size or 1 for engine in absent):
            names = ", ".join(engine.id for engine in absent)
            raise Conflict(
                f"{call}: world_size {plan.world_size} counts engines that are down ({names}); "
                f"init with world_size {plan.base + sum(sizes)}, or wait for them. No engine was called"
            )

    async def shutdown(self, asked: Asked) -> Reply:
        """Release the transfer group."""
        engines = self.living()
        if not engines:
            raise Conflict(f"{asked.call.path}: no engine is alive")
        shot = asked.shot(limit_of(self._settings, asked))
        legs = await self._fan(asked, [(engine, shot) for engine in engines], fire)
        merged = merge(asked.call, legs)
        if not merged.passed:
            self.group = None
        self._fence(asked.call.path, engines, merged.failed, taint=False)
        return reply_merged(asked.call, merged, legs)

    async def start(self, asked: Asked) -> Reply:
        """Open a round."""
        call = asked.call
        self.round.check(call)
        engines = self._members(call.path)
        await self._preflight(call.path, engines)
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
            self._fence(call.path, engines, merged.failed, taint=False)
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
        engines = self._members(call.path)
        await self._preflight(call.path, engines)
        needs = ranks.needs_sizes(asked.body, None) and len(engines) > 1
        sizes = await self._sizes(call.path, engines, refetch=False) if needs else [1] * len(engines)
        bodies = ranks.plan_update(asked.body, sizes) if needs else [asked.body] * len(engines)
        alone = not self.round.live and not (native and self.half_way)
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
        self._fence(call, engines, merged.failed, taint=False)

    async def finish(self, asked: Asked) -> Reply:
        """Close a round; if every engine did, the fleet has new weights."""
        call = asked.call
        self.round.check(call)
        engines = self._members(call.path)
        if self.round.live:
            engines = [engine for engine in engines if engine.id in self.round.members] or engines
        await self._preflight(call.path, engines)
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
                self._fence(call.path, engines, merged.failed, taint=False)
            return reply_merged(call, merged, legs)
        updated = self.round.finished()
        self.half_way = False
        body = ranks.parse(asked.body)
        label = body.get("weight_version") if isinstance(body, dict) else None
        label = None if label is None else str(label)
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
        by = "trainer" if label is not None else "auto"
        wanted = label
        if wanted is None and self._settings.label_updates is Labels.AUTO:
            wanted = self._admission.next_label()
        unlabelled: list[Leg] = []
        if wanted is not None:
            todo = engines if label is None else await self._not_showing(engines, wanted)
            labelled = await asyncio.gather(*(self._label_one(engine, wanted) for engine in todo))
            unlabelled = [leg for leg in labelled if not leg.ok and leg.outcome is not Outcome.MISSING]
            if any(leg.outcome is Outcome.MISSING for leg in labelled) and label is None:
                wanted = None  # servers that know no labels: the number of the update has to do
        bad = {leg.engine for leg in unlabelled}
        good = [(engine, boot) for engine, boot in boots if engine.id not in bad]
        for engine in engines:
            engine.updating = False
        self._admission.commit(good, wanted, by=by)
        if not unlabelled:
            return reply_merged(asked.call, merged, legs)
        for engine in engines:
            if engine.id in bad:
                self._admission.failed(engine, "/update_weight_version", "its new weights got no label", taint=False)
        merged = Merged(424, b"", failed=tuple(unlabelled))
        return reply_merged(asked.call, merged, unlabelled, note=". The weights were taken, but not labelled there")

    async def _not_showing(self, engines: Sequence[Engine], label: str) -> list[Engine]:
        """Engines that finished but do not show the label: older servers ignore it in a finish."""
        shot = Shot(CALLS["/weight_info"], "GET", "/weight_info", timeout=self._settings.control_timeout)
        legs = await asyncio.gather(*(fire(engine, shot) for engine in engines))
        shown = [data.get("weight_version") if isinstance(data := leg.json(), dict) else None for leg in legs]
        return [engine for engine, version in zip(engines, shown, strict=True) if version != label]

    async def _label_one(self, engine: Engine, label: str) -> Leg:
        body = orjson.dumps({"new_version": label})
        call = CALLS["/update_weight_version"]
        shot = Shot(call, "POST", call.path, JSON_HEADERS, body, self._settings.control_timeout)
        leg = await fire(engine, shot)
        for _ in range(LABEL_TRIES - 1):
            if leg.ok or leg.outcome is Outcome.MISSING or not engine.alive:
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
        engines = [
            engine
            for engine in self.living()
            if engine.plain or (not engine.tainted and (fleet.pristine or engine.epoch == fleet.epoch))
        ] or self.living()
        if not engines:
            raise Conflict(f"{call.path}: no engine is alive; wait until GET /health answers 200")
        boots = {engine: engine.boot for engine in engines}
        shot = asked.shot(limit_of(self._settings, asked))
        legs = await self._fan(asked, [(engine, shot) for engine in engines], fire)
        merged = merge(call, legs)
        body = ranks.parse(asked.body)
        version = body.get("new_version") if isinstance(body, dict) else None
        if not merged.failed and not merged.passed and version is not None:
            for engine, boot in boots.items():
                if engine.boot == boot:
                    self._prober.set_version(engine, str(version))
                    if fleet.pristine:
                        engine.epoch = fleet.epoch
            fleet.tied = ()
            self._admission.voting = False
            self._admission.set_fleet_version(str(version), by="trainer")
            self._admission.review_all()
        self._fence(call.path, engines, merged.failed, taint=False)
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
        self._fleet.emit("round_broken", why=why, engines=[engine.id for engine in hit])

    def _fence(self, call: str, engines: Sequence[Engine], failed: Sequence[Leg], *, taint: bool) -> None:
        legs = {leg.engine: leg for leg in failed}
        for engine in engines:
            leg = legs.get(engine.id)
            if leg is None or (leg.outcome is Outcome.MISSING and engine.plain):
                continue
            self._admission.failed(engine, call, f"failed {call}: {leg.said()}", taint=taint)


def conflict(error: Conflict) -> Reply:
    """A conflict found before any engine was called."""
    return reply_error(error)


__all__ = ["Group", "RoundState", "Updates", "conflict"]
