"""Holds engines back that come into a busy fleet: their weight grows over ``slow_start`` seconds.

The rule is `proxy.core.balancing.slow_start`; here are the clock and the weights. Nothing runs while nobody is held
back, and a request never asks: policies see another weight in another list.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from proxy.core.balancing.slow_start import SlowStart
from proxy.core.engine_state import State
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet

_log = logging.getLogger("fleetgate.fleet")


class Ramps:
    """Follows the fleet and sets weights.

    Args:
        fleet: the engines; of several workers the director's, who are told each weight.
        seconds: length of a ramp; 0: nothing is done.
    """

    def __init__(self, fleet: Fleet, seconds: float) -> None:
        self._fleet = fleet
        self._seconds = seconds
        self._rule = SlowStart(seconds)
        self._timer: asyncio.TimerHandle | None = None
        if seconds:
            fleet.listeners.append(self._on_event)

    def _on_event(self, kind: str, details: dict[str, Any]) -> None:
        if kind == "engine_state" and details["state"] == State.READY:
            # Told before the list of eligible engines is made, so that the first request sees the smaller weight.
            engine = self._fleet.engines[details["engine"]]
            if self._rule.came(engine.id, self._fleet.clock()):
                _log.info("engine %s gets its share over %g s", engine.id, self._seconds)
                self._weigh(engine)
                self._later()
        elif kind in ("engine_restarted", "engine_removed"):
            self._rule.gone(details["engine"])
        elif kind == "engine_checked" and self._rule:
            # A look sets the weight of the world size. So do an init and /get_world_size, until the next step.
            self._weigh(self._fleet.engines[details["engine"]])

    def _weigh(self, engine: Engine) -> None:
        engine.weight = engine.whole_weight * self._rule.share(engine.id, self._fleet.clock())

    def _later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._rule.step, self.step)

    def step(self) -> None:
        """Set the weights of now."""
        self._timer = None
        for engine_id, share in self._rule.shares(self._fleet.clock()).items():
            engine = self._fleet.engines[engine_id]
            engine.weight = engine.whole_weight * share
        self._fleet.refresh()
        if self._rule:
            self._later()

    def stop(self) -> None:
        """No more steps."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
