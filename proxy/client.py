"""A small client for trainers: one weight sync as one ``with`` block.

    from proxy.client import FleetClient

    client = FleetClient("http://127.0.0.1:8000")
    client.init_weight_transfer({"master_address": host, "master_port": port, "rank_offset": 1,
                                 "world_size": 1 + client.world_size()})
    with client.sync(version="step-7") as sync:
        sync.update({"names": names, "dtype_names": dtypes, "shapes": shapes}, send=broadcast)
    print(sync.result.fallen)

The block pauses and starts; leaving it finishes with the version and resumes. If the block raises, nothing is
finished, so no version is published; ``/resume`` is sent on every way out. `AsyncFleetClient` is the same for asyncio.

The synchronous client needs the standard library only.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import aiohttp

DEFAULT_TIMEOUT = 1860.0
"""Seconds for one call: a little over the proxy's own limit of a transfer, so that its answer arrives."""


class FleetCallError(Exception):
    """A control call did not happen as a whole.

    Attributes:
        path: of the call.
        status: 424 some engines failed, 409 not now and no engine was called, 401/403 credentials, 4xx bad request.
        message: what was wrong and what would be right.
        engines: report by engine id; empty if no engine was called.
        fallen: ids of the engines that failed.
    """

    def __init__(self, path: str, status: int, body: bytes) -> None:
        data = _parse(body)
        error = data.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        self.path = path
        self.status = status
        self.message = str(message or body[:500].decode("utf-8", "replace"))
        engines = data.get("engines")
        self.engines: dict[str, Any] = engines if isinstance(engines, dict) else {}
        self.fallen = [name for name, leg in self.engines.items() if leg.get("outcome") != "answered"]
        super().__init__(f"{path} answered {status}: {self.message}")


@dataclass(slots=True)
class SyncResult:
    """What came of one sync.

    Attributes:
        version: the fleet's version after it, or None if it was not finished.
        fallen: engines that serve nothing now, with the reason: they were lost, or failed a call.
        errors: every call of the sync that failed, in order.
    """

    version: str | None = None
    fallen: dict[str, str] = field(default_factory=dict)
    errors: list[FleetCallError] = field(default_factory=list)

    def note(self, fleet: dict[str, Any]) -> None:
        """Take over what ``GET /fleet`` said."""
        self.version = fleet.get("weight_version")
        self.fallen = {
            str(engine["id"]): f"{engine['state']}: {engine['reason']}"
            for engine in fleet.get("engines", [])
            if engine.get("state") in ("fenced", "down", "starting")
        }


def _parse(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _pause_path(mode: str, *, clear_cache: bool | None) -> str:
    query: dict[str, str] = {"mode": mode}
    if clear_cache is not None:
        query["clear_cache"] = str(clear_cache).lower()
    return f"/pause?{urlencode(query)}"


class FleetClient:
    """Control calls, blocking.

    Args:
        url: where the proxy answers control calls.
        token: its control token, if it has one.
        timeout: seconds for one call.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} must be a URL such as http://127.0.0.1:8000")
        self._parts = parts
        self._timeout = timeout
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def call(self, path: str, body: object = None, *, method: str = "POST") -> Any:
        """One control call.

        Args:
            path: with a query, if any.
            body: sent as JSON; None sends no body at all.
            method: HTTP method.

        Returns:
            The JSON answer, or its text where it is none.

        Raises:
            FleetCallError: it did not happen as a whole.
            OSError: the proxy could not be reached.
        """
        make = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = make(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
        try:
            headers = dict(self._headers)
            data = None
            if body is not None:
                data = json.dumps(body).encode()
                headers["Content-Type"] = "application/json"
            connection.request(method, self._parts.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
            return _answer(path, response.status, response.read())
        finally:
            connection.close()

    def world_size(self) -> int:
        """Workers of all living engines."""
        return int(self.call("/get_world_size", method="GET")["world_size"])

    def weight_version(self) -> str | None:
        """The version that all engines hold, or None if they differ."""
        version = self.call("/weight_info", method="GET")["weight_version"]
        return None if version is None else str(version)

    def fleet(self) -> dict[str, Any]:
        """The state of every engine."""
        data = self.call("/fleet", method="GET")
        return data if isinstance(data, dict) else {}

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Make a transfer group of all living engines; blocks until they have joined the trainer's rendezvous."""
        self.call("/init_weight_transfer_engine", {"init_info": init_info})

    @contextmanager
    def sync(
        self, *, version: str | None = None, mode: str = "keep", clear_cache: bool | None = None, native: bool = True
    ) -> Iterator[Sync]:
        """Pause, start, your block, finish with the version, resume.

        Args:
            version: label of the new weights; None lets the proxy give one.
            mode: how running requests are paused: ``keep``, ``wait`` or ``abort``.
            clear_cache: passed on to ``/pause``; None leaves it to vLLM.
            native: send start and finish; False for updates that are whole by themselves.

        Raises:
            FleetCallError: a call of the sync failed; ``/resume`` was sent all the same.
        """
        sync = Sync(self)
        try:
            sync.call(_pause_path(mode, clear_cache=clear_cache))
            if native:
                sync.call("/start_weight_update")
            yield sync
            if native:
                sync.call("/finish_weight_update", None if version is None else {"weight_version": version})
            elif version is not None:
                sync.call("/update_weight_version", {"new_version": version})
        except BaseException:
            # The first failure is the one to tell; that of the resume stays in the result.
            with suppress(FleetCallError, OSError):
                sync.leave()
            raise
        sync.leave()


class Sync:
    """The inside of a `FleetClient.sync` block.

    Attributes:
        result: what came of it; complete after the block.
    """

    def __init__(self, client: FleetClient) -> None:
        self._client = client
        self.result = SyncResult()

    def call(self, path: str, body: object = None) -> Any:
        """One control call whose failure is noted in the result."""
        try:
            return self._client.call(path, body)
        except FleetCallError as error:
            self.result.errors.append(error)
            raise

    def update(self, update_info: object, *, send: Callable[[], None] | None = None) -> None:
        """Send weights.

        Args:
            update_info: body of ``/update_weights``: one object for all workers, or a list with one entry per worker.
            send: broadcasts the tensors; runs in this thread while the engines receive, as collectives demand.

        Raises:
            FleetCallError: an engine failed.
        """
        if send is None:
            self.call("/update_weights", {"update_info": update_info})
            return
        failure: list[BaseException] = []

        def receive() -> None:
            try:
                self.call("/update_weights", {"update_info": update_info})
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=receive, name="update_weights", daemon=True)
        thread.start()
        send()
        thread.join()
        if failure:
            raise failure[0]

    def leave(self) -> None:
        """Resume, and note who serves what; not knowing the latter is no failure of the sync."""
        try:
            self.call("/resume")
        finally:
            with suppress(FleetCallError, OSError):
                self.result.note(self._client.fleet())


