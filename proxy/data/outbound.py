"""The request as an engine gets it: the client's end-to-end fields as they came, then the proxy's own."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.data.exchange import Exchange
    from proxy.data.upstream import Upstream


def field_lines(exchange: Exchange) -> bytes:
    """All header lines but Host and framing; the same for every attempt.

    Those that do not tell one request from the next are written once for heads that repeat (`proxy.core.repeats`).
    """
    head = exchange.head
    lines = head.lines or _lines(exchange)
    if exchange.plane.spans is None:
        head.lines = lines
    return lines if head.request_id else b"%bX-Request-Id: %b\r\n" % (lines, exchange.id_bytes)


def _lines(exchange: Exchange) -> bytes:
    """The client's end-to-end fields, then the proxy's own.

    Of trusted peers only (`trusted_proxies`) ``X-Forwarded-For`` is kept and appended to, ``X-Forwarded-Proto`` kept.
    ``Via`` is a must for a gateway (RFC 9110 section 7.6.3).
    """
    head = exchange.head
    plane = exchange.plane
    parts: list[bytes] = []
    fields = head.fields if plane.spans is None else plane.spans.fields(exchange)
    authorized = head.authorization
    if authorized and plane.control_token is not None:
        # A trainer that sends its token with everything: it is for the proxy, no engine sees it.
        fields = [field for field in fields if not _is_token(field, plane.control_token)]
        authorized = any(name.lower() == b"authorization" for name, _ in fields)
    for name, value in fields:
        parts += (name, b": ", value, b"\r\n")
    if not authorized and plane.engine_authorization:
        parts.append(plane.engine_authorization)
    peer = exchange.client.peer
    if head.forwarded_for is not None and exchange.client.trusted:
        parts += (b"X-Forwarded-For: ", head.forwarded_for, b", ", peer, b"\r\n")
    else:
        parts += (b"X-Forwarded-For: ", peer, b"\r\n")
    proto = head.forwarded_proto if exchange.client.trusted else None
    parts += (b"X-Forwarded-Proto: ", proto or plane.scheme, b"\r\nVia: ")
    if head.via is not None:
        parts += (head.via, b", ")
    parts += (b"1.1 ", plane.name, b"\r\n")
    if head.websocket:
        parts.append(b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
    return b"".join(parts)


def _is_token(field: tuple[bytes, bytes], token: bytes) -> bool:
    """Whether a field is the control token as a credential."""
    name, value = field
    if name.lower() != b"authorization" or value[:7].lower() != b"bearer ":
        return False
    return hmac.compare_digest(value[7:].strip(), token)


def request_head(exchange: Exchange, upstream: Upstream) -> bytes:
    """The whole head, framed anew: a body that is here gets its length, one that is still coming keeps its framing.

    A request without a body gets no Content-Length.
    """
    head = exchange.head
    if exchange.body_done:
        has_body = head.chunked or head.length is not None
        framing = b"Content-Length: %d\r\n\r\n" % exchange.body_size if has_body else b"\r\n"
    elif head.chunked:
        framing = b"Transfer-Encoding: chunked\r\n\r\n"
    else:
        framing = b"Content-Length: %d\r\n\r\n" % (head.length or 0)
    start = (head.method, b" ", upstream.prefix, head.target, b" HTTP/1.1\r\nHost: ", upstream.host_header, b"\r\n")
    return b"".join((*start, exchange.lines, framing))


def chunk(data: bytes) -> bytes:
    """One chunk (RFC 9112 section 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)
