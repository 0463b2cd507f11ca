"""The proxy ends with requests still under way: each client is told, and no answer that was cut looks whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy import app as proxy_app
from proxy.app import App
from proxy.config import Settings
from tests.scenarios.blackbox.conftest import run_proxy
from tests.tools.fault_engine import FaultEngine, Request, Wire, answer_bytes
from tests.tools.fault_scripts import SSE_HEAD, chunk, reply, silent
from tests.tools.rig import Client, Reply, ask, eventually, get, post

EVENT = b'event: x\ndata: {"id":"x"}\n\n'
STREAM = SSE_HEAD + chunk(EVENT)
JSON = answer_bytes(200, b'{"choices":[]}' + b" " * 500)[:200]


def begun(data: bytes):
    """An answer that begins and never ends."""

    async def script(wire: Wire, request: Request) -> None:
        await wire.send(data)
        await wire.gone.wait()

    return script


@asynccontextmanager
async def stopping(engine: FaultEngine, **settings: Any) -> AsyncIterator[App]:
    """A proxy that is stopped at the end of the block; what still ran then must have let go of its engine."""
    app = await proxy_app.start(Settings(port=0, engine=[engine.url], **{"drain_timeout": 0.0, **settings}))
    try:
        await eventually(lambda: len(app.fleet.eligible) == 1)
        yield app
    finally:
        await app.stop()
    assert not len(app.plane.tracker)
    assert [engine.inflight for engine in app.fleet] == [0]


def is_told(got: Reply) -> bool:
    """Whether it is the whole answer of a proxy that stops."""
    assert (got.status, got.complete) == (503, True)
    assert got.field("Connection") == "close"
    assert got.field("X-Fleetgate-Error") == "shutting_down"
    return json.loads(got.body)["error"]["code"] == "shutting_down"


DIALECTS = {
    "/v1/chat/completions": (b"data: ", lambda said: said["error"]["param"] == "shutting_down"),
    "/v1/messages": (b"event: error\ndata: ", lambda said: said["type"] == "error"),
    "/v1/responses": (b"event: error\ndata: ", lambda said: said["code"] == "shutting_down"),
}


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_stream_ends_with_one_error_event_of_its_route_and_is_cut(path: str) -> None:
    mark, check = DIALECTS[path]
    async with FaultEngine(begun(STREAM)) as engine, asyncio.TaskGroup() as group:
        async with stopping(engine) as app:
            asked = group.create_task(ask(app.url, post(path, b'{"stream":true}')))
            await eventually(lambda: any(one.relay.begun for one in app.plane.tracker.all()))
        got = await asked
        assert (got.status, got.complete) == (200, False)
        assert got.body.startswith(EVENT + mark)
        assert check(json.loads(got.body[len(EVENT + mark) :]))
        await eventually(lambda: not engine.open_wires)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("data", [STREAM, JSON], ids=["stream", "json"])
async def test_an_answer_that_has_begun_never_looks_whole(version: str, data: bytes) -> None:
    request = f"POST /v1/completions HTTP/{version}\r\nHost: a\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    async with FaultEngine(begun(data)) as engine:
        async with stopping(engine) as app, Client.to(app.url) as client:
            await client.send(request)
            await client.reader.readuntil(b"\r\n\r\n")
            await app.stop()
            if version == "1.1" and data is STREAM:
                assert not (await client.reader.read()).endswith(b"0\r\n\r\n")
            else:
                # The end of the connection alone could be taken for the end of the answer.
                with pytest.raises(ConnectionError):
                    await client.reader.read()


@pytest.mark.parametrize("where", ["at an engine", "held", "held with pings", "in its body"])
async def test_who_waits_is_told(where: str) -> None:
    async with FaultEngine(silent()) as engine, asyncio.TaskGroup() as group:
        async with stopping(engine, hold_ping=0.01 if where == "held with pings" else 0.0) as app:
            if where.startswith("held"):
                app.plane.gate.close("a trainer")
            request = post("/v1/completions", b'{"stream":true}')
            asked = group.create_task(ask(app.url, request[:-5] if where == "in its body" else request))
            await eventually(lambda: len(app.plane.tracker) == 1)
            if where == "held with pings":
                await eventually(lambda: app.plane.tracker.all()[0].relay.begun)
            elif where == "at an engine":
                await eventually(lambda: len(engine.requests) == 1)
        got = await asked
        if where == "held with pings":
            assert not got.complete
            assert got.body.count(b"shutting_down") == 1
        else:
            assert is_told(got)


async def test_a_slot_that_is_freed_brings_nobody_to_an_engine() -> None:
    async with FaultEngine(silent()) as engine, asyncio.TaskGroup() as group:
        async with stopping(engine, max_inflight=1) as app:
            asked = [group.create_task(ask(app.url, post("/v1/completions", b"{}"))) for _ in range(6)]
            await eventually(lambda: app.plane.gate.held == 5 and len(engine.requests) == 1)
        assert all([is_told(await one) for one in asked])
        await eventually(lambda: not engine.open_wires)
        assert len(engine.requests) == 1


async def test_a_control_call_under_way_is_cut_and_never_answered_with_what_is_sent_again() -> None:
    async with FaultEngine(silent()) as engine:
        async with stopping(engine, fanout_paths=[{"path": "/slow"}]) as app, Client.to(app.url) as client:
            await client.send(post("/slow", b"{}"))
            await eventually(lambda: len(engine.requests) == 1)
            await app.stop()
            assert await client.closed()


async def test_an_idle_connection_and_a_list_of_events_end() -> None:
    async with FaultEngine(silent()) as engine:
        async with stopping(engine) as app, Client.to(app.url) as idle, Client.to(app.url) as events:
            await events.send(get("/fleet/events"))
            await events.reader.readuntil(b"\r\n\r\n")
            await app.stop()
            assert await idle.closed()
            assert b"\r\n0\r\n" not in await events.reader.read()


async def test_while_it_drains_it_takes_no_request_and_every_control_call() -> None:
    async with FaultEngine(reply(answer_bytes(200, b"{}"))) as engine, asyncio.TaskGroup() as group:
        async with (
            stopping(engine, drain_timeout=600.0, fanout_paths=[{"path": "/custom"}]) as app,
            Client.to(app.url) as idle,
            Client.to(app.url) as trainer,
        ):
            await idle.send(post("/v1/completions", b"{}"))
            assert (await idle.reply()).status == 200
            await trainer.send(post("/custom", b"{}"))
            assert (await trainer.reply()).status == 200
            app.plane.gate.close("a trainer")
            held = group.create_task(ask(app.url, post("/v1/completions", b"{}")))
            await eventually(lambda: app.plane.gate.held == 1)
            stop = group.create_task(app.stop())
            assert await idle.closed()
            ready = await ask(app.url, get("/ready"))
            assert ready.status == 503
            assert json.loads(ready.body)["problem"] == "the proxy stops"
            assert (await ask(app.url, get("/health"))).status == 200
            for refused in (
                post("/v1/completions", b"{}"),
                get("/v1/models"),
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n",
                b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
            ):
                assert is_told(await ask(app.url, refused))
            for _ in range(2):
                await trainer.send(post("/custom", b"{}"))
                got = await trainer.reply()
                assert (got.status, got.field("Connection")) == (200, None)
            await trainer.send(post("/v1/completions", b"{}"))
            assert is_told(await trainer.reply())
            assert not stop.done()
            app.plane.gate.open()
            assert (await held).status == 200
            await stop
            with pytest.raises(ConnectionError):
                await ask(app.url, get("/health"))


async def test_a_control_call_under_way_is_part_of_what_is_waited_for() -> None:
    go = asyncio.Event()

    async def script(wire: Wire, request: Request) -> None:
        await go.wait()
        await wire.send(answer_bytes(200, b"{}"))

    async with FaultEngine(script) as engine, asyncio.TaskGroup() as group:
        async with (
            stopping(engine, drain_timeout=600.0, fanout_paths=[{"path": "/slow"}]) as app,
            Client.to(app.url) as trainer,
            Client.to(app.url) as events,
        ):
            await events.send(get("/fleet/events"))
            await events.reader.readuntil(b"\r\n\r\n")
            await trainer.send(post("/slow", b"{}"))
            await eventually(lambda: len(engine.requests) == 1)
            stop = group.create_task(app.stop())
            # It has to outlast several looks of the drain.
            await asyncio.sleep(0.2)
            assert not stop.done()
            go.set()
            assert (await trainer.reply()).status == 200
            await stop


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_second_signal_waits_for_nothing_and_tells_everybody(workers: str) -> None:
    async with FaultEngine(begun(STREAM)) as engine, asyncio.TaskGroup() as group:
        async with run_proxy("--engine", engine.url, "--workers", workers, "--drain-timeout", "600") as proxy:
            asked = [group.create_task(ask(proxy.url, post("/v1/completions", b"{}"))) for _ in range(4)]
            await eventually(lambda: len(engine.requests) == 4)
            proxy.process.terminate()
            await eventually(lambda: any("stopping" in line for line in proxy.lines))
            proxy.process.terminate()
            assert await asyncio.wait_for(proxy.process.wait(), 20) == 1
        for one in asked:
            got = await one
            assert not got.complete
            assert got.body.endswith(b"\n\n")
            assert got.body.count(b"shutting_down") == 1


async def test_a_drain_that_takes_too_long_is_a_clean_stop() -> None:
    async with FaultEngine(silent()) as engine, asyncio.TaskGroup() as group:
        async with run_proxy("--engine", engine.url, "--drain-timeout", "0.1") as proxy:
            asked = group.create_task(ask(proxy.url, post("/v1/completions", b"{}")))
            await eventually(lambda: len(engine.requests) == 1)
            assert await proxy.stop() == 0
        assert is_told(await asked)
