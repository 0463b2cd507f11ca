"""Equal checksums: an engine whose label or history says otherwise may hold the fleet's weights all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from proxy.config import Settings
from proxy.control.asked import JSON_HEADERS
from proxy.control.fanout import Shot, fire
from proxy.control.labels import label_shot
from proxy.core.calls import CALLS
from proxy.core.engine_state import State
from proxy.core.merge import checksums_of
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.tasks import spawn

_log = logging.getLogger("fleetgate.admission")


class Checksums:
    """Records the checksums of the fleet's version and compares engines with them.

    Args:
        settings: limits.
        fleet: the engines, the fleet's version and what was recorded for it.
        settling: engines that somebody is looking into already.
        review: asks the rules about an engine again.
    """

    def __init__(
        self, settings: Settings, fleet: Fleet, settling: set[Engine], review: Callable[[Engine], None]
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._settling = settling
        self._review = review

    async def compare(self, engine: Engine) -> None:
        """Rule 5: are its weights the fleet's although its label or its history says otherwise?"""
        version, epoch = self._fleet.version, self._fleet.epoch
        boot = engine.boot
        engine.compared, engine.checksums_equal = version, None
        shot = Shot(
            CALLS["/weight_checker"], "POST", "/weight_checker", JSON_HEADERS, b'{"action":"checksum"}',
            self._settings.pause_timeout,
        )  # fmt: skip
        found = checksums_of(await fire(engine, shot))
        if found is not None and engine.boot == boot and (self._fleet.version, self._fleet.epoch) == (version, epoch):
            await self._compared(engine, found)

    async def _compared(self, engine: Engine, found: dict[str, Any]) -> None:
        version, epoch = self._fleet.version, self._fleet.epoch
        boot = engine.boot
        engine.compared = version
        engine.checksums_equal = found == self._fleet.checksums.get(engine.world_size)
        if not engine.checksums_equal or version is None:
            _log.info("checksums of %s are not those of %r", engine.id, version)
            return
        if engine.version != version or engine.marked:
            leg = await fire(engine, label_shot(version, self._settings))
            if not leg.ok or engine.boot != boot or (self._fleet.version, self._fleet.epoch) != (version, epoch):
                engine.compared = engine.checksums_equal = None
                return
            self._fleet.set_version(engine, version)
        engine.epoch = epoch
        engine.tainted = False
        self._review(engine)

    def record(self, answers: Sequence[tuple[Engine, dict[str, Any]]]) -> None:
        """A ``/weight_checker`` call showed checksums: those that serving engines agree on are the fleet's.

        Engines that are out are compared with them.

        They are never asked for unbidden: hashing a model keeps an engine's core from anything else for seconds.
        """
        serving: dict[int | None, list[dict[str, Any]]] = {}
        for engine, found in answers:
            if engine.state is State.READY and not engine.updating and not engine.suspect:
                serving.setdefault(engine.world_size, []).append(found)
        for size, sums in serving.items():
            if all(found == sums[0] for found in sums):
                self._fleet.checksums.setdefault(size, sums[0])
            else:
                _log.warning("serving engines have different checksums: none are taken for the fleet's")
        for engine, found in answers:
            fenced = engine.state is State.FENCED and not engine.updating and engine not in self._settling
            if fenced and engine.world_size in self._fleet.checksums and self._fleet.version is not None:
                self._settling.add(engine)
                spawn(self._settle(engine, found), name=f"compare {engine.id}")

    async def _settle(self, engine: Engine, found: dict[str, Any]) -> None:
        try:
            await self._compared(engine, found)
        finally:
            self._settling.discard(engine)
        self._review(engine)
