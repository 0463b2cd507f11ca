"""An answer on its way to a client: framing, joined writes, and how it breaks off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.core.framing import RequestHead
from proxy.data.connection import Head
from proxy.data.flood import BURST, Flood
from proxy.data.relay import JOINED, Relay
from proxy.errors import EngineBroken, EngineTimeout, FleetgateError, HoldTimeout, RequestAborted


class Client:
    """A client connection that only remembers."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.cuts: list[bool] = []
        self.keeps = True
        self.taking = True
        self.closing = False
        self.transport = self
        self.loop = SimpleNamespace(time=lambda: 1.0)

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def cut(self, *, hard: bool = False) -> None:
        self.cuts.append(hard)

    def keeps_alive(self, request: Any) -> bool:
        return self.keeps

    def answer_begun(self) -> None:
        pass


def rig(*, method: bytes = b"POST", http11: bool = True, path: bytes = b"/v1/completions") -> tuple[Relay, Client]:
    client = Client()
    exchange: Any = SimpleNamespace(
        client=client,
        head=RequestHead(method, path, path, http11, []),
        generation=True,
        engine=SimpleNamespace(id="e1"),
        version=b"v7",
        attempts=2,
        id_bytes=b"id",
        started=0.5,
        plane=SimpleNamespace(
            stats=SimpleNamespace(first_byte_seconds=SimpleNamespace(observe=lambda _: None)), flood=Flood(0.001)
        ),
    )
    return Relay(exchange), client


def head(*, length: int | None = None, chunked: bool = False, status: int = 200) -> Head:
    return Head(status, b"OK", [(b"X-A", b"1")], length, chunked, keep_alive=True)


def test_an_answer_with_a_length_keeps_it() -> None:
    relay, client = rig()
    relay.begin(head(length=5))
    relay.data(b"hello", 1.0)
    relay.end()
    fields = b"X-A: 1\r\nContent-Length: 5\r\nX-Fleetgate-Engine: e1\r\nX-Fleetgate-Weight-Version: v7\r\n"
    fields += b"X-Fleetgate-Attempts: 2\r\nX-Request-Id: id\r\n"
    assert client.writes == [b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n", b"hello"]
    assert relay.whole()
    assert relay.bytes_out == 5


def test_a_chunked_answer_is_framed_anew() -> None:
    relay, client = rig()
    relay.begin(head(chunked=True))
    relay.data(b"x" * 17, 1.0)
    relay.end()
    assert b"Transfer-Encoding: chunked" in client.writes[0]
    assert client.writes[1:] == [b"11\r\n" + b"x" * 17 + b"\r\n", b"0\r\n\r\n"]


def test_what_comes_in_one_turn_leaves_in_one_write() -> None:
    relay, client = rig()
    relay.begin(head(chunked=True), more=True)
    relay.data(b"hello", 1.0, more=True)
    relay.end()
    assert len(client.writes) == 1
    assert client.writes[0].endswith(b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n")


def test_what_is_big_is_not_copied_to_be_joined() -> None:
    relay, client = rig()
    relay.begin(head(length=JOINED), more=True)
    relay.data(b"x" * JOINED, 1.0, more=True)
    assert len(client.writes) == 1
    relay.end()
    assert len(client.writes) == 1


def test_an_empty_answer_leaves_with_its_end() -> None:
    relay, client = rig()
    relay.begin(head(length=0), more=True)
    assert client.writes == []
    relay.end()
    assert len(client.writes) == 1


def test_what_waits_leaves_before_a_cut() -> None:
    relay, client = rig()
    relay.stream = True
    relay.begin(head(chunked=True), more=True)
    relay.cut(EngineBroken("gone"))
    assert b"200 OK" in client.writes[0]
    assert b"gone" in b"".join(client.writes)
    assert client.cuts == [False]


def test_an_old_client_gets_no_chunks() -> None:
    relay, client = rig(http11=False)
    client.keeps = False
    relay.begin(head(chunked=True))
    relay.data(b"hello", 1.0)
    relay.end()
    assert b"Transfer-Encoding" not in client.writes[0]
    assert b"Connection: close" in client.writes[0]
    assert client.writes[1:] == [b"hello"]


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 304), (b"GET", 204)])
def test_no_body_no_framing(method: bytes, status: int) -> None:
    relay, client = rig(method=method)
    relay.begin(head(length=0, status=status))
    relay.end()
    assert b"Content-Length" not in client.writes[0]
    assert b"Transfer-Encoding" not in client.writes[0]
    assert len(client.writes) == 1


