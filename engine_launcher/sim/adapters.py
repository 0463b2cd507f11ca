"""Loading and unloading LoRA adapters: weights of their own, derived from the base weights and the adapter's path."""

from __future__ import annotations

from aiohttp import web

from engine_launcher.sim import parsing
from engine_launcher.sim.errors import WireError, missing
from engine_launcher.sim.replies import BareResponse, error_reply
from engine_launcher.sim.serving import engine_of


async def _adapter_body(request: web.Request) -> parsing.Body:
    body = await parsing.json_body(request)
    if "lora_name" not in body:
        raise missing("lora_name", body)
    return body


async def load(request: web.Request) -> web.Response:
    """``POST /v1/load_lora_adapter``: plain text, unlike every other answer."""
    body = await _adapter_body(request)
    if "lora_path" not in body:
        raise missing("lora_path", body)
    name, path = body["lora_name"], body["lora_path"]
    engine = engine_of(request)
    if not name or not path:
        return error_reply(WireError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput"))
    if name == engine.config.model_name:
        return error_reply(
            WireError(400, f"The lora adapter '{name}' conflicts with a served base model.", "InvalidUserInput")
        )
    if name in engine.adapters and not body.get("load_inplace"):
        return error_reply(
            WireError(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                "InvalidUserInput",
            )
        )
    engine.adapters[name] = path
    return BareResponse(body=f"Success: LoRA adapter '{name}' added successfully.".encode())


async def unload(request: web.Request) -> web.Response:
    """``POST /v1/unload_lora_adapter``."""
    body = await _adapter_body(request)
    name = body["lora_name"]
    engine = engine_of(request)
    if not name:
        return error_reply(
            WireError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput")
        )
    if name not in engine.adapters:
        return error_reply(WireError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError"))
    del engine.adapters[name]
    return BareResponse(body=f"Success: LoRA adapter '{name}' removed successfully.".encode())
