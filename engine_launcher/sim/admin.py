"""The admin path ``/sim/...``: what a test reads and sets on a running engine. vLLM has nothing under that path.

``POST /sim/faults`` a JSON list of rules replaces those in force; ``GET`` lists them ·
``POST /sim/speed {"tokens_per_second", "step_overhead_seconds"}`` ·
``GET /sim/log`` the control calls, ``?all=1`` with data-plane requests, ``?path=`` of one path; ``DELETE`` forgets ·
``GET /sim/state`` · ``POST /sim/reset`` as after a restart, the port stays ·
``POST /sim/version {"version", "weights"}`` · ``POST /sim/die`` · ``POST /sim/kill_engine``.
"""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from engine_launcher.sim.faults import parse_fault
from engine_launcher.sim.replies import json_reply
from engine_launcher.sim.serving import engine_of

PREFIX = "/sim/"


async def _body(request: web.Request) -> Any:
    raw = await request.read()
    try:
        return orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise web.HTTPBadRequest(text=f"the body is not JSON: {error}") from error


async def set_faults(request: web.Request) -> web.Response:
    """Replace the rules in force."""
    raw = await _body(request)
    try:
        rules = [parse_fault(item) for item in (raw if isinstance(raw, list) else [raw] if raw else [])]
    except (ValueError, TypeError) as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    engine_of(request).faults.replace(rules)
    return json_reply({"faults": len(rules)})


async def get_faults(request: web.Request) -> web.Response:
    """List the rules in force, with how often each still strikes."""
    rules = engine_of(request).faults.rules
    return json_reply(
        [
            {"path": r.path, "action": r.action, "times": r.times, "probability": r.probability, "when": r.when}
            for r in rules
        ]
    )


async def set_speed(request: web.Request) -> web.Response:
    """Change how fast tokens come."""
    body = await _body(request)
    speed = engine_of(request).core.speed
    speed.tokens_per_second = float(body.get("tokens_per_second", speed.tokens_per_second))
    speed.step_overhead_seconds = float(body.get("step_overhead_seconds", speed.step_overhead_seconds))
    return json_reply(
        {"tokens_per_second": speed.tokens_per_second, "step_overhead_seconds": speed.step_overhead_seconds}
    )


async def get_log(request: web.Request) -> web.Response:
    """Return the recorded calls, oldest first."""
    log = engine_of(request).log
    entries = log.entries(all_paths=request.query.get("all") == "1", path=request.query.get("path"))
    return json_reply(entries)


async def clear_log(request: web.Request) -> web.Response:
    """Forget the recorded calls."""
    engine_of(request).log.clear()
    return json_reply({})


async def get_state(request: web.Request) -> web.Response:
    """Return everything a test may want to know about the engine."""
    return json_reply(engine_of(request).state())


async def reset(request: web.Request) -> web.Response:
    """Become as after a restart: base weights, label ``default``, no group, new start time; faults and log go too."""
    await engine_of(request).reset()
    return json_reply(engine_of(request).state())


async def set_version(request: web.Request) -> web.Response:
    """Set the label, and the weights if given."""
    body = await _body(request)
    core = engine_of(request).core
    core.version = str(body.get("version", core.version))
    core.weights = str(body.get("weights", core.weights))
    return json_reply({"version": core.version, "weights": core.weights})


async def die(request: web.Request) -> web.Response:
    """End the server as SIGKILL would; this call is not answered."""
    engine_of(request).die()
    return web.Response()


async def kill_engine(request: web.Request) -> web.Response:
    """Kill the engine process behind the API server."""
    engine_of(request).kill_engine()
    return json_reply({})


def routes() -> list[web.RouteDef]:
    """Return the admin routes."""
    return [
        web.post(PREFIX + "faults", set_faults),
        web.get(PREFIX + "faults", get_faults),
        web.post(PREFIX + "speed", set_speed),
        web.get(PREFIX + "log", get_log),
        web.delete(PREFIX + "log", clear_log),
        web.get(PREFIX + "state", get_state),
        web.post(PREFIX + "reset", reset),
        web.post(PREFIX + "version", set_version),
        web.post(PREFIX + "die", die),
        web.post(PREFIX + "kill_engine", kill_engine),
    ]
