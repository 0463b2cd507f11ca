"""What the proxy knows of vLLM's data routes: which generate, and which protocol an error must speak there."""

from __future__ import annotations

from enum import StrEnum

import orjson


class Dialect(StrEnum):
    """The protocol of a route, for errors inside a stream that has begun."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    RESPONSES = "responses"


GENERATION: dict[bytes, Dialect] = {
    b"/v1/completions": Dialect.OPENAI,
    b"/v1/chat/completions": Dialect.OPENAI,
    b"/v1/chat/completions/batch": Dialect.OPENAI,
    b"/v1/responses": Dialect.RESPONSES,
    b"/v1/messages": Dialect.ANTHROPIC,
    b"/inference/v1/generate": Dialect.OPENAI,
    b"/skyrl/v1/generate": Dialect.OPENAI,
    b"/generate": Dialect.OPENAI,
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

OTHER: frozenset[bytes] = frozenset(
    {
        b"/v1/models",
        b"/tokenize",
        b"/detokenize",
        b"/v1/chat/completions/render",
        b"/v1/completions/render",
        b"/v1/messages/count_tokens",
        b"/server_info",
        b"/version",
        b"/ping",
        b"/load",
        b"/liveness",
        b"/v1/realtime",
    }
)

_PURE: frozenset[bytes] = frozenset(
    {
        b"/tokenize",
        b"/detokenize",
        b"/v1/chat/completions/render",
        b"/v1/completions/render",
        b"/v1/messages/count_tokens",
    }
)
"""POST routes that only compute something from their body."""

_LABELS: dict[bytes, str] = {path: path.decode("ascii") for path in (*GENERATION, *OTHER)}


def is_generation(method: bytes, path: bytes) -> bool:
    """Whether the request runs the model."""
    return method == b"POST" and (path in GENERATION or (path[-1:] == b"/" and path.rstrip(b"/") in GENERATION))


def is_repeatable(method: bytes, path: bytes) -> bool:
    """Whether running the request twice changes nothing but its cost: a safe method, a generation, a computation."""
    if method in (b"GET", b"HEAD", b"OPTIONS"):
        return True
    return method == b"POST" and (path.rstrip(b"/") in GENERATION or path.rstrip(b"/") in _PURE)


def dialect(path: bytes) -> Dialect:
    """The protocol of errors on this route."""
    return GENERATION.get(path.rstrip(b"/"), Dialect.OPENAI)


def label(path: bytes) -> str:
    """The value of the metric label ``route``: a known route or ``other``, so that clients cannot grow the set."""
    return _LABELS.get(path) or _LABELS.get(path.rstrip(b"/"), "other")


def error_event(kind: Dialect, *, message: str, error_type: str, code: str, status: int) -> bytes:
    """One error as an event of the route's own stream protocol.

    OpenAI routes: what vLLM itself sends, ``data: {"error": {...}}``. Messages: ``event: error`` with the Anthropic
    error object. Responses: an ``error`` event of the Responses stream.
    """
    if kind is Dialect.ANTHROPIC:
        body = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"
    if kind is Dialect.RESPONSES:
        failed = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: " + orjson.dumps(failed) + b"\n\n"
    error = {"message": message, "type": error_type, "param": code, "code": status}
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"
