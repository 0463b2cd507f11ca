"""Slow readers, slow senders, big bodies, many connections: everything has a bound."""

from __future__ import annotations

import asyncio

import pytest

from tests.tools.fault_engine import FaultEngine, Request, Wire, answer_bytes
from tests.tools.fault_scripts import SSE_HEAD, chunk, echo, reply, silent, stream
from tests.tools.rig import Client, ask, eventually, get, memory, post, proxy_for

BODY = b'{"prompt":"x"}'
MB = 1 << 20


def flood(total: int, piece: int = 65536) -> object:
    async def script(wire: Wire, request: Request) -> None:
        await wire.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n" % total
        )
        sent = 0
        while sent < total:
            await wire.send(b"x" * min(piece, total - sent))
            sent += piece

    return script


async def test_a_client_that_does_not_read_stalls_only_its_own_stream() -> None:
    async with FaultEngine(flood(300 * MB)) as big, proxy_for(big) as app:
        async with Client.to(app.url, limit=65536) as lazy, Client.to(app.url, limit=65536) as keen:
            await lazy.send(post("/v1/completions", BODY))
            await lazy.reader.readuntil(b"\r\n\r\n")
            lazy.writer.transport.pause_reading()  # type: ignore[attr-defined]
            big.script = stream(200, 0.001)
            await keen.send(post("/v1/completions", BODY))
            got = await asyncio.wait_for(keen.reply(), 20)
            assert got.complete
            assert got.body.endswith(b"data: [DONE]\n\n")
            front = next(front for front in app.listener._server._fronts if not front.taking)
            held = front.transport.get_write_buffer_size()
            assert held < 1 * MB, f"{held} bytes held for one client"
            lazy.writer.transport.abort()


@pytest.mark.parametrize("direction", ["down", "up"])
async def test_bodies_of_300_mb_pass_with_flat_memory(direction: str) -> None:
    total = 300 * MB

    async def swallow(wire: Wire, request: Request) -> None:
        await wire.drop_body(total)
        await wire.send(answer_bytes(200, b"{}"))

    engine = FaultEngine(flood(total) if direction == "down" else swallow, reads_body=direction == "down")
    async with engine, proxy_for(engine, replay_limit=8 * MB) as app, Client.to(app.url) as client:
        before = memory()
        most = 0
        if direction == "down":
            await client.send(post("/v1/completions", BODY))
            await client.reader.readuntil(b"\r\n\r\n")
            left = total
            while left:
                left -= len(await client.reader.read(1 * MB))
                most = max(most, memory())
        else:
            await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % total)
            piece = b"x" * MB
            for _ in range(300):
                await client.send(piece)
                most = max(most, memory())
            assert (await client.reply()).status == 200
        grown = (most - before) / MB
        print(f"300 MB {direction}: memory grew by {grown:.1f} MiB")
        # The kept part of the body (8 MiB), the buffers of both sockets, and this test's own pieces.
        assert grown < 64


async def test_a_client_that_reads_nothing_is_cut_after_the_limit() -> None:
    async with FaultEngine(flood(300 * MB)) as engine, proxy_for(engine, stalled_client_timeout=0.2) as app:
        async with Client.to(app.url, limit=65536) as lazy:
            await lazy.send(post("/v1/completions", BODY))
            await lazy.reader.readuntil(b"\r\n\r\n")
            lazy.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await eventually(lambda: not len(app.plane.tracker), "cut")
            await asyncio.wait_for(engine.requests[0].wire.gone.wait(), 2)


async def test_a_client_that_reads_slowly_is_not_cut() -> None:
    total = 8 * MB
    async with FaultEngine(flood(total)) as engine, proxy_for(engine, stalled_client_timeout=0.3) as app:
        async with Client.to(app.url, limit=65536) as slow:
            await slow.send(post("/v1/completions", BODY))
            await slow.reader.readuntil(b"\r\n\r\n")
            got = 0
            while got < total:
                got += len(await slow.reader.read(262_144))
                await asyncio.sleep(0.03)
            assert got == total


async def test_an_engine_whose_answer_was_held_back_serves_the_next_request() -> None:
    """The end of an answer comes in the very read that stopped the reading."""
    async with (
        FaultEngine(reply(answer_bytes(200, b"x" * 200_000))) as engine,
        proxy_for(engine, stream_buffer=1024) as app,
        Client.to(app.url) as client,
    ):
        for _ in range(30):
            await client.send(post("/v1/completions", BODY))
            got = await asyncio.wait_for(client.reply(), 5)
            assert len(got.body) == 200_000


async def test_a_trickled_head_is_cut() -> None:
    async with (
        FaultEngine(echo()) as engine,
        proxy_for(engine, header_timeout=0.3) as app,
        Client.to(app.url) as client,
    ):
        await client.send(b"POST /v1/completions HTTP/1.1\r\n")

        async def trickle() -> None:
            for n in range(1000):
                await client.send(b"X-%d: a\r\n" % n)
                await asyncio.sleep(0.02)

        task = asyncio.ensure_future(trickle())
        got = await asyncio.wait_for(client.reply(), 3)
        assert got.status == 408
        assert await asyncio.wait_for(client.closed(), 3)
        task.cancel()
        assert engine.requests == []


