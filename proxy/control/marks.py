"""What engines are told for the proxy's own successor: which of them hold nobody's weights.

The proxy keeps nothing on disk. If it dies while weights are half sent, the next one finds engines that are paused and
show the label of weights that are gone. Two things let it tell:

- an engine whose update broke is labelled `proxy.core.admission.UNKNOWN` at once, before any resume reaches it;
- where engines are found paused, a resume without an update in between first asks each whether an update session is
  open, by closing it: vLLM refuses a finish without a start, and what an open session leaves behind is nobody's.

With ``label_updates: off`` the labels are the trainer's alone, and only the second holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import orjson

from proxy.config import Labels, Settings
from proxy.control.asked import JSON_HEADERS
from proxy.control.fanout import Shot, fire
from proxy.core.admission import UNKNOWN
from proxy.core.calls import CALLS
from proxy.core.merge import UNCERTAIN, Leg
from proxy.fleet.engine import Engine
from proxy.fleet.probes import Prober

_log = logging.getLogger("fleetgate.control")

SESSION_LIMIT = 10.0
"""Seconds for one engine to say whether a session is open: it closes an open one, which may take a loader a while, and
a resume waits for it."""


class Marks:
    """Sets and takes back the label of nobody's weights.

    Args:
        settings: who labels, limits.
        prober: keeps the labels.
    """

    def __init__(self, settings: Settings, prober: Prober) -> None:
        self._settings = settings
        self._prober = prober

    async def forsake(self, engines: Sequence[Engine]) -> None:
        """Label engines as holding nobody's weights. One that fails is out all the same while this proxy lives."""
        if self._settings.label_updates is Labels.AUTO:
            await asyncio.gather(*(self._forsake(engine) for engine in engines))

    async def _forsake(self, engine: Engine) -> None:
        if engine.plain or engine.forsaken or engine.version == UNKNOWN or not engine.alive:
            return
        boot = engine.boot
        leg = await self.label(engine, UNKNOWN, timeout=self._settings.probe_timeout)
        if leg.ok and engine.boot == boot:
            engine.forsaken = True

    async def restore(self, engines: Sequence[Engine]) -> None:
        """Nothing happened to their weights after all: give them back the label that they showed."""
        for engine in engines:
            if engine.forsaken and engine.version is not None:
                version = engine.version
                leg = await self.label(engine, version, timeout=self._settings.control_timeout)
                if leg.ok:
                    self._prober.set_version(engine, version)

    async def label(self, engine: Engine, label: str, *, timeout: float) -> Leg:
        """One ``/update_weight_version``."""
        call = CALLS["/update_weight_version"]
        body = orjson.dumps({"new_version": label})
        return await fire(engine, Shot(call, "POST", call.path, JSON_HEADERS, body, timeout))

    async def close_sessions(self, engines: Sequence[Engine]) -> list[Engine]:
        """Engines in which an update session was open, or that do not say; it is closed now."""
        call = CALLS["/finish_weight_update"]
        shot = Shot(call, "POST", call.path, timeout=SESSION_LIMIT)
        asked = [engine for engine in engines if not engine.plain]
        legs = await asyncio.gather(*(fire(engine, shot) for engine in asked))
        found = [e for e, leg in zip(asked, legs, strict=True) if leg.ok or leg.outcome in UNCERTAIN]
        if found:
            names = ", ".join(engine.id for engine in found)
            _log.warning("an update was left half done before this proxy started: %s", names)
        return found
