"""One look at a request head: what is refused, what is forwarded, and what the proxy itself needs to know.

llhttp has split the bytes into lines and refused what is no HTTP at all. This module refuses what is HTTP to some
readers and something else to others (RFC 9112 sections 3.2, 5, 6), because a disagreement between the proxy and an
engine about where a request ends is how requests are smuggled. Whatever passes is framed anew by the proxy.

Hop-by-hop fields (RFC 9110 section 7.6.1) are dropped here, before the proxy adds its own, so that a client cannot
strip those by naming them in ``Connection``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.errors import (
    BadRequest,
    BodyTooLarge,
    ExpectationFailed,
    HeadersTooLarge,
    MethodNotAllowed,
    NotImplementedCoding,
    TargetTooLong,
    VersionNotSupported,
)

HOP_BY_HOP: frozenset[bytes] = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token (RFC 9110 section 5.6.2)
_MARKS = re.compile(rb"[^a-z0-9]")
_MIMICKED = frozenset({b"content-length", b"transfer-encoding", b"x-forwarded-for", b"x-forwarded-proto"})
"""Fields that say where a request ends, or for which the proxy vouches: no other name may be taken for one of them."""
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~-]*)(?::[0-9]{0,5})?")
_TARGET = re.compile(rb"[\x21\x24-\x7e]+")  # visible ASCII without the quote and the number sign
MAX_DIGITS = 18
"""Digits of a Content-Length: an exabyte less one."""
_NUMBER = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,6})?")

MAX_KNOWN_NAMES = 4096
"""Field names whose lower-case form is remembered. Names repeat on every request; the bound keeps strangers out."""
_lower: dict[bytes, bytes] = {}


def lower_name(name: bytes) -> bytes:
    """The lower-case form of a field name.

    Raises:
        BadRequest: it is no name, or one that a server which reads all marks alike, as CGI does with the underscore,
            takes for a field of framing or of forwarding.
    """
    known = _lower.get(name)
    if known is not None:
        return known
    if _NAME.fullmatch(name) is None:
        raise BadRequest(f"the header name {name[:64]!r} is refused: it is no token (RFC 9110 section 5.6.2)")
    known = name.lower()
    read_as = _MARKS.sub(b"-", known)
    if read_as in _MIMICKED and read_as != known:
        raise BadRequest(f"the header name {name[:64]!r} is refused: some servers read it as {read_as.decode()!r}")
    if len(_lower) < MAX_KNOWN_NAMES:
        _lower[name] = known
    return known


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a request head and body; see the settings of the same names."""

    request_line: int = 8192
    header_line: int = 8192
    headers: int = 128
    body: int = 0
    head: int = 73_728
    """Names and values of all fields together, and the request line: as much as eight of the longest lines."""


