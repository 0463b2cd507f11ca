"""A repeated head is the one that judging it anew would give; what would be refused is never a repetition."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.framing import Limits, RequestHead, inspect
from proxy.core.repeats import Fields, Repeats
from proxy.errors import FleetgateError

LIMITS = Limits(body=100_000)
FIRST: Fields = [
    (b"Host", b"x:80"),
    (b"Content-Type", b"application/json"),
    (b"Content-Length", b"2048"),
    (b"X-Session-ID", b"s1"),
    (b"Authorization", b"Bearer k"),
]


def judge(fields: Fields, method: bytes = b"POST", target: bytes = b"/v1/completions") -> RequestHead:
    return inspect(method, target, "1.1", list(fields), limits=LIMITS, session_headers=(b"x-session-id",))


def primed(fields: Fields = FIRST, method: bytes = b"POST") -> Repeats:
    repeats = Repeats(LIMITS)
    repeats.keep(method, b"/v1/completions", "1.1", list(fields), judge(fields, method))
    return repeats


def find(repeats: Repeats, fields: Fields) -> RequestHead | None:
    return repeats.find(b"POST", b"/v1/completions", "1.1", list(fields))


def with_field(place: int, name: bytes, value: bytes) -> Fields:
    return [*FIRST[:place], (name, value), *FIRST[place + 1 :]]


def test_the_same_fields_are_the_same_head():
    repeats = primed()
    head = find(repeats, FIRST)
    assert head == judge(FIRST)
    assert find(repeats, FIRST) is head


@pytest.mark.parametrize("digits", [b"0", b"7", b"999", b"2049", b"0000"])
def test_another_length_is_the_only_difference(digits):
    fields = with_field(2, b"Content-Length", digits)
    assert find(primed(), fields) == judge(fields)


@pytest.mark.parametrize("value", [b"", b"+1", b"-1", b"0x1", b"1 ", b"1,1", b"99999", b"\xb2", b"20480"])
def test_a_length_that_is_odd_long_or_too_much_is_judged_anew(value):
    assert find(primed(), with_field(2, b"Content-Length", value)) is None


def test_a_length_over_the_limit_of_bodies_is_judged_anew():
    fields = with_field(2, b"Content-Length", b"100000")
    assert find(primed(fields), with_field(2, b"Content-Length", b"100001")) is None


@pytest.mark.parametrize(
    "fields",
    [
        with_field(3, b"X-Session-ID", b"s2"),
        with_field(0, b"Host", b"y:80"),
        [*FIRST, (b"Transfer-Encoding", b"chunked")],
        [*FIRST, (b"Content-Length", b"2048")],
        with_field(2, b"Content-length", b"2047"),
        FIRST[:-1],
    ],
)
def test_any_other_difference_is_judged_anew(fields):
    assert find(primed(), fields) is None


def test_another_request_line_is_judged_anew():
    repeats = primed()
    assert repeats.find(b"PUT", b"/v1/completions", "1.1", FIRST) is None
    assert repeats.find(b"POST", b"/v1/completions?x", "1.1", FIRST) is None
    assert repeats.find(b"POST", b"/v1/completions", "1.0", FIRST) is None


def test_an_upgrade_is_not_remembered():
    fields: Fields = [(b"Host", b"x"), (b"Connection", b"Upgrade"), (b"Upgrade", b"h2c")]
    assert find(primed(fields), fields) is None


def test_a_chunked_body_repeats_too():
    fields: Fields = [(b"Host", b"x"), (b"Transfer-Encoding", b"chunked")]
    repeats = primed(fields)
    assert find(repeats, fields) == judge(fields)
    assert find(repeats, [*fields, (b"Content-Length", b"1")]) is None


FIELD = st.sampled_from(
    [
        *FIRST,
        (b"Content-Length", b"5"),
        (b"Content-Length", b"x"),
        (b"content-length", b"5"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Connection", b"close"),
        (b"Connection", b"x-session-id"),
        (b"Upgrade", b"websocket"),
        (b"X-Request-Id", b"r1"),
        (b"X_Odd", b"1"),
        (b"Host", b""),
    ]
)


@given(st.lists(st.lists(FIELD, max_size=6), min_size=2, max_size=4))
def test_a_connection_with_memory_judges_as_one_without(requests):
    repeats = Repeats(LIMITS)
    for fields in requests:
        found = repeats.find(b"POST", b"/p", "1.1", list(fields))
        try:
            wanted = judge(fields, target=b"/p")
        except FleetgateError:
            assert found is None
            break
        assert found is None or replace(found, lines=b"") == wanted
        if found is None:
            repeats.keep(b"POST", b"/p", "1.1", list(fields), wanted)
