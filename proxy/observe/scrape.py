"""Reads the engines' metric pages for the proxy's own, at most once a second, and never waits long for one of them."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field

from proxy.data.upstream import Answer, FetchError
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.observe import exposition, turns
from proxy.observe.load import Load, Meter
from proxy.tasks import spawn

FRESH = 1.0
"""Seconds for which what was read counts as now: two Prometheus servers and a live page cost the engines one read."""
PATIENCE = 0.3
"""Seconds that the page waits for the engines. One that is slower is shown with its last page, and the next page does
not wait for it until it has answered in time again."""
GIVE_UP = 5.0
"""Seconds after which a read is given up; it goes on behind the page until then, so that a slow engine has one."""
KEEP = 30.0
"""Seconds for which an engine's last page stands in for a new one. Older numbers would be taken for current ones."""
PAGE_LIMIT = 16 << 20
"""Bytes of one engine's page; vLLM's is 52 KB, with many adapters a few hundred."""

_HEADERS = ((b"Accept", b"text/plain;version=0.0.4"), (b"Accept-Encoding", b"identity"))


@dataclass(eq=False, slots=True)
class _Reader:
    """What is kept for one engine."""

    engine: Engine
    reader: exposition.PageReader
    page: exposition.Page = field(default_factory=dict)
    read_at: float = float("-inf")
    slow: bool = False
    task: asyncio.Task[None] | None = None
    meter: Meter = field(default_factory=Meter)


class Scraper:
    """The engines' pages.

    Args:
        fleet: the engines; those that live are read.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._readers: dict[Engine, _Reader] = {}
        self._round: asyncio.Task[None] | None = None
        self._round_at = float("-inf")
        self._parsing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Scraper engines={len(self._readers)}>"

    def stale(self) -> dict[str, bool]:
        """For each engine of the fleet, whether the page shows something older than the last round, or nothing."""
        return {engine.id: not self._is_current(engine) for engine in self._fleet}

    def load(self) -> dict[str, Load]:
        """What the engines' pages say about their work, by engine."""
        return {reader.engine.id: reader.meter.load for reader in self._readers.values() if self._usable(reader)}

    async def refresh(self) -> None:
        """Read the pages unless that was done within the last second; callers share one round."""
        loop = asyncio.get_running_loop()
        if self._round is None or self._round.done():
            if loop.time() - self._round_at < FRESH:
                return
            self._round_at = loop.time()
            self._round = spawn(self._read_all(), name="scrape engines")
        # A scraper that goes away must not end the round for the others.
        await asyncio.shield(self._round)

    async def merged(self, fmt: exposition.Format) -> list[bytes]:
        """The families of all engines in pieces."""
        pages = [self._readers[engine].page for engine in self._fleet if self._usable(self._readers.get(engine))]
        return [part async for part in turns.paced(exposition.merge(pages, fmt)) if part]

    async def stop(self) -> None:
        """End what still runs."""
        tasks = [reader.task for reader in self._readers.values() if reader.task is not None]
        if self._round is not None:
            tasks.append(self._round)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_current(self, engine: Engine) -> bool:
        reader = self._readers.get(engine)
        return reader is not None and reader.read_at >= self._round_at

    def _usable(self, reader: _Reader | None) -> bool:
        if reader is None or not reader.engine.alive:
            return False
        return asyncio.get_running_loop().time() - reader.read_at < KEEP

    async def _read_all(self) -> None:
        living = [engine for engine in self._fleet if engine.alive]
        for gone in self._readers.keys() - set(living):
            self._forget(gone)
        awaited: list[asyncio.Task[None]] = []
        for engine in living:
            reader = self._readers.get(engine) or self._add(engine)
            if reader.task is None or reader.task.done():
                reader.task = spawn(self._read(reader), name=f"scrape {engine.id}")
            if not reader.slow:
                awaited.append(reader.task)
        if awaited:
            _, late = await asyncio.wait(awaited, timeout=PATIENCE)
            for reader in self._readers.values():
                if reader.task in late:
                    reader.slow = True

    def _add(self, engine: Engine) -> _Reader:
        reader = self._readers[engine] = _Reader(engine, exposition.PageReader(engine.id))
        return reader

    def _forget(self, engine: Engine) -> None:
        reader = self._readers.pop(engine)
        if reader.task is not None:
            reader.task.cancel()

    async def _read(self, reader: _Reader) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            answer = await reader.engine.upstream.fetch(
                "GET", "/metrics", headers=_HEADERS, timeout=GIVE_UP, limit=PAGE_LIMIT
            )
        except FetchError:
            return
        came = loop.time()
        reader.slow = came - started > PATIENCE
        # Dozens of pages may have arrived in this turn of the loop; its other work comes between two of them.
        async with self._parsing:
            body = _plain(answer)
            if answer.status == 200 and body is not None:
                reader.page = await turns.finish(reader.reader.steps(body))
                reader.read_at = came
                reader.meter.feed(reader.page, came)
            await asyncio.sleep(0)


def _plain(answer: Answer) -> bytes | None:
    """The page without a content coding; None if it has one that was not asked for and cannot be undone."""
    coding = (answer.head.get(b"content-encoding") or b"identity").strip().lower()
    if coding == b"identity":
        return answer.body
    if coding != b"gzip":
        return None
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        body = inflater.decompress(answer.body, PAGE_LIMIT)
    except zlib.error:
        return None
    return body if inflater.eof else None
