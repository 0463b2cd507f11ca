"""Puts the rooms together: settings in, a running proxy out, and a clean stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import sys
from dataclasses import dataclass

import uvloop
from aiohttp import web

from proxy.config import Settings
from proxy.control.plane import ControlPlane
from proxy.data.handoff import WebSide
from proxy.data.plane import DataPlane
from proxy.fleet.discovery import Discovery
from proxy.fleet.registry import Fleet
from proxy.observe import logs
from proxy.observe.control_stats import ControlStats
from proxy.observe.pages import add_routes
from proxy.server import Server

_log = logging.getLogger("fleetgate")

EXIT_OK = 0
EXIT_FAILURE = 1
FORCE_EXIT = 130
"""Exit code after a second signal: stopped by force, as shells report an interrupt."""
GC_THRESHOLD = 50_000
"""Allocations between two looks of the garbage collector at its youngest generation. Requests leave no cycles behind;
the default of 700 spends some 5 % of the processor on finding none."""


@dataclass(slots=True)
class App:
    """A running proxy.

    Attributes:
        settings: what it runs with.
        fleet: the engines.
        plane: the data plane.
        control: the control plane.
        discovery: brings in the engines of a file or of DNS.
        server: the main listener.
        url: where clients reach it.
        control_url: where trainers reach it; the same unless ``control_port`` is set.
    """

    settings: Settings
    fleet: Fleet
    plane: DataPlane
    control: ControlPlane
    discovery: Discovery
    server: Server
    web_side: WebSide
    control_site: web.AppRunner | None
    url: str
    control_url: str

    async def stop(self) -> None:
        """Drain, then end everything this proxy started."""
        await self.server.stop()
        await self.discovery.stop()
        await self.control.stop()
        await self.web_side.stop()
        if self.control_site is not None:
            await self.control_site.cleanup()
        for engine in self.fleet:
            engine.upstream.close()


async def start(settings: Settings) -> App:
    """Start a proxy on the running loop.

    Raises:
        OSError: a listener's address cannot be bound.
    """
    loop = asyncio.get_running_loop()
    fleet = Fleet(loop.time)
    plane = DataPlane(settings, fleet)
    control = ControlPlane(settings, fleet, plane)
    stats = ControlStats()
    fleet.listeners.append(stats.on_event)
    plane.watch = control.prober
    own_port = settings.control_port is not None
    main_app = control.make_app(public=own_port)
    add_routes(main_app, plane, stats)
    web_side = WebSide(main_app)
    await web_side.start()
    server = Server(plane, web_side, control.paths)
    host, port = await server.start()
    scheme = "https" if settings.tls_cert else "http"
    url = control_url = f"{scheme}://{_bracket(host)}:{port}"
    control_site: web.AppRunner | None = None
    if own_port:
        control_app = control.make_app(public=False)
        add_routes(control_app, plane, stats)
        control_site = web.AppRunner(control_app, handler_cancellation=True, access_log=None)
        await control_site.setup()
        site = web.TCPSite(
            control_site, settings.control_host or settings.host, settings.control_port, ssl_context=server.ssl_context
        )
        await site.start()
        control_host, control_port = control_site.addresses[0][:2]
        control_url = f"{scheme}://{_bracket(control_host)}:{control_port}"
    discovery = Discovery(settings, fleet, control.members)
    await discovery.start()
    await control.start()
    return App(settings, fleet, plane, control, discovery, server, web_side, control_site, url, control_url)


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code. A second signal ends it at once."""
    try:
        app = await start(settings)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        why = error.strerror or str(error)
        _log.error("cannot listen on %s: %s; choose another --port, or stop what listens there", where, why)
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
        _log.warning("stopped by force")
        return FORCE_EXIT
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
