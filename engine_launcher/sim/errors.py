"""Errors in the shapes that vLLM gives them on the wire."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

PAUSED_MESSAGE = "Generation is paused. Please retry after it resumes."
BUSY_MESSAGE = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
PREFILL_BACKLOG_MESSAGE = (
    "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
)
ENGINE_DEAD_MESSAGE = "The server had an error while processing your request."

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class WireError(Exception):
    """An error that a route answers with.

    Attributes:
        status: HTTP status of a non-streamed answer, and ``code`` of the body.
        message: text of the error.
        type: ``type`` of an OpenAI-shaped body.
        param: what in the request was wrong, or None.

    """

    def __init__(self, status: int, message: str, type_: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type_
        self.param = param

    def payload(self, *, type_: str | None = None) -> dict[str, Any]:
        """Return the OpenAI-shaped body; ``type_`` replaces the type where a route reports another one."""
        return error_payload(self.status, self.message, type_ or self.type, self.param)

    def anthropic(self) -> dict[str, Any]:
        """Return the body that ``/v1/messages`` gives this error."""
        kind = _ANTHROPIC_TYPES.get(self.status) or ("api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class PausedError(WireError):
    """A request that arrived while generation is paused in ``abort`` or ``wait``."""

    def __init__(self) -> None:
        super().__init__(503, PAUSED_MESSAGE, "ServiceUnavailableError")


class BusyError(WireError):
    """A request beyond the queue limits."""

    def __init__(self, message: str = BUSY_MESSAGE) -> None:
        super().__init__(503, message, "Service Unavailable")


class EngineDeadError(WireError):
    """The engine process behind the API server is gone."""

    def __init__(self) -> None:
        super().__init__(500, ENGINE_DEAD_MESSAGE, "InternalServerError")


class BadRequestError(WireError):
    """A request whose values vLLM refuses after parsing."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, message, "BadRequestError", param)


class ValidationError(WireError):
    """A request that does not parse: the shape FastAPI's validation errors get in vLLM."""

    def __init__(self, *problems: dict[str, Any], param: str | None = None) -> None:
        label = "error" if len(problems) == 1 else "errors"
        lines = "".join(f"  {problem}\n" for problem in problems)
        first = param if param is not None else str(problems[0].get("loc", "")) or None
        super().__init__(400, f"{len(problems)} validation {label}:\n{lines}".rstrip(), "Bad Request", first)


class HttpError(WireError):
    """An ``HTTPException`` of a control route: its type is the reason phrase."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message, HTTPStatus(status).phrase)


class CallFailedError(WireError):
    """A control call that failed inside the engine process."""

    def __init__(self, method: str, detail: str) -> None:
        super().__init__(500, f"Call to {method} method failed: {detail}", "InternalServerError")


class WorkerFailedError(CallFailedError):
    """A control call that failed inside a worker."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            "collective_rpc",
            f"Worker failed with error '{detail}', please check the stack trace above for the root cause",
        )


def error_payload(status: int, message: str, type_: str, param: str | None = None) -> dict[str, Any]:
    """Return an OpenAI-shaped error body."""
    return {"error": {"message": message, "type": type_, "param": param, "code": status}}


def summary(value: Any) -> Any:
    """Return how a validation error shows a value: containers by their size, the rest as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, dict)):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def missing(field: str, body: Any = None) -> ValidationError:
    """Return the error for a body without ``field``; ``body`` is what was sent, where vLLM says so."""
    return ValidationError({"type": "missing", "loc": f"body.{field}", "msg": "Field required", "input": summary(body)})


def dumps(value: Any) -> bytes:
    """Serialise ``value`` as JSON bytes."""
    return orjson.dumps(value)