@pytest.mark.parametrize(
    ("answer", "stream", "sent", "hard"),
    [
        (head(length=50), False, b"{", True),
        (head(chunked=True), False, b"{", True),
        (head(length=50), True, b"data: {}\n\n", True),
        (head(chunked=True), True, b"data: {}\n\n", False),
        (head(chunked=True), True, b"data: {", False),
        (head(), True, b"data: {}\n\n", False),
    ],
)
def test_only_a_stream_without_a_length_can_say_that_it_broke_off(
    answer: Head, stream: bool, sent: bytes, hard: bool
) -> None:
    relay, client = rig()
    relay.stream = stream
    relay.begin(answer)
    relay.data(sent, 1.0)
    before = len(client.writes)
    relay.cut(EngineBroken("gone"))
    assert client.cuts == [hard]
    said = b"".join(client.writes[before:])
    assert (b'"error"' in said) is not hard
    if not hard and not sent.endswith(b"\n\n"):
        assert b"\n\ndata: " in said
    assert not said.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("stream", "tail", "whole"),
    [
        (False, b'{"a":1}', True),
        (False, b'{"a":', False),
        (True, b"data: [DONE]\n\n", True),
        (True, b"data: {}\n\n", False),
    ],
)
def test_an_answer_that_only_its_connection_ends_is_judged_by_its_last_bytes(
    stream: bool, tail: bytes, whole: bool
) -> None:
    relay, _ = rig()
    relay.stream = stream
    relay.begin(head())
    for at in range(0, len(tail), 3):
        relay.data(tail[at : at + 3], 1.0)
    assert relay.whole() is whole


def test_the_first_ping_commits_to_a_stream_and_the_head_is_not_sent_twice() -> None:
    relay, client = rig()
    relay.ping()
    relay.ping()
    relay.begin(head(chunked=True))
    relay.data(b"data: {}\n\n", 1.0)
    relay.end()
    everything = b"".join(client.writes)
    assert everything.count(b"HTTP/1.1 200") == 1
    assert everything.count(b": held\n\n") == 2
    assert b"text/event-stream" in client.writes[0]
    assert everything.endswith(b"a\r\ndata: {}\n\n\r\n0\r\n\r\n")


def test_a_ping_claims_nothing_that_is_not_known_before_an_engine_has_the_request() -> None:
    relay, client = rig()
    exchange: Any = relay._exchange
    exchange.engine = None
    relay.ping()
    assert b"X-Request-Id: id" in client.writes[0]
    for name in (b"X-Fleetgate-Engine", b"X-Fleetgate-Weight-Version", b"X-Fleetgate-Attempts"):
        assert name not in client.writes[0]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineBroken("m"), "BadGatewayError"),
        (EngineTimeout("m"), "GatewayTimeoutError"),
        (HoldTimeout("m"), "ServiceUnavailableError"),
        (RequestAborted("m"), "BadRequestError"),
    ],
)
def test_an_error_inside_a_stream_is_the_one_that_a_whole_answer_would_tell(error: FleetgateError, kind: str) -> None:
    relay, client = rig()
    relay.ping()
    relay.cut(error)
    said = b"".join(client.writes)
    assert b'"type":"%b"' % kind.encode() in said
    assert b'"code":%d' % error.status in said
    assert b'"param":"%b"' % error.code.encode() in said


class Timers:
    """A loop whose clock is turned by hand."""

    def __init__(self) -> None:
        self.now = 1.0
        self.due: list[Any] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, then: Any) -> None:
        self.due.append(then)

    def turn(self, seconds: float) -> None:
        self.now += seconds
        due, self.due = self.due, []
        for then in due:
            then()


def stream() -> tuple[Relay, Client, Timers, list[bool]]:
    relay, client = rig()
    loop = Timers()
    reading: list[bool] = []
    exchange: Any = relay._exchange
    client.loop = exchange.client.loop = loop  # type: ignore[assignment]
    exchange.client_writable = reading.append
    relay.stream = True
    relay.begin(head(chunked=True))
    client.writes.clear()
    return relay, client, loop, reading


def flood(relay: Relay, loop: Timers, pieces: int) -> None:
    for _ in range(pieces):
        relay.data(b"x", loop.now)