@dataclass(slots=True)
class RequestHead:
    """What is known of a request when its head has arrived.

    Attributes:
        method: as sent.
        target: origin form (path and query), byte-exact.
        path: target up to the query.
        http11: HTTP/1.1 rather than 1.0.
        fields: end-to-end fields in order and case, without Host, framing and those that the proxy rewrites.
        host: value of Host, or empty (HTTP/1.0).
        length: Content-Length, or None.
        chunked: the body comes in chunks.
        expect_continue: the client waits for a 100 before it sends the body.
        keep_alive: the client keeps the connection.
        websocket: it asks for an upgrade to WebSocket, and no body comes with it.
        request_id: ``X-Request-Id``, or None.
        forwarded_for: ``X-Forwarded-For`` lines joined, or None.
        forwarded_proto: ``X-Forwarded-Proto`` lines joined, or None.
        via: ``Via`` lines joined, or None.
        session: the session key, or None.
        hold_timeout: ``X-Fleetgate-Hold-Timeout`` in seconds, or None.
        no_retry: ``X-Fleetgate-No-Retry: 1``: one attempt only (pauses are still waited for).
        authorization: whether an ``Authorization`` field came.
        upgrade: whether an ``Upgrade`` field came.
        lines: the fields as they are sent on, once somebody has written them (`proxy.data.outbound`).
    """

    method: bytes
    target: bytes
    path: bytes
    http11: bool
    fields: list[tuple[bytes, bytes]]
    host: bytes = b""
    length: int | None = None
    chunked: bool = False
    expect_continue: bool = False
    keep_alive: bool = True
    websocket: bool = False
    request_id: bytes | None = None
    forwarded_for: bytes | None = None
    forwarded_proto: bytes | None = None
    via: bytes | None = None
    session: bytes | None = None
    hold_timeout: float | None = None
    no_retry: bool = False
    authorization: bool = False
    upgrade: bool = False
    lines: bytes = b""

    @property
    def has_body(self) -> bool:
        """Whether body bytes may follow the head."""
        return self.chunked or bool(self.length)

    def with_length(self, length: int) -> RequestHead:
        """The same head with another Content-Length. Spelled out: `dataclasses.replace` takes four times as long."""
        return RequestHead(
            self.method, self.target, self.path, self.http11, self.fields, self.host, length, self.chunked,
            self.expect_continue, self.keep_alive, self.websocket, self.request_id, self.forwarded_for,
            self.forwarded_proto, self.via, self.session, self.hold_timeout, self.no_retry, self.authorization,
            self.upgrade, self.lines,
        )  # fmt: skip


def inspect(
    method: bytes,
    target: bytes,
    version: str,
    headers: list[tuple[bytes, bytes]],
    *,
    limits: Limits,
    session_headers: tuple[bytes, ...] = (),
) -> RequestHead:
    """Judge a request head and pick out what the proxy needs.

    Args:
        method: request method.
        target: request target as sent.
        version: ``1.0`` or ``1.1``.
        headers: fields in order, as llhttp split them.
        limits: sizes that are taken.
        session_headers: lower-case names of the fields that carry a session key, the strongest first.

    Raises:
        ClientFault: one of the leaves of `proxy.errors`, with what was wrong and what would be right.
    """
    if version not in ("1.1", "1.0"):
        raise VersionNotSupported(f"HTTP/{version} is not spoken here; use HTTP/1.1")
    if method == b"CONNECT":
        raise MethodNotAllowed("CONNECT is not served: this is no forward proxy")
    if len(method) + len(target) + 11 > limits.request_line:
        raise TargetTooLong(f"the request line is over {limits.request_line} bytes")
    if len(headers) > limits.headers:
        raise HeadersTooLarge(f"the request has over {limits.headers} header fields")
    http11 = version == "1.1"
    head = RequestHead(method, b"", b"", http11, [])
    fields = head.fields
    hosts = 0
    named: set[bytes] | None = None
    upgrade = b""
    close = not http11
    total = len(target)
    for name, value in headers:
        size = len(name) + len(value)
        total += size
        if size > limits.header_line:
            raise HeadersTooLarge(f"the header {name[:64]!r} is over {limits.header_line} bytes")
        known = _lower.get(name) or lower_name(name)
        if known not in _SPECIAL:
            fields.append((name, value))
            # An empty one is none, or all who send it would be one session.
            if value and known in session_headers and head.session is None:
                head.session = value
            continue
        if known == b"host":
            hosts += 1
            head.host = value
        elif known == b"content-length":
            # White space around a value is not part of it (RFC 9112 section 5).
            digits = value.strip(b" \t")
            if head.length is not None or not digits.isdigit() or len(digits) > MAX_DIGITS:
                raise BadRequest("Content-Length must be one number of decimal digits, given once")
            head.length = int(digits)
        elif known == b"transfer-encoding":
            if value.strip(b" \t").lower() != b"chunked" or head.chunked:
                _refuse_coding(value, again=head.chunked)
            head.chunked = True
        elif known == b"connection":
            for token in value.lower().split(b","):
                option = token.strip()
                if option == b"close":
                    close = True
                elif option not in (b"keep-alive", b"upgrade", b""):
                    named = {option} if named is None else named | {option}
        elif known == b"upgrade":
            head.upgrade = True
            upgrade = value.lower().strip()
        elif known == b"expect":
            if value.lower().strip() != b"100-continue":
                raise ExpectationFailed("the only expectation met is '100-continue'")
            head.expect_continue = http11
        elif known == b"x-request-id":
            # An empty one is none: the proxy's own takes its place.
            if value:
                head.request_id = head.request_id or value
                fields.append((name, value))
        elif known == b"x-forwarded-for":
            head.forwarded_for = value if head.forwarded_for is None else head.forwarded_for + b", " + value
        elif known == b"x-forwarded-proto":
            head.forwarded_proto = value if head.forwarded_proto is None else head.forwarded_proto + b", " + value
        elif known == b"via":
            head.via = value if head.via is None else head.via + b", " + value
        elif known == b"authorization":
            head.authorization = True
            fields.append((name, value))
        elif known == b"x-fleetgate-hold-timeout":
            if _NUMBER.fullmatch(value) is None:
                raise BadRequest("X-Fleetgate-Hold-Timeout must be seconds, such as 30 or 0.5")
            head.hold_timeout = float(value)
        elif known == b"x-fleetgate-no-retry":
            head.no_retry = value == b"1"
    if total > limits.head:
        raise HeadersTooLarge(f"the request head is over {limits.head} bytes")
    _check_framing(head, limits)
    if hosts != 1 and (http11 or hosts):
        raise BadRequest(f"a request must carry one Host field, this one has {hosts}")
    if hosts and _HOST.fullmatch(head.host) is None:
        raise BadRequest("the Host field is not a host with an optional port")
    _set_target(head, target)
    head.keep_alive = not close
    head.websocket = upgrade == b"websocket" and http11 and method == b"GET" and not head.has_body
    if named is not None:
        if b"x-request-id" in named:
            # It was for this hop only: the proxy's own takes its place.
            head.request_id = None
        head.fields = [(name, value) for name, value in fields if lower_name(name) not in named]
    return head