async def test_a_trickled_head_behind_a_request_is_cut() -> None:
    async with (
        FaultEngine(echo()) as engine,
        proxy_for(engine, header_timeout=0.3) as app,
        Client.to(app.url) as client,
    ):
        await client.send(post("/v1/completions", BODY) + b"POST /v1/comp")
        assert (await client.reply()).status == 200
        await client.send(b"letions")
        got = await asyncio.wait_for(client.reply(), 3)
        assert got.status == 408
        assert len(engine.requests) == 1


@pytest.mark.parametrize("replay_limit", [1000, 1_000_000])
async def test_a_body_that_stops_coming_is_cut(replay_limit: int) -> None:
    settings = {"body_timeout": 0.3, "replay_limit": replay_limit}
    async with FaultEngine(silent(), reads_body=False) as engine, proxy_for(engine, **settings) as app:
        async with Client.to(app.url) as client:
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 90000\r\n\r\n" + b"x" * 5000
            )
            got = await asyncio.wait_for(client.reply(), 3)
            assert got.status == 408
            assert await asyncio.wait_for(client.closed(), 3)


async def test_the_body_of_a_pipelined_request_that_stops_coming_is_cut() -> None:
    async with FaultEngine(stream(10, 0.02)) as engine, proxy_for(engine, body_timeout=0.3) as app:
        async with Client.to(app.url) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 90000\r\n\r\nx"
            await client.send(post("/v1/completions", BODY) + head)
            assert (await client.reply()).status == 200
            assert (await asyncio.wait_for(client.reply(), 3)).status == 408


async def test_a_control_call_whose_body_stops_coming_is_cut() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, body_timeout=0.3) as app, Client.to(app.url) as client:
        await client.send(b"POST /pause HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nx")
        assert (await asyncio.wait_for(client.reply(), 3)).status == 408


async def test_an_idle_connection_is_closed() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, client_idle=0.2) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", BODY))
        assert (await client.reply()).status == 200
        assert await asyncio.wait_for(client.closed(), 3)


async def test_a_long_answer_is_no_idle_connection() -> None:
    settings = {"client_idle": 0.1, "header_timeout": 0.1, "body_timeout": 0.1}
    async with FaultEngine(stream(5, 0.2)) as engine, proxy_for(engine, **settings) as app:
        got = await ask(app.url, post("/v1/completions", BODY))
        assert got.complete
        assert got.body.count(b"data: ") == 6


async def test_bodies_over_the_limit_are_refused() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, max_body=1000) as app:
        got = await ask(app.url, post("/v1/completions", b"x" * 1001))
        assert (got.status, got.field("X-Fleetgate-Error")) == (413, "body_too_large")
        async with Client.to(app.url) as client:
            await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(20):
                await client.send(b"64\r\n" + b"x" * 100 + b"\r\n")
            assert (await client.reply()).status == 413
            assert await asyncio.wait_for(client.closed(), 5)
        assert engine.requests == []


async def test_a_client_reads_the_refusal_although_it_is_still_sending() -> None:
    """Closing with unread bytes would reset the connection and take the answer with it."""
    async with FaultEngine(echo()) as engine, proxy_for(engine, max_body=1000) as app:
        for _ in range(20):
            async with Client.to(app.url) as client:
                await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5000000\r\n\r\n")
                await client.send(b"x" * 1_000_000)
                assert (await asyncio.wait_for(client.reply(), 5)).status == 413
        assert engine.requests == []


async def test_connections_over_the_limit_are_refused_with_an_answer() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, max_connections=3) as app:
        async with Client.to(app.url) as a, Client.to(app.url) as b, Client.to(app.url) as c:
            for client in (a, b, c):
                await client.send(get("/v1/models"))
                assert (await client.reply()).status == 200
            got = await ask(app.url, get("/v1/models"))
            assert (got.status, got.field("X-Fleetgate-Error")) == (503, "too_many_connections")
            assert got.field("Retry-After")
        await eventually(lambda: app.plane.stats.connections == 0)
        assert (await ask(app.url, get("/v1/models"))).status == 200


async def test_many_slow_heads_leave_others_alone() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        loris = [await asyncio.open_connection("127.0.0.1", int(app.url.rpartition(":")[2])) for _ in range(300)]
        for _, writer in loris:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nX: ")
        for _ in range(50):
            assert (await asyncio.wait_for(ask(app.url, post("/v1/completions", BODY)), 2)).status == 200
        for _, writer in loris:
            writer.close()


async def test_a_stream_is_flushed_event_by_event() -> None:
    going = asyncio.Event()

    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SSE_HEAD + chunk(b'data: {"id":1}\n\n'))
        await going.wait()
        await wire.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with FaultEngine(script) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", BODY))
        head = await asyncio.wait_for(client.reader.readuntil(b'data: {"id":1}\n\n'), 2)
        assert b"X-Accel-Buffering: no" in head
        going.set()
        await asyncio.wait_for(client.reader.readuntil(b"[DONE]"), 2)