def test_the_first_pieces_of_a_stream_never_wait() -> None:
    relay, client, loop, _ = stream()
    flood(relay, loop, BURST + 1)
    assert client.writes == [b"1\r\nx\r\n"] * (BURST + 1)


def test_what_comes_faster_than_the_window_leaves_together_and_is_read_together() -> None:
    relay, client, loop, reading = stream()
    flood(relay, loop, BURST + 1)
    client.writes.clear()
    flood(relay, loop, 3)
    assert (client.writes, reading) == ([], [False])
    loop.turn(0.001)
    assert client.writes == [b"1\r\nx\r\n" * 3]
    assert reading == [False, True]
    assert not loop.due


def test_a_stream_that_slows_down_waits_no_more() -> None:
    relay, client, loop, _ = stream()
    flood(relay, loop, BURST + 2)
    loop.turn(0.001)
    client.writes.clear()
    for _ in range(5):
        loop.turn(0.02)
        flood(relay, loop, 1)
    assert client.writes == [b"1\r\nx\r\n"] * 5


def test_the_end_takes_along_what_waits() -> None:
    relay, client, loop, _ = stream()
    flood(relay, loop, BURST + 2)
    client.writes.clear()
    relay.end()
    assert client.writes == [b"1\r\nx\r\n0\r\n\r\n"]
    loop.turn(0.001)
    assert len(client.writes) == 1


def test_a_cut_takes_along_what_waits() -> None:
    relay, client, loop, _ = stream()
    flood(relay, loop, BURST + 2)
    client.writes.clear()
    relay.cut(EngineBroken("gone"))
    assert client.writes[0] == b"1\r\nx\r\n"
    assert b"engine_broken" in b"".join(client.writes[1:])


def test_a_client_that_does_not_take_it_keeps_its_engine_waiting() -> None:
    relay, client, loop, reading = stream()
    flood(relay, loop, BURST + 2)
    client.taking = False
    loop.turn(0.001)
    assert reading == [False]


def test_a_big_piece_leaves_at_once_with_what_waits() -> None:
    relay, client, loop, _ = stream()
    flood(relay, loop, BURST + 2)
    client.writes.clear()
    relay.data(b"y" * JOINED, loop.now)
    assert len(client.writes) == 1
    assert client.writes[0].startswith(b"1\r\nx\r\n")


def test_big_pieces_are_no_flood() -> None:
    relay, client, loop, reading = stream()
    for _ in range(3 * BURST):
        relay.data(b"y" * JOINED, loop.now)
    assert (len(client.writes), reading, loop.due) == (3 * BURST, [], [])


def test_a_bug_in_one_flush_holds_no_other_stream_up() -> None:
    (first, broken, loop, _), (second, whole, _, _) = stream(), stream()
    crashed: list[bool] = []
    second._flood = first._flood
    second._exchange.client.loop = loop  # type: ignore[assignment]
    first._exchange.crashed = lambda: crashed.append(True)  # type: ignore[method-assign]
    for relay in (first, second):
        flood(relay, loop, BURST + 2)
    broken.write = None  # type: ignore[assignment, method-assign]
    whole.writes.clear()
    loop.turn(0.001)
    assert (crashed, whole.writes) == ([True], [b"1\r\nx\r\n"])


@pytest.mark.parametrize("http11", [True, False])
@pytest.mark.parametrize(
    ("length", "chunked", "told"), [(None, True, True), (None, False, True), (100, False, False), (100, True, True)]
)
def test_a_cut_stream_tells_its_error_unless_the_client_was_told_a_length(
    http11: bool, length: int | None, chunked: bool, told: bool
) -> None:
    relay, client = rig(http11=http11)
    relay.stream = True
    relay.begin(head(length=length, chunked=chunked))
    relay.data(b"data: 1\n\n", 1.0)
    relay.cut(EngineBroken("gone"))
    assert (b'"error"' in b"".join(client.writes)) is told
    assert client.cuts == [not told]


@pytest.mark.parametrize("http11", [True, False])
def test_a_pinged_stream_tells_its_error_whatever_the_engine_says(http11: bool) -> None:
    for begins in (False, True):
        relay, client = rig(http11=http11)
        relay.ping()
        if begins:
            relay.begin(head(length=100))
        relay.cut(HoldTimeout("gone"))
        assert b'"error"' in b"".join(client.writes)
        assert client.cuts == [False]
