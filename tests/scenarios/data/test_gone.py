"""A client that goes away: the engine's connection is closed within a second and the slot is free, on every path."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from proxy.app import App
from tests.scenarios.data import wire_forms as forms
from tests.tools.fault_engine import FaultEngine, Request, Wire
from tests.tools.fault_scripts import SSE_HEAD, chunk, cut_after, reply, silent, stream
from tests.tools.rig import Client, eventually, get, post, proxy_for

BODY = b'{"prompt":"x"}'
WITHIN = 1.0
"""Seconds that the contract gives."""


async def leave(client: Client, how: str) -> float:
    """Close, half-close or reset; returns when."""
    if how == "reset":
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.writer.transport.abort()
    elif how == "half-close":
        client.writer.write_eof()
    else:
        client.writer.close()
    return asyncio.get_running_loop().time()


async def freed(app: App, wire: Wire | None, left: float) -> None:
    """The engine's connection is closed in time, and all is given back."""
    if wire is not None:
        await asyncio.wait_for(wire.gone.wait(), 5)
        assert wire.gone_at - left < WITHIN
    await eventually(lambda: not len(app.plane.tracker), "the request is over")
    assert [engine.inflight for engine in app.fleet] == [0] * len(app.fleet)


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
async def test_while_the_engine_is_silent(how: str, path: str) -> None:
    async with FaultEngine(silent()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post(path, BODY))
        await eventually(lambda: len(engine.requests) == 1)
        left = await leave(client, how)
        await freed(app, engine.requests[0].wire, left)
        assert app.plane.stats.disconnects == 1


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_inside_a_stream(how: str) -> None:
    async with FaultEngine(stream(1000, 0.01)) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", BODY))
        await client.reader.readuntil(b"data: ")
        left = await leave(client, how)
        await freed(app, engine.requests[0].wire, left)


async def test_inside_a_stream_that_is_silent() -> None:
    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SSE_HEAD + chunk(b'data: {"id":1}\n\n'))
        await wire.gone.wait()

    async with FaultEngine(script) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", BODY))
        await client.reader.readuntil(b"data: ")
        left = await leave(client, "close")
        await freed(app, engine.requests[0].wire, left)


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_while_held(how: str) -> None:
    async with FaultEngine(silent()) as engine, proxy_for(engine, max_held_requests=1) as app:
        app.plane.gate.close("a trainer")
        for _ in range(3):
            async with Client.to(app.url) as client:
                await client.send(post("/v1/completions", BODY))
                await eventually(lambda: app.plane.gate.held == 1)
                await leave(client, how)
                await eventually(lambda: app.plane.gate.held == 0, "its place is free")
        app.plane.gate.open()
        assert engine.requests == []


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_while_the_body_is_still_being_sent(how: str) -> None:
    async with FaultEngine(silent(), reads_body=False) as engine, proxy_for(engine, replay_limit=1000) as app:
        async with Client.to(app.url) as client:
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 5000
            )
            await eventually(lambda: len(engine.requests) == 1, "the upload began")
            left = await leave(client, how)
            await freed(app, engine.requests[0].wire, left)


async def test_while_a_body_fills_the_engines_buffers() -> None:
    """The proxy does not read the client, because the engine does not read: its reset is noticed all the same.

    An orderly end would wait behind the unread bytes, where TCP hides it from everybody.
    """

    async def script(wire: Wire, request: Request) -> None:
        wire.transport.pause_reading()  # type: ignore[union-attr]
        await asyncio.sleep(2.5)
        wire.transport.resume_reading()  # type: ignore[union-attr]
        await wire.gone.wait()

    async with FaultEngine(script, reads_body=False) as engine, proxy_for(engine, replay_limit=1000) as app:
        async with Client.to(app.url) as client:
            client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n")
            client.writer.write(b"x" * 20_000_000)
            await eventually(lambda: len(engine.requests) == 1, "the upload began")
            await asyncio.sleep(0.2)
            left = await leave(client, "reset")
            await eventually(lambda: not len(app.plane.tracker), "the request is over", WITHIN + 0.5)
            assert asyncio.get_running_loop().time() - left < WITHIN + 0.5
            assert next(iter(app.fleet)).inflight == 0


