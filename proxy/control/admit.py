"""The shell around `proxy.core.admission`: gathers the facts, carries out the verdict.

Before an engine is let in it catches up: idempotent control calls that it missed (a pause, a resume, a cache reset) are
sent again, and LoRA adapters that the others have are loaded. Whatever happens to it meanwhile ends the attempt: the
verdict is asked again after every await.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from proxy.config import Settings
from proxy.control.asked import JSON_HEADERS
from proxy.control.checksums import Checksums
from proxy.control.fanout import Shot, fire
from proxy.core.admission import DEFAULT, UNKNOWN_EPOCH, Decision, Facts, Verdict, is_automatic, judge, next_label, vote
from proxy.core.calls import custom
from proxy.core.engine_state import Event, State
from proxy.core.merge import Outcome
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.tasks import spawn

if TYPE_CHECKING:
    from proxy.data.gate import Gate

_log = logging.getLogger("fleetgate.admission")

CATCH_UP_DELAY = 1.0
"""Seconds that a fence lasts at least: an engine that failed a call is not let back before people could see it."""


class Admission:
    """Decides which engines may answer clients.

    Args:
        settings: limits.
        fleet: the engines and the fleet version.
        gate: closed while generation is paused.
    """

    def __init__(self, settings: Settings, fleet: Fleet, gate: Gate) -> None:
        self._settings = settings
        self._fleet = fleet
        self._gate = gate
        self._settling: set[Engine] = set()
        self.checksums = Checksums(settings, fleet, self._settling, self.review)
        self._labels_beyond = 0
        self._left_open = False
        self._judging = False
        self._counted = False
        self.voting = True
        """Whether labels that are seen may still change the fleet's version: until all engines of the start were."""

    def facts(self, engine: Engine) -> Facts:
        """What the rules are asked about."""
        fleet = self._fleet
        return Facts(
            plain=engine.plain,
            was_rl=engine.was_rl,
            version=engine.version,
            fleet_version=fleet.version,
            tie=bool(fleet.tied),
            pristine=fleet.pristine,
            tainted=engine.tainted,
            in_round=engine.updating,
            epoch=engine.epoch,
            fleet_epoch=fleet.epoch,
            by_hand=engine.by_hand,
            recorded=engine.world_size in fleet.checksums,
            checksums_equal=engine.checksums_equal if engine.compared == fleet.version else None,
            checked=engine.compared == fleet.version and fleet.version is not None,
        )

    def verdict(self, engine: Engine) -> Verdict:
        """What the rules say now."""
        return judge(self.facts(engine))

    def fits(self, engine: Engine) -> bool:
        """Whether it holds the fleet's weights, as far as the rules can tell."""
        return self.verdict(engine).decision is Decision.ADMIT

    # Votes at start

    def count_votes(self) -> None:
        """Take the label that most living engines hold for the fleet's (contract: "At start")."""
        fleet = self._fleet
        self._counted = True
        self._recall()
        voters = [engine for engine in fleet if engine.alive and not engine.plain]
        labels = [engine.version for engine in voters]
        # Whoever holds nobody's weights has a say only where no other has a real label.
        result = vote(engine.version for engine in voters if not engine.tainted)
        result = vote(labels) if result.version in (None, DEFAULT) and not result.tied else result
        fleet.tied = result.tied
        if result.tied:
            _log.warning(
                "engines disagree about the weights and no label has a majority (%s): all are fenced until a weight "
                "sync, or POST /fleet/engines/ID/admit", ", ".join(result.tied),
            )  # fmt: skip
        named = [label for label in labels if label not in (None, DEFAULT)]
        marked = any(engine.marked for engine in fleet)
        if named or marked:
            fleet.pristine = False
            lost = marked or DEFAULT in labels or any(not engine.alive for engine in fleet)
            if lost or not all(is_automatic(label) for label in named):
                # Whoever restarted may have shown a later label than those that are left.
                self._hide_history()
        self.decide(result.version, by="start")

    def _recall(self) -> None:
        """Keep out who was in an update that an earlier proxy did not see the end of: its label names other weights.

        One that is merely behind is in doubt where a round seems to have been going on: later rounds put most of them
        right. Any other is marked (`proxy.core.marks`).
        """
        told = [(engine, engine.history) for engine in self._fleet if engine.alive and engine.history is not None]
        self._left_open = self._left_open or any(history.open for _, history in told)
        self._fleet.pristine = self._fleet.pristine and not self._left_open
        for engine, history in told:
            if history.open or ((self._left_open or history.paused) and history.behind):
                engine.history, engine.session = None, history.open or None
                self._fleet.taint(engine)
                _log.warning(
                    "engine %s was inside a weight update before this proxy started: what it holds is not %r",
                    engine.id, engine.version,
                )  # fmt: skip
                if engine.state is State.READY:
                    self.fence(engine, self.verdict(engine).reason)

    def decide(self, version: str | None, *, by: str) -> None:
        """Labels that engines brought along say what the fleet has: whoever was met before is judged by that anew."""
        self.set_fleet_version(version, by=by)
        for engine in self._fleet:
            if engine.met and engine.boot == 0 and self._is_named(engine):
                engine.epoch = self._fleet.epoch

    def set_fleet_version(self, version: str | None, *, by: str) -> None:
        """The fleet has these weights now."""
        fleet = self._fleet
        self._judging = True
        before, fleet.version = fleet.version, version
        if version is not None:
            fleet.labels_seen.add(version)
            if version != DEFAULT:
                fleet.pristine = False
        if before != version:
            fleet.checksums.clear()
            fleet.emit("weight_version", version=version, before=before, epoch=fleet.epoch, by=by)
            _log.info("fleet version: %r -> %r (by %s)", before, version, by)

    def _hide_history(self) -> None:
        """Which automatic labels an earlier proxy gave out cannot be seen.

        Two weights must never have the same one, so they go on from a number that no count of updates reaches.
        """
        self._labels_beyond = time.time_ns() // 1_000_000

    def next_label(self) -> str:
        """A label that no engine ever showed."""
        if not self._counted:
            # A sync came before every engine was heard, and after it labels are not counted any more.
            self._hide_history()
        return next_label([*self._fleet.labels_seen, self._fleet.version], beyond=self._labels_beyond)

    # One engine

    def review_all(self) -> None:
        """Ask the rules about everybody."""
        for engine in list(self._fleet):
            self.review(engine)

    def review(self, engine: Engine) -> None:
        """Ask the rules about one engine and do what they say. Never waits; catching up happens in the background.

        Before the first count of labels nothing is known of the fleet: what looks untouched may have missed every
        update, so nobody is let in, whatever call comes that early.
        """
        if not self._judging:
            return
        if self._fleet.engines.get(engine.id) is not engine or not engine.alive:
            return
        if engine.suspect or engine.state is State.STARTING:
            return
        if not engine.met:
            self._meet(engine)
        verdict = self.verdict(engine)
        if verdict.decision is not Decision.ADMIT:
            if engine.updating and not engine.tainted and engine.state in (State.READY, State.DRAINING):
                # Inside a healthy round it is merely not eligible; a fence would say that something went wrong.
                return
            self.fence(engine, verdict.reason)
            if verdict.decision is Decision.COMPARE and not engine.busy:
                self._settle(engine)
            return
        if engine.state is State.FENCED:
            if not self._may_settle(engine):
                return
            if engine.owed or self._missing_adapters(engine):
                self._settle(engine)
            else:
                self.admit(engine, verdict.reason)
        elif engine.state is State.READY:
            # What let it in once may be long past: why it is in now.
            engine.reason = verdict.reason

    def _meet(self, engine: Engine) -> None:
        """A process that is new here: its label is all there is to go by. ``default`` says nothing after an update."""
        engine.met = True
        self._recall()
        known = engine.plain or self._fleet.pristine or self._is_named(engine)
        engine.epoch = self._fleet.epoch if known and engine.boot == 0 else UNKNOWN_EPOCH

    def _is_named(self, engine: Engine) -> bool:
        return engine.version == self._fleet.version and engine.version not in (None, DEFAULT)

    def _may_settle(self, engine: Engine) -> bool:
        if not engine.failed_call or engine.by_hand:
            return True
        # It failed or missed a call: what it is paused for is not over, so there is nothing to let it in for.
        return not self._gate.closed and self._fleet.clock() - engine.since >= CATCH_UP_DELAY

    def fence(self, engine: Engine, reason: str) -> None:
        """Keep it out."""
        if engine.state is State.FENCED:
            engine.reason = reason
        else:
            self._fleet.apply(engine, Event.FENCE, reason)

    def admit(self, engine: Engine, reason: str) -> None:
        """Let it in: its weights are the fleet's."""
        fleet = self._fleet
        engine.epoch = fleet.epoch
        engine.failed_call = ""
        engine.compared = engine.checksums_equal = None
        fleet.apply(engine, Event.ADMIT, reason)

    # Catching up

    def _missing_adapters(self, engine: Engine) -> list[str]:
        return [name for name, (_, body) in self._fleet.adapters.items() if engine.adapters.get(name) != body]

    def _settle(self, engine: Engine) -> None:
        if engine in self._settling:
            return
        self._settling.add(engine)
        spawn(self._catch_up(engine), name=f"catch up {engine.id}")

    async def _catch_up(self, engine: Engine) -> None:
        boot = engine.boot
        try:
            if self.verdict(engine).decision is Decision.COMPARE:
                await self.checksums.compare(engine)
            elif await self._pay(engine) and await self._load_adapters(engine) and engine.boot == boot:
                verdict = self.verdict(engine)
                if verdict.decision is Decision.ADMIT and engine.state is State.FENCED and not engine.suspect:
                    self.admit(engine, verdict.reason)
        finally:
            self._settling.discard(engine)

    async def _pay(self, engine: Engine) -> bool:
        """Send what it owes; a pause and a resume cancel each other out before they come here.

        One that is paused and owes no ``/resume`` was paused by somebody else, who may be in the middle of an update.
        """
        for path, shot in list(engine.owed.items()):
            leg = await fire(engine, shot)
            done = shot.done_by(leg)
            if done and engine.owed.get(path) is shot:
                del engine.owed[path]
                if path in ("/pause", "/resume"):
                    engine.reported_paused = path == "/pause"
                elif path == "/wake_up":
                    engine.asleep = frozenset()
                    self._fleet.refresh()
            elif not done:
                self.fence(engine, f"still owes {path}: {leg.said()}")
                return False
        return not engine.owed

    async def _load_adapters(self, engine: Engine) -> bool:
        for name in self._missing_adapters(engine):
            path, body = self._fleet.adapters[name]
            shot = Shot(custom(path, None), "POST", path, JSON_HEADERS, body, self._settings.pause_timeout)
            leg = await fire(engine, shot)
            already = leg.outcome is Outcome.REFUSED and leg.status == 400 and b"already" in leg.body
            if not leg.ok and not already:
                self.fence(engine, f"lacks the LoRA adapter {name!r}, and loading it failed: {leg.said()}")
                return False
            engine.adapters[name] = body
        return not engine.owed

    # After control calls

    def failed(self, engine: Engine, call: str, why: str, *, taint: bool) -> None:
        """It failed or missed a control call: out, until it has caught up (and, if tainted, a whole round)."""
        if taint:
            self._fleet.taint(engine)
        engine.failed_call = call
        if engine.alive and engine.state is not State.STARTING:
            self.fence(engine, why)

    def commit(self, engines: Iterable[tuple[Engine, int]], label: str | None, *, by: str) -> None:
        """These engines (with the boot they began it with) took a whole update: theirs are the fleet's weights."""
        fleet = self._fleet
        fleet.epoch += 1
        fleet.pristine = False
        fleet.tied, fleet.coming = (), ""
        self.voting = self._left_open = False
        took = set()
        for engine in fleet:
            engine.history = None
        for engine, boot in engines:
            if engine.boot != boot:
                continue
            took.add(engine)
            engine.tainted = engine.updating = False
            engine.epoch = fleet.epoch
            engine.by_hand = None if engine.by_hand else engine.by_hand
            engine.failed_call = ""
            if label is not None:
                fleet.set_version(engine, label)
        fleet.checksums.clear()
        version = label if label is not None else next((engine.version for engine in took), fleet.version)
        self.set_fleet_version(version, by=by)
        for engine in fleet:
            if engine not in took and engine.alive and not engine.plain:
                self.fence(engine, "took no part in the last weight update")
        fleet.refresh()
        self.review_all()
