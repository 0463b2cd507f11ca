"""Engines as prime-rl, SkyRL and AReaL start them: vLLM with routes of their own, here on the simulated engine.

What each route takes, answers and does is read from ``src/prime_rl/inference/vllm/server.py``,
``skyrl/backends/skyrl_train/inference_servers/vllm_server_actor.py`` (with ``new_inference_worker_wrap.py``) and
``areal/engine/vllm_ext/areal_vllm_server.py``. "Weights" are a label, as everywhere on the simulated engine.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from engine_launcher.sim import adapters, completions, control, parsing
from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.errors import CallFailedError
from engine_launcher.sim.replies import json_reply
from engine_launcher.sim.server import SimEngine
from engine_launcher.sim.serving import engine_of


class FrameworkEngine(SimEngine):
    """A simulated engine whose own routes come before vLLM's of the same path."""

    own: tuple[str, ...] = ()

    def __init__(self, config: SimConfig | None = None) -> None:
        super().__init__(config)
        self.broadcaster: dict[str, Any] | None = None
        self.meta: dict[str, Any] | None = None
        self.updates: list[str] = []

    def _forget(self) -> None:
        super()._forget()
        self.broadcaster = self.meta = None

    def _routes(self) -> list[web.RouteDef]:
        return [*self.framework_routes(), *super()._routes()]

    def framework_routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    def take(self, weights: str) -> None:
        """New weights have arrived."""
        self.core.weights = weights
        self.updates.append(weights)


async def _load_in_place(request: web.Request) -> web.Response:
    body = await parsing.json_body(request)
    engine_of(request).adapters[body["lora_name"]] = body["lora_path"]
    return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")


class PrimeEngine(FrameworkEngine):
    """prime-rl's server."""

    def framework_routes(self) -> list[web.RouteDef]:
        return [
            web.post("/update_weights", self._update),
            web.post("/init_broadcaster", self._init),
            web.post("/load_lora_adapter", _load_in_place),
            web.get("/liveness", self._liveness),
        ]

    async def _update(self, request: web.Request) -> web.Response:
        body = await parsing.json_body(request)
        if self.broadcaster is None:
            raise CallFailedError("collective_rpc", "the broadcaster was not initialised")
        await asyncio.sleep(0)
        self.take(str(body["weight_dir"]))
        return json_reply({"status": "ok"})

    async def _init(self, request: web.Request) -> web.Response:
        self.broadcaster = await parsing.json_body(request)
        return json_reply({"status": "ok"})

    async def _liveness(self, _: web.Request) -> web.Response:
        return json_reply({"status": "ok"})


class SkyEngine(FrameworkEngine):
    """SkyRL's server: weights come through worker methods."""

    started = False
    sent: dict[str, Any] | None = None

    def framework_routes(self) -> list[web.RouteDef]:
        return [
            web.post("/collective_rpc", self._rpc),
            web.post("/skyrl/v1/load_lora_adapter", _load_in_place),
            web.post("/skyrl/v1/generate", completions.handle),
            web.post("/fetch_weights", self._fetch),
        ]

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await parsing.json_body(request)
        method, kwargs = body["method"], body.get("kwargs", {})
        if method == "skyrl_start_weight_update":
            self.started, self.sent = True, None
        elif method in ("update_weights_nccl", "update_weights_ipc"):
            if not self.started:
                raise CallFailedError("collective_rpc", "no update was started")
            self.sent = kwargs["update_info"]
        elif method == "skyrl_finish_weight_update":
            assert self.sent is not None
            self.started = False
            self.take(",".join(self.sent["names"]))
        elif method not in ("skyrl_sleep_for_weight_sync", "skyrl_wake_for_weight_sync"):
            return await control.collective_rpc(request)
        return json_reply({"results": [None] * self.config.world_size})

    async def _fetch(self, request: web.Request) -> web.Response:
        body = await parsing.json_body(request)
        return json_reply({"results": [{"version": body["target_version"]}]})


class ArealEngine(FrameworkEngine):
    """AReaL's server: it holds completions itself while paused, and aborts what runs."""

    def __init__(self, config: SimConfig | None = None) -> None:
        super().__init__(config)
        self.open = asyncio.Event()
        self.open.set()

    def framework_routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self._completions),
            web.post("/areal_pause_generation", self._pause),
            web.post("/areal_continue_generation", self._continue),
            web.post("/areal_update_weights", self._from_disk),
            web.post("/areal_init_weights_update_group", self._init),
            web.post("/areal_set_update_weight_meta", self._set_meta),
            web.post("/areal_update_weights_xccl", self._receive),
            web.post("/v1/load_lora_adapter", adapters.load),
        ]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        await self.open.wait()
        return await completions.handle(request)

    async def _pause(self, _: web.Request) -> web.Response:
        self.open.clear()
        await self.core.pause("abort")
        return _done("Generation paused and all requests aborted")

    async def _continue(self, _: web.Request) -> web.Response:
        self.core.resume()
        self.open.set()
        return _done("Generation continued")

    async def _from_disk(self, request: web.Request) -> web.Response:
        body = await parsing.json_body(request)
        await self.core.pause("abort")
        self.take(body["model_path"])
        self.core.resume()
        return _done("TP rank: 0 success\n")

    async def _init(self, request: web.Request) -> web.Response:
        self.broadcaster = await parsing.json_body(request)
        return _done("TP rank: 0 success\n")

    async def _set_meta(self, request: web.Request) -> web.Response:
        self.meta = await parsing.json_body(request)
        return _done("TP rank: 0 success\n")

    async def _receive(self, _: web.Request) -> web.Response:
        if self.broadcaster is None or self.meta is None:
            return json_reply({"success": False, "message": "TP rank: 0 failed. reason: no group or no metadata"}, 400)
        await self.core.pause("abort")
        self.take(",".join(self.meta["names"]))
        self.meta = None
        self.core.resume()
        return _done("TP rank: 0 success\n")


def _done(message: str) -> web.Response:
    return json_reply({"success": True, "message": message})
