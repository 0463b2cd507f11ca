"""What the legs of an idempotent call mean for its engines: who is fenced, who owes the call, who is down already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from proxy.config import Settings
from proxy.control.admit import Admission
from proxy.control.asked import Asked
from proxy.control.fanout import Shot
from proxy.core.calls import Kind
from proxy.core.engine_state import State
from proxy.core.merge import Leg, Merged, Outcome
from proxy.errors import Conflict
from proxy.fleet.engine import Engine
from proxy.fleet.probes import Prober
from proxy.fleet.registry import Fleet

OWED: frozenset[Kind] = frozenset({Kind.PAUSE, Kind.RESUME, Kind.WAKE, Kind.PLAIN})
"""Calls that are sent again later to an engine that failed or missed them."""

_OPPOSITE = {"/pause": "/resume", "/resume": "/pause"}


class Aftermath:
    """Judges legs and keeps what engines owe.

    Args:
        settings: limits.
        fleet: the engines.
        admission: fences who failed.
        prober: looks at who could not be reached.
    """

    def __init__(self, settings: Settings, fleet: Fleet, admission: Admission, prober: Prober) -> None:
        self._settings = settings
        self._fleet = fleet
        self._admission = admission
        self._prober = prober

    def targets(self, asked: Asked) -> list[Engine]:
        """Engines that a call goes to.

        Raises:
            Conflict: none is alive.
        """
        engines = [engine for engine in self._fleet if engine.alive]
        if not engines:
            raise Conflict(f"{asked.call.path}: no engine is alive; wait until GET /health answers 200")
        return engines

    def missed(self, asked: Asked, shot: Shot) -> None:
        """Engines that are down missed the call: not a failure, but they catch up before they are let in."""
        for engine in self._fleet:
            if engine.state is State.DOWN:
                engine.failed_call = asked.call.path
                if asked.call.kind is Kind.RPC:
                    self._fleet.taint(engine)
                if asked.call.kind in OWED:
                    self.owe(engine, shot)
            elif engine.state is State.STARTING and asked.call.kind is Kind.RESUME:
                # Not known yet, but it may have been paused with the others before this proxy was started.
                self.owe(engine, shot)

    def owe(self, engine: Engine, shot: Shot) -> None:
        """It gets the call before it is let in; a pause and a resume cancel each other out."""
        opposite = _OPPOSITE.get(shot.call.path)
        if opposite is not None:
            engine.owed.pop(opposite, None)
        engine.owed[shot.call.path] = replace(shot, timeout=shot.timeout or self._settings.pause_timeout)

    def settle(self, asked: Asked, shot: Shot, engines: Sequence[Engine], legs: Sequence[Leg], merged: Merged) -> None:
        """Fence who failed the call, note who did it."""
        if merged.passed:
            return
        failed = {leg.engine for leg in merged.failed}
        path = asked.call.path
        for engine, leg in zip(engines, legs, strict=True):
            if leg.ok:
                engine.owed.pop(path, None)
                continue
            if leg.outcome is Outcome.UNREACHABLE:
                self._prober.suspect(engine, leg.detail)
            elif leg.engine not in failed or leg.outcome is Outcome.MISSING:
                continue
            # A worker method may be one of a weight sync: an engine that lacks it is not caught up by the next one.
            taint = asked.call.kind is Kind.RPC
            if leg.outcome is Outcome.ABANDONED and not taint:
                continue
            if asked.call.kind in OWED:
                self.owe(engine, shot)
            self._admission.failed(engine, path, f"failed {path}: {leg.said()}", taint=taint)


def that_count(legs: Sequence[Leg]) -> list[Leg]:
    """Legs that count: an engine that refuses the connection is down already, which is not a failure.

    If nobody can be reached that is one.
    """
    return [leg for leg in legs if leg.outcome is not Outcome.UNREACHABLE] or list(legs)
