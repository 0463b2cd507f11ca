"""The control routes of vLLM's development mode: pause, versions, weight transfer, sleep, caches, adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from engine_launcher.sim import adapters, model, parsing
from engine_launcher.sim.errors import (
    CallFailedError,
    HttpError,
    ValidationError,
    WorkerFailedError,
    missing,
    summary,
)
from engine_launcher.sim.replies import BareResponse, json_reply
from engine_launcher.sim.scheduler import PAUSE_MODES, PauseMode
from engine_launcher.sim.serving import engine_of

if TYPE_CHECKING:
    from engine_launcher.sim.config import SimConfig
    from engine_launcher.sim.server import SimEngine

_PAUSE_CHOICES = "'abort', 'wait' or 'keep'"
WEIGHT_CHECKER_ACTIONS = ("checksum", "reset", "compare")


def _literal_error(location: str, given: Any, expected: str) -> ValidationError:
    return ValidationError(
        {
            "type": "literal_error",
            "loc": location,
            "msg": f"Input should be {expected}",
            "input": given,
            "ctx": {"expected": expected},
        }
    )


def _pause_mode(request: web.Request) -> PauseMode:
    given = request.query.get("mode", "abort")
    for mode in PAUSE_MODES:
        if mode == given:
            return mode
    raise _literal_error("query.mode", given, _PAUSE_CHOICES)


async def pause(request: web.Request) -> web.Response:
    """``POST /pause``."""
    mode = _pause_mode(request)
    core = engine_of(request).core
    await core.turn()
    await core.pause(mode)
    return json_reply({"status": "paused"})


async def resume(request: web.Request) -> web.Response:
    """``POST /resume``."""
    core = engine_of(request).core
    await core.turn()
    core.resume()
    return json_reply({"status": "resumed"})


async def is_paused(request: web.Request) -> web.Response:
    """``GET /is_paused``."""
    core = engine_of(request).core
    await core.turn()
    return json_reply({"is_paused": core.paused != "no"})


async def abort_requests(request: web.Request) -> web.Response:
    """``POST /abort_requests``."""
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise HttpError(400, "Invalid JSON format") from error
    if not isinstance(body, dict):
        raise HttpError(400, "Request body must be a JSON object")
    ids = body.get("request_ids")
    core = engine_of(request).core
    count = core.abort_ids([str(id_) for id_ in ids]) if ids else core.abort_all()
    return json_reply({"status": "aborted", "aborted": count})


async def _field(request: web.Request, name: str) -> Any:
    body = await parsing.optional_json(request)
    if not isinstance(body, dict) or name not in body:
        raise missing(name)
    return body[name]


async def init_weight_transfer(request: web.Request) -> web.Response:
    """``POST /init_weight_transfer_engine``."""
    info = await _field(request, "init_info")
    if not isinstance(info, dict):
        raise ValidationError(
            {
                "type": "dict_type",
                "loc": "body.init_info",
                "msg": "Input should be a valid dictionary",
                "input": summary(info),
            }
        )
    engine = engine_of(request)
    await engine.core.collective(lambda: engine.transfer.init(info))
    return json_reply({"message": "Weight transfer initialized"})


async def shutdown_weight_transfer(request: web.Request) -> web.Response:
    """``POST /shutdown_weight_transfer_engine``."""
    engine = engine_of(request)
    await engine.core.collective(engine.transfer.shutdown)
    return json_reply({"message": "Weight transfer shut down"})


async def start_weight_update(request: web.Request) -> web.Response:
    """``POST /start_weight_update``."""
    engine = engine_of(request)
    await engine.core.turn()
    engine.transfer.start()
    return json_reply({"message": "Weight update started"})


async def start_draft_weight_update(request: web.Request) -> web.Response:
    """``POST /start_draft_weight_update``."""
    engine = engine_of(request)
    await engine.core.turn()
    engine.transfer.start(draft=True)
    return json_reply({"message": "Draft weight update started"})


async def update_weights(request: web.Request) -> web.Response:
    """``POST /update_weights``."""
    info = await _field(request, "update_info")
    if not isinstance(info, dict) and not (isinstance(info, list) and all(isinstance(item, dict) for item in info)):
        raise ValidationError(
            {
                "type": "dict_type",
                "loc": "body.update_info",
                "msg": "Input should be a valid dictionary",
                "input": info,
            },
            {
                "type": "list_type",
                "loc": "body.update_info",
                "msg": "Input should be a valid list",
                "input": summary(info),
            },
        )
    engine = engine_of(request)

    async def receive() -> None:
        engine.core.weights = await engine.transfer.update(info, engine.core.weights)

    await engine.core.collective(receive)
    return json_reply({"message": "Weights updated"})


async def finish_weight_update(request: web.Request) -> web.Response:
    """``POST /finish_weight_update``."""
    body = await parsing.optional_json(request)
    version = body.get("weight_version") if isinstance(body, dict) else None
    if version is not None and not isinstance(version, str):
        raise _not_a_string("weight_version", version)
    engine = engine_of(request)
    await engine.core.turn()
    engine.transfer.finish()
    if version is not None:
        engine.core.version = version
    return json_reply({"message": "Weight update finished"})


def _not_a_string(name: str, given: Any) -> ValidationError:
    return ValidationError(
        {"type": "string_type", "loc": f"body.{name}", "msg": "Input should be a valid string", "input": summary(given)}
    )


async def update_weight_version(request: web.Request) -> web.Response:
    """``POST /update_weight_version``."""
    version = await _field(request, "new_version")
    if not isinstance(version, str):
        raise _not_a_string("new_version", version)
    core = engine_of(request).core
    await core.turn()
    core.version = version
    return json_reply({"success": True, "new_version": version})


async def weight_info(request: web.Request) -> web.Response:
    """``GET /weight_info``."""
    core = engine_of(request).core
    await core.turn()
    return json_reply({"weight_version": core.version})


def _worker_prefixes(config: SimConfig) -> list[str]:
    return [f"dp{dp}:pp0:pcp0:tp{tp}:" for dp in range(config.data_parallel_size) for tp in range(config.world_size)]


def _checksums(engine: SimEngine) -> dict[str, str]:
    found: dict[str, str] = {}
    for prefix in _worker_prefixes(engine.config):
        found.update(model.checksums(engine.core.weights, prefix))
    return found


async def weight_checker(request: web.Request) -> web.Response:
    """``POST /weight_checker``."""
    action = await _field(request, "action")
    if action not in WEIGHT_CHECKER_ACTIONS:
        raise _literal_error("body.action", action, "'checksum', 'reset' or 'compare'")
    engine = engine_of(request)
    await engine.core.turn()
    if action == "reset":
        engine.core.weights = "zero"
        return json_reply({"status": "reset"})
    found = _checksums(engine)
    if action == "checksum":
        return json_reply({"checksums": found})
    body = await parsing.optional_json(request)
    baseline = body.get("baseline")
    if not isinstance(baseline, Mapping):
        raise HttpError(400, "action='compare' requires a 'baseline' object")
    mismatches = sorted(key for key in found.keys() | baseline.keys() if found.get(key) != baseline.get(key))
    return json_reply({"match": not mismatches, "mismatches": mismatches})


async def get_world_size(request: web.Request) -> web.Response:
    """``GET /get_world_size``."""
    config = engine_of(request).config
    include = request.query.get("include_dp", "true").lower() not in ("false", "0", "no", "off")
    return json_reply({"world_size": config.world_size * (config.data_parallel_size if include else 1)})


async def collective_rpc(request: web.Request) -> web.Response:
    """``POST /collective_rpc``: the few worker methods that a simulated worker has."""
    try:
        body = json.loads(await request.read())
    except json.JSONDecodeError as error:
        raise HttpError(400, f"JSON decode error: {error}") from error
    if not isinstance(body, dict):
        raise HttpError(400, "Request body must be a JSON object")
    method = body.get("method")
    if method is None:
        raise HttpError(400, "Missing 'method' in request body")
    engine = engine_of(request)
    await engine.core.turn()
    prefixes = _worker_prefixes(engine.config)
    results: list[Any] = [None] * len(prefixes)
    if method == "compute_weight_checksums":
        results = [model.checksums(engine.core.weights, prefix) for prefix in prefixes]
    elif method == "reset_weights":
        engine.core.weights = "zero"
    elif method != "check_health":
        raise WorkerFailedError(f"'Worker' object has no attribute '{method}'")
    return json_reply({"results": results})


async def sleep(request: web.Request) -> web.Response:
    """``POST /sleep``: pauses without rejecting, so that new requests wait for the wake-up."""
    given = request.query.get("level", "1")
    if given not in ("0", "1", "2"):
        bound = {"le": 2} if given.lstrip("-").isdigit() and int(given) > 2 else {"ge": 0}
        raise ValidationError(
            {
                "type": "less_than_equal" if "le" in bound else "greater_than_equal",
                "loc": "query.level",
                "msg": "Input should be less than or equal to 2"
                if "le" in bound
                else "Input should be greater than or equal to 0",
                "input": given,
                "ctx": bound,
            }
        )
    mode = _pause_mode(request)
    engine = engine_of(request)
    await engine.core.turn()
    await engine.core.pause(mode, reject=False)
    engine.sleep_level = int(given)
    return json_reply({"status": "sleeping", "level": int(given)})


async def wake_up(request: web.Request) -> web.Response:
    """``POST /wake_up``."""
    tags = request.query.getall("tags", [])
    engine = engine_of(request)
    await engine.core.turn()
    engine.sleep_level = 0
    engine.core.resume()
    return json_reply({"status": "awake", "tags": tags or None})


async def is_sleeping(request: web.Request) -> web.Response:
    """``GET /is_sleeping``: a paused scheduler counts as asleep, as in vLLM."""
    engine = engine_of(request)
    await engine.core.turn()
    return json_reply({"is_sleeping": engine.sleep_level > 0 or engine.core.paused != "no"})


async def release_kv_cache_memory(request: web.Request) -> web.Response:
    """``POST /release_kv_cache_memory``."""
    core = engine_of(request).core
    await core.turn()
    if core.paused == "no" or core.unfinished:
        raise CallFailedError("release_kv_cache_memory", "release_kv_cache_memory() requires a completed pause first")
    return json_reply({"status": "kv_cache_released"})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """``POST /reset_prefix_cache``: fails while running requests hold blocks."""
    core = engine_of(request).core
    await core.turn()
    forced = request.query.get("reset_running_requests", "false").lower() in ("true", "1", "yes", "on")
    return json_reply({"success": forced or not core.running})


async def plain_ok(request: web.Request) -> web.Response:
    """Answer 200 with nothing: the other cache resets and the profiler."""
    await engine_of(request).core.turn()
    return BareResponse(status=200)


async def extra_control(request: web.Request) -> web.Response:
    """Serve a framework's own control path: ``sim_weights``, ``path`` or ``weight_dir`` in the body set the weights."""
    body = await parsing.optional_json(request)
    if isinstance(body, dict):
        engine = engine_of(request)
        for key in ("sim_weights", "path", "weight_dir"):
            if isinstance(body.get(key), str):
                engine.core.weights = body[key]
                break
    return json_reply({"success": True, "message": "ok"})


