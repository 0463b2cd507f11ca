"""The control plane: everything that is not a request to one engine.

One `ControlPlane` serves any number of aiohttp applications (the shared main port, and the control port where there is
one); the state is in the plane, the applications only route.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from proxy.config import Settings
from proxy.control.admit import Admission
from proxy.control.asked import Asked, forwarded, reply_error
from proxy.control.conductor import Conductor
from proxy.control.fleet_api import FleetApi
from proxy.core import calls
from proxy.core.admission import DEFAULT
from proxy.core.calls import CALLS, Call
from proxy.core.engine_state import State
from proxy.core.paths import PathTable
from proxy.errors import BodyTooLarge, FleetgateError, Forbidden, MethodNotAllowed, NotFound, Unauthorized
from proxy.fleet.engine import Engine, engine_id
from proxy.fleet.members import Members
from proxy.fleet.probes import Prober
from proxy.fleet.registry import Fleet

if TYPE_CHECKING:
    from proxy.data.plane import DataPlane

_log = logging.getLogger("fleetgate.control")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PUBLIC = frozenset(
    {"/health", "/ready", "/metrics", "/fleet", "/fleet/events", "/fleet/load", "/fleet/syncs", "/fleet/ui",
     "/finish_session"}
)  # fmt: skip
"""Paths that need no control token: probes, dashboards, and what rollout clients call."""


class ControlPlane:
    """All control and fleet routes.

    Args:
        settings: the proxy's settings.
        fleet: the engines; filled from the settings by `start`.
        plane: the data plane, for its gate, its requests and its balancer.
    """

    def __init__(self, settings: Settings, fleet: Fleet, plane: DataPlane) -> None:
        self.settings = settings
        self.fleet = fleet
        self.gate = plane.gate
        self.paths = PathTable(item.path for item in settings.fanout_paths)
        self.admission = Admission(settings, fleet, plane.gate)
        self.prober = Prober(settings, fleet, self._on_look)
        self.members = Members(settings, fleet, self.prober)
        self.conductor = Conductor(
            settings, fleet, plane.gate, plane.tracker, prober=self.prober, admission=self.admission
        )
        self.prober.on_restart = self.conductor.updates.on_restart
        fleet.listeners.append(self._on_event)
        self.members.on_leaving = self.conductor.labels.leave
        self.members.on_removed = self._on_removed
        self._balancer = plane.balancer
        self._api = FleetApi(self)
        self.draining = False
        """The proxy stops: it is not ready, whatever its engines are."""
        self._started = self._recovered = False
        self._first: set[Engine] = set()
        token = settings.control_token
        self._token = token.get_secret_value().encode() if token is not None else None
        key = settings.engine_api_key
        self._engine_key = key.get_secret_value().encode("latin-1") if key is not None else None

    # Life

    async def start(self) -> None:
        """Add the configured engines, look at each once, and go on from what they say."""
        for url in self.settings.engine:
            if engine_id(url) not in self.fleet.engines:
                self.members.add(url)
        self._first = set(self.fleet)
        await asyncio.gather(*(self._first_look(engine) for engine in self._first))
        if self.admission.voting:
            self.admission.count_votes()
        self._started = True
        self._recovered = self.conductor.pauses.recover()
        self.admission.review_all()
        self._settle_votes()

    async def _first_look(self, engine: Engine) -> None:
        try:
            await self.prober.identify(engine)
        except Exception:
            _log.exception("first look at %s failed", engine.id)

    async def stop(self) -> None:
        """End probes, legs and event streams."""
        self._api.close()
        await self.conductor.stop()
        await self.prober.stop()

    def _on_look(self, engine: Engine) -> None:
        """An engine answered: votes are counted as long as not everybody of the start has been heard."""
        self.conductor.labels.mark(engine)
        if not self._started:
            return
        if self.admission.voting and (engine in self._first or not self._first):
            self.admission.count_votes()
        if not self._recovered:
            self._recovered = self.conductor.pauses.recover()
        if engine.reported_paused and not self.gate.closed and not engine.owed and not engine.busy:
            self.prober.watch_paused(engine)
        if self.admission.voting:
            self.admission.review_all()
            self._settle_votes()
        else:
            self.admission.review(engine)

    def _settle_votes(self) -> None:
        """The vote is over when everybody of the start was heard, or, with nobody there, the first who came.

        Weights that clients have got answers from cannot be outvoted by whoever comes later.
        """
        if self._first:
            done = all(engine.alive or engine.id not in self.fleet.engines for engine in self._first)
            named = self.fleet.version not in (None, DEFAULT)
            done = done or (named and any(engine.state is State.READY for engine in self.fleet))
        else:
            done = self.fleet.version is not None or any(engine.alive for engine in self.fleet)
        if done:
            self.admission.voting = False

    def _on_event(self, kind: str, details: dict[str, Any]) -> None:
        if kind == "engine_state" and details["state"] == State.DOWN:
            engine = self.fleet.engines.get(details["engine"])
            if engine is not None:
                self.conductor.on_down(engine)

    def _on_removed(self, engine: Engine) -> None:
        self._balancer.forget(engine.id)

    # Routes

    def owns(self, path: str) -> bool:
        """Whether a plain path is answered here; a trailing slash is tolerated."""
        return self.paths.is_control(path.rstrip("/").encode("latin-1") or b"/")

    def make_app(self, *, public: bool = False) -> web.Application:
        """An application with the routes.

        Args:
            public: only what needs no credential: the main port, where control calls have a port of their own.
        """
        # The public side has nothing that a credential would open, so it asks for none.
        middlewares = [self._errors] if public else [self._errors, self._credentials]
        app = web.Application(middlewares=middlewares, client_max_size=self.settings.max_control_body)
        app.on_response_prepare.append(_name_server)
        api = self._api
        for path, handler in (
            ("/health", api.health),
            ("/ready", api.ready),
            ("/fleet", api.show),
            ("/fleet/events", api.events),
        ):
            app.router.add_get(path, handler)
            app.router.add_get(f"{path}/", handler)
        app.router.add_post("/finish_session", self._finish_session)
        app.router.add_post("/finish_session/", self._finish_session)
        if public:
            app.router.add_route("*", "/{path:.*}", self._elsewhere)
            return app
        for slash in ("", "/"):
            app.router.add_post(f"/fleet/engines{slash}", api.add)
            app.router.add_delete(f"/fleet/engines/{{engine}}{slash}", api.remove)
            app.router.add_post(f"/fleet/engines/{{engine}}/{{action:drain|admit|fence}}{slash}", api.act)
        for call in CALLS.values():
            app.router.add_route("*", call.path, self._control)
            app.router.add_route("*", f"{call.path}/", self._control)
        for item in self.settings.fanout_paths:
            pattern = item.path[:-1] + "{rest:.*}" if item.path.endswith("*") else item.path.rstrip("/") + "{rest:/?}"
            app.router.add_route("*", pattern, self._control)
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every error as the body and fields that the contract promises."""
        try:
            response = await handler(request)
        except FleetgateError as error:
            response = reply_error(error).response(with_legs=False)
        except web.HTTPRequestEntityTooLarge:
            limit = self.settings.max_control_body
            response = reply_error(BodyTooLarge(f"the body of a control call is over {limit} bytes")).response(
                with_legs=False
            )
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            response = reply_error(MethodNotAllowed(f"{request.path} takes {allowed}, not {request.method}")).response(
                with_legs=False
            )
            response.headers["Allow"] = allowed
        except web.HTTPNotFound:
            response = reply_error(NotFound(f"there is no {request.path} here")).response(with_legs=False)
        if not response.prepared:
            request_id = request.headers.get("X-Request-Id")
            if request_id is not None:
                response.headers["X-Request-Id"] = request_id
        return response

    @web.middleware
    async def _credentials(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._authorize(request)
        return await handler(request)

    def _authorize(self, request: web.Request) -> None:
        """Compare in constant time (RFC 6750 section 2.1).

        Raises:
            Unauthorized: a control token is set, and another or none came.
        """
        path = request.path.rstrip("/") or "/"
        if self._token is None or (path in _PUBLIC and request.method in ("GET", "HEAD", "POST")):
            return
        given = request.headers.get("Authorization", "")
        scheme, _, credential = given.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(credential.strip().encode(), self._token):
            raise Unauthorized("control calls and /fleet writes need 'Authorization: Bearer' with the control token")

    async def _elsewhere(self, request: web.Request) -> web.StreamResponse:
        raise Forbidden(f"{request.path} is served on the control port")

    async def _finish_session(self, request: web.Request) -> web.Response:
        """``POST /finish_session``: forget where a session lives. The key comes as a query, a field or JSON."""
        key = request.query.get("session_id")
        for name in self.settings.session_headers:
            key = key or request.headers.get(name)
        if not key and request.can_read_body:
            try:
                data = await request.json()
            except ValueError:
                data = None
            key = data.get("session_id") if isinstance(data, dict) else None
        found = bool(key) and self._balancer.finish(str(key).encode())
        return web.json_response({"status": "finished" if found else "unknown", "session_id": key})

    async def _control(self, request: web.Request) -> web.StreamResponse:
        call = self._call_of(request)
        if call.method and request.method != call.method:
            raise web.HTTPMethodNotAllowed(request.method, [call.method])
        raw_path, question, query = request.raw_path.partition("?")
        asked = Asked(
            call=call,
            method=request.method,
            target=(raw_path.rstrip("/") or "/") + question + query,
            query=query,
            headers=forwarded(request.raw_headers, token=self._token, engine_key=self._engine_key),
            body=await request.read() if _has_body(request) else None,
            client=request.remote or request.headers.get("X-Forwarded-For") or "?",
            request_id=request.headers.get("X-Request-Id", ""),
        )
        reply = await self.conductor.handle(asked)
        return reply.response(with_legs=request.headers.get("X-Fleetgate-Report") == "1")

    def _call_of(self, request: web.Request) -> Call:
        path = request.raw_path.partition("?")[0].rstrip("/") or "/"
        call = CALLS.get(path)
        if call is not None:
            return call
        for item in self.settings.fanout_paths:
            hit = path.startswith(item.path[:-1]) if item.path.endswith("*") else path == item.path.rstrip("/")
            if hit:
                return calls.custom(path, item.rank_field, method=request.method)
        raise NotFound(f"there is no {path} here")


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:  # noqa: ARG001 - a signal
    """Not aiohttp's own field, which tells strangers the versions of Python and aiohttp."""
    response.headers["Server"] = "fleetgate"


def _has_body(request: web.Request) -> bool:
    """Whether a body came, be it empty: a body-less POST stays body-less, a GET with a body keeps it."""
    return "Content-Length" in request.headers or "Transfer-Encoding" in request.headers
