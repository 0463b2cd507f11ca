"""What a request head is refused for, and what is picked out of it. The vectors on the wire are in the scenarios."""

from __future__ import annotations

import pytest

from proxy.core.framing import Limits, RequestHead, inspect, lower_name
from proxy.errors import (
    BadRequest,
    BodyTooLarge,
    ClientFault,
    ExpectationFailed,
    HeadersTooLarge,
    MethodNotAllowed,
    NotImplementedCoding,
    TargetTooLong,
    VersionNotSupported,
)

Fields = list[tuple[bytes, bytes]]
HOST = (b"Host", b"a")


def look(
    *fields: tuple[bytes, bytes],
    method: bytes = b"POST",
    target: bytes = b"/v1/completions",
    version: str = "1.1",
    limits: Limits | None = None,
    host: bool = True,
) -> RequestHead:
    headers = [HOST, *fields] if host else list(fields)
    return inspect(
        method, target, version, headers, limits=limits or Limits(), session_headers=(b"x-session-id", b"x-b")
    )


REFUSED: list[tuple[str, dict[str, object], Fields, type[ClientFault]]] = [
    ("version 2", {"version": "2.0"}, [], VersionNotSupported),
    ("version 0.9", {"version": "0.9"}, [], VersionNotSupported),
    ("CONNECT", {"method": b"CONNECT", "target": b"a:1"}, [], MethodNotAllowed),
    ("no Host", {"host": False}, [], BadRequest),
    ("two Hosts", {}, [HOST], BadRequest),
    ("Host with a space", {"host": False}, [(b"Host", b"a b")], BadRequest),
    ("Host with userinfo", {"host": False}, [(b"Host", b"u@a")], BadRequest),
    ("Host with a port of letters", {"host": False}, [(b"Host", b"a:b")], BadRequest),
    ("length twice", {}, [(b"Content-Length", b"2"), (b"content-length", b"2")], BadRequest),
    ("length +2", {}, [(b"Content-Length", b"+2")], BadRequest),
    ("length of 19 digits", {}, [(b"Content-Length", b"1" * 19)], BadRequest),
    ("length and chunks", {}, [(b"Content-Length", b"2"), (b"Transfer-Encoding", b"chunked")], BadRequest),
    ("chunks and 1.0", {"version": "1.0"}, [(b"Transfer-Encoding", b"chunked")], BadRequest),
    ("gzip, chunked", {}, [(b"Transfer-Encoding", b"gzip, chunked")], NotImplementedCoding),
    ("chunked, gzip", {}, [(b"Transfer-Encoding", b"chunked, gzip")], BadRequest),
    ("chunked twice", {}, [(b"Transfer-Encoding", b"chunked, chunked")], BadRequest),
    ("two codings", {}, [(b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"chunked")], BadRequest),
    ("Expect", {}, [(b"Expect", b"tea")], ExpectationFailed),
    ("length with an underscore", {}, [(b"Content_Length", b"2")], BadRequest),
    ("length with a dot", {}, [(b"content.Length", b"2")], BadRequest),
    ("coding with an underscore", {}, [(b"TRANSFER_ENCODING", b"chunked")], BadRequest),
    ("forwarding with an underscore", {}, [(b"X_Forwarded-For", b"6.6.6.6")], BadRequest),
    ("no token", {}, [(b"X Y", b"1")], BadRequest),
    ("empty name", {}, [(b"", b"1")], BadRequest),
    ("long line", {}, [(b"X", b"a" * 9000)], HeadersTooLarge),
    ("many fields", {}, [(b"X", b"a")] * 200, HeadersTooLarge),
    ("long head", {}, [(b"X", b"a" * 8000)] * 10, HeadersTooLarge),
    ("long target", {"target": b"/" + b"a" * 9000}, [], TargetTooLong),
    ("relative target", {"target": b"v1"}, [], BadRequest),
    ("empty target", {"target": b""}, [], BadRequest),
    ("asterisk", {"target": b"*"}, [], BadRequest),
    ("foreign authority", {"target": b"http://b/v1"}, [], BadRequest),
    ("fragment", {"target": b"/v1#a"}, [], BadRequest),
    ("8-bit target", {"target": b"/\xe9"}, [], BadRequest),
    ("deadline", {}, [(b"X-Fleetgate-Hold-Timeout", b"soon")], BadRequest),
    ("body over the limit", {"limits": Limits(body=5)}, [(b"Content-Length", b"6")], BodyTooLarge),
]


