"""The look at a stream's first event: exact, early, however the bytes are split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.failures import Kind
from proxy.core.sse import FirstEvent, Verdict, ends_event, looks_whole, read_error

LIMIT = 64 << 10
PAUSED = "Generation is paused. Please retry after it resumes."


def error(code: object, kind: str = "X", message: str = "m") -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


ANTHROPIC = b'{"type":"error","error":{"type":"overloaded_error","message":"%b"}}'
FAILED = b'{"type":"response.failed","response":{"id":"r","error":{"code":"server_error","message":"%b"}}}'
COHERE = b'{"type": "message-end", "delta": {"error": "%b", "finish_reason": "ERROR"}}'

CASES: dict[str, tuple[bytes, Verdict, Kind | None]] = {
    "completion": (b'data: {"id":"cmpl-1","object":"text_completion"}\n\n', Verdict.NORMAL, None),
    "object first": (b'data: {"object":"text_completion","id":"1"}\n\n', Verdict.NORMAL, None),
    "type first": (b'data: {"type":"response.created"}\n\n', Verdict.NORMAL, None),
    "done": (b"data: [DONE]\n\n", Verdict.NORMAL, None),
    "text": (b"data: hello\n\n", Verdict.NORMAL, None),
    "message_start": (b'event: message_start\ndata: {"type":"message_start"}\n\n', Verdict.NORMAL, None),
    "no JSON": (b'data: {"error": nonsense\n\n', Verdict.NORMAL, None),
    "error that is null": (b'data: {"error":null,"id":"1"}\n\n', Verdict.NORMAL, None),
    "message first, no error": (b'data: {"message":"hello","id":"1"}\n\n', Verdict.NORMAL, None),
    "list": (b'data: [{"error":1}]\n\n', Verdict.NORMAL, None),
    "paused": (b"data: " + error(503, message=PAUSED) + b"\n\n", Verdict.ERROR, Kind.PAUSED),
    "paused chat": (b"data: " + error(503, "InternalServerError", PAUSED) + b"\n\n", Verdict.ERROR, Kind.PAUSED),
    "paused without a code": (b"data: " + error(None, "x", PAUSED) + b"\n\n", Verdict.ERROR, Kind.PAUSED),
    "busy": (b"data: " + error(503) + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "busy, code as text": (b"data: " + error("503") + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "failed": (b"data: " + error(500) + b"\n\n", Verdict.ERROR, Kind.FAILED),
    "failed by type": (b"data: " + error(None, "InternalServerError") + b"\n\n", Verdict.ERROR, Kind.FAILED),
    "about the request": (b"data: " + error(400, message=PAUSED) + b"\n\n", Verdict.ERROR, None),
    "anthropic": (b"event: error\ndata: " + ANTHROPIC % b"busy" + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "anthropic paused": (b"event: error\ndata: " + ANTHROPIC % PAUSED.encode() + b"\n\n", Verdict.ERROR, Kind.PAUSED),
    "no space after the colon": (b"data:" + error(503) + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "old form": (b'data: {"object":"error","message":"m","code":503}\n\n', Verdict.ERROR, Kind.BUSY),
    "error as text": (b'data: {"error":"engine is paused","code":503}\n\n', Verdict.ERROR, Kind.FAILED),
    "two data lines": (b'data: {"error":\ndata: {"code":503}}\n\n', Verdict.ERROR, Kind.BUSY),
    "white space before the key": (b'data:  { \t "error" : {"code": 503}}\n\n', Verdict.ERROR, Kind.BUSY),
    "comments first": (b": a\n\n: b\n\ndata: " + error(503) + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "id and retry first": (b"id: 1\nretry: 5\ndata: " + error(503) + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "empty events first": (b"\n\n\ndata: " + error(503) + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "a byte order mark": (b"\xef\xbb\xbfdata: " + error(503) + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "key on a second line": (b"data: {\ndata: " + error(503)[1:] + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "value on a third line": (b'data: {\ndata: "object":\ndata: "error","code":503}\n\n', Verdict.ERROR, Kind.BUSY),
    "an empty line of data first": (b"data: \ndata: " + error(503) + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "an event without data first": (b"data:\n\ndata: " + error(503) + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "called message": (b"event: message\ndata: " + error(503) + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "called nothing": (b"event:\ndata: " + error(503) + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "called something else": (b"event: x\ndata: " + error(503) + b"\n\n", Verdict.NORMAL, None),
    "error not first": (b'data: {"id":"a","model":"m",' + error(503)[1:] + b"\n\n", Verdict.ERROR, Kind.BUSY),
    "object not first": (b'data: {"message":"m","object":"error","code":503}\n\n', Verdict.ERROR, Kind.BUSY),
    "the word as a token": (b'data: {"id":"a","logprobs":[{"token":"error"}]}\n\n', Verdict.NORMAL, None),
    "error after an event": (b'data: {"id":"a"}\n\ndata: ' + error(503) + b"\n\n", Verdict.NORMAL, None),
    "responses paused": (
        b"event: response.failed\ndata: " + FAILED % PAUSED.encode() + b"\n\n",
        Verdict.ERROR,
        Kind.PAUSED,
    ),
    "responses failed": (b"event: response.failed\ndata: " + FAILED % b"died" + b"\n\n", Verdict.ERROR, Kind.FAILED),
    "responses, no name": (b"data: " + FAILED % PAUSED.encode() + b"\n\n", Verdict.ERROR, Kind.PAUSED),
    "responses, done": (
        b'event: response.failed\ndata: {"type":"response.failed","response":{"id":"r","error":null}}\n\n',
        Verdict.NORMAL,
        None,
    ),
    "cohere": (b'data: {"type":"message-start","delta":{}}\n\n', Verdict.NORMAL, None),
    "cohere paused": (b"data: " + COHERE % PAUSED.encode() + b"\n\n", Verdict.ERROR, Kind.PAUSED),
    "cohere busy": (
        b"data: " + COHERE % b"The engine is currently busy and cannot accept new requests." + b"\n\n",
        Verdict.ERROR,
        Kind.BUSY,
    ),
    "cohere, about the request": (b"data: " + COHERE % b"too long" + b"\n\n", Verdict.ERROR, None),
    "field without a colon": (b"data\ndata: " + error(503) + b"\n\n", Verdict.ERROR, Kind.BUSY),
}
ENDS = {"LF": b"\n", "CRLF": b"\r\n", "CR": b"\r"}
# The old form with a text cannot be told from a failure without its message being read as the error's own.
CASES["error as text"] = (CASES["error as text"][0], Verdict.ERROR, Kind.PAUSED)


def read(data: bytes, cuts: list[int]) -> tuple[Verdict, bytes, FirstEvent]:
    """Feed the pieces until a verdict is there; what was held, and the reader."""
    reader = FirstEvent(LIMIT)
    start = 0
    for end in [*sorted(cuts), len(data)]:
        if end <= start:
            continue
        verdict = reader.feed(data[start:end])
        start = end
        if verdict is not Verdict.MORE:
            return verdict, data[:start], reader
    return Verdict.MORE, data, reader


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", CASES)
def test_every_form_whole_and_byte_by_byte(name: str, end: str) -> None:
    data, verdict, kind = CASES[name]
    data = data.replace(b"\n", ENDS[end]) + b"data: more" + ENDS[end] * 2
    for cuts in ([], list(range(len(data)))):
        got, fed, reader = read(data, cuts)
        assert got is verdict
        assert reader.held == fed
        assert (reader.error.kind if reader.error is not None else None) is kind


@given(st.sampled_from(sorted(CASES)), st.sampled_from(sorted(ENDS)), st.lists(st.integers(0, 300), max_size=30))
def test_a_split_anywhere_changes_nothing(name: str, end: str, cuts: list[int]) -> None:
    data, verdict, kind = CASES[name]
    data = data.replace(b"\n", ENDS[end]) + b"data: more" + ENDS[end] * 2
    got, fed, reader = read(data, [cut for cut in cuts if cut < len(data)])
    assert got is verdict
    assert reader.held == fed
    assert (reader.error.kind if reader.error is not None else None) is kind


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=20))
def test_any_bytes_are_held_exactly_and_split_alike(data: bytes, cuts: list[int]) -> None:
    whole = read(data, [])
    split = read(data, [cut for cut in cuts if cut < len(data)])
    assert whole[2].held == data
    assert split[2].held == split[1]
    # Split earlier it may know earlier; what it says about the same bytes is the same.
    if whole[0] is not split[0]:
        assert {whole[0], split[0]} <= {Verdict.MORE, Verdict.NORMAL}


def test_a_normal_stream_is_let_go_with_its_first_event() -> None:
    event = b'data: {"id":"a"}\n\n'
    reader = FirstEvent(LIMIT)
    assert reader.feed(event[:-1]) is Verdict.MORE
    assert reader.feed(event[-1:]) is Verdict.NORMAL
    assert reader.held == event


def test_a_usual_first_event_is_neither_copied_nor_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstEvent, "_line", None)
    reader = FirstEvent(LIMIT)
    data = b'data: {"id":"a"}\n\ndata: {"id":"a","choices":[]}\n\n'
    assert reader.feed(data) is Verdict.NORMAL
    assert reader.held is data


def test_what_is_no_object_is_let_go_at_its_first_byte() -> None:
    assert FirstEvent(LIMIT).feed(b"data: [") is Verdict.NORMAL
    assert FirstEvent(LIMIT).feed(b"event: x\n") is Verdict.NORMAL


def test_what_may_still_be_an_error_is_waited_for() -> None:
    reader = FirstEvent(LIMIT)
    for piece in (b"d", b"ata: ", b'{"er', b'ror": {"message": "a'):
        assert reader.feed(piece) is Verdict.MORE


def test_an_event_over_the_limit_is_no_error() -> None:
    reader = FirstEvent(1024)
    assert reader.feed(b'data: {"error": "' + b"x" * 900) is Verdict.MORE
    assert reader.feed(b"x" * 200) is Verdict.NORMAL
    assert len(reader.held) == 17 + 1100


def test_a_stream_that_ends_inside_its_first_event_is_read_to_the_end() -> None:
    for rest in (b"", b"\n", b"\r", b"\r\n"):
        reader = FirstEvent(LIMIT)
        assert reader.feed(b"data: " + error(503) + rest) is Verdict.MORE
        assert reader.finish() is Verdict.ERROR
        assert reader.error is not None
        assert reader.error.kind is Kind.BUSY
    reader = FirstEvent(LIMIT)
    reader.feed(b": only a comment\n\n")
    assert reader.finish() is Verdict.MORE


class CountingBytes(bytearray):
    """A buffer that counts the bytes searched in it."""


def test_work_is_linear_in_the_bytes_fed() -> None:
    """Byte by byte, the parser calls the judge a bounded number of times and never searches a byte twice."""
    judged = 0
    original = FirstEvent._judge

    def judge(self: FirstEvent, line: bytes) -> Verdict:
        nonlocal judged
        judged += 1
        assert len(line) <= 64 or self._settled
        return original(self, line)

    class Reader(FirstEvent):
        _judge = judge

    for size in (1_000, 20_000):
        judged = 0
        reader = Reader(1 << 20)
        data = b'data: {"error": "' + b"x" * size
        for at in range(len(data)):
            assert reader.feed(data[at : at + 1]) is Verdict.MORE
            assert reader._scan == at + 1 or at < 3
        assert judged <= 65


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (error(503), 503, Kind.BUSY),
        (error(503, message=PAUSED), 503, Kind.PAUSED),
        (b'{"error":{"code":"engine_paused","message":"x"}}', 503, Kind.PAUSED),
        (ANTHROPIC % b"x", 503, Kind.BUSY),
        (ANTHROPIC % b"x", 529, Kind.BUSY),
        (error(500), 500, Kind.FAILED),
        (b'{"message":"Generation is paused.","id":"cohere"}', 503, Kind.PAUSED),
        (b"<html>busy</html>", 503, Kind.BUSY),
        (b"", 500, Kind.FAILED),
        (b"[]", 503, Kind.BUSY),
        (b'{"detail":"x"}', 503, Kind.BUSY),
    ],
)
def test_error_answers(body: bytes, status: int, kind: Kind) -> None:
    found = read_error(body, status=status)
    assert found is not None
    assert found.kind is kind


@pytest.mark.parametrize("body", [b"{}", b'{"id":1}', b"null", b"nonsense", b'{"error":null}'])
def test_bodies_of_events_that_are_no_errors(body: bytes) -> None:
    assert read_error(body) is None


@pytest.mark.parametrize(
    ("tail", "ended"),
    [(b"", True), (b"a\n\n", True), (b"a\r\n\r\n", True), (b"a\r\r", True), (b"a\n", False), (b"a", False)],
)
def test_ends_event(tail: bytes, ended: bool) -> None:
    assert ends_event(tail) is ended


@pytest.mark.parametrize(
    ("tail", "stream", "whole"),
    [
        (b"data: [DONE]\n\n", True, True),
        (b"event: message_stop\ndata: {}\n\n", True, True),
        (b'data: {"type":"response.completed"}\n\n', True, True),
        (b"data: [DONE]\n", True, False),
        (b'data: {"id":1}\n\n', True, False),
        (b'{"a":1}', False, True),
        (b"[1]\n", False, True),
        (b'{"a":1', False, False),
        (b"", False, False),
    ],
)
def test_looks_whole(tail: bytes, stream: bool, whole: bool) -> None:
    assert looks_whole(tail, stream=stream) is whole


def test_events_of_acceptance_are_looked_past():
    """A paused /v1/responses stream is cut after these two: nothing may have gone to the client by then."""
    peek = FirstEvent(65536)
    accepted = b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n'
    working = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
    for piece in (accepted[:10], accepted[10:], working):
        assert peek.feed(piece) is Verdict.MORE
    assert peek.finish() is Verdict.MORE
    assert peek.feed(b"event: response.output_item.added\n") is Verdict.NORMAL
    assert peek.held == accepted + working + b"event: response.output_item.added\n"


def test_an_error_after_the_events_of_acceptance_is_an_error():
    peek = FirstEvent(65536)
    assert peek.feed(b'event: response.created\ndata: {"type":"response.created"}\n\n') is Verdict.MORE
    body = b'event: error\ndata: {"type":"error","error":{"message":"Generation is paused.","code":503}}\n\n'
    assert peek.feed(body) is Verdict.ERROR
    assert peek.error is not None
    assert peek.error.kind is Kind.PAUSED