_SPECIAL: frozenset[bytes] = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"x-request-id",
    b"x-forwarded-for",
    b"x-forwarded-proto",
    b"via",
    b"authorization",
    b"x-fleetgate-hold-timeout",
    b"x-fleetgate-no-retry",
}


def _refuse_coding(value: bytes, *, again: bool) -> None:
    """A body that does not end with one ``chunked`` has no length (RFC 9112 section 6.3); others are 501 (6.1)."""
    codings = [coding.strip() for coding in value.lower().split(b",")]
    if again or codings[-1] != b"chunked" or b"chunked" in codings[:-1]:
        raise BadRequest("Transfer-Encoding must be 'chunked', given once")
    raise NotImplementedCoding("the only transfer coding taken is 'chunked'")


def _check_framing(head: RequestHead, limits: Limits) -> None:
    if head.chunked:
        if head.length is not None:
            raise BadRequest("a request must not carry both Content-Length and Transfer-Encoding")
        if not head.http11:
            raise BadRequest("HTTP/1.0 has no transfer codings; send a Content-Length")
    if limits.body and head.length is not None and head.length > limits.body:
        raise BodyTooLarge(f"the body is over {limits.body} bytes")


def _set_target(head: RequestHead, target: bytes) -> None:
    if _TARGET.fullmatch(target) is None:
        raise BadRequest("the request target has characters that must be percent-encoded")
    if target[:1] == b"/":
        pass
    elif target[:7].lower() == b"http://" or target[:8].lower() == b"https://":
        # RFC 9112 section 3.2.2: the authority of an absolute target replaces Host; another one is refused.
        authority, slash, rest = target[target.index(b"//") + 2 :].partition(b"/")
        if authority.lower() != head.host.lower():
            raise BadRequest("the target names another host than the Host field")
        target = slash + rest if slash else b"/"
    elif not (target == b"*" and head.method == b"OPTIONS"):
        raise BadRequest("the request target must be a path")
    head.target = target
    head.path = target.partition(b"?")[0]
