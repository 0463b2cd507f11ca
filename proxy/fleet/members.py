"""Who belongs to the fleet: engines are added, drained and removed here, whoever asks for it.

Other sources of members (a watched file, DNS) call the same methods.
"""

from __future__ import annotations

import asyncio
import fnmatch
import ssl
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from proxy.config import Settings
from proxy.core.addresses import parse_engine_url
from proxy.core.engine_state import Event, State
from proxy.data.upstream import Upstream
from proxy.errors import BadRequest, Conflict, Forbidden, NotFound
from proxy.fleet.engine import Engine, engine_id
from proxy.fleet.probes import Prober
from proxy.fleet.registry import Fleet

DRAIN_POLL = 0.05
"""Seconds between looks whether a draining engine has become idle: removal is no hot path."""


def make_engine(url: str, settings: Settings) -> Engine:
    """An engine that is in no fleet yet.

    Raises:
        ValueError: the URL is no engine's base URL.
    """
    canonical = parse_engine_url(url)
    upstream = Upstream(
        canonical,
        idle_limit=settings.engine_idle,
        connect_timeout=settings.connect_timeout,
        header_limit=settings.response_header_limit,
        ssl_context=ssl.create_default_context(cafile=settings.engine_ca) if canonical.startswith("https") else None,
    )
    return Engine(engine_id(canonical), canonical, upstream)


class Members:
    """Adds and removes engines.

    Args:
        settings: limits of connections, and which engines may be added.
        fleet: where they live.
        prober: looks after them.
    """

    def __init__(self, settings: Settings, fleet: Fleet, prober: Prober) -> None:
        self._settings = settings
        self._fleet = fleet
        self._prober = prober
        self.on_leaving: Callable[[Engine], Awaitable[None]] | None = None
        self.on_removed: Callable[[Engine], None] | None = None
        """Called when an engine left the fleet."""

    def add(self, url: str) -> Engine:
        """Take an engine in; it gets requests once it has been looked at and admitted.

        Raises:
            ValueError: bad URL, or it is in the fleet already.
        """
        engine = make_engine(url, self._settings)
        self._fleet.add(engine)
        self._prober.watch(engine)
        return engine

    def add_asked(self, url: object) -> Engine:
        """Take in an engine that ``POST /fleet/engines`` names, or keep one that is being removed.

        Raises:
            BadRequest: no URL, or a bad one.
            Forbidden: not in ``allow_engines``.
            Conflict: it is in the fleet already.
        """
        if not isinstance(url, str) or not url:
            raise BadRequest('send {"url": "http://host:port"}')
        try:
            canonical = parse_engine_url(url)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        where = urlsplit(canonical).netloc
        if not any(_allowed(where, pattern) for pattern in self._settings.allow_engines):
            allowed = ", ".join(self._settings.allow_engines) or "none"
            raise Forbidden(f"engine {where} is not allowed; --allow-engines has: {allowed}")
        known = self._fleet.engines.get(engine_id(canonical))
        if known is not None and known.leaving:
            known.drained = False
            self.stay(known, "added again while it was being removed")
            return known
        try:
            return self.add(canonical)
        except ValueError as error:
            raise Conflict(str(error)) from None

    def find(self, name: str) -> Engine:
        """The engine of this id.

        Raises:
            NotFound: there is none.
        """
        engine = self._fleet.engines.get(name)
        if engine is None:
            known = ", ".join(self._fleet.engines) or "none"
            raise NotFound(f"no engine {name!r} in the fleet; there are: {known}")
        return engine

    def drain(self, engine: Engine, reason: str) -> None:
        """Give this process no new requests until an operator admits it; those that run go on.

        One that is fenced stays so, and drains once nothing else keeps it out: a fence may end by itself.

        Raises:
            Conflict: it does not answer.
        """
        if not engine.alive:
            raise Conflict(f"engine {engine.id} is {engine.state}; only one that answers can be drained")
        engine.drained = True
        if engine.state is State.READY:
            self._fleet.apply(engine, Event.DRAIN, reason)

    async def remove(self, engine: Engine, *, drain: float) -> bool | None:
        """Take an engine out; True if it was idle by then, None if `stay` called it off.

        Args:
            engine: of the fleet.
            drain: seconds that running requests get.
        """
        if drain > 0:
            engine.leaving = True
            if engine.state is State.READY:
                self._fleet.apply(engine, Event.DRAIN, "being removed")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain
        while engine.inflight and loop.time() < deadline and engine.state is not State.DOWN:
            await asyncio.sleep(DRAIN_POLL)
            if not engine.leaving:
                return None
        idle = not engine.inflight
        if self._fleet.engines.get(engine.id) is not engine:
            # Another removal of it gave its requests less time.
            return idle
        if self.on_leaving is not None:
            await self.on_leaving(engine)
        self._fleet.remove(engine)
        await self._prober.forget(engine)
        engine.upstream.close()
        if self.on_removed is not None:
            self.on_removed(engine)
        return idle

    def stay(self, engine: Engine, why: str) -> bool:
        """Call off the removal of an engine that still drains; True if there was one."""
        if not engine.leaving or self._fleet.engines.get(engine.id) is not engine:
            return False
        engine.leaving = False
        if engine.state is State.DRAINING and not engine.drained:
            # The only way to ready is through the fence: admission looks at it again, now.
            self._fleet.apply(engine, Event.FENCE, why)
            self._prober.nudge(engine)
        return True


def _allowed(where: str, pattern: str) -> bool:
    """Match ``host:port`` against a pattern; brackets of an IPv6 address are no character class."""
    return fnmatch.fnmatchcase(where.lower(), pattern.lower().replace("[", "[[]"))
