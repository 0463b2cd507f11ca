"""Transfer groups over several engines: who is in one, with which ranks, and whether all of it is there.

A group is made by an init and stays as it is until the next one. Init, start and update are collectives: an engine that
is not what it was, or does not answer, would keep all others waiting, so nobody is called then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.config import Settings
from proxy.control.admit import Admission
from proxy.control.asked import Asked, Reply, limit_of, reply_merged
from proxy.control.fanout import Runner, Shot, fire
from proxy.core import ranks
from proxy.core.calls import CALLS
from proxy.core.merge import Leg, Outcome, merge
from proxy.errors import Conflict
from proxy.fleet.engine import Engine
from proxy.fleet.probes import Prober
from proxy.fleet.registry import Fleet

Shots = list[tuple[Engine, Shot]]
Fan = Callable[[Asked, Shots, Runner], Coroutine[Any, Any, list[Leg]]]

TRAINER_RANKS = 1
"""Ranks that a trainer keeps for itself in the advice how large the next group must be (vLLM's trainers keep one)."""


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


class Groups:
    """Makes groups and says who takes part in a collective.

    Args:
        settings: limits.
        fleet: the engines.
        admission: fences who failed.
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
        self.group: Group | None = None
        self.counted: list[Engine] = []
        """The engines of the last ``GET /get_world_size``: those that the trainer's world size speaks of."""
        self.on_init: Callable[[], None] | None = None
        """Called before an init is sent: a round that is open is abandoned."""

    def living(self) -> list[Engine]:
        """Engines that a call goes to."""
        return [engine for engine in self._fleet if engine.alive]

    def on_restart(self, engine: Engine) -> None:
        """A process was replaced: its group can do nothing any more."""
        group = self.group
        if group is not None and engine in group.members and not group.lost:
            group.lost = f"{engine.id} restarted"

    def advice(self) -> str:
        """What a trainer should do to get a group again."""
        living = self.living()
        base = self.group.base if self.group is not None and self.group.base is not None else TRAINER_RANKS
        workers = sum(engine.world_size or 1 for engine in living)
        return (
            f"call /init_weight_transfer_engine again with world_size {workers + base} "
            f"({workers} workers on {len(living)} living engines + {base} of the trainer)"
        )

    def members(self, call: str) -> list[Engine]:
        """The engines of a collective, in rank order.

        Raises:
            Conflict: a member of the group is not what it was, so nobody may be called.
        """
        group = self.group
        if group is None:
            return self.living()
        why = group.lost or self._why_lost(group)
        if why:
            raise Conflict(f"{call}: the transfer group is broken ({why}); {self.advice()}. No engine was called")
        return list(group.members)

    def _why_lost(self, group: Group) -> str:
        gone = [engine for engine in group.members if self._fleet.engines.get(engine.id) is not engine]
        other = [engine for engine, boot in group.members.items() if engine.boot != boot and engine not in gone]
        if gone or other:
            words = [f"{engine.id} was removed" for engine in gone] + [f"{engine.id} restarted" for engine in other]
            group.lost = ", ".join(words)
            return group.lost
        # An engine that is down may come back as the process it was: then its group holds.
        return ", ".join(f"{engine.id} is down" for engine in group.members if not engine.alive)

    async def preflight(self, call: str, engines: Sequence[Engine]) -> None:
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

    async def none_replaced(self, call: str, engines: Sequence[Engine]) -> None:
        """Where the proxy is going to label, know each process before the weights are final.

        Raises:
            Conflict: one was replaced, unnoticed until now.
        """
        gone = await self._prober.replaced(engines)
        if gone:
            names = ", ".join(engine.id for engine in gone)
            raise Conflict(f"{call}: {names} restarted; {self.advice()}. No engine was called")

    def _next(self, bad: Sequence[Engine]) -> str:
        if self.group is not None and any(engine in self.group.members for engine in bad):
            return self.advice()
        return "try again when it answers, or when GET /fleet shows it as down"

    async def sizes(self, call: str, engines: Sequence[Engine], *, refetch: bool) -> list[int]:
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

    async def init(self, asked: Asked) -> Reply:
        """Make a transfer group of all living engines, each with its own ranks."""
        call = asked.call
        engines = self.living()
        await self.preflight(call.path, engines)
        needs = ranks.needs_sizes(asked.body, call.rank_field)
        sizes = (
            await self.sizes(call.path, engines, refetch=True)
            if needs and len(engines) > 1
            else [engine.world_size or 1 for engine in engines]
        )
        engines, sizes = self._those_meant(asked, engines, sizes)
        try:
            plan = ranks.plan_init(asked.body, call.rank_field, sizes)
        except Conflict as error:
            who = ", ".join(f"{engine.id} ({size})" for engine, size in zip(engines, sizes, strict=True))
            raise Conflict(f"{call.path}: {error.message}. No engine was called; engines (workers): {who}") from None
        self._check_absent(call.path, plan, sizes)
        if self.on_init is not None:
            self.on_init()
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
            self.fence(call.path, engines, merged.failed, taint=False)
        else:
            first_ranks = dict(zip((engine.id for engine in engines), plan.offsets, strict=False))
            self.group = Group(boots, first_ranks, plan.base)
            members = {engine.id: first_ranks.get(engine.id) for engine in engines}
            self._fleet.emit("group", members=members, world_size=plan.world_size, base=plan.base)
        return reply_merged(call, merged, legs)

    def _those_meant(self, asked: Asked, engines: list[Engine], sizes: list[int]) -> tuple[list[Engine], list[int]]:
        """Leave out engines that came after the trainer asked for the world size: it has no ranks for them."""
        meant = [(engine, size) for engine, size in zip(engines, sizes, strict=True) if engine in self.counted]
        total = ranks.group_size(asked.body, asked.call.rank_field)
        if total is None or len(meant) == len(engines) or sum(size for _, size in meant) != total:
            return engines, sizes
        return [engine for engine, _ in meant], [size for _, size in meant]

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
        self.fence(asked.call.path, engines, merged.failed, taint=False)
        return reply_merged(asked.call, merged, legs)

    def fence(self, call: str, engines: Sequence[Engine], failed: Sequence[Leg], *, taint: bool) -> None:
        """Fence who failed, except plain engines that merely lack the route."""
        legs = {leg.engine: leg for leg in failed}
        for engine in engines:
            leg = legs.get(engine.id)
            if leg is None or (leg.outcome is Outcome.MISSING and engine.plain):
                continue
            self._admission.failed(engine, call, f"failed {call}: {leg.said()}", taint=taint)