async def test_while_the_body_is_kept_for_replay() -> None:
    async with FaultEngine(silent()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n" + b"x" * 100)
        await eventually(lambda: len(app.plane.tracker) == 1)
        await leave(client, "close")
        await freed(app, None, 0.0)
        assert engine.requests == []


async def test_while_connecting() -> None:
    """The engine's backlog is full, so the connection is neither made nor refused."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers = []
    async with FaultEngine(silent()) as engine, proxy_for(engine, connect_timeout=30.0) as app:
        upstream = next(iter(app.fleet)).upstream
        upstream.port = listener.getsockname()[1]
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        async with Client.to(app.url) as client:
            await client.send(post("/v1/completions", BODY))
            await eventually(lambda: next(iter(app.fleet)).inflight == 1, "connecting")
            await leave(client, "close")
            await freed(app, None, 0.0)
        upstream.port = engine.port
    for filler in fillers:
        filler.close()
    listener.close()


async def test_in_back_off() -> None:
    busy = forms.refused("/v1/completions", forms.BUSY, "Service Unavailable").replace(
        b"\r\n\r\n", b"\r\nRetry-After: 20\r\n\r\n", 1
    )
    async with FaultEngine(reply(busy)) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", BODY))
        await eventually(lambda: "BACKOFF" in repr(app.plane.tracker.all()))
        await leave(client, "close")
        await freed(app, None, 0.0)
        assert len(engine.requests) == 1


async def test_while_the_engine_is_being_looked_at() -> None:
    """A stream was cut before its first event; ``/is_paused`` and ``/health`` hang, and the client leaves."""
    engine = FaultEngine(cut_after(len(SSE_HEAD), SSE_HEAD))
    async with engine, proxy_for(engine, probe_timeout=5.0, probe_interval=60.0) as app, Client.to(app.url) as client:
        engine.probes = False

        async def hang_on_probes(wire: Wire, request: Request) -> None:
            if request.path in ("/is_paused", "/health"):
                await wire.gone.wait()
            else:
                await cut_after(len(SSE_HEAD), SSE_HEAD)(wire, request)

        engine.script = hang_on_probes
        await client.send(post("/v1/completions", BODY))
        await eventually(lambda: "JUDGING" in repr(app.plane.tracker.all()), "judging")
        await leave(client, "close")
        await freed(app, None, 0.0)
        engine.probes = True


async def test_while_its_first_event_is_looked_at() -> None:
    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SSE_HEAD + chunk(b'data: {"error'))
        await wire.gone.wait()

    async with FaultEngine(script) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", BODY))
        await eventually(lambda: "PEEKING" in repr(app.plane.tracker.all()))
        left = await leave(client, "close")
        await freed(app, engine.requests[0].wire, left)


async def test_pipelined_requests_of_a_client_that_left_are_never_run() -> None:
    async with FaultEngine(silent()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", BODY) + get("/v1/models") + post("/v1/completions", BODY))
        await eventually(lambda: len(engine.requests) == 1)
        left = await leave(client, "reset")
        await freed(app, engine.requests[0].wire, left)
        await asyncio.sleep(0.05)
        assert len(engine.requests) == 1


async def test_random_departures_leave_nothing_behind() -> None:
    """500 clients that leave at random moments, over engines that do everything."""
    import random

    rng = random.Random(3)

    async def script(wire: Wire, request: Request) -> None:
        await asyncio.sleep(rng.random() * 0.05)
        await rng.choice([stream(20, 0.002), silent(), cut_after(rng.randrange(200), b"HTTP/1.1 200 OK\r\n" * 20)])(
            wire, request
        )

    async with FaultEngine(script) as one, FaultEngine(script) as two, proxy_for(one, two, max_inflight=40) as app:

        async def visit() -> None:
            await asyncio.sleep(rng.random())
            async with Client.to(app.url) as client:
                await client.send(post("/v1/completions", BODY)[: rng.randrange(20, 200)])
                await asyncio.sleep(rng.random() * 0.2)

        await asyncio.gather(*[visit() for _ in range(500)])
        await eventually(lambda: not len(app.plane.tracker), "all over")
        for engine in (one, two):
            await eventually(lambda e=engine: e.running == 0, "no engine works for nobody")
