"""Streams whose events come faster than the proxy writes them one by one."""

from __future__ import annotations

import asyncio

import pytest

from tests.tools.fault_engine import FaultEngine, Request, Wire
from tests.tools.fault_scripts import SSE_HEAD, chunk
from tests.tools.rig import Client, eventually, post, proxy_for

STREAM = b'{"prompt":"x","stream":true}'
EVENTS = [b'data: {"n":%d}\n\n' % n for n in range(3000)]


async def flood(wire: Wire, request: Request) -> None:
    """Each event in a write of its own, as vLLM's server does; then the stream stays open."""
    await wire.send(SSE_HEAD)
    for event in EVENTS:
        await wire.send(chunk(event))
    await asyncio.sleep(30)


async def body_of(reader: asyncio.StreamReader, size: int) -> bytes:
    """So many bytes of a chunked body."""
    await reader.readuntil(b"\r\n\r\n")
    body = b""
    while len(body) < size:
        length = int(await reader.readuntil(b"\r\n"), 16)
        body += (await reader.readexactly(length + 2))[:-2]
    return body


@pytest.mark.parametrize("window", [0.0, 0.001, 0.05])
async def test_every_event_of_a_flood_arrives_though_the_stream_stays_open(window: float) -> None:
    async with (
        FaultEngine(flood) as engine,
        proxy_for(engine, flood_window=window) as app,
        Client.to(app.url) as client,
    ):
        await client.send(post("/v1/completions", STREAM))
        whole = b"".join(EVENTS)
        assert await asyncio.wait_for(body_of(client.reader, len(whole)), 10) == whole


async def test_the_prompts_of_a_stream_are_known_after_its_body_is_forgotten() -> None:
    """``/abort_requests`` by the client's id has to name each of them to the engine."""
    body = b'{"stream":true,"prompt":["a","b","c"]}'
    async with FaultEngine(flood) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", body, "X-Request-Id: mine"))
        await client.reader.readuntil(b"\r\n\r\n")
        (request,) = app.plane.tracker.find("mine")
        assert (request.body, request.prompts) == ([], 3)


async def test_a_flood_that_its_client_leaves_is_ended_at_the_engine() -> None:
    async with FaultEngine(flood) as engine, proxy_for(engine) as app:
        async with Client.to(app.url) as client:
            await client.send(post("/v1/completions", STREAM))
            await client.reader.read(100)
        await eventually(lambda: not len(app.plane.tracker))
        assert app.fleet.engines[engine.id].inflight == 0
