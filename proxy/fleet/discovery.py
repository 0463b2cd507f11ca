"""Engines that a watched file or DNS names: they join and leave by themselves.

A source owns only the engines it brought; those of ``--engine`` and of the API stay whatever it says. What two sources
name stays until neither does; what is named again while it still drains stays. A source that fails (no file, no answer)
changes nothing: an outage of the directory must not empty the fleet. While a transfer group
stands, an engine that joins is not a member of it; it stays fenced until the next round takes it in. Whoever brought
an engine, it comes to its share of the requests by `proxy.fleet.ramps`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from proxy.config import Settings
from proxy.core.membership import difference, read_list
from proxy.fleet.dns import dns_source
from proxy.fleet.engine import engine_id
from proxy.fleet.members import Members
from proxy.fleet.ramps import Ramps
from proxy.fleet.registry import Fleet
from proxy.tasks import spawn

_log = logging.getLogger("fleetgate.discovery")

FILE_INTERVAL = 0.5
"""Seconds between looks at the file's time stamp: an engine that the launcher started should be in within a second."""
EMPTY_LOOKS = 3
"""Empty answers in a row that are believed: a resolver that is restarting says for a moment that nobody is there."""


class Source:
    """One source of engines.

    Args:
        name: for the log.
        look: the URLs it names now; None if nothing changed since the last look.
        interval: seconds between two looks.
    """

    def __init__(self, name: str, look: Callable[[], Awaitable[list[str] | None]], interval: float) -> None:
        self.name = name
        self.look = look
        self.interval = interval
        self.named: list[str] = []
        """What it named when it was last believed."""
        self.mine: set[str] = set()
        """Those of them that it brought."""
        self.empty = 0
        self.complaint = ""


class Discovery:
    """Keeps the fleet in step with its sources.

    Args:
        settings: which sources there are.
        fleet: the engines.
        members: adds and removes them.
    """

    def __init__(self, settings: Settings, fleet: Fleet, members: Members) -> None:
        self._settings = settings
        self._fleet = fleet
        self._members = members
        self._ramps = Ramps(fleet, settings.slow_start)
        self._tasks: list[asyncio.Task[None]] = []
        self._sources: list[Source] = []
        # They are added after the first look at the sources, and yet are not the sources' own.
        self._configured = {engine_id(url) for url in settings.engine}
        if settings.engines_file is not None:
            watched = FileList(settings.engines_file)
            self._sources.append(Source(str(settings.engines_file), watched.look, FILE_INTERVAL))
        if settings.engines_dns is not None:
            names = dns_source(settings.engines_dns)
            self._sources.append(Source(settings.engines_dns, names.look, settings.engines_dns_interval))

    async def start(self) -> None:
        """Look at each source once, then keep looking."""
        for source in self._sources:
            await self._step(source)
            self._tasks.append(spawn(self._loop(source), name=f"discovery {source.name}"))

    async def stop(self) -> None:
        """Look no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ramps.stop()

    async def _loop(self, source: Source) -> None:
        while True:
            await asyncio.sleep(source.interval)
            await self._step(source)

    async def _step(self, source: Source) -> None:
        try:
            wanted = await source.look()
        except (OSError, ValueError) as error:
            if str(error) != source.complaint:
                source.complaint = str(error)
                _log.warning("engines of %s: %s; the fleet stays as it is", source.name, error)
            return
        source.complaint = ""
        if wanted is None:
            if not source.empty:
                return
            # Still as empty as it was.
            wanted = []
        source.empty = source.empty + 1 if not wanted else 0
        if source.named and not wanted and source.empty < EMPTY_LOOKS:
            return
        change = difference(source.named, wanted)
        source.named = wanted
        for url in change.add:
            self._join(source, url)
        for url in change.remove:
            self._leave(source, url)

    def _join(self, source: Source, url: str) -> None:
        name = engine_id(url)
        engine = self._fleet.engines.get(name)
        if engine is None:
            self._members.add(url)
        elif not self._members.stay(engine, f"{source.name} names it again"):
            return
        if name not in self._configured:
            source.mine.add(url)
        _log.info("engine %s joins (%s)", url, source.name)

    def _leave(self, source: Source, url: str) -> None:
        if url not in source.mine:
            return
        source.mine.discard(url)
        other = next((each for each in self._sources if url in each.named), None)
        if other is not None:
            other.mine.add(url)
            return
        engine = self._fleet.engines.get(engine_id(url))
        if engine is not None:
            _log.info("engine %s leaves (%s)", url, source.name)
            spawn(self._members.remove(engine, drain=self._settings.drain_timeout), name=f"remove {engine.id}")


class FileList:
    """A file with one engine URL a line. Read again when its time stamp, size or inode changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None

    async def look(self) -> list[str] | None:
        """The URLs, or None if the file is as it was.

        Raises:
            OSError: it cannot be read.
            ValueError: a line is no engine URL.
        """
        stat = self._path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if stamp == self._stamp:
            return None
        urls = read_list(self._path.read_text(encoding="utf-8"))
        self._stamp = stamp
        return urls
