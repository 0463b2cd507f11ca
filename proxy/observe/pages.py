"""Pages for people and for Prometheus: ``/metrics``, ``/fleet/ui`` and the JSON that it needs besides ``/fleet``."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from proxy.errors import BadRequest
from proxy.observe import exposition
from proxy.observe.metrics import OwnPage
from proxy.observe.scrape import Scraper
from proxy.observe.syncs import MAX_SYNCS
from proxy.observe.turns import paced

if TYPE_CHECKING:
    from proxy.data.plane import DataPlane
    from proxy.observe.control_stats import ControlStats

_DIGITS = 6
"""Of a number in a query; nobody means more, and a number of a million digits takes a second to read."""
PIECE = 64 << 10
"""Bytes of a page that are written at once."""
_NO_STORE = {"Cache-Control": "no-store"}


class Pages:
    """Answers the pages.

    Args:
        plane: the data plane.
        control: what the control plane counts.
    """

    def __init__(self, plane: DataPlane, control: ControlStats) -> None:
        self._plane = plane
        self._control = control
        self._scraper = Scraper(plane.fleet)
        self._own = OwnPage(plane, control, self._scraper)
        self._ui, self._policy = _load_ui()
        plane.fleet.listeners.append(self._on_event)

    def _on_event(self, kind: str, details: dict[str, Any]) -> None:
        if kind == "engine_removed":
            self._plane.stats.forget(details["engine"])

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """``GET /metrics``: the proxy's families are of this moment, those of the engines at most a second old."""
        fmt = exposition.negotiate(request.headers.get("Accept", ""))
        await self._scraper.refresh()
        parts = [part async for part in paced(self._own.render(fmt))]
        parts += await self._scraper.merged(fmt)
        if fmt is exposition.Format.OPENMETRICS:
            parts.append(b"# EOF\n")
        # With many engines it is megabytes: written in pieces, a slow reader holds up itself and not the loop.
        response = web.StreamResponse(headers={"Content-Type": fmt.value, **_NO_STORE})
        response.content_length = sum(map(len, parts))
        await response.prepare(request)
        if request.method != "HEAD":
            async for piece in paced(_pieces(parts)):
                await response.write(piece)
        await response.write_eof()
        return response

    async def load(self, request: web.Request) -> web.Response:  # noqa: ARG002 - the signature of a handler
        """``GET /fleet/load``: work of each engine as its own metrics tell it."""
        await self._scraper.refresh()
        data = {engine: load.as_json() for engine, load in self._scraper.load().items()}
        return _json({"engines": data})

    async def syncs(self, request: web.Request) -> web.Response:
        """``GET /fleet/syncs?last=N``: the last weight syncs, newest first."""
        last = request.query.get("last", str(MAX_SYNCS))
        if not last.isascii() or not last.isdigit() or len(last) > _DIGITS:
            raise BadRequest(f"last={last[:_DIGITS]!r} must be a number of syncs, such as last=8")
        return _json(self._control.syncs.as_json(int(last)))

    async def ui(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """``GET /fleet/ui``: the live page."""
        return web.Response(
            body=self._ui,
            headers={
                "Content-Type": "text/html; charset=utf-8",
                "Content-Security-Policy": self._policy,
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
                "Referrer-Policy": "no-referrer",
                **_NO_STORE,
            },
        )

    async def stop(self, app: web.Application) -> None:  # noqa: ARG002
        """End reads that still run."""
        await self._scraper.stop()


def _pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Small parts joined to what is worth a write, large ones as they are."""
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= PIECE:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def _json(data: object) -> web.Response:
    return web.Response(body=orjson.dumps(data), content_type="application/json", headers=_NO_STORE)


def _digest(part: bytes) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(part).digest()).decode("ascii") + "'"


def _load_ui() -> tuple[bytes, str]:
    """The live page with its style and script inside, and the policy that allows exactly those two and this server."""
    room = files("proxy.observe")
    html, css, script = (room.joinpath(f"ui.{ext}").read_bytes() for ext in ("html", "css", "js"))
    page = html.replace(b"/*STYLE*/", css).replace(b"/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; style-src {_digest(css)}; script-src {_digest(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def add_routes(app: web.Application, plane: DataPlane, control_stats: ControlStats) -> None:
    """Add the pages to an application.

    Args:
        app: whose routes they become; its clean-up ends what the pages started.
        plane: the data plane.
        control_stats: must already listen to the fleet's events.
    """
    pages = Pages(plane, control_stats)
    for path, handler in (
        ("/metrics", pages.metrics),
        ("/fleet/ui", pages.ui),
        ("/fleet/load", pages.load),
        ("/fleet/syncs", pages.syncs),
    ):
        app.router.add_get(path, handler)
        app.router.add_get(f"{path}/", handler)
    app.on_cleanup.append(pages.stop)
