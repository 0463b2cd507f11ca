"""A vLLM server's control routes in a few lines: enough of the wire to be paused, updated, killed and replaced.

Faithful where it matters (vllm-wire): order of the update calls, one session at a time, labels that are ``default``
after a restart, collectives that wait for each other, and engine-core routes that hang while one runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Seen:
    """One request as the engine got it."""

    method: str
    path: str
    query: str
    body: bytes | None
    headers: list[tuple[str, str]]
    at: float

    def json(self) -> Any:
        return json.loads(self.body or b"null")


@dataclass
class Fault:
    """What goes wrong with a path.

    kind: status, hang, drop (connection closed), lost (likewise, once it is done), slow, false (success:false), body
    """

    kind: str
    status: int = 500
    seconds: float = 0.0
    times: int = -1
    body: Any = None


@dataclass(eq=False)
class MockEngine:
    world_size: int = 1
    rl: bool = True
    metrics: bool = True
    lora: bool = True
    port: int = 0
    version: str = "default"
    weights: str = "base"
    paused: bool = False
    asleep: bool = False
    session: bool = False
    loaded: dict[str, str] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    health: int = 200
    start_time: float = field(default_factory=lambda: time.time() - 1000)
    pending: str | None = None
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    served: list[tuple[str, str]] = field(default_factory=list)
    close_each: bool = False
    _runner: web.AppRunner | None = None
    _release: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> MockEngine:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05, access_log=None, auto_decompress=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def kill(self) -> None:
        """The process dies: connections break, the port refuses."""
        if self._runner is None:
            return
        self._release.set()
        for protocol in list(self._runner.server.connections):
            if protocol.transport is not None:
                protocol.transport.abort()
        runner, self._runner = self._runner, None
        await runner.cleanup()
        self._release = asyncio.Event()

    async def restart(self, **changes: Any) -> None:
        """Killed and started again: base weights, no label, no session, another start time."""
        await self.kill()
        self.version, self.weights, self.paused, self.asleep, self.session = "default", "base", False, False, False
        self.loaded = {}
        self.counts.clear()
        self.pending = None
        self.start_time = time.time()
        for name, value in changes.items():
            setattr(self, name, value)
        await self.start()

    def fail(self, path: str, kind: str = "status", **what: Any) -> None:
        self.faults[path].append(Fault(kind, **what))

    def heal(self) -> None:
        self.faults.clear()
        self._release.set()
        self._release = asyncio.Event()

    def calls(self, path: str) -> list[Seen]:
        return [item for item in self.seen if item.path == path]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = "/" + request.match_info["path"]
        has_body = "Content-Length" in request.headers or "Transfer-Encoding" in request.headers
        body = await request.read() if has_body else None
        headers = [(k.decode(), v.decode()) for k, v in request.raw_headers]
        if path not in ("/health", "/metrics"):
            query = request.raw_path.partition("?")[2]
            self.seen.append(Seen(request.method, path, query, body, headers, time.monotonic()))
        faults = self.faults.get(path)
        lost = bool(faults) and faults[0].kind == "lost"
        answer = await self._faulty(path, request)
        if answer is None:
            answer = await self._route(request.method, path, request, body)
        if lost:
            assert request.transport is not None
            request.transport.abort()
        self.counts[path, f"{answer.status // 100}xx"] += 1
        if self.close_each:
            answer.force_close()
        return answer

    async def _faulty(self, path: str, request: web.Request) -> web.Response | None:
        faults = self.faults.get(path)
        if not faults:
            return None
        fault = faults[0]
        if fault.times > 0:
            fault.times -= 1
            if fault.times == 0:
                faults.pop(0)
        if fault.kind == "hang":
            await self._release.wait()
            return web.Response(status=500)
        if fault.kind == "lost":
            return None
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
            return None
        if fault.kind == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=500)
        if fault.kind == "false":
            return web.json_response({"success": False})
        if fault.kind == "body":
            return web.json_response(fault.body, status=fault.status)
        if path == "/update_weights" and fault.status >= 500:
            self.session = False
        return error(fault.status, "injected")

    async def _route(self, method: str, path: str, request: web.Request, body: bytes | None) -> web.StreamResponse:
        if path == "/health":
            return web.Response(status=self.health)
        if path == "/metrics":
            if not self.metrics:
                return error(404, "Not Found")
            counts = (
                ""
                if not self.asleep
                else (
                    'vllm:engine_sleep_state{sleep_state="awake"} 0.0\n'
                    'vllm:engine_sleep_state{sleep_state="weights_offloaded"} 1.0\n'
                )
            )
            counts += "".join(
                f'http_requests_total{{handler="{path}",method="POST",status="{status}"}} {count}.0\n'
                for (path, status), count in self.counts.items()
            )
            return web.Response(text=f"# x\nprocess_start_time_seconds {self.start_time}\n{counts}")
        if path.startswith("/v1/completions"):
            self.served.append((self.version, self.weights))
            return web.json_response({"choices": [{"text": self.weights}]})
        if path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in ["base", *self.loaded]]})
        if self.lora and path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            data = json.loads(body or b"{}")
            if data["lora_name"] in self.loaded and not data.get("load_inplace"):
                return error(400, f"The lora adapter '{data['lora_name']}' has already been loaded.")
            self.loaded[data["lora_name"]] = data.get("lora_path", "")
            return web.Response(text=f"Success: LoRA adapter '{data['lora_name']}' added successfully.")
        if self.lora and path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            data = json.loads(body or b"{}")
            if self.loaded.pop(data["lora_name"], None) is None:
                return error(404, f"The lora adapter '{data['lora_name']}' cannot be found.")
            return web.Response(text=f"Success: LoRA adapter '{data['lora_name']}' removed successfully.")
        if not self.rl:
            return error(404, "Not Found")
        return await self._rl(method, path, request, json.loads(body) if body else None)

    async def _rl(self, method: str, path: str, request: web.Request, data: Any) -> web.StreamResponse:
        key = f"{method} {path}"
        if key == "POST /pause":
            if request.query.get("mode", "abort") not in ("abort", "wait", "keep"):
                return error(400, "1 validation error: mode")
            self.paused = True
            return web.json_response({"status": "paused"})
        if key == "POST /resume":
            self.paused = False
            return web.json_response({"status": "resumed"})
        if key == "GET /is_paused":
            return web.json_response({"is_paused": self.paused})
        if key == "GET /is_sleeping":
            return web.json_response({"is_sleeping": self.asleep or self.paused})
        if key == "GET /weight_info":
            return web.json_response({"weight_version": self.version})
        if key == "GET /get_world_size":
            return web.json_response({"world_size": self.world_size})
        if key == "POST /init_weight_transfer_engine":
            return web.json_response({"message": "Weight transfer initialized"})
        if key == "POST /shutdown_weight_transfer_engine":
            return web.json_response({"message": "Weight transfer shut down"})
        if key in ("POST /start_weight_update", "POST /start_draft_weight_update"):
            if self.session:
                return error(500, "start_weight_update called while a weight update is already active.")
            self.session = True
            return web.json_response({"message": "Weight update started"})
        if key == "POST /update_weights":
            if isinstance(data, dict) and "update_info" in data:
                if not self.session:
                    return error(500, "start_weight_update must be called before update_weights.")
                self.pending = json.dumps(data["update_info"], sort_keys=True)
            else:
                self.weights = json.dumps(data, sort_keys=True)
            return web.json_response({"message": "Weights updated"})
        if key == "POST /finish_weight_update":
            if not self.session:
                return error(500, "finish_weight_update called without a matching start_weight_update.")
            self.session = False
            if self.pending is not None:
                self.weights, self.pending = self.pending, None
            if isinstance(data, dict) and data.get("weight_version"):
                self.version = data["weight_version"]
            return web.json_response({"message": "Weight update finished"})
        if key == "POST /update_weight_version":
            self.version = data["new_version"]
            return web.json_response({"success": True, "new_version": self.version})
        if key == "POST /weight_checker":
            digest = hashlib.sha256(self.weights.encode()).hexdigest()
            return web.json_response({"checksums": {"dp0:pp0:pcp0:tp0:w": digest}})
        if key == "POST /abort_requests":
            if not isinstance(data, dict):
                return error(400, "Request body must be a JSON object")
            ids = data.get("request_ids") or ["a", "b"]
            return web.json_response({"status": "aborted", "aborted": len(ids)})
        if key == "POST /collective_rpc":
            return web.json_response({"results": [f"{self.port}"] * self.world_size})
        if key == "POST /sleep":
            self.asleep = True
            return web.json_response({"status": "sleeping", "level": 1})
        if key == "POST /wake_up":
            self.asleep = False
            return web.json_response({"status": "awake", "tags": None})
        if path == "/reset_prefix_cache":
            return web.json_response({"success": True})
        if path in ("/reset_mm_cache", "/reset_encoder_cache"):
            return web.Response()
        if path.startswith(("/areal_", "/skyrl/", "/init_broadcaster")):
            return web.json_response({"status": "ok"})
        return error(404, "Not Found")


def error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "InternalServerError", "param": None, "code": status}}
    return web.json_response(body, status=status)
