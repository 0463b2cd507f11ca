"""An engine that a stranger would write from vLLM's documents: small, scriptable, records what it gets.

It shares nothing with the simulated engine, so a misunderstanding in one is not hidden by the other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

Handler = Callable[["Engine", web.Request], Awaitable[web.StreamResponse]]

PAUSED = {
    "error": {
        "message": "Generation is paused. Please retry after it resumes.",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}
BUSY = {
    "error": {
        "message": "The engine is currently busy and cannot accept new requests. "
        "Please try again later or on a different instance.",
        "type": "Service Unavailable",
        "param": None,
        "code": 503,
    }
}
CONTROL = {
    "/resume": {"status": "resumed"},
    "/sleep": {"status": "sleeping", "level": 1},
    "/wake_up": {"status": "awake", "tags": None},
    "/reset_prefix_cache": {"success": True},
    "/init_weight_transfer_engine": {"message": "Weight transfer initialized"},
    "/shutdown_weight_transfer_engine": {"message": "Weight transfer shut down"},
    "/start_weight_update": {"message": "Weight update started"},
    "/start_draft_weight_update": {"message": "Draft weight update started"},
    "/update_weights": {"message": "Weights updated"},
    "/release_kv_cache_memory": {"status": "kv_cache_released"},
}


@dataclass
class Seen:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class Engine:
    name: str
    world_size: int = 1
    version: str = "default"
    paused: bool = False
    reject_when_paused: bool = True
    rl: bool = True
    tokens: int = 3
    token_delay: float = 0.0
    health: int = 200
    checksums: dict[str, str] | None = None
    """What /weight_checker answers; None: the route does not exist, so that nothing is known but the label."""
    seen: list[Seen] = field(default_factory=list)
    overrides: dict[str, Handler] = field(default_factory=dict)
    delays: dict[str, float] = field(default_factory=dict)
    running: int = 0
    most_running: int = 0
    gone: int = 0
    port: int = 0
    keepalive: float = 5.0
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> Engine:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._any)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, keepalive_timeout=self.keepalive, shutdown_timeout=0.05
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=2048)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self, version: str = "default") -> None:
        await self.stop()
        self.version = version
        self.paused = False
        await self.start()

    def calls(self, path: str) -> list[Seen]:
        return [item for item in self.seen if item.path.partition("?")[0] == path]

    async def _any(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = [(key.decode(), value.decode()) for key, value in request.raw_headers]
        path = request.path
        self.seen.append(Seen(request.method, request.raw_path, headers, body))
        if path in self.delays:
            await asyncio.sleep(self.delays[path])
        if path in self.overrides:
            return await self.overrides[path](self, request)
        if path == "/health":
            return web.Response(status=self.health)
        if path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "m", "owner": self.name}]})
        if path in (
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/messages",
            "/v1/responses",
            "/inference/v1/generate",
        ):
            return await self._generate(request, body)
        if not self.rl:
            return web.json_response({"detail": "Not Found"}, status=404)
        return self._control(request, path, body)

    def _control(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        if path == "/pause":
            if request.query.get("mode", "abort") not in ("abort", "wait", "keep"):
                error = {
                    "message": "1 validation error: mode",
                    "type": "Bad Request",
                    "param": "query.mode",
                    "code": 400,
                }
                return web.json_response({"error": error}, status=400)
            self.paused = True
            return web.json_response({"status": "paused"})
        if path == "/resume":
            self.paused = False
        if path == "/is_paused":
            return web.json_response({"is_paused": self.paused})
        if path == "/is_sleeping":
            return web.json_response({"is_sleeping": False})
        if path == "/weight_info":
            return web.json_response({"weight_version": self.version})
        if path == "/get_world_size":
            return web.json_response({"world_size": self.world_size})
        if path == "/finish_weight_update":
            if body:
                self.version = json.loads(body).get("weight_version") or self.version
            return web.json_response({"message": "Weight update finished"})
        if path == "/update_weight_version":
            self.version = json.loads(body)["new_version"]
            return web.json_response({"success": True, "new_version": self.version})
        if path == "/weight_checker" and self.checksums is not None:
            return web.json_response({"checksums": self.checksums})
        if path == "/abort_requests":
            ids = json.loads(body).get("request_ids")
            return web.json_response({"status": "aborted", "aborted": len(ids) if ids else self.running})
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return web.Response(text="Success: LoRA adapter 'a' added successfully.")
        if path == "/collective_rpc":
            return web.json_response({"results": [self.name]})
        if path in CONTROL:
            return web.json_response(CONTROL[path])
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _generate(self, request: web.Request, body: bytes) -> web.StreamResponse:
        wanted = json.loads(body) if body else {}
        stream = bool(wanted.get("stream"))
        if self.paused and self.reject_when_paused:
            return await self._reject(request, PAUSED, stream=stream)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if not stream:
                await asyncio.sleep(self.token_delay * self.tokens)
                return web.json_response({"engine": self.name, "version": self.version, "echo": wanted})
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            for index in range(self.tokens):
                await asyncio.sleep(self.token_delay)
                await response.write(b'data: {"id":"x","n":%d,"engine":"%b"}\n\n' % (index, self.name.encode()))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionResetError):
            self.gone += 1
            raise
        else:
            return response
        finally:
            self.running -= 1

    async def _reject(self, request: web.Request, error: object, *, stream: bool) -> web.StreamResponse:
        if not stream:
            return web.json_response(error, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if request.path == "/v1/responses":
            assert request.transport is not None
            request.transport.abort()
            return response
        if request.path == "/v1/messages":
            inner = {"type": "overloaded_error", "message": "Generation is paused. Please retry after it resumes."}
            await response.write(
                b"event: error\ndata: " + json.dumps({"type": "error", "error": inner}).encode() + b"\n\n"
            )
        else:
            await response.write(b"data: " + json.dumps(error).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
