import asyncio

import pytest

from proxy.data.upstream import FetchError
from proxy.fleet.sentinel import Sentinel

KEEP = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


class Server:
    """Answers every request with the same bytes and counts its connections."""

    def __init__(self, answer):
        self.answer = answer
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
                if self.answer == CLOSE:
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
        for _ in range(2):
            assert (await sentinel.ask("/health", timeout=1)).body == b"ok"
        await asyncio.sleep(0.02)
        assert not sentinel.kept
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
