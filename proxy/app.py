"""Puts the rooms together: settings in, a running proxy out, and a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import uvloop
from aiohttp import web

from proxy.config import Settings
from proxy.control.plane import ControlPlane
from proxy.data.handoff import WebSide, web_runner
from proxy.data.plane import DataPlane
from proxy.fleet.discovery import Discovery
from proxy.fleet.registry import Fleet
from proxy.observe import logs, tracing
from proxy.observe.control_stats import ControlStats
from proxy.observe.pages import add_routes
from proxy.server import Server, server_context
from proxy.workers.director import DirectorPlane, private_directory

if TYPE_CHECKING:
    from proxy.observe.spans import Spans

_log = logging.getLogger("fleetgate")

EXIT_OK = 0
EXIT_FAILURE = 1
FORCED_SECONDS = 3.0
"""Seconds that everything gets to end after a second signal."""
GC_THRESHOLD = 50_000
"""Allocations between two looks of the garbage collector at its youngest generation. Requests leave no cycles behind;
the default of 700 spends some 5 % of the processor on finding none."""


class ListenError(OSError):
    """An address cannot be listened on; the message says which, and what to do."""


@contextlib.contextmanager
def _listening(host: str, port: int | None, prefix: str = "") -> Iterator[None]:
    """Name the listener whose address cannot be had, and the setting that would give it another."""
    try:
        yield
    except OSError as error:
        elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        flag = "host" if elsewhere else "port"
        raise ListenError(
            f"cannot listen on {_bracket(host)}:{port}: {error.strerror or error}; choose another --{prefix}{flag}, "
            "or stop what listens there"
        ) from None


class Listener(Protocol):
    """Who answers on the main port."""

    ssl_context: ssl.SSLContext | None

    def bind(self) -> Awaitable[tuple[str, int]]:
        """Take the port; returns the address and port.

        Raises:
            OSError: somebody else has it.
        """

    def serve(self) -> Awaitable[None]:
        """Everything is known of the fleet that can be: requests may come."""

    def stop(self) -> Awaitable[None]:
        """Drain, then close."""

    def hurry(self) -> None:
        """Drain no longer."""


class OwnListener:
    """One process does it all."""

    def __init__(self, plane: DataPlane, control: ControlPlane, app: web.Application) -> None:
        plane.watch = control.prober
        self._web_side = WebSide(app)
        self._server = Server(plane, self._web_side, control.paths)
        self.ssl_context = self._server.ssl_context

    async def bind(self) -> tuple[str, int]:
        """Listen at once: a request that comes early is held until the engines are known."""
        await self._web_side.start()
        return await self._server.start()

    async def serve(self) -> None:
        """Requests are answered already."""

    async def stop(self) -> None:
        """Drain, then close."""
        await self._server.stop()
        await self._web_side.stop()

    def hurry(self) -> None:
        """Drain no longer."""
        self._server.hurry()


class WorkersListener:
    """Workers share the port; this process directs them."""

    def __init__(self, plane: DirectorPlane, control: ControlPlane, app: web.Application) -> None:
        self._workers = plane.workers
        self._workers.prober = control.prober
        self._seconds = plane.settings.drain_timeout
        self._runner = web_runner(app)
        self._directory = private_directory()
        self._path = f"{self._directory}/control.sock"
        self.ssl_context = server_context(plane.settings)

    async def bind(self) -> tuple[str, int]:
        """Reserve the port; workers listen on it."""
        return self._workers.reserve()

    async def serve(self) -> None:
        """Start the workers."""
        await self._runner.setup()
        await web.UnixSite(self._runner, self._path).start()
        await self._workers.start(self._path)

    async def stop(self) -> None:
        """Let the workers drain, then close."""
        await self._workers.stop(self._seconds)
        await self._runner.cleanup()
        shutil.rmtree(self._directory, ignore_errors=True)

    def hurry(self) -> None:
        """Drain no longer."""
        self._workers.hurry()


@dataclass(slots=True)
class App:
    """A running proxy.

    Attributes:
        settings: what it runs with.
        fleet: the engines.
        plane: the data plane.
        control: the control plane.
        discovery: brings in the engines of a file or of DNS.
        listener: answers on the main port.
        control_site: answers on the control port, if there is one.
        url: where clients reach it.
        control_url: where trainers reach it; the same unless ``control_port`` is set.
        spans: makes spans of what it does, where that is wanted.
    """

    settings: Settings
    fleet: Fleet
    plane: DataPlane
    control: ControlPlane
    discovery: Discovery
    listener: Listener
    control_site: web.AppRunner | None
    url: str
    control_url: str
    spans: Spans | None = None

    async def stop(self) -> None:
        """Drain, then end everything this proxy started."""
        self.plane.draining = self.control.draining = True
        await self.listener.stop()
        await self.discovery.stop()
        await self.control.stop()
        if self.control_site is not None:
            await self.control_site.cleanup()
        for engine in self.fleet:
            engine.upstream.close()
        if self.spans is not None:
            await self.spans.stop()


async def start(settings: Settings, spans: Spans | None = None) -> App:
    """Start a proxy on the running loop: one process, or a director with workers.

    Args:
        settings: what it runs with.
        spans: makes its spans; those of workers' requests are made by the workers.

    Raises:
        ListenError: a listener's address cannot be bound.
    """
    fleet = Fleet(asyncio.get_running_loop().time)
    director = DirectorPlane(settings, fleet) if settings.workers > 1 else None
    # The director's plane has of the data plane what the control plane and the pages ask for.
    plane = DataPlane(settings, fleet) if director is None else cast("DataPlane", director)
    control = ControlPlane(settings, fleet, plane)
    control.conductor.spans = spans
    if director is None and spans is not None:
        plane.trace(spans)
    stats = ControlStats()
    fleet.listeners.append(stats.on_event)
    own_port = settings.control_port is not None
    app = control.make_app(public=own_port)
    add_routes(app, plane, stats)
    listener: Listener = (
        OwnListener(plane, control, app) if director is None else WorkersListener(director, control, app)
    )
    with _listening(settings.host, settings.port):
        host, port = await listener.bind()
    scheme = "https" if settings.tls_cert else "http"
    url = control_url = f"{scheme}://{_bracket(host)}:{port}"
    control_site: web.AppRunner | None = None
    if own_port:
        control_app = control.make_app(public=False)
        add_routes(control_app, plane, stats)
        control_site = web_runner(control_app)
        await control_site.setup()
        wanted = settings.control_host or settings.host
        site = web.TCPSite(control_site, wanted, settings.control_port, ssl_context=listener.ssl_context)
        with _listening(wanted, settings.control_port, "control-"):
            await site.start()
        control_host, control_port = control_site.addresses[0][:2]
        control_url = f"{scheme}://{_bracket(control_host)}:{control_port}"
    discovery = Discovery(settings, fleet, control.members)
    await discovery.start()
    await control.start()
    with _listening(settings.host, port):
        await listener.serve()
    return App(settings, fleet, plane, control, discovery, listener, control_site, url, control_url, spans)


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code. A second signal ends the drain."""
    try:
        app = await start(settings, tracing.start(settings))
    except ListenError as error:
        _log.error("%s", error)
        return EXIT_FAILURE
    except OSError as error:
        _log.error("cannot start: %s", error)
        return EXIT_FAILURE
    _log.info("listening on %s", app.url)
    if app.control_url != app.url:
        _log.info("control calls on %s", app.control_url)
    if not len(app.fleet):
        _log.warning("no engine is configured; give --engine URL or add one with POST /fleet/engines")
    asked = asyncio.Event()
    forced = asyncio.Event()

    def on_signal() -> None:
        (forced if asked.is_set() else asked).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    gc.collect()
    gc.freeze()
    await asked.wait()
    _log.info("stopping: running requests get up to %g s", settings.drain_timeout)
    stop = asyncio.ensure_future(app.stop())
    force = asyncio.ensure_future(forced.wait())
    await asyncio.wait({stop, force}, return_when=asyncio.FIRST_COMPLETED)
    force.cancel()
    if not stop.done():
        app.listener.hurry()
        await asyncio.wait({stop}, timeout=FORCED_SECONDS)
        _log.warning("stopped by force")
        return EXIT_FAILURE
    stop.result()
    _log.info("stopped")
    return EXIT_OK


def raise_file_limit() -> None:
    """Allow as many open files as the system lets us: a held rollout is a socket, an open one is two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(settings: Settings) -> int:
    """Run the proxy in this process; returns the exit code."""
    logs.configure(settings.log_format, settings.log_level)
    raise_file_limit()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
    try:
        return uvloop.run(serve(settings))
    except KeyboardInterrupt:
        return EXIT_OK
    finally:
        sys.stderr.flush()