def routes(*, dev_mode: bool, runtime_lora: bool, profiler: bool) -> list[web.RouteDef]:
    """Return the control routes that a server with these settings has."""
    found: list[web.RouteDef] = []
    if dev_mode:
        found += [
            web.post("/pause", pause),
            web.post("/resume", resume),
            web.get("/is_paused", is_paused),
            web.post("/abort_requests", abort_requests),
            web.post("/init_weight_transfer_engine", init_weight_transfer),
            web.post("/shutdown_weight_transfer_engine", shutdown_weight_transfer),
            web.post("/start_weight_update", start_weight_update),
            web.post("/start_draft_weight_update", start_draft_weight_update),
            web.post("/update_weights", update_weights),
            web.post("/finish_weight_update", finish_weight_update),
            web.post("/update_weight_version", update_weight_version),
            web.get("/weight_info", weight_info),
            web.post("/weight_checker", weight_checker),
            web.get("/get_world_size", get_world_size),
            web.post("/collective_rpc", collective_rpc),
            web.post("/sleep", sleep),
            web.post("/wake_up", wake_up),
            web.get("/is_sleeping", is_sleeping),
            web.post("/release_kv_cache_memory", release_kv_cache_memory),
            web.post("/reset_prefix_cache", reset_prefix_cache),
            web.post("/reset_mm_cache", plain_ok),
            web.post("/reset_encoder_cache", plain_ok),
        ]
    if runtime_lora:
        found += [
            web.post("/v1/load_lora_adapter", adapters.load),
            web.post("/v1/unload_lora_adapter", adapters.unload),
        ]
    if profiler:
        found += [web.post("/start_profile", plain_ok), web.post("/stop_profile", plain_ok)]
    return found
