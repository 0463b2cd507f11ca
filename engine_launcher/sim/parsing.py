"""Reading request bodies, with vLLM's errors for what does not parse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from aiohttp import web

from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.errors import BadRequestError, ValidationError, WireError, summary
from engine_launcher.sim.sequences import Sampling

Body = dict[str, Any]
GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy sampling in vLLM."""


async def json_body(request: web.Request) -> Body:
    """Return the JSON object in the body of a data-plane request.

    Raises:
        ValidationError: not declared as JSON, not JSON, or not an object.

    """
    media_type = request.headers.get("Content-Type", "").lower().partition(";")[0].strip()
    if media_type != "application/json":
        raise WireError(
            400,
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            "Bad Request",
        )
    raw = await request.read()
    if not raw:
        raise ValidationError({"type": "missing", "loc": "body", "msg": "Field required", "input": summary(None)})
    body = _loads(raw)
    if not isinstance(body, dict):
        problem = {
            "type": "model_attributes_type",
            "loc": "body",
            "msg": "Input should be a valid dictionary or object to extract fields from",
            "input": summary(body),
        }
        raise ValidationError(problem)
    return body


async def optional_json(request: web.Request) -> Any:
    """Return the body as JSON, or None when there is none."""
    raw = await request.read()
    return _loads(raw) if raw else None


def _loads(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _explain(raw)


def _explain(raw: bytes) -> Any:
    # vLLM's texts about broken JSON are those of the standard library's parser.
    try:
        return json.loads(raw)
    except ValueError as error:
        place = error.pos if isinstance(error, json.JSONDecodeError) else 0
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        problem = {
            "type": "json_invalid",
            "loc": f"body.{place}",
            "msg": "JSON decode error",
            "input": summary({}),
            "ctx": {"error": reason},
        }
        raise ValidationError(problem) from error


def integer(body: Mapping[str, Any], name: str, default: int | None, *, at_least: int | None = None) -> int | None:
    """Return an integer field.

    Raises:
        ValidationError: the value is not an integer.
        BadRequestError: the value is too small.

    """
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        problem = {
            "type": "int_parsing" if isinstance(value, str) else "int_type",
            "loc": f"body.{name}",
            "msg": "Input should be a valid integer, unable to parse string as an integer"
            if isinstance(value, str)
            else "Input should be a valid integer",
            "input": value,
        }
        raise ValidationError(problem)
    if at_least is not None and value < at_least:
        raise BadRequestError(
            f"{name} must be at least {at_least}, got {value}. (parameter={name}, value={value})", name
        )
    return value


def flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a boolean field."""
    value = body.get(name)
    return default if value is None else bool(value)


def stop_strings(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``stop`` as strings: it may be one, or a list."""
    raw = body.get("stop")
    if raw is None:
        return ()
    if isinstance(raw, str):
        return (raw,) if raw else ()
    return tuple(str(item) for item in raw if item)


def sampling(
    body: Mapping[str, Any],
    config: SimConfig,
    *,
    prompt_tokens: int,
    default_max_tokens: int | None,
    candidates: int = 0,
    max_tokens_fields: Sequence[str] = ("max_tokens",),
) -> Sampling:
    """Return the sampling parameters of a request.

    Args:
        body: the request, or its ``sampling_params``.
        config: of the engine; its model length bounds the answer.
        prompt_tokens: of the longest prompt.
        default_max_tokens: of a request that says nothing; None is "as long as the model allows".
        candidates: candidates to report at each token.
        max_tokens_fields: fields that hold the limit, the first that is set wins.

    Raises:
        WireError: a value is wrong, or the prompt leaves no room for an answer.

    """
    room = config.max_model_len - prompt_tokens
    wanted = default_max_tokens
    for name in max_tokens_fields:
        if body.get(name) is not None:
            wanted = integer(body, name, None, at_least=1)
            break
    if room < 1:
        raise BadRequestError(
            f"This model's maximum context length is {config.max_model_len} tokens. However, your prompt contains at "
            f"least {config.max_model_len + 1} input tokens, which exceeds this limit even without any output tokens. "
            f"Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={config.max_model_len + 1})",
            "input_tokens",
        )
    stop_ids = body.get("stop_token_ids") or ()
    n = integer(body, "n", 1) or 0
    if n < 1:
        raise BadRequestError(f"n must be at least 1, got {n}.")
    temperature = body.get("temperature")
    if n > 1 and temperature is not None and float(temperature) < GREEDY_BELOW:
        raise BadRequestError(f"n must be 1 when using greedy sampling, got {n}.")
    return Sampling(
        max_tokens=min(room, wanted) if wanted is not None else room,
        n=n,
        ignore_eos=flag(body, "ignore_eos"),
        min_tokens=integer(body, "min_tokens", 0, at_least=0) or 0,
        stop=stop_strings(body),
        stop_token_ids=frozenset(int(token) for token in stop_ids),
        include_stop=flag(body, "include_stop_str_in_output"),
        candidates=candidates,
    )
