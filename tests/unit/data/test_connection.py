"""One engine connection, fed bytes by hand: what its receiver hears, and when it may serve again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.core.failures import Failure, Kind
from proxy.data.connection import Connection, Head
from proxy.data.upstream import Upstream


class Wire:
    """A transport that only remembers."""

    def __init__(self) -> None:
        self.written = b""
        self.state = "open"
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.state = "closed"

    def abort(self) -> None:
        self.state = "aborted"

    def is_closing(self) -> bool:
        return self.state != "open"

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Heard:
    """A receiver that only remembers."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.body = b""
        self.pieces = 0
        self.ended = False
        self.failure: Failure | None = None
        self.writable: list[bool] = []
        self.crashed = 0
        self.breaks_at = ""

    def _maybe_break(self, where: str) -> None:
        if self.breaks_at == where:
            raise RuntimeError(where)

    def on_head(self, head: Head) -> None:
        self._maybe_break("head")
        assert self.head is None
        self.head = head

    def on_data(self, data: bytes, more: bool) -> None:
        self._maybe_break("data")
        self.body += data
        self.pieces += 1

    def on_end(self) -> None:
        self._maybe_break("end")
        assert not self.ended
        self.ended = True

    def on_failure(self, failure: Failure) -> None:
        self._maybe_break("failure")
        assert self.failure is None
        self.failure = failure

    def on_writable(self, writable: bool) -> None:
        self.writable.append(writable)

    def on_crash(self) -> None:
        self.crashed += 1


class Rig:
    """A connection with a request on its way."""

    def __init__(self, *, head: bool = False, open_body: bool = False, reused: bool = False) -> None:
        self.upstream = Upstream("http://127.0.0.1:1", idle_limit=2.0)
        self.connection = Connection(self.upstream)
        self.wire = Wire()
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]
        self.connection.reused = reused
        self.heard = Heard()
        self.connection.send(self.heard, b"request", bodyless_answer=head, open_body=open_body)

    def feed(self, data: bytes, piece: int = 1 << 20) -> None:
        for start in range(0, len(data), piece):
            self.connection.data_received(data[start : start + piece])

    @property
    def kept(self) -> bool:
        """Whether it may serve again."""
        return self.upstream.take_idle(asyncio.get_running_loop().time()) is self.connection


GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize(
    "data",
    [
        GOOD,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nX-Trailer: a\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: a\r\n\r\n" + GOOD,
    ],
)
async def test_a_whole_answer_leaves_the_connection_usable(data: bytes, piece: int) -> None:
    rig = Rig()
    rig.feed(data, piece)
    assert rig.heard.ended
    assert rig.heard.body == b"hello"
    assert rig.heard.head is not None
    assert rig.heard.head.status == 200
    assert rig.heard.head.get(b"link") is None
    assert rig.kept
    # And it serves again.
    rig.heard = Heard()
    rig.connection.send(rig.heard, b"request")
    rig.feed(GOOD, piece)
    assert rig.heard.body == b"hello"


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        GOOD + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL",
        GOOD + b"x",
    ],
)
async def test_a_whole_answer_after_which_the_connection_must_not_serve(data: bytes) -> None:
    rig = Rig()
    rig.feed(data)
    assert rig.heard.ended
    assert rig.heard.body == b"hello"
    assert rig.wire.state == "closed"
    assert not rig.kept


async def test_an_early_answer_does_not_free_a_connection_whose_request_is_not_whole() -> None:
    rig = Rig(open_body=True)
    rig.feed(GOOD)
    assert rig.heard.ended
    assert not rig.kept


async def test_a_request_that_became_whole_frees_it() -> None:
    rig = Rig(open_body=True)
    rig.connection.write(b"the rest")
    rig.connection.request_open = False
    rig.feed(GOOD)
    assert rig.kept
    assert rig.wire.written == b"requestthe rest"


async def test_reading_goes_on_when_an_answer_ends_that_was_held_back() -> None:
    rig = Rig()
    rig.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe")
    rig.connection.pause_reading()
    assert not rig.wire.reading
    rig.feed(b"llo")
    assert rig.wire.reading
    assert rig.kept


