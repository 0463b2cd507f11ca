"""Which fields of an engine's answer reach the client."""

from __future__ import annotations

from proxy.core.answers import end_to_end


def test_hop_by_hop_and_our_own_are_dropped_the_rest_is_kept_in_order_and_case() -> None:
    kept, has_id = end_to_end(
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
    assert kept == [(b"Server", b"uvicorn"), (b"Set-Cookie", b"a"), (b"set-cookie", b"b")]
    assert not has_id


def test_an_echoed_request_id_is_noticed_unless_it_is_named_hop_by_hop() -> None:
    assert end_to_end([(b"X-Request-ID", b"a")]) == ([(b"X-Request-ID", b"a")], True)
    assert end_to_end([(b"Connection", b"x-request-id"), (b"X-Request-ID", b"a")]) == ([], False)


def test_unknown_names_do_not_grow_the_table_without_bound() -> None:
    for n in range(10_000):
        assert end_to_end([(b"X-%d" % n, b"a")])[0]
