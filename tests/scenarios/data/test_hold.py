"""The gate from outside: order, limits, deadlines, pings, and what is never held."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from proxy.app import App
from tests.tools.fault_engine import FaultEngine, Request, Wire, answer_bytes
from tests.tools.fault_scripts import echo, reply, sse
from tests.tools.rig import Client, Reply, ask, eventually, get, post, proxy_for

BODY = b'{"prompt":"x"}'


async def test_nothing_new_reaches_an_engine_after_the_gate_closed_not_even_over_a_connection_in_the_making() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, engine_idle=0.0) as app, Client.to(app.url) as client:
        connect = engine_connect = next(iter(app.fleet)).upstream.connect
        going = asyncio.Event()
        making = asyncio.Event()

        async def slow_connect() -> object:
            making.set()
            await going.wait()
            return await engine_connect()

        next(iter(app.fleet)).upstream.connect = slow_connect  # type: ignore[method-assign, assignment]
        await client.send(post("/v1/completions", BODY))
        await making.wait()
        app.plane.gate.close("a trainer")
        going.set()
        await eventually(lambda: app.plane.gate.held == 1, "held after all")
        assert engine.requests == []
        next(iter(app.fleet)).upstream.connect = connect  # type: ignore[method-assign]
        app.plane.gate.open()
        got = await client.reply()
        assert got.status == 200
        assert got.field("X-Fleetgate-Attempts") == "1"


async def test_an_engine_that_left_while_the_connection_was_made_gets_nothing() -> None:
    async with FaultEngine(echo()) as one, FaultEngine(echo()) as two:
        async with proxy_for(one, two, policy="round_robin", engine_idle=0.0) as app:
            for engine in app.fleet:
                upstream = engine.upstream

                async def connect(original=upstream.connect, fenced=engine):
                    made = await original()
                    if fenced.id == one.id:
                        fenced.paused = True
                        app.fleet.refresh()
                    return made

                upstream.connect = connect  # type: ignore[method-assign]
            got = [await ask(app.url, post("/v1/completions", BODY)) for _ in range(4)]
            assert {reply.field("X-Fleetgate-Engine") for reply in got} == {two.id}
            assert one.requests == []


async def test_order_is_kept_also_by_those_that_come_back() -> None:
    """100 requests reach a paused engine, are refused in a shuffled order, and run in the order in which they came."""
    refused = answer_bytes(503, b'{"error":{"message":"Generation is paused.","code":503}}')
    waiting: list[Wire] = []

    async def script(wire: Wire, request: Request) -> None:
        if engine.paused:
            waiting.append(wire)
            if len(waiting) == 50:
                for other in reversed(waiting):
                    await other.send(refused)
        else:
            await wire.send(answer_bytes(200, b"{}"))

    engine = FaultEngine(script, paused=False)
    async with engine, proxy_for(engine, pause_watch_interval=30.0, max_inflight=50) as app:
        engine.paused = True
        asked = []
        for n in range(100):
            asked.append(asyncio.ensure_future(ask(app.url, post("/v1/completions", b'{"n":%d}' % n))))
            await eventually(lambda n=n: len(app.plane.tracker) == n + 1)
        await eventually(lambda: app.plane.gate.held == 100, "all held")
        engine.paused = False
        engine.requests.clear()
        first = next(iter(app.fleet))
        first.paused = False
        app.fleet.refresh()
        await asyncio.gather(*asked)
        order = [json.loads(request.body)["n"] for request in engine.requests]
        # The engine sees them in the order of its own accepts, 50 at once at most: neighbours may swap, ages may not.
        assert all(abs(place - n) < 50 for place, n in enumerate(order))
        assert sorted(order) == list(range(100))


async def test_order_of_release_is_the_order_of_arrival() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, max_inflight=1) as app:
        app.plane.gate.close("a trainer")
        asked = []
        for n in range(100):
            asked.append(asyncio.ensure_future(ask(app.url, post("/v1/completions", b'{"n":%d}' % n))))
            await eventually(lambda n=n: app.plane.gate.held == n + 1)
        app.plane.gate.open()
        assert {one.status for one in await asyncio.gather(*asked)} == {200}
        assert [json.loads(request.body)["n"] for request in engine.requests] == list(range(100))
        assert engine.peak == 1


async def test_limits_by_number_and_bytes() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, max_held_requests=2, max_held_bytes=1000) as app:
        app.plane.gate.close("a trainer")
        first = asyncio.ensure_future(ask(app.url, post("/v1/completions", b"x" * 600)))
        await eventually(lambda: app.plane.gate.held == 1)
        got = await ask(app.url, post("/v1/completions", b"x" * 600))
        assert b"600 of 1000 bytes" in got.body
        assert (got.status, got.field("X-Fleetgate-Error")) == (503, "hold_queue_full")
        assert int(got.field("Retry-After") or 0) > 0
        assert json.loads(got.body)["error"]["code"] == "hold_queue_full"
        second = asyncio.ensure_future(ask(app.url, post("/v1/completions", b"x" * 100)))
        await eventually(lambda: app.plane.gate.held == 2)
        got = await ask(app.url, post("/v1/completions", b"x"))
        assert got.field("X-Fleetgate-Error") == "hold_queue_full"
        app.plane.gate.open()
        assert {one.status for one in await asyncio.gather(first, second)} == {200}


async def test_the_limit_by_time_and_the_deadline_of_a_request() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, hold_timeout=0.4) as app:
        app.plane.gate.close("a trainer")
        began = time.monotonic()
        short = asyncio.ensure_future(ask(app.url, post("/v1/completions", BODY, "X-Fleetgate-Hold-Timeout: 0.1")))
        long = asyncio.ensure_future(ask(app.url, post("/v1/completions", BODY, "X-Fleetgate-Hold-Timeout: 50")))
        got = await short
        assert got.status == 503
        assert got.field("X-Fleetgate-Error") == "hold_timeout"
        assert got.field("Retry-After")
        # uvloop's clock counts whole milliseconds.
        assert time.monotonic() - began > 0.098
        assert not long.done()
        assert (await long).status == 503
        assert time.monotonic() - began > 0.398
        assert engine.requests == []
        app.plane.gate.open()


@pytest.mark.parametrize("value", ["soon", "-1", "1e3", ""])
async def test_a_deadline_that_is_none_is_refused(value: str) -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        assert (await ask(app.url, post("/v1/completions", BODY, f"X-Fleetgate-Hold-Timeout: {value}"))).status == 400
        assert engine.requests == []


async def test_what_does_not_generate_is_never_held() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        app.plane.gate.close("a trainer")
        for data in (
            get("/v1/models"),
            post("/tokenize", BODY),
            get("/version"),
            get("/health"),
            get("/v1/completions"),
        ):
            assert (await asyncio.wait_for(ask(app.url, data), 2)).status == 200
        assert app.plane.gate.held == 0
        app.plane.gate.open()


@pytest.mark.parametrize("path", ["/v1/%63ompletions", "/v1%2Fcompletions/", "/cohere/v2/chat", "/generative_scoring"])
async def test_what_an_engine_would_run_is_held_in_any_spelling_and_sent_as_it_was_written(path: str) -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        app.plane.gate.close("a trainer")
        asked = asyncio.ensure_future(ask(app.url, post(f"{path}?a=%41", BODY)))
        await eventually(lambda: app.plane.gate.held == 1, "held")
        assert engine.requests == []
        app.plane.gate.open()
        assert (await asked).status == 200
        assert engine.requests[0].target == f"{path}?a=%41"


async def test_pings_keep_a_held_stream_busy_and_the_answer_is_unchanged() -> None:
    events = [b'data: {"id":"1"}\n\n', b"data: [DONE]\n\n"]
    async with FaultEngine(reply(sse(*events))) as engine, proxy_for(engine, hold_ping=0.05) as app:
        app.plane.gate.close("a trainer")
        async with Client.to(app.url) as client:
            await client.send(post("/v1/completions", b'{"stream": true}'))
            for _ in range(3):
                await asyncio.wait_for(client.reader.readuntil(b": held\n\n"), 2)
            app.plane.gate.open()
            await asyncio.wait_for(client.reader.readuntil(b"0\r\n\r\n"), 2)
        async with Client.to(app.url) as client:
            app.plane.gate.close("a trainer")
            await client.send(post("/v1/completions", b'{"stream": true}'))
            await eventually(lambda: b": held" in bytes(client.reader._buffer))
            app.plane.gate.open()
            got = await client.reply()
            assert got.status == 200
            assert got.complete
            assert got.field("Content-Type") == "text/event-stream; charset=utf-8"
            lines = got.body.split(b": held\n\n")
            assert lines[-1] == b"".join(events)
            assert not any(lines[:-1])


async def pinged(app: App, path: str) -> Reply:
    """The answer to a stream that was held until it had got a ping."""
    async with Client.to(app.url) as client:
        app.plane.gate.close("a trainer")
        await client.send(post(path, b'{"stream": true}'))
        await eventually(lambda: b": held" in bytes(client.reader._buffer))
        app.fleet.version = "v2"
        app.plane.gate.open()
        return await client.reply()


async def test_a_pinged_answer_claims_no_version_engine_or_attempts() -> None:
    async with FaultEngine(reply(sse(b"data: [DONE]\n\n"))) as engine, proxy_for(engine, hold_ping=0.03) as app:
        app.fleet.version = "v1"
        got = await pinged(app, "/v1/completions")
        assert (got.status, got.complete) == (200, True)
        assert got.field("X-Request-Id")
        for name in ("X-Fleetgate-Weight-Version", "X-Fleetgate-Engine", "X-Fleetgate-Attempts"):
            assert got.field(name) is None


REFUSAL = "max_tokens must be at least 1, got 0."
REFUSED = {"message": REFUSAL, "type": "BadRequestError", "param": "max_tokens", "code": 400}


@pytest.mark.parametrize("status", [400, 429, 500])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_after_pings_a_refusal_is_the_engines_own_error_as_an_event_and_a_cut(path: str, status: int) -> None:
    said = REFUSED | {"code": status}
    sent: dict[str, object] = {"error": said}
    wanted: dict[str, object] = {"error": said}
    if path == "/v1/messages":
        sent = wanted = {"type": "error", "error": {"type": "invalid_request_error", "message": REFUSAL}}
    elif path == "/v1/responses":
        wanted = {"type": "error", "code": str(status), "message": REFUSAL, "param": "max_tokens", "sequence_number": 0}
    bad = reply(answer_bytes(status, json.dumps(sent, indent=1).encode()))
    async with FaultEngine(bad) as engine, proxy_for(engine, hold_ping=0.03) as app:
        got = await pinged(app, path)
        assert not got.complete
        assert json.loads(got.body.rpartition(b"data: ")[2]) == wanted
        assert len(engine.requests) == 1


async def test_after_pings_an_answer_that_is_no_stream_is_an_error_of_the_proxys_own() -> None:
    async with FaultEngine(reply(answer_bytes(200, b"{}"))) as engine, proxy_for(engine, hold_ping=0.03) as app:
        got = await pinged(app, "/v1/completions")
        assert not got.complete
        error = json.loads(got.body.rpartition(b"data: ")[2])["error"]
        assert (error["code"], error["param"]) == (502, "engine_broken")


async def test_a_pinged_client_of_http_1_0_is_told_of_the_limit_and_reset() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, hold_ping=0.03, hold_timeout=0.2) as app:
        app.plane.gate.close("a trainer")
        async with Client.to(app.url) as client:
            await client.send(b'POST /v1/completions HTTP/1.0\r\nContent-Length: 16\r\n\r\n{"stream": true}')
            body = (await client.reader.readuntil(b"}}\n\n")).partition(b"\r\n\r\n")[2]
            assert b'"param":"hold_timeout"' in body
            with pytest.raises(ConnectionResetError):
                await client.reader.read()


async def test_a_request_that_asks_for_no_stream_gets_no_pings() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, hold_ping=0.02) as app, Client.to(app.url) as client:
        app.plane.gate.close("a trainer")
        await client.send(post("/v1/completions", BODY))
        await asyncio.sleep(0.1)
        assert not client.reader._buffer
        app.plane.gate.open()
        assert (await client.reply()).body.endswith(BODY)


async def test_a_body_too_big_to_keep_waits_in_the_socket() -> None:
    body = b"x" * 3_000_000
    async with FaultEngine(echo()) as engine, proxy_for(engine, replay_limit=10_000) as app:
        app.plane.gate.close("a trainer")
        asked = asyncio.ensure_future(ask(app.url, post("/v1/completions", body)))
        await eventually(lambda: app.plane.gate.held == 1)
        assert app.plane.gate.held_bytes < 1_000_000
        app.plane.gate.open()
        assert (await asked).status == 200
        assert engine.requests[0].body == body


async def test_release_of_thousands_does_not_starve_a_stream() -> None:
    """1,000 held requests go in batches; a control call in between is answered at once."""
    async with FaultEngine(reply(answer_bytes(200, b"{}"))) as engine, proxy_for(engine) as app:
        app.plane.gate.close("a trainer")
        async with asyncio.TaskGroup() as group:
            for _ in range(1000):
                group.create_task(_one(app.url))
            await eventually(lambda: app.plane.gate.held == 1000, "all held", 60)
            app.plane.gate.open()
            assert (await ask(app.url, get("/health"))).status == 200
        assert len(engine.requests) == 1000


async def _one(url: str) -> None:
    assert (await ask(url, post("/v1/completions", BODY))).status == 200