@pytest.mark.parametrize(
    ("data", "length", "serves"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", 99, False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 0, False),
        (b"HTTP/1.1 200 OK\r\nX: a\r\n\r\n", 0, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 0, True),
        (b"HTTP/1.1 204 No\r\n\r\n", 0, True),
    ],
)
async def test_an_answer_to_head_ends_with_its_head(data: bytes, length: int, serves: bool) -> None:
    rig = Rig(head=True)
    rig.feed(data)
    assert rig.heard.ended
    assert rig.heard.body == b""
    assert rig.heard.head is not None
    assert rig.heard.head.length == length
    assert rig.kept is serves


async def test_the_end_of_the_connection_ends_an_answer_without_a_length() -> None:
    rig = Rig()
    rig.feed(b"HTTP/1.1 200 OK\r\nX: a\r\n\r\nhello")
    assert not rig.heard.ended
    rig.connection.eof_received()
    rig.connection.connection_lost(None)
    assert rig.heard.ended
    assert rig.heard.failure is None


@pytest.mark.parametrize(
    ("data", "reused", "kind"),
    [
        (b"", True, Kind.STALE),
        (b"", False, Kind.LOST),
        (b"HTTP/1.1 20", True, Kind.CUT),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe", False, Kind.CUT),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", False, Kind.CUT),
        (b"HTTP/1.1 100 Continue\r\n\r\n", True, Kind.CUT),
    ],
)
async def test_what_the_loss_of_a_connection_means(data: bytes, reused: bool, kind: Kind) -> None:
    rig = Rig(reused=reused)
    lost: list[Kind] = []
    rig.upstream.on_lost = lost.append
    rig.feed(data)
    rig.connection.eof_received()
    rig.connection.connection_lost(None)
    assert not rig.heard.ended
    assert rig.heard.failure is not None
    assert rig.heard.failure.kind is kind
    assert lost == [kind]
    assert rig.upstream.connections == set()


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    ],
)
async def test_what_is_no_clear_answer_is_broken(data: bytes) -> None:
    rig = Rig()
    rig.feed(data)
    assert rig.heard.failure is not None
    assert rig.heard.failure.kind is Kind.BROKEN
    assert rig.wire.state == "aborted"


async def test_bytes_on_an_idle_connection_end_it() -> None:
    rig = Rig()
    rig.feed(GOOD)
    rig.feed(GOOD)
    assert rig.wire.state == "aborted"
    assert not rig.kept


async def test_a_connection_that_is_too_old_is_not_taken() -> None:
    rig = Rig()
    rig.feed(GOOD)
    assert rig.upstream.take_idle(asyncio.get_running_loop().time() + 2.1) is None
    assert rig.wire.state == "aborted"


@pytest.mark.parametrize("where", ["head", "data", "end"])
async def test_a_receiver_that_breaks_is_told_to_end_and_the_connection_goes(where: str) -> None:
    rig = Rig()
    rig.heard.breaks_at = where
    rig.feed(GOOD)
    assert rig.heard.crashed == 1
    assert rig.wire.state != "open"


async def test_a_receiver_that_breaks_at_a_failure_is_told_to_end() -> None:
    rig = Rig()
    rig.heard.breaks_at = "failure"
    rig.connection.connection_lost(None)
    assert rig.heard.crashed == 1


async def test_detaching_ends_the_exchange_and_the_connection() -> None:
    rig = Rig()
    rig.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe")
    rig.connection.detach()
    rig.connection.connection_lost(None)
    assert rig.heard.failure is None
    assert rig.wire.state == "aborted"


async def test_sending_on_a_dead_connection_is_a_failure_at_the_next_turn() -> None:
    rig = Rig()
    rig.feed(GOOD)
    rig.wire.abort()
    heard = Heard()
    rig.connection.reused = True
    rig.connection.send(heard, b"request")
    assert heard.failure is None
    await asyncio.sleep(0)
    assert heard.failure is not None
    assert heard.failure.kind is Kind.STALE


async def test_back_pressure_of_an_upload_reaches_the_receiver() -> None:
    rig = Rig()
    rig.connection.pause_writing()
    rig.connection.resume_writing()
    assert rig.heard.writable == [False, True]


async def test_a_switch_that_nobody_takes_ends_the_connection() -> None:
    rig = Rig()
    rig.feed(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nframes")
    assert rig.heard.head is not None
    assert rig.heard.head.status == 101
    assert rig.wire.state == "aborted"
