"""The connections to one engine: which is taken, when they go, and the one whole exchange of probes and control calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy.core.failures import Kind
from proxy.data.connection import Connection
from proxy.data.upstream import FetchError, Upstream


class Wire:
    """A transport that only remembers."""

    def __init__(self) -> None:
        self.state = "open"
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.state = "closed"

    def abort(self) -> None:
        self.state = "aborted"

    def is_closing(self) -> bool:
        return self.state != "open"

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def idle(upstream: Upstream) -> tuple[Connection, Wire]:
    connection, wire = Connection(upstream), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    upstream.put_idle(connection)
    return connection, wire


async def test_the_youngest_is_taken_first_and_the_dead_are_skipped() -> None:
    upstream = Upstream("http://127.0.0.1:1")
    old, _ = idle(upstream)
    dead, wire = idle(upstream)
    young, _ = idle(upstream)
    wire.state = "closing"
    now = asyncio.get_running_loop().time()
    assert upstream.take_idle(now) is young
    assert upstream.take_idle(now) is old
    assert upstream.take_idle(now) is None
    assert young.reused
    assert wire.state == "aborted"
    assert dead.receiver is None
    upstream.close()


async def test_nothing_is_kept_without_an_idle_limit() -> None:
    upstream = Upstream("http://127.0.0.1:1", idle_limit=0.0)
    _, wire = idle(upstream)
    assert wire.state == "closed"
    assert upstream.take_idle(asyncio.get_running_loop().time()) is None


async def test_the_old_are_swept() -> None:
    upstream = Upstream("http://127.0.0.1:1", idle_limit=2.0)
    connection, wire = idle(upstream)
    _, young = idle(upstream)
    connection.idle_since -= 3.0
    upstream._expire()
    assert wire.state == "closed"
    assert young.state == "open"
    upstream.close()
    assert young.state == "aborted"
    assert upstream._sweep is None


async def test_a_connection_that_ends_while_idle_is_forgotten() -> None:
    upstream = Upstream("http://127.0.0.1:1")
    connection, _ = idle(upstream)
    connection.connection_lost(None)
    assert upstream.connections == set()
    assert upstream.take_idle(asyncio.get_running_loop().time()) is None
    upstream.close()


async def test_dropping_the_idle_leaves_the_busy() -> None:
    upstream = Upstream("http://127.0.0.1:1")
    _, one = idle(upstream)
    busy, two = idle(upstream)
    assert upstream.take_idle(asyncio.get_running_loop().time()) is busy
    upstream.drop_idle()
    assert (one.state, two.state) == ("aborted", "open")
    upstream.close()


def test_a_prefix_and_a_port_are_part_of_the_request() -> None:
    upstream = Upstream("http://engine:8100/replica-0")
    head = upstream.request_head(b"POST", b"/pause?mode=keep", [(b"X-A", b"1")], b"{}")
    assert head == (
        b"POST /replica-0/pause?mode=keep HTTP/1.1\r\nHost: engine:8100\r\nX-A: 1\r\nContent-Length: 2\r\n\r\n"
    )
    assert b"Content-Length" not in upstream.request_head(b"POST", b"/resume", [], None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://name.invalid:1", "http://xn--a-.example\u2603:1"])
async def test_no_connection_is_a_failure_that_says_which_engine(url: str) -> None:
    upstream = Upstream("http://127.0.0.1:1")
    upstream.host = url.removeprefix("http://").rpartition(":")[0]
    upstream.url = url
    with pytest.raises(FetchError) as caught:
        await upstream.fetch("GET", "/health", timeout=5)
    assert caught.value.failure.kind is Kind.CONNECT
    assert not caught.value.sent
    assert url in caught.value.failure.detail


async def test_a_whole_exchange_and_its_limits() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/silent" in head:
            await reader.read()
        elif b"/cut" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    answer = await upstream.fetch("GET", "/good", timeout=5)
    assert (answer.status, answer.body) == (200, b"hello")
    for target, kind in (("/silent", Kind.TIMEOUT), ("/cut", Kind.CUT)):
        with pytest.raises(FetchError) as caught:
            await upstream.fetch("GET", target, timeout=0.2)
        assert caught.value.failure.kind is kind
        assert caught.value.sent
    with pytest.raises(FetchError) as caught:
        await upstream.fetch("GET", "/good", timeout=5, limit=3)
    assert caught.value.failure.kind is Kind.BROKEN
    server.close()
    upstream.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextlib.asynccontextmanager
async def serving(last_words: bytes) -> AsyncIterator[tuple[Upstream, list[int]]]:
    """An engine that answers well, and writes ``last_words`` to the second request of a connection before it closes."""
    connections: list[int] = []
    talks: list[asyncio.Task[None] | None] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.append(asyncio.current_task())
        connections.append(0)
        place = len(connections) - 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                connections[place] += 1
                if place == 0 and connections[place] == 2:
                    writer.write(last_words)
                    break
                writer.write(OK)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        yield upstream, connections
        upstream.close()
        await asyncio.gather(*[task for task in talks if task is not None])


async def test_what_may_be_repeated_goes_on_a_used_connection_and_again_on_a_new_one_if_that_is_dead() -> None:
    async with serving(b"") as (upstream, connections):
        for _ in range(2):
            answer = await upstream.fetch("POST", "/pause", timeout=5, repeatable=True)
            assert (answer.status, answer.body) == (200, b"ok")
        # The second came to a connection that closed without a word, and was sent again.
        assert connections == [2, 1]
        assert upstream.take_idle(asyncio.get_running_loop().time()) is not None


async def test_what_broke_inside_its_answer_is_not_sent_again() -> None:
    async with serving(OK[:20]) as (upstream, connections):
        await upstream.fetch("POST", "/pause", timeout=5, repeatable=True)
        with pytest.raises(FetchError) as caught:
            await upstream.fetch("POST", "/pause", timeout=5, repeatable=True)
        assert caught.value.failure.kind is Kind.CUT
        assert connections == [2]


async def test_what_must_not_be_repeated_has_a_connection_of_its_own() -> None:
    async with serving(b"") as (upstream, connections):
        await upstream.fetch("POST", "/pause", timeout=5, repeatable=True)
        await upstream.fetch("POST", "/start_weight_update", timeout=5)
        await upstream.fetch("POST", "/start_weight_update", timeout=5)
        assert connections == [1, 1, 1]
