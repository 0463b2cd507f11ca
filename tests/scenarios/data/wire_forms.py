"""The forms in which vLLM refuses, as bytes, by route and by whether a stream was asked for."""

from __future__ import annotations

from tests.tools.fault_engine import answer_bytes
from tests.tools.fault_scripts import SSE_HEAD, sse

PAUSED = "Generation is paused. Please retry after it resumes."
BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
FAILED = "The server had an error while processing your request."

STREAMED = ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/messages", "/v1/responses"]
PLAIN = [
    *STREAMED,
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/rerank",
    "/v1/audio/transcriptions",
    "/generate",
    "/v1/chat/completions/batch",
]


def error(message: str, kind: str, code: int) -> bytes:
    return b'{"error":{"message":"%b","type":"%b","param":null,"code":%d}}' % (message.encode(), kind.encode(), code)


def anthropic(message: str, kind: str) -> bytes:
    return b'{"type":"error","error":{"type":"%b","message":"%b"}}' % (kind.encode(), message.encode())


def refused(path: str, message: str, kind: str) -> bytes:
    """A 503 as a status."""
    body = anthropic(message, "overloaded_error") if path == "/v1/messages" else error(message, kind, 503)
    return answer_bytes(503, body)


def refused_stream(path: str, message: str, kind: str) -> bytes:
    """The same inside a 200."""
    if path == "/v1/messages":
        return sse(b"event: error\ndata: " + anthropic(message, "overloaded_error") + b"\n\n")
    if path == "/v1/chat/completions":
        kind = "InternalServerError"
    return sse(b"data: " + error(message, kind, 503) + b"\n\n", b"data: [DONE]\n\n")


CUT_STREAM = SSE_HEAD
"""``/v1/responses`` while paused: the head of a stream, then the connection is cut."""
