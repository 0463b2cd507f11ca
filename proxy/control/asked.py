"""A control call as a client asked for it, and the reply that it gets.

Both are plain data, free of the web framework, so that a reply can be given to everybody who joined the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from proxy.config import Settings
from proxy.control.fanout import Headers, Shot
from proxy.core.calls import Call, Kind, Limit
from proxy.core.framing import HOP_BY_HOP
from proxy.core.lifecycle import Holder
from proxy.core.merge import Leg, Merged, message, report, with_report
from proxy.errors import FleetgateError, PartialFailure

JSON_HEADERS: Headers = ((b"Content-Type", b"application/json"),)
"""For the calls that the proxy makes by itself."""

_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-fleetgate-report"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One control call.

    Attributes:
        call: which.
        method: as sent.
        target: path without a trailing slash, and query to the letter.
        query: to the letter, without the question mark.
        headers: end-to-end fields, in order and case.
        body: None if there was none at all, which is not the same as an empty one.
        client: address of the caller.
        request_id: its ``X-Request-Id``, or empty.
    """

    call: Call
    method: str
    target: str
    query: str = ""
    headers: Headers = ()
    body: bytes | None = None
    client: str = "the proxy"
    request_id: str = ""

    def shot(self, timeout: float | None) -> Shot:
        """What each engine is sent, unless its body has to differ."""
        return Shot(self.call, self.method, self.target, self.headers, self.body, timeout)


def limit_of(settings: Settings, asked: Asked) -> float | None:
    """Seconds for one leg; None for no limit."""
    if asked.call.kind is Kind.PAUSE and "mode=wait" in asked.query.split("&"):
        return settings.pause_wait_timeout or None
    return float(getattr(settings, asked.call.limit)) or None


def forwarded(raw: Sequence[tuple[bytes, bytes]], *, token: bytes | None, engine_key: bytes | None) -> Headers:
    """The fields that go on to the engines: end-to-end ones, as they came (RFC 9110 section 7.6.1).

    Args:
        raw: fields as received.
        token: the control token: it is for the proxy, no engine sees it.
        engine_key: the engines' API key, sent where no other credential came.
    """
    named = {b""}
    for name, value in raw:
        if name.lower() == b"connection":
            named.update(part.strip().lower() for part in value.split(b","))
    fields: list[tuple[bytes, bytes]] = []
    authorized = False
    for name, value in raw:
        lower = name.lower()
        if lower in _NOT_FORWARDED or lower in named:
            continue
        if lower == b"authorization":
            if token is not None and value[:7].lower() == b"bearer " and value[7:].strip() == token:
                continue
            authorized = True
        fields.append((name, value))
    if engine_key is not None and not authorized:
        fields.append((b"Authorization", b"Bearer " + engine_key))
    return tuple(fields)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a control call, for everybody who asked for it.

    Attributes:
        status: HTTP status.
        body: as it is sent without a report.
        content_type: of the body.
        fields: further header fields.
        legs: what each engine did; empty if none was called.
    """

    status: int
    body: bytes
    content_type: str = "application/json"
    fields: tuple[tuple[str, str], ...] = field(default=())
    legs: tuple[Leg, ...] = ()

    def response(self, *, with_legs: bool) -> web.Response:
        """As an HTTP answer, with the legs inside where they were asked for."""
        body, content_type = self.body, self.content_type
        if with_legs and self.legs and self.status != PartialFailure.status:
            merged = Merged(self.status, body, content_type)
            body, content_type = with_report(merged, self.legs), "application/json"
        headers = [*self.fields]
        if content_type:
            headers.append(("Content-Type", content_type))
        return web.Response(status=self.status, body=body, headers=headers)


def reply_json(data: Any, *, status: int = 200, legs: Sequence[Leg] = ()) -> Reply:
    """A JSON reply of the proxy's own."""
    return Reply(status, orjson.dumps(data), legs=tuple(legs))


def reply_error(error: FleetgateError, *, legs: Sequence[Leg] = (), holder: Holder | None = None) -> Reply:
    """An error as a reply; a conflict names who holds the lock."""
    body = error.body()
    if holder is not None:
        body = orjson.dumps({**orjson.loads(body), "holder": holder.as_json()})
    fields = tuple((name, value) for name, value in error.headers() if name != "Content-Type")
    return Reply(error.status, body, "application/json", fields, tuple(legs))


def reply_merged(call: Call, merged: Merged, legs: Sequence[Leg], *, note: str = "") -> Reply:
    """The merged answer, or the partial failure that names the engines."""
    if not merged.failed:
        return Reply(merged.status, merged.body, merged.content_type, legs=tuple(legs))
    text = message(call, merged, len(legs))
    return reply_error(PartialFailure(f"{text}{note}", engines=report(legs)), legs=legs)


__all__ = [
    "JSON_HEADERS",
    "Asked",
    "Limit",
    "Reply",
    "forwarded",
    "limit_of",
    "reply_error",
    "reply_json",
    "reply_merged",
]
