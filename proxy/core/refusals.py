"""An engine's error answer as an event, for a client whose stream had begun before the engine said no.

That happens to a held stream that was sent pings: its status is 200 for good, so the engine's own words can only come
inside it.
"""

from __future__ import annotations

from typing import Any

import orjson

from proxy.core.routes import Dialect, as_event

LONGEST = 1000
"""Characters of a body that is no error object and is passed on as the message."""


def refusal_event(kind: Dialect, status: int, body: bytes) -> bytes:
    """The engine's message and code in the route's own stream protocol.

    Args:
        kind: the protocol.
        status: of the engine's answer, 400 or above.
        body: of the engine's answer, or the beginning of it.
    """
    error = _error_object(body)
    message = error.get("message")
    if not isinstance(message, str) or not message:
        message = body.decode("utf-8", "replace").strip()[:LONGEST] or f"the engine answered status {status}"
    code = error.get("code")
    told = {
        "message": message,
        "type": error.get("type") or _type(kind, status),
        "param": error.get("param"),
        "code": status if code is None else code,
    }
    return as_event(kind, error | told)


def _error_object(body: bytes) -> dict[str, Any]:
    """The error object of any of vLLM's routes; empty where there is none."""
    try:
        parsed: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(parsed, dict):
        return {}
    error: Any = parsed.get("error")
    if isinstance(error, dict):
        return error
    # A bare text, an error object without its wrapper, or what FastAPI itself answers.
    found = {name: parsed[name] for name in ("message", "type", "param", "code") if name in parsed}
    for text in (error, parsed.get("detail")):
        if isinstance(text, str):
            found.setdefault("message", text)
    return found


def _type(kind: Dialect, status: int) -> str:
    if kind is Dialect.ANTHROPIC:
        return "invalid_request_error" if status < 500 else "api_error"
    return "BadRequestError" if status < 500 else "InternalServerError"
