"""Whole answers of the proxy's own: errors in the OpenAI shape."""

from __future__ import annotations

from collections.abc import Iterable

from proxy.errors import FleetgateError

REASONS = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    414: "URI Too Long",
    417: "Expectation Failed",
    424: "Failed Dependency",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
    508: "Loop Detected",
}
"""Reason phrases of RFC 9110 section 15 for every status in `proxy.errors`."""


def error_answer(
    error: FleetgateError, *, close: bool, bodyless: bool = False, extra: Iterable[tuple[str, str]] = ()
) -> bytes:
    """The bytes of one whole answer.

    Args:
        error: what went wrong.
        close: the connection ends after it.
        bodyless: the request was a HEAD.
        extra: further fields.
    """
    body = error.body()
    lines = [f"HTTP/1.1 {error.status} {REASONS.get(error.status, 'Error')}"]
    lines += [f"{name}: {value}" for name, value in (*error.headers(), *extra)]
    lines.append(f"Content-Length: {len(body)}")
    if close:
        lines.append("Connection: close")
    head = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"
    return head if bodyless else head + body
