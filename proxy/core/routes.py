"""What the proxy knows of vLLM's data routes: which generate, and which protocol an error must speak there."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import orjson

from proxy.core.spelling import plain


class Dialect(StrEnum):
    """The protocol of a route, for errors inside a stream that has begun."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    RESPONSES = "responses"
    COHERE = "cohere"


GENERATION: dict[bytes, Dialect] = {
    b"/v1/completions": Dialect.OPENAI,
    b"/v1/chat/completions": Dialect.OPENAI,
    b"/v1/chat/completions/batch": Dialect.OPENAI,
    b"/v1/responses": Dialect.RESPONSES,
    b"/v1/messages": Dialect.ANTHROPIC,
    b"/inference/v1/generate": Dialect.OPENAI,
    b"/skyrl/v1/generate": Dialect.OPENAI,
    b"/generate": Dialect.OPENAI,
    b"/cohere/v2/chat": Dialect.COHERE,
    b"/generative_scoring": Dialect.OPENAI,
    b"/v1/decisions": Dialect.OPENAI,
    b"/v1/systemone": Dialect.OPENAI,
    b"/invocations": Dialect.OPENAI,
    b"/v1/embeddings": Dialect.OPENAI,
    b"/v2/embed": Dialect.OPENAI,
    b"/pooling": Dialect.OPENAI,
    b"/classify": Dialect.OPENAI,
    b"/score": Dialect.OPENAI,
    b"/v1/score": Dialect.OPENAI,
    b"/rerank": Dialect.OPENAI,
    b"/v1/rerank": Dialect.OPENAI,
    b"/v2/rerank": Dialect.OPENAI,
    b"/v1/audio/transcriptions": Dialect.OPENAI,
    b"/v1/audio/translations": Dialect.OPENAI,
    b"/v1/audio/speech": Dialect.OPENAI,
}
"""Routes that run the model: they are held while the gate is closed and go to ``ready`` engines only."""

_PURE: frozenset[bytes] = frozenset(
    {
        b"/tokenize",
        b"/detokenize",
        b"/v1/chat/completions/render",
        b"/v1/chat/completions/derender",
        b"/v1/completions/render",
        b"/v1/completions/derender",
        b"/v1/messages/count_tokens",
        b"/v1/messages/render",
        b"/v1/responses/render",
        b"/cohere/v2/chat/render",
    }
)
"""POST routes that only compute something from their body."""

OTHER: frozenset[bytes] = _PURE | {
    b"/v1/models",
    b"/server_info",
    b"/version",
    b"/ping",
    b"/load",
    b"/liveness",
    b"/v1/realtime",
}
"""Routes that do not run the model."""


_LABELS: dict[bytes, str] = {path: path.decode("ascii") for path in (*GENERATION, *OTHER)}


def is_generation(method: bytes, path: bytes) -> bool:
    """Whether the request runs the model."""
    # Engines decode a path before they look for its route, so an odd spelling runs the model too.
    return method == b"POST" and (path in GENERATION or (path not in _LABELS and plain(path) in GENERATION))


def is_repeatable(method: bytes, path: bytes) -> bool:
    """Whether running the request twice changes nothing but its cost: a safe method, a generation, a computation."""
    if method in (b"GET", b"HEAD", b"OPTIONS"):
        return True
    path = plain(path)
    return method == b"POST" and (path in GENERATION or path in _PURE)


def dialect(path: bytes) -> Dialect:
    """The protocol of errors on this route."""
    path = plain(path)
    # A stream that is read again by its id: GET /v1/responses/ID?stream=true.
    return Dialect.RESPONSES if path.startswith(b"/v1/responses/") else GENERATION.get(path, Dialect.OPENAI)


def label(path: bytes) -> str:
    """The value of the metric label ``route``: a known route or ``other``, so that clients cannot grow the set."""
    return _LABELS.get(path) or _LABELS.get(plain(path), "other")


def error_event(kind: Dialect, *, message: str, error_type: str, code: str, status: int) -> bytes:
    """One error of the proxy's own as an event of the route's stream protocol."""
    if kind is Dialect.RESPONSES:
        return as_event(kind, {"message": message, "param": None, "code": code})
    if kind is Dialect.ANTHROPIC:
        error_type = "api_error"
    return as_event(kind, {"message": message, "type": error_type, "param": code, "code": status})


def as_event(kind: Dialect, error: dict[str, Any]) -> bytes:
    """An error object of the OpenAI kind as an event of a route's stream protocol.

    OpenAI routes: what vLLM itself sends, ``data: {"error": {...}}``. Messages: ``event: error`` with the Anthropic
    error object. Responses: an ``error`` event of the Responses stream. Cohere: a last event with the reason ``ERROR``.
    """
    if kind is Dialect.ANTHROPIC:
        body = {"type": "error", "error": {"type": error["type"], "message": error["message"]}}
        return b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"
    if kind is Dialect.COHERE:
        end = {"type": "message-end", "delta": {"error": error["message"], "finish_reason": "ERROR"}}
        return b"data: " + orjson.dumps(end) + b"\n\n"
    if kind is Dialect.RESPONSES:
        failed = {"type": "error", "code": str(error["code"]), "message": error["message"], "param": error["param"]}
        return b"event: error\ndata: " + orjson.dumps(failed | {"sequence_number": 0}) + b"\n\n"
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"
