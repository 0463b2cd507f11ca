"""One simulated engine: its HTTP server, and everything that is lost when it restarts."""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from engine_launcher.sim import (
    admin,
    chat,
    completions,
    control,
    generate,
    messages,
    misc,
    responses,
)
from engine_launcher.sim.config import MAX_BODY_BYTES, SimConfig
from engine_launcher.sim.errors import WireError, error_payload
from engine_launcher.sim.faults import Fault, Faults
from engine_launcher.sim.metrics import Counts
from engine_launcher.sim.recording import Entry, RequestLog
from engine_launcher.sim.replies import (
    ENGINE,
    GARBAGE,
    STREAM_FAULT,
    BareResponse,
    dead_reply,
    error_reply,
    hang,
    json_reply,
    partial_reply,
)
from engine_launcher.sim.scheduler import EngineCore
from engine_launcher.sim.transfer import WeightTransfer
from proxy.tasks import spawn

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Path prefixes that vLLM's ``--api-key`` guards."""
ENGINE_DEATH_SECONDS = 1.0
"""How long vLLM's API server outlives its engine process, answering ``/health`` with 503."""
LISTEN_BACKLOG = 4096
"""Connections that may wait to be accepted: a load test opens thousands at once."""
KILLED_EXIT_CODE = 137
"""Exit code of a process that died of SIGKILL, as a shell reports it."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SimEngine:
    """A simulated vLLM server.

    In a test: ``engine = SimEngine(SimConfig(seed=1)); await engine.start(); ...; await engine.stop()``. Everything
    that ``/sim/...`` offers over HTTP is an attribute or a method here.

    Attributes:
        url: base URL, once started.
        core: scheduler, weights and version.
        transfer: weight-transfer state.
        faults: rules in force.
        log: recorded requests.
        adapters: loaded LoRA adapters, name to path.
        counts: of answers and of weight operations, for the metrics page.
        exit_on_death: end the process when told to die; False only closes every connection and the port.

    """

    def __init__(
        self, config: SimConfig | None = None, *, host: str = "127.0.0.1", port: int = 0, exit_on_death: bool = False
    ) -> None:
        self.config = config or SimConfig()
        self.host = host
        self.port = port
        self.exit_on_death = exit_on_death
        self.faults = Faults(self.config.seed)
        self.log = RequestLog()
        self.connections_total = 0
        self.requests_total = 0
        self.disconnects = 0
        self.sockets: set[web.WebSocketResponse] = set()
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._forget()

    def _forget(self) -> None:
        """Become a process that just started."""
        self.core = EngineCore(self.config)
        self.transfer = WeightTransfer(self.config.world_size, self.config.weight_transfer_backend)
        self.adapters: dict[str, str] = {}
        self.sleep_level = 0
        self.counts = Counts()
        self.started_at = time.time()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Bind the port and serve.

        Raises:
            OSError: the port is taken.

        """
        app = web.Application(middlewares=[self._middleware], client_max_size=MAX_BODY_BYTES)
        app[ENGINE] = self
        app.on_response_prepare.append(_strip_media_type)
        app.add_routes(admin.routes())
        app.add_routes(self._routes())
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=self.config.keep_alive_seconds,
            handler_cancellation=True,
            shutdown_timeout=0.5,
        )
        await self._runner.setup()
        factory = self._runner.server
        assert factory is not None
        server = factory

        def connect() -> asyncio.Protocol:
            self.connections_total += 1
            return server()

        self._server = await asyncio.get_running_loop().create_server(
            connect, self.host, self.port, backlog=LISTEN_BACKLOG, reuse_address=True
        )
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.core.start()

    def _routes(self) -> list[web.RouteDef]:
        config = self.config
        found = [
            web.post("/v1/completions", completions.handle),
            web.post("/v1/chat/completions", chat.handle),
            web.post("/v1/responses", responses.handle),
            web.post("/v1/messages", messages.handle),
            web.post("/v1/messages/count_tokens", messages.count_tokens),
            web.post("/inference/v1/generate", generate.handle),
            web.post("/inference/v1/abort_requests", generate.abort),
            *misc.routes(),
            *control.routes(dev_mode=config.dev_mode, runtime_lora=config.runtime_lora, profiler=config.profiler),
        ]
        if config.dev_mode:
            found.append(web.get("/server_info", misc.server_info))
        found += [web.post(path, control.extra_control) for path in config.extra_control_paths]
        return found

    async def stop(self) -> None:
        """Close the port and every connection."""
        await self._close_port()
        await self.core.stop()
        await self.transfer.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _close_port(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def restart(self) -> None:
        """Stop, forget everything, and serve again on the same port."""
        await self.stop()
        self._forget()
        self.faults.replace([])
        await self.start()

    async def reset(self) -> None:
        """Forget everything as after a restart, without closing the port; faults and log go too."""
        self.core.abort_all()
        await self.core.stop()
        await self.transfer.close()
        self._forget()
        self.faults.replace([])
        self.log.clear()
        self.core.start()

    # -- death -------------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """End as SIGKILL ends a process: every connection is reset, nothing is answered."""
        if self.exit_on_death:
            os._exit(KILLED_EXIT_CODE)
        if self._server is not None:
            self._server.close()
            self._server = None
        for handler in self._connections():
            if handler.transport is not None:
                handler.transport.abort()
        self.core.dead = True
        spawn(self.core.stop(), name="sim-engine-died")

    def kill_engine(self) -> None:
        """Kill the engine process behind the API server, which then ends by itself."""
        self.core.kill()
        spawn(self._end_after_engine_death(), name="sim-engine-process-died")

    async def _end_after_engine_death(self) -> None:
        await asyncio.sleep(ENGINE_DEATH_SECONDS)
        self.die()

    # -- requests ----------------------------------------------------------------------------------------------------

    @web.middleware
    async def _middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path.startswith(admin.PREFIX):
            return await handler(request)
        self.requests_total += 1
        entry = await self._record(request)
        try:
            response = await self._serve(request, handler)
        except asyncio.CancelledError:
            self.disconnects += 1
            raise
        entry.status = response.status
        if self.config.request_id_headers and not response.prepared:
            given = request.headers.get("X-Request-Id")
            if given is not None:
                response.headers["X-Request-Id"] = given
        return response

    async def _record(self, request: web.Request) -> Entry:
        is_control = request.path in _CONTROL_PATHS or request.path in self.config.extra_control_paths
        body = await request.read() if is_control or request.content_type == "application/json" else b""
        return self.log.add(
            control=is_control,
            method=request.method,
            path=request.path,
            query=request.query_string,
            headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers],
            body=body,
            connection=id(request.transport),
        )

    async def _serve(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        fault = self.faults.strike(request.method, request.path)
        if fault is None:
            return await self._handle(request, handler)
        if fault.when == "before" and not fault.mid_body:
            early = await self._strike(request, fault)
            return early if early is not None else await self._handle(request, handler)
        if fault.mid_body:
            request[STREAM_FAULT] = fault
        response = await self._handle(request, handler)
        if fault.mid_body:
            if isinstance(response, web.Response) and fault.after_bytes is not None:
                return partial_reply(request, response, fault)
            return response
        late = await self._strike(request, fault)
        return late if late is not None else response

    async def _strike(self, request: web.Request, fault: Fault) -> web.StreamResponse | None:
        """Carry out a fault that strikes a whole request; None means that the request goes on."""
        action = fault.action
        if action == "delay":
            await asyncio.sleep(fault.seconds or 0.0)
            return None
        if action == "hang":
            await hang(fault)
            return dead_reply(request)
        if action in ("cut", "reset"):
            return dead_reply(request, rst=action == "reset")
        if action == "garbage":
            if request.transport is not None:
                request.transport.write(GARBAGE)
            return dead_reply(request)
        if action == "die":
            self.die()
            return dead_reply(request)
        if action == "engine_dead":
            self.kill_engine()
            return None
        if action == "success_false":
            return json_reply({"success": False})
        if fault.when == "before":
            self.counts.answered(request, fault.status)
        return _status_reply(fault)

    async def _handle(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        key = self.config.api_key
        if key is not None and request.path.startswith(GUARDED) and request.method != "OPTIONS":
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), key.encode()):
                return json_reply({"error": "Unauthorized"}, 401)
        try:
            with self.counts.operation(request.path):
                response = await handler(request)
        except WireError as error:
            response = error_reply(error)
        except web.HTTPException as error:
            response = json_reply({"detail": error.reason}, error.status)
        except ConnectionResetError:
            # The client went away while its answer was written; there is nobody to answer.
            self.disconnects += 1
            return dead_reply(request)
        self.counts.answered(request, response.status)
        return response

    # -- what a test asks --------------------------------------------------------------------------------------------

    @property
    def open_connections(self) -> int:
        """Connections that are open now."""
        return len(self._connections())

    def _connections(self) -> list[web.RequestHandler]:
        server = self._runner.server if self._runner is not None else None
        return server.connections if server is not None else []

    def state(self) -> dict[str, Any]:
        """Return everything a test may want to know."""
        core, transfer = self.core, self.transfer
        group = transfer.group
        return {
            "version": core.version,
            "weights": core.weights,
            "paused": core.paused != "no",
            "pause_mode": core.pause_mode,
            "rejecting": core.rejecting,
            "sleeping": self.sleep_level > 0,
            "dead": core.dead,
            "running": len(core.running),
            "waiting": len(core.waiting),
            "peak_unfinished": core.counters.peak_unfinished,
            "prompt_tokens": core.counters.prompt_tokens,
            "generation_tokens": core.counters.generation_tokens,
            "finished": core.counters.finished,
            "aborted_by_client": core.counters.aborted_by_client,
            "disconnects": self.disconnects,
            "requests_total": self.requests_total,
            "connections_total": self.connections_total,
            "connections_open": self.open_connections,
            "adapters": self.adapters,
            "process_start_time_seconds": self.started_at,
            "transfer": {
                "active": transfer.active,
                "group": None if group is None else {"rank_offset": group.rank_offset, "world_size": group.world_size},
                "metadata": transfer.metadata,
                "records": transfer.records,
            },
        }


async def _strip_media_type(request: web.Request, response: web.StreamResponse) -> None:
    del request
    if isinstance(response, BareResponse):
        response.headers.pop("Content-Type", None)


def _status_reply(fault: Fault) -> web.Response:
    body = fault.body
    if body is None:
        body = error_payload(fault.status, "Injected fault", "InternalServerError")
    text = isinstance(body, str)
    response = web.Response(text=body, status=fault.status) if text else json_reply(body, fault.status)
    response.headers.update(fault.headers)
    return response


_CONTROL_PATHS = frozenset(route.path for route in control.routes(dev_mode=True, runtime_lora=True, profiler=True))