def _answer(path: str, status: int, body: bytes) -> Any:
    if not 200 <= status < 300:
        raise FleetCallError(path.partition("?")[0], status, body)
    if not body:
        return None
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")


class AsyncFleetClient:
    """Control calls for asyncio; the same interface as `FleetClient`. Use it as ``async with``.

    Args:
        url: where the proxy answers control calls.
        token: its control token, if it has one.
        timeout: seconds for one call.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Each call has a connection of its own: a POST on a reused one may fail without the proxy having seen it.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, path: str, body: object = None, *, method: str = "POST") -> Any:
        """One control call; see `FleetClient.call`.

        Raises:
            FleetCallError: it did not happen as a whole.
            aiohttp.ClientError: the proxy could not be reached.
        """
        if self._session is None:
            raise RuntimeError("use the client as 'async with AsyncFleetClient(url) as client'")
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        async with self._session.request(method, self._url + path, data=data, headers=headers) as response:
            return _answer(path, response.status, await response.read())

    async def world_size(self) -> int:
        """Workers of all living engines."""
        return int((await self.call("/get_world_size", method="GET"))["world_size"])

    async def weight_version(self) -> str | None:
        """The version that all engines hold, or None if they differ."""
        version = (await self.call("/weight_info", method="GET"))["weight_version"]
        return None if version is None else str(version)

    async def fleet(self) -> dict[str, Any]:
        """The state of every engine."""
        data = await self.call("/fleet", method="GET")
        return data if isinstance(data, dict) else {}

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Make a transfer group of all living engines."""
        await self.call("/init_weight_transfer_engine", {"init_info": init_info})

    @asynccontextmanager
    async def sync(
        self, *, version: str | None = None, mode: str = "keep", clear_cache: bool | None = None, native: bool = True
    ) -> AsyncIterator[AsyncSync]:
        """Pause, start, your block, finish with the version, resume; see `FleetClient.sync`.

        A cancelled block resumes too.
        """
        sync = AsyncSync(self)
        try:
            await sync.call(_pause_path(mode, clear_cache=clear_cache))
            if native:
                await sync.call("/start_weight_update")
            yield sync
            if native:
                await sync.call("/finish_weight_update", None if version is None else {"weight_version": version})
            elif version is not None:
                await sync.call("/update_weight_version", {"new_version": version})
        except BaseException:
            with suppress(FleetCallError, aiohttp.ClientError):
                await asyncio.shield(asyncio.ensure_future(sync.leave()))
            raise
        await sync.leave()


class AsyncSync:
    """The inside of an `AsyncFleetClient.sync` block.

    Attributes:
        result: what came of it; complete after the block.
    """

    def __init__(self, client: AsyncFleetClient) -> None:
        self._client = client
        self.result = SyncResult()

    async def call(self, path: str, body: object = None) -> Any:
        """One control call whose failure is noted in the result."""
        try:
            return await self._client.call(path, body)
        except FleetCallError as error:
            self.result.errors.append(error)
            raise

    async def update(self, update_info: object, *, send: Awaitable[object] | None = None) -> None:
        """Send weights; ``send`` broadcasts the tensors at the same time.

        Raises:
            FleetCallError: an engine failed.
        """
        receive = self.call("/update_weights", {"update_info": update_info})
        if send is None:
            await receive
        else:
            await asyncio.gather(receive, send)

    async def leave(self) -> None:
        """Resume, and note who serves what; not knowing the latter is no failure of the sync."""
        try:
            await self.call("/resume")
        finally:
            with suppress(FleetCallError, aiohttp.ClientError):
                self.result.note(await self._client.fleet())
