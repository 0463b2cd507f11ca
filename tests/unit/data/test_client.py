"""A client that takes its answer slowly, told from one that takes nothing. Real sockets, a clock turned by hand."""

from __future__ import annotations

import asyncio
import fcntl
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.data.client import FLUSH, ClientConnection, unread

LIMIT = 60.0


class Loop:
    """Remembers timers instead of running them."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Any]] = []

    def call_later(self, seconds: float, then: Any, *arguments: Any) -> Any:
        item = (seconds, lambda: then(*arguments))
        self.due.append(item)
        return SimpleNamespace(cancel=lambda: self.due.remove(item))

    def strike(self) -> float:
        (seconds, then) = self.due.pop()
        then()
        return seconds


class Transport:
    """A transport with bytes of its own in front of a real socket that is full."""

    def __init__(self, sock: socket.socket | None, waiting: int = 1000) -> None:
        self.sock = sock
        self.waiting = waiting
        self.aborted = self.closed = False

    def get_extra_info(self, name: str) -> Any:
        return self.sock if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True


class Pair:
    """A connection whose reader reads only when it is told to."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.reader = socket.socket()
            self.reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            self.reader.connect(server.getsockname())
            self.writer = server.accept()[0]
        self.writer.setblocking(False)
        try:
            while True:
                self.writer.send(b"x" * 65536)
        except BlockingIOError:
            pass

    def read(self) -> None:
        """All that has arrived, so that the window opens."""
        self.reader.recv(1 << 20)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.reader.close()
    made.writer.close()


def client_of(transport: Transport) -> tuple[ClientConnection, Loop]:
    settings = SimpleNamespace(stalled_client_timeout=LIMIT)
    loop = Loop()
    server: Any = SimpleNamespace(plane=SimpleNamespace(settings=settings), loop=loop)
    client = ClientConnection(server)
    client.transport = transport  # type: ignore[assignment]
    return client, loop


async def taken(pair: Pair, transport: Any) -> None:
    """Let the client read until the kernel has got rid of something."""
    before = unread(transport)
    async with asyncio.timeout(10):
        while unread(transport) == before:
            pair.read()
            await asyncio.sleep(0)


async def lasts_as_long_as_it_reads(pair: Pair, transport: Any, loop: Loop) -> None:
    for _ in range(3):
        await taken(pair, transport)
        assert loop.strike() == LIMIT
        assert not transport.aborted
    loop.strike()
    assert transport.aborted


async def test_what_the_kernel_got_rid_of_is_progress_although_the_transport_has_as_much_as_before(pair: Pair) -> None:
    transport = Transport(pair.writer)
    client, loop = client_of(transport)
    client.stalls()
    await lasts_as_long_as_it_reads(pair, transport, loop)
    assert not loop.due


async def test_a_closed_connection_lasts_as_long_as_its_client_reads(pair: Pair) -> None:
    transport = Transport(pair.writer)
    client, loop = client_of(transport)
    client.close()
    assert loop.strike() == FLUSH
    await lasts_as_long_as_it_reads(pair, transport, loop)


def test_a_connection_that_has_nothing_left_to_write_ends_at_once() -> None:
    transport = Transport(None, waiting=0)
    client, loop = client_of(transport)
    client.close()
    loop.strike()
    assert transport.aborted


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_where_the_kernel_does_not_tell_the_transport_alone_counts(
    pair: Pair, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    transport = Transport(pair.writer)
    client, loop = client_of(transport)
    client.stalls()
    transport.waiting = 999
    loop.strike()
    assert not transport.aborted
    loop.strike()
    assert transport.aborted


def test_a_client_that_caught_up_is_not_watched() -> None:
    client, loop = client_of(Transport(None))
    client.stalls()
    client.caught_up()
    assert client.taking
    assert not loop.due
