"""Which fields of an engine's answer reach the client."""

from __future__ import annotations

import pytest

from proxy.core.answers import Fields, read_fields


def test_hop_by_hop_and_our_own_are_dropped_the_rest_is_kept_in_order_and_case() -> None:
    said = read_fields(
        [
            (b"Server", b"uvicorn"),
            (b"connection", b"keep-alive, X-Hop"),
            (b"X-HOP", b"1"),
            (b"Transfer-Encoding", b"chunked"),
            (b"Content-Length", b"5"),
            (b"X-Fleetgate-Engine", b"forged"),
            (b"X-Forwarded-For", b"10.0.0.1"),
            (b"Set-Cookie", b"a"),
            (b"set-cookie", b"b"),
        ]
    )
    assert b"".join(said.lines) == b"Server: uvicorn\r\nSet-Cookie: a\r\nset-cookie: b\r\n"
    assert (said.length, said.coding, said.stream, said.has_id) == (5, b"chunked", False, False)


def test_an_echoed_request_id_is_noticed_unless_it_is_named_hop_by_hop() -> None:
    assert read_fields([(b"X-Request-ID", b"a")]) == Fields(
        [b"X-Request-ID", b": ", b"a", b"\r\n"], None, None, False, True
    )
    assert read_fields([(b"Connection", b"x-request-id"), (b"X-Request-ID", b"a")]) == Fields(
        [], None, None, False, False
    )


@pytest.mark.parametrize("kind", [b"text/event-stream", b"Text/Event-Stream; charset=utf-8"])
def test_an_event_stream_is_told_by_its_type_in_any_case(kind: bytes) -> None:
    said = read_fields([(b"Content-Type", kind)])
    assert said.stream
    assert said.lines[2] == kind


def test_unknown_names_do_not_grow_the_table_without_bound() -> None:
    for n in range(10_000):
        assert read_fields([(b"X-%d" % n, b"a")]).lines
