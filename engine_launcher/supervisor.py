"""Looks after a running fleet: engines that die or no longer answer are started again, all of them in turn when asked.

Each engine has one task that owns it: whatever ends or starts it happens there, one thing after another. What the proxy
does about an engine is its own business: it sees the death before anybody here does, and lets the new process in only
when its weights are known to be the fleet's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import aiohttp

from engine_launcher.errors import LauncherError
from engine_launcher.fleet import Engine, EngineFleet
from engine_launcher.proxy_link import FILE_GRACE, POLL, FileRoster, LinkError, NoRoster, ProxyLink, Roster
from engine_launcher.restart import Care, Restarts
from proxy.tasks import spawn

_log = logging.getLogger("fleetgate.launcher")

BUSY_METRICS: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
"""What an engine itself says about its load, for a launcher that cannot ask the proxy."""


class Supervisor:
    """Keeps the engines of a fleet alive.

    Args:
        fleet: started already.
        care: how.
        roster: where the engines are written down.
        link: the proxy in front of them, if it is known.
    """

    def __init__(
        self, fleet: EngineFleet, care: Care, *, roster: Roster | None = None, link: ProxyLink | None = None
    ) -> None:
        care.check()
        self._fleet = fleet
        self._care = care
        self._roster = roster or NoRoster()
        self._link = link
        self._rolls: dict[int, asyncio.Queue[asyncio.Future[None]]] = {}
        self._lost: set[int] = set()
        self._rolling = False

    @property
    def living(self) -> list[Engine]:
        """Engines that are not given up."""
        return [each for each in self._fleet.engines if each.index not in self._lost]

    async def show(self) -> None:
        """Write down where the engines are; raises ``LauncherError``."""
        await self._roster.show([each.url for each in self.living])

    async def run(self) -> None:
        """Look after all of them until none is left."""
        keep = spawn(self._roster.keep(), name="keep the roster")
        try:
            async with asyncio.TaskGroup() as group:
                for each in self._fleet.engines:
                    self._rolls.setdefault(each.index, asyncio.Queue())
                    group.create_task(self._keep(each), name=f"keep engine {each.index}")
        finally:
            keep.cancel()
            await asyncio.gather(keep, return_exceptions=True)

    # One engine

    async def _keep(self, engine: Engine) -> None:
        restarts = Restarts(self._care)
        name = engine.process.name
        while True:
            served_since = time.monotonic()
            what = await self._next(engine)
            if isinstance(what, asyncio.Future):
                await self._roll_one(engine, what)
                continue
            served = time.monotonic() - served_since
            _log.error("%s %s; see %s, which ends with: %s", name, what, engine.process.log, _last(engine))
            while True:
                wait = restarts.next(served)
                if wait is None:
                    _log.error("%s is given up after %d restarts in a row", name, restarts.done)
                    await self._give_up(engine)
                    return
                _log.info("starting %s again in %g s (%d of %d)", name, wait, restarts.done, self._care.restarts)
                await asyncio.sleep(wait)
                if await self._start(engine):
                    break
                served = 0.0

    async def _next(self, engine: Engine) -> str | asyncio.Future[None]:
        """Wait until the engine needs something: how it failed, or a future that wants it restarted."""
        death = spawn(engine.process.wait(), name=f"death of engine {engine.index}")
        ill = spawn(self._until_ill(engine), name=f"health of engine {engine.index}")
        asked = spawn(self._rolls[engine.index].get(), name=f"restart of engine {engine.index}")
        waits: set[asyncio.Task[Any]] = {death, ill, asked}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if death.done() and not death.cancelled():
            engine.ready = False
            if asked.done() and not asked.cancelled():
                # It died before it could be restarted; the restart that follows does for both.
                asked.result().set_result(None)
            return f"ended with exit code {death.result()}"
        if asked.done() and not asked.cancelled():
            return asked.result()
        engine.ready = False
        # It does not answer, so it would not heed a request to end either.
        await engine.process.kill()
        return f"did not answer /health {self._care.health_failures} times in a row, and was killed"

    async def _until_ill(self, engine: Engine) -> None:
        care, failures = self._care, 0
        timeout = aiohttp.ClientTimeout(total=care.health_timeout)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while failures < care.health_failures:
                await asyncio.sleep(care.health_interval)
                try:
                    async with session.get(f"{engine.url}/health") as answer:
                        good = answer.status == 200
                except (aiohttp.ClientError, TimeoutError):
                    good = False
                failures = 0 if good else failures + 1

    async def _start(self, engine: Engine) -> bool:
        name, before = engine.process.name, engine.url
        began = time.monotonic()
        try:
            await self._fleet.launch(engine)
            await self._fleet.until_ready([engine])
            if engine.url != before:
                await self.show()
        except LauncherError as error:
            _log.error("%s", str(error).partition("\n")[0])
            await engine.process.kill()
            return False
        took = time.monotonic() - began
        _log.info("%s answers again after %.1f s; the proxy admits it once its weights are known", name, took)
        return True

    async def _give_up(self, engine: Engine) -> None:
        self._lost.add(engine.index)
        rolls = self._rolls[engine.index]
        while not rolls.empty():
            rolls.get_nowait().set_exception(LauncherError(f"{engine.process.name} was given up"))
        try:
            await self.show()
        except LauncherError as error:
            _log.error("%s", error)

    # All in turn

    async def roll(self) -> None:
        """Restart every engine, one after another: drained, restarted, admitted, and only then the next.

        Raises ``LauncherError`` where one does not come back; those after it are left as they are.
        """
        if self._rolling:
            raise LauncherError("a rolling restart runs already")
        if self._link is None:
            raise LauncherError("a rolling restart needs the proxy's URL, to drain engines first: give --proxy URL")
        self._rolling = True
        try:
            for each in self._fleet.engines:
                if each.index in self._lost:
                    continue
                done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._rolls.setdefault(each.index, asyncio.Queue()).put_nowait(done)
                await done
                await self._admitted(each)
            _log.info("every engine was restarted")
        finally:
            self._rolling = False

    async def _roll_one(self, engine: Engine, done: asyncio.Future[None]) -> None:
        failed: LauncherError | None = None
        try:
            await self._drain_one(engine)
        except LauncherError as error:
            failed = error
        else:
            _log.info("%s is drained and is restarted", engine.process.name)
            engine.ready = False
            await engine.process.stop()
            if not await self._start(engine):
                # Its own task sees the dead process next, and goes on with the usual care.
                failed = LauncherError(f"{engine.process.name} did not come back; the rolling restart ends here")
        if done.done():
            return
        if failed is None:
            done.set_result(None)
        else:
            done.set_exception(failed)

    async def _drain_one(self, engine: Engine) -> None:
        assert self._link is not None
        before = await self._link.engine(engine.url)
        await self._link.drain(engine.url)
        if await self._link.idle([engine.url], self._care.roll_wait):
            return
        if before is not None and before["state"] == "ready":
            await self._link.admit(engine.url)
        raise LauncherError(
            f"{engine.process.name} still had requests after {self._care.roll_wait:g} s (--roll-wait); it serves on, "
            "and the rolling restart ends here"
        )

    async def _admitted(self, engine: Engine) -> None:
        assert self._link is not None
        deadline = time.monotonic() + self._care.roll_wait
        said = ""
        while time.monotonic() < deadline:
            try:
                known = await self._link.engine(engine.url)
            except LinkError as error:
                # A proxy that is restarted meanwhile is no reason to leave the rest as they are.
                reason = str(error)
            else:
                if known is not None and known["state"] == "ready" and known["eligible"]:
                    _log.info("%s is admitted", engine.process.name)
                    return
                reason = "unknown to the proxy" if known is None else f"{known['state']}: {known['reason']}"
            if reason != said:
                said = reason
                _log.info("%s is not admitted yet (%s)", engine.process.name, reason)
            await asyncio.sleep(POLL)
        raise LauncherError(
            f"{engine.process.name} was not admitted within {self._care.roll_wait:g} s (--roll-wait): {said}; the "
            "rolling restart ends here"
        )

    # The end

    async def drain(self) -> None:
        """Let what runs at the engines end, as long as the care says, and have nothing new sent there."""
        urls = [each.url for each in self.living if each.ready]
        if not urls or not self._care.drain:
            return
        try:
            if self._link is not None:
                told = await asyncio.gather(*map(self._link.drain, urls), return_exceptions=True)
                unknown = [each for each in told if isinstance(each, BaseException)]
                if len(unknown) == len(urls):
                    raise unknown[0]
                idle = await self._link.idle(urls, self._care.drain)
            elif isinstance(self._roster, FileRoster):
                await self._roster.show(())
                await asyncio.sleep(min(FILE_GRACE, self._care.drain))
                idle = await _idle(urls, max(0.0, self._care.drain - FILE_GRACE))
            else:
                return
        except LauncherError as error:
            _log.warning("engines are ended without being drained: %s", error)
            return
        if not idle:
            _log.warning("requests still ran after %g s (--drain); they are cut", self._care.drain)

    async def leave(self) -> None:
        """Strike the engines off, after they have ended."""
        with contextlib.suppress(LinkError):
            await self._roster.show(())


def _last(engine: Engine) -> str:
    return engine.process.tail(1).strip() or "(nothing)"


async def _idle(urls: Sequence[str], limit: float) -> bool:
    """Wait until the engines themselves say that nothing runs there."""
    deadline = time.monotonic() + limit
    timeout = aiohttp.ClientTimeout(total=max(1.0, limit))
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            if not any(await asyncio.gather(*(_load(session, url) for url in urls))):
                return True
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL)


async def _load(session: aiohttp.ClientSession, url: str) -> float:
    try:
        async with session.get(f"{url}/metrics") as answer:
            page = await answer.text()
    except (aiohttp.ClientError, TimeoutError):
        return 0.0
    values = [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(BUSY_METRICS)]
    with contextlib.suppress(ValueError):
        return sum(map(float, values))
    return 0.0
