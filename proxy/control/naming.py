"""``/update_weight_version``: the trainer names the weights that the fleet has."""

from __future__ import annotations

from proxy.config import Settings
from proxy.control.admit import Admission
from proxy.control.asked import Asked, Reply, limit_of, reply_merged
from proxy.control.groups import Fan, Groups
from proxy.control.labels import Labeller, again
from proxy.core import ranks
from proxy.core.merge import merge
from proxy.errors import Conflict
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet


class Naming:
    """Runs the call.

    Args:
        settings: limits.
        fleet: the engines.
        groups: says who lives, and fences who failed.
        admission: says who holds the fleet's weights.
        labels: keeps the label from processes that replaced the ones that are meant.
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
        self._tried: tuple[str, int] = ("", -1)
        """The last label that not all took, and the fleet's epoch then."""

    def _holds(self, engine: Engine) -> bool:
        """Whether it has the fleet's weights, be it under the label that a call before this one gave to some only."""
        half_named = (engine.version, engine.epoch) == self._tried and engine.epoch == self._fleet.epoch
        return (
            engine.plain
            or self._admission.fits(engine)
            or (half_named and not engine.tainted and not engine.updating and engine.by_hand is not False)
        )

    async def label(self, asked: Asked) -> Reply:
        """Set the fleet version by hand of the trainer.

        Engines whose weights are known not to be the fleet's get no label: it would speak for weights they lack, and
        after a restart of the proxy nobody would know.

        Raises:
            Conflict: no engine holds weights that a label could speak for.
        """
        call = asked.call
        fleet = self._fleet
        living = self._groups.living()
        boots = await self._labels.still([(engine, engine.boot) for engine in living if self._holds(engine)])
        engines = [engine for engine, _ in boots]
        if not engines:
            why = "; ".join(f"{engine.id}: {engine.reason}" for engine in living) or "no engine is alive"
            raise Conflict(f"{call.path}: no engine holds weights that the label could speak for ({why})")
        body = ranks.parse(asked.body)
        version = body.get("new_version") if isinstance(body, dict) else None
        shot = asked.shot(limit_of(self._settings, asked))
        self._tried = (str(version), fleet.epoch)
        # Until all have it, one that shows it is not out of step.
        before, fleet.coming = fleet.coming, str(version)
        try:
            legs = await self._fan(asked, [(engine, shot) for engine in engines], again)
            legs = await self._labels.take_back(boots, legs)
        finally:
            fleet.coming = before
        merged = merge(call, legs)
        if not merged.failed and not merged.passed and version is not None:
            for engine, boot in boots:
                if engine.boot == boot:
                    fleet.set_version(engine, str(version))
                    if fleet.pristine:
                        engine.epoch = fleet.epoch
            fleet.tied = ()
            self._admission.voting = False
            self._admission.decide(str(version), by="trainer")
            self._admission.review_all()
        self._groups.fence(call.path, engines, merged.failed, taint=False)
        return reply_merged(call, merged, legs)
