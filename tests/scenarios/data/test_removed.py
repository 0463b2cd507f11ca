"""An engine leaves the fleet while it still runs requests: what is cut is cut by the proxy, and everybody is told so."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from tests.tools.fault_engine import FaultEngine, Request, Wire, answer_bytes
from tests.tools.fault_scripts import SSE_HEAD, chunk, reply, silent
from tests.tools.rig import Client, ask, eventually, post, proxy_for

EVENT = b'data: {"id":"1"}\n\n'
GOOD = answer_bytes(200, b'{"ok":1}')


async def begins(wire: Wire, request: Request) -> None:
    """A stream that goes on for ever."""
    await wire.send(SSE_HEAD + chunk(EVENT))
    await wire.gone.wait()


async def removed(url: str, engine: FaultEngine) -> None:
    request = f"DELETE /fleet/engines/{engine.id}?drain=0.05 HTTP/1.1\r\nHost: proxy\r\n\r\n"
    assert (await ask(url, request.encode())).status == 200


async def test_a_stream_that_is_cut_by_the_removal_of_its_engine_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fleetgate")
    async with FaultEngine(begins) as engine, FaultEngine(silent()) as other:
        async with proxy_for(engine, other, outlier_failures=1) as app, asyncio.TaskGroup() as group:
            app.fleet.engines[other.id].suspect = True
            app.fleet.refresh()
            asked = [group.create_task(ask(app.url, post("/v1/completions", b"{}"))) for _ in range(3)]
            await eventually(lambda: sum(one.relay.begun for one in app.plane.tracker.all()) == 3)
            await removed(app.url, engine)
            for one in asked:
                got = await one
                assert not got.complete
                error = json.loads(got.body.removeprefix(EVENT + b"data: "))["error"]
                assert (error["code"], error["param"]) == (503, "engine_removed")
                assert error["message"] == f"engine {engine.id} was removed from the fleet before its answer was whole"
            assert f"engine {engine.id} was removed; 3 requests that it had are cut or sent elsewhere" in caplog.text
            # Nothing of it is a word against the engine, which may come back under the same name.
            assert not app.plane.outliers
            assert "broke" not in caplog.text


async def test_what_was_not_answered_yet_goes_elsewhere_or_is_told_the_same() -> None:
    async with FaultEngine(silent()) as engine, FaultEngine(reply(GOOD)) as other:
        async with proxy_for(engine, other, policy="round_robin") as app, asyncio.TaskGroup() as group:
            app.fleet.engines[other.id].suspect = True
            app.fleet.refresh()
            once = group.create_task(ask(app.url, post("/v1/completions", b"{}", "X-Fleetgate-No-Retry: 1")))
            again = group.create_task(ask(app.url, post("/v1/completions", b"{}")))
            await eventually(lambda: len(engine.requests) == 2)
            app.fleet.engines[other.id].suspect = False
            app.fleet.refresh()
            await removed(app.url, engine)
            assert ((await again).status, (await again).body) == (200, b'{"ok":1}')
            told = await once
            assert (told.status, told.field("X-Fleetgate-Error")) == (503, "engine_removed")
            assert told.field("Retry-After")


async def test_an_engine_that_was_removed_while_the_connection_to_it_was_made_gets_nothing() -> None:
    async with FaultEngine(reply(GOOD)) as engine, FaultEngine(reply(GOOD)) as other:
        async with proxy_for(engine, engine_idle=0.0) as app, Client.to(app.url) as client:
            left = app.fleet.engines[engine.id]
            connect = left.upstream.connect
            making, going = asyncio.Event(), asyncio.Event()

            async def slow_connect() -> object:
                making.set()
                await going.wait()
                return await connect()

            left.upstream.connect = slow_connect  # type: ignore[method-assign, assignment]
            await client.send(post("/v1/completions", b"{}"))
            await making.wait()
            app.fleet.remove(left)
            going.set()
            await eventually(lambda: app.plane.gate.held == 1, "held for an engine")
            assert engine.requests == []
            await ask(app.url, post("/fleet/engines", b'{"url":"%b"}' % other.url.encode()))
            assert (await client.reply()).field("X-Fleetgate-Engine") == other.id
