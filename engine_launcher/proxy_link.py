"""What the launcher asks of a proxy: to take engines in, to drain them, and how they fare there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import aiohttp

from engine_launcher.errors import LauncherError
from engine_launcher.fleet import write_urls
from proxy.core.addresses import parse_engine_url
from proxy.fleet.engine import engine_id

_log = logging.getLogger("fleetgate.launcher")

CALL_TIMEOUT: Final = 10.0
"""Seconds for one answer of the proxy; it answers ``/fleet`` in milliseconds."""

POLL: Final = 0.2
"""Seconds between two looks whether an engine has run empty or been admitted."""

KEEP_INTERVAL: Final = 5.0
"""Seconds between two looks whether the proxy still knows the engines: one that was restarted does not."""

FILE_GRACE: Final = 3.0
"""Seconds after engines were struck off a watched file in which the proxy sees that: it believes an empty file only
after some looks, a second and a half in all."""


class LinkError(LauncherError):
    """The proxy could not be asked, or refused."""


class ProxyLink:
    """A proxy as its launcher sees it.

    Args:
        url: base URL of its control plane.
        token: its control token, if it asks for one.
        verify: whether its certificate is checked; not where it is this command's own child on this machine.
    """

    def __init__(self, url: str, token: str | None = None, *, verify: bool = True) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._verify = verify
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<ProxyLink {self.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, path: str, body: Any = None, timeout: float = CALL_TIMEOUT) -> tuple[int, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        try:
            async with self._session.request(
                method, self.url + path, json=body, ssl=self._verify, timeout=aiohttp.ClientTimeout(total=timeout)
            ) as answer:
                data = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise LinkError(f"{method} {self.url}{path}: {error or type(error).__name__}") from None
        return answer.status, data

    async def _do(self, method: str, path: str, body: Any = None, timeout: float = CALL_TIMEOUT) -> Any:
        status, data = await self._ask(method, path, body, timeout)
        if status >= 400 and status != 409:
            said = data.get("error", {}).get("message", data) if isinstance(data, dict) else data
            hint = "; give it with --control-token" if status in (401, 403) else ""
            raise LinkError(f"{method} {self.url}{path} answered {status}: {said}{hint}")
        return data

    async def engines(self) -> dict[str, dict[str, Any]]:
        """What ``GET /fleet`` says of each engine, by id; raises ``LinkError``."""
        data = await self._do("GET", "/fleet")
        return {each["id"]: each for each in data["engines"]}

    async def engine(self, url: str) -> dict[str, Any] | None:
        """What the proxy knows of one engine, or ``None`` if it does not know it; raises ``LinkError``."""
        return (await self.engines()).get(name_of(url))

    async def add(self, url: str) -> None:
        """Have an engine taken in; fine if it is known. Raises ``LinkError``."""
        await self._do("POST", "/fleet/engines", {"url": url})

    async def remove(self, url: str) -> None:
        """Have an engine taken out at once; fine if it is unknown. Raises ``LinkError``."""
        status, data = await self._ask("DELETE", f"/fleet/engines/{name_of(url)}")
        if status not in (200, 404):
            raise LinkError(f"DELETE {self.url}/fleet/engines/{name_of(url)} answered {status}: {data}")

    async def drain(self, url: str) -> None:
        """Have no more requests sent to an engine; fine if it gets none anyway. Raises ``LinkError``."""
        await self._do("POST", f"/fleet/engines/{name_of(url)}/drain")

    async def admit(self, url: str) -> None:
        """Have a drained engine take requests again; raises ``LinkError``."""
        await self._do("POST", f"/fleet/engines/{name_of(url)}/admit")

    async def idle(self, urls: Sequence[str], limit: float) -> bool:
        """Wait until none of these engines has a request, ``limit`` seconds at most; False if some are left then."""
        deadline = time.monotonic() + limit
        while True:
            known = await self.engines()
            if not any(known.get(name_of(url), {}).get("inflight") for url in urls):
                return True
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL)


def name_of(url: str) -> str:
    """The proxy's id of an engine."""
    return engine_id(parse_engine_url(url))


class Roster(Protocol):
    """Where it is written down which engines there are."""

    async def show(self, urls: Sequence[str]) -> None:
        """These are the engines now; raises ``LauncherError``."""

    async def keep(self) -> None:
        """See to it that what was shown stays known. Never ends by itself."""


class NoRoster:
    """Nobody is told: the proxy was given the engines otherwise."""

    async def show(self, urls: Sequence[str]) -> None:
        """Nothing to do."""

    async def keep(self) -> None:
        """Nothing to do."""
        await asyncio.Event().wait()


class FileRoster:
    """A file with one URL a line, that a proxy watches (``--engines-file``)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def show(self, urls: Sequence[str]) -> None:
        """Write it in one step."""
        write_urls(self._path, urls)

    async def keep(self) -> None:
        """Nothing to do: a file stays."""
        await asyncio.Event().wait()


class ApiRoster:
    """The proxy's own API (``--register``). What a proxy was told so it forgets when it is restarted."""

    def __init__(self, link: ProxyLink) -> None:
        self._link = link
        self._shown: list[str] = []

    async def show(self, urls: Sequence[str]) -> None:
        """Add and remove; a proxy that is not there yet is told by ``keep``."""
        gone = [url for url in self._shown if url not in urls]
        new = [url for url in urls if url not in self._shown]
        self._shown = list(urls)
        try:
            for url in gone:
                await self._link.remove(url)
            for url in new:
                await self._link.add(url)
        except LinkError as error:
            _log.warning("%s; it is tried again", error)

    async def keep(self) -> None:
        """Tell a proxy that knows none of the engines. One that an operator took out stays out."""
        told = ""
        while True:
            await asyncio.sleep(KEEP_INTERVAL)
            try:
                known = await self._link.engines()
                if self._shown and not any(name_of(url) in known for url in self._shown):
                    for url in self._shown:
                        await self._link.add(url)
                    _log.info("the proxy at %s was told of %d engines", self._link.url, len(self._shown))
                told = ""
            except LinkError as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("%s; it is tried again", error)
