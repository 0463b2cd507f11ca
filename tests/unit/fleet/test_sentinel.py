import asyncio

import pytest

from proxy.data.upstream import FetchError
from proxy.fleet.sentinel import Sentinel

KEEP = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


class Server:
    """Answers every request with the same bytes and counts its connections."""

    def __init__(self, answer, *, closes=False):
        self.answer = answer
        self.closes = closes or answer == CLOSE
        self.writers = []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc):
        self.server.close()
        for writer in self.writers:
            writer.close()
        await asyncio.sleep(0)

    async def serve(self, reader, writer):
        self.writers.append(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                if self.answer is not None:
                    writer.write(self.answer)
                if self.closes:
                    writer.close()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def until(check):
    async with asyncio.timeout(5):
        while not check():
            await asyncio.sleep(0.005)


async def test_one_connection_serves_every_probe_and_its_end_is_news():
    ended = []
    async with Server(KEEP) as server:
        sentinel = Sentinel(server.url, lambda: ended.append(1), connect_timeout=1)
        for _ in range(3):
            assert (await sentinel.ask("/health", timeout=1)).status == 200
        assert len(server.writers) == 1
        assert sentinel.kept
        server.writers[0].transport.abort()
        await until(lambda: ended)
        assert not sentinel.kept
        assert (await sentinel.ask("/health", timeout=1)).status == 200
        sentinel.close()


async def test_a_server_that_closes_each_connection_makes_no_news():
    ended = []
    async with Server(CLOSE) as server:
        sentinel = Sentinel(server.url, lambda: ended.append(1), connect_timeout=1)
        assert (await sentinel.ask("/health", timeout=1)).body == b"ok"
        await asyncio.sleep(0.02)
        assert not sentinel.kept
        assert ended == []
        sentinel.close()


async def shy(server, ended, lasting):
    """A sentinel that has met a server that closes each connection after its answer, without a word."""
    sentinel = Sentinel(server.url, lambda: ended.append(1), connect_timeout=1, lasting=lasting)
    await sentinel.ask("/health", timeout=1)
    await until(lambda: ended)
    ended.clear()
    assert (await sentinel.ask("/health", timeout=1)).body == b"ok"
    assert sentinel.kept
    return sentinel


def open_ones(server):
    return [writer for writer in server.writers if not writer.is_closing()]


@pytest.mark.parametrize("answer", [KEEP, CLOSE])
async def test_where_idle_connections_end_a_silent_one_tells_of_the_process(answer):
    ended = []
    async with Server(answer, closes=True) as server:
        sentinel = Sentinel(server.url, lambda: ended.append(1), connect_timeout=1, lasting=0)
        await sentinel.ask("/health", timeout=1)
        await until(lambda: not sentinel.kept)
        ended.clear()
        for _ in range(3):
            assert (await sentinel.ask("/health", timeout=1)).body == b"ok"
        await until(lambda: len(open_ones(server)) == 1)
        assert sentinel.kept
        assert ended == []
        open_ones(server)[0].transport.abort()
        await until(lambda: ended)
        assert not sentinel.kept
        sentinel.close()


async def test_where_silent_ones_end_too_only_the_first_is_news():
    ended = []
    async with Server(KEEP, closes=True) as server:
        sentinel = await shy(server, ended, lasting=60)
        for _ in range(3):
            await until(lambda: len(open_ones(server)) == 1)
            open_ones(server)[0].transport.abort()
            await until(lambda: not sentinel.kept)
            await sentinel.ask("/health", timeout=1)
        assert ended == [1]
        sentinel.close()


async def test_two_at_once_open_one_silent_connection():
    ended = []
    async with Server(KEEP, closes=True) as server:
        sentinel = await shy(server, ended, lasting=0)
        open_ones(server)[0].transport.abort()
        await until(lambda: not sentinel.kept)
        await asyncio.gather(*(sentinel.ask("/health", timeout=1) for _ in range(4)))
        await until(lambda: len(open_ones(server)) == 1)
        sentinel.close()


async def test_another_process_gets_a_fresh_start():
    ended = []
    async with Server(KEEP, closes=True) as server:
        sentinel = await shy(server, ended, lasting=0)
        server.closes = False
        sentinel.start_over()
        for _ in range(2):
            await sentinel.ask("/health", timeout=1)
        await until(lambda: len(open_ones(server)) == 1)
        assert sentinel.kept
        assert ended == []
        sentinel.close()


async def test_closing_it_oneself_makes_no_news():
    ended = []
    async with Server(KEEP) as server:
        sentinel = Sentinel(server.url, lambda: ended.append(1), connect_timeout=1)
        await sentinel.ask("/health", timeout=1)
        sentinel.drop()
        await asyncio.sleep(0.02)
        await sentinel.ask("/health", timeout=1)
        sentinel.close()
        await asyncio.sleep(0.02)
        assert ended == []


async def test_two_at_once_do_not_share_a_connection():
    async with Server(KEEP) as server:
        sentinel = Sentinel(server.url, list, connect_timeout=1)
        await sentinel.ask("/health", timeout=1)
        answers = await asyncio.gather(*(sentinel.ask("/health", timeout=1) for _ in range(5)))
        assert [answer.status for answer in answers] == [200] * 5
        sentinel.close()


async def test_silence_ends_with_the_limit_and_the_connection():
    async with Server(None) as server:
        sentinel = Sentinel(server.url, list, connect_timeout=1)
        with pytest.raises(FetchError, match="no answer within"):
            await sentinel.ask("/health", timeout=0.05)
        assert not sentinel.kept
        sentinel.close()


async def test_nobody_there():
    sentinel = Sentinel("http://127.0.0.1:1", list, connect_timeout=1)
    with pytest.raises(FetchError) as caught:
        await sentinel.ask("/health", timeout=1)
    assert not caught.value.sent