@pytest.mark.parametrize(("what", "how", "fields", "error"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused(what: str, how: dict[str, object], fields: Fields, error: type[ClientFault]) -> None:
    with pytest.raises(error) as caught:
        look(*fields, **how)  # type: ignore[arg-type]
    assert type(caught.value) is error


def test_end_to_end_fields_are_kept_in_order_and_case() -> None:
    head = look((b"X-b", b"1"), (b"ACCEPT", b""), (b"X-b", b"2"), (b"Authorization", b"k"))
    assert head.fields == [(b"X-b", b"1"), (b"ACCEPT", b""), (b"X-b", b"2"), (b"Authorization", b"k")]
    assert head.authorization
    assert head.session == b"1"


def test_hop_by_hop_fields_and_those_named_are_dropped() -> None:
    head = look(
        (b"Connection", b"close, X-Hop ,upgrade"),
        (b"X-Hop", b"1"),
        (b"Keep-Alive", b"1"),
        (b"TE", b"trailers"),
        (b"Upgrade", b"h2c"),
        (b"X-Kept", b"1"),
    )
    assert head.fields == [(b"X-Kept", b"1")]
    assert not head.keep_alive
    assert not head.websocket


def test_ours_cannot_be_stripped_by_naming_them() -> None:
    head = look((b"Connection", b"X-Request-Id, Via"), (b"X-Request-Id", b"a"), (b"Via", b"1.1 b"))
    assert head.fields == []
    # What is for this hop only goes no further; ours takes its place.
    assert head.request_id is None
    assert head.via == b"1.1 b"


def test_every_token_is_a_name() -> None:
    fields = [(b"!#$%&'*+.^_`|~", b"1"), (b"X_Req", b"2"), (b"X.Req", b"3"), (b"x-req_1", b"4")]
    assert look(*fields).fields == fields


def test_the_host_that_was_forwarded_is_an_end_to_end_field() -> None:
    fields = [(b"X-Forwarded-Host", b"a"), (b"x-forwarded-host", b"b, c")]
    assert look(*fields).fields == fields


def test_joined_fields() -> None:
    head = look((b"X-Forwarded-For", b"1"), (b"X-Forwarded-For", b"2"), (b"Via", b"a"), (b"via", b"b"))
    assert (head.forwarded_for, head.via) == (b"1, 2", b"a, b")
    assert head.fields == []


@pytest.mark.parametrize(("value", "seconds"), [(b"30", 30.0), (b"0.5", 0.5), (b"0", 0.0)])
def test_the_deadline(value: bytes, seconds: float) -> None:
    assert look((b"X-Fleetgate-Hold-Timeout", value)).hold_timeout == seconds


def test_targets() -> None:
    assert look(target=b"/a?b=%20#"[:-1]).path == b"/a"
    assert look(target=b"http://A/v1?x").target == b"/v1?x"
    assert look(target=b"http://a").target == b"/"
    assert look(method=b"OPTIONS", target=b"*").target == b"*"


def test_bodies() -> None:
    assert not look().has_body
    assert not look((b"Content-Length", b"0")).has_body
    assert look((b"Content-Length", b" 5 ")).length == 5
    assert look((b"Transfer-Encoding", b"Chunked ")).chunked
    assert look((b"Expect", b"100-Continue")).expect_continue
    assert not look((b"Expect", b"100-continue"), version="1.0").expect_continue


def test_keep_alive() -> None:
    assert look().keep_alive
    assert not look((b"Connection", b"Close")).keep_alive
    assert not look(version="1.0").keep_alive
    assert look(version="1.0", host=False).host == b""


def test_a_websocket_is_an_upgrade_of_a_get() -> None:
    upgrade = (b"Upgrade", b"WebSocket")
    assert look(upgrade, method=b"GET").websocket
    assert not look(upgrade).websocket
    assert not look(upgrade, method=b"GET", version="1.0").websocket
    # With a body it is none: the body would have to come before the frames.
    assert not look(upgrade, (b"Content-Length", b"2"), method=b"GET").websocket
    assert look(upgrade, (b"Content-Length", b"0"), method=b"GET").websocket


def test_an_empty_request_id_is_none() -> None:
    head = look((b"X-Request-Id", b""), (b"X-Request-Id", b"b"))
    assert head.request_id == b"b"
    assert head.fields == [(b"X-Request-Id", b"b")]


def test_an_empty_session_is_none() -> None:
    assert look((b"X-Session-ID", b"")).session is None
    assert look((b"X-Session-ID", b""), (b"X-B", b"k")).session == b"k"
    # It is the client's field all the same.
    assert look((b"X-B", b"")).fields == [(b"X-B", b"")]


def test_names_are_remembered_within_a_bound() -> None:
    for n in range(10_000):
        assert lower_name(b"X-%d" % n) == b"x-%d" % n
