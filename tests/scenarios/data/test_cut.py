"""An answer that an engine did not finish never passes for a whole one: 1,000 cuts at random bytes, all seen."""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp
import pytest

from tests.tools.fault_engine import FaultEngine, Request, Wire, answer_bytes
from tests.tools.fault_scripts import SSE_HEAD, chunk, chunked, close_delimited, cut_after, reply, sse
from tests.tools.rig import Client, ask, get, post, proxy_for

JSON = json.dumps({"id": "x", "choices": [{"text": "y" * 300, "token_ids": list(range(100))}]}).encode()
EVENTS = [b'data: {"id":"%d","choices":[{"text":"abc"}]}\n\n' % n for n in range(20)]
WHOLE_STREAM = b"".join(EVENTS) + b"data: [DONE]\n\n"

FORMS: dict[str, bytes] = {
    "length": answer_bytes(200, JSON),
    "chunked": chunked(JSON[:200], JSON[200:350], JSON[350:]),
    "to the end": close_delimited(JSON),
    "stream": sse(*EVENTS, b"data: [DONE]\n\n"),
    "stream to the end": close_delimited(WHOLE_STREAM, kind=b"text/event-stream"),
    "stream of a length": answer_bytes(200, WHOLE_STREAM, kind=b"text/event-stream"),
}
CUTS = 1000


def seen_as_cut(status: int, body: bytes, complete: bool, *, stream: bool) -> bool:
    """Whether a careful client knows that the answer is not whole."""
    if status != 200 or not complete:
        return True
    return stream and b'"error"' in body


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_thousand_cuts_at_random_bytes_are_all_seen(version: str) -> None:
    """Half of all cuts are made by HTTP/1.0 clients, a quarter with a reset."""
    rng = random.Random(f"cuts {version}")
    engine = FaultEngine(reply(b""))
    seen = begun = 0
    async with engine, proxy_for(engine, max_attempts=1) as app:
        for n in range(CUTS // 2):
            name = rng.choice(list(FORMS))
            data = FORMS[name]
            # Cutting a close-delimited answer at its very end is no cut.
            at = rng.randrange(0, len(data) - (2 if "to the end" in name else 0))
            engine.script = cut_after(at, data, rst=n % 4 == 0)
            request = f"POST /v1/completions HTTP/{version}\r\nHost: a\r\nContent-Length: 2\r\n\r\n{{}}".encode()
            got = await ask_or_reset(app.url, request)
            head = got is not None and got.status == 200
            begun += head
            ok = got is None or seen_as_cut(got.status, got.body, got.complete, stream="stream" in name)
            assert ok, f"cut of {name!r} at byte {at} of {len(data)} passed for whole: {got}"
            seen += 1
    assert seen == CUTS // 2
    assert begun > CUTS // 10, "most cuts must be inside a begun answer, or this shows nothing"


async def ask_or_reset(url: str, request: bytes):
    try:
        return await ask(url, request)
    except ConnectionError:
        return None


async def test_whole_answers_of_every_form_are_whole() -> None:
    """The other half of the proof: nothing is reported as cut that was not."""
    engine = FaultEngine(reply(b""))
    async with engine, proxy_for(engine) as app:
        for name, data in FORMS.items():
            for version in ("1.1", "1.0"):
                engine.script = cut_after(len(data), data)
                request = f"POST /v1/completions HTTP/{version}\r\nHost: a\r\nContent-Length: 2\r\n\r\n{{}}".encode()
                got = await ask(app.url, request)
                assert got.complete, name
                assert got.body == (WHOLE_STREAM if "stream" in name else JSON), name


async def test_a_common_client_sees_a_cut() -> None:
    engine = FaultEngine(reply(b""))
    async with engine, proxy_for(engine, max_attempts=1) as app, aiohttp.ClientSession() as session:
        for name, data in FORMS.items():
            at = len(data) - 40
            engine.script = cut_after(at, data)
            with pytest.raises((aiohttp.ClientError, ValueError)):
                async with session.post(f"{app.url}/v1/completions", json={}) as answer:
                    body = await answer.read()
                    if "stream" in name and b'"error"' in body:
                        raise ValueError("an error event")


DIALECTS = {
    "/v1/completions": (b"data: ", lambda error: error["error"]["code"] == 502),
    "/v1/chat/completions": (b"data: ", lambda error: error["error"]["type"] == "BadGatewayError"),
    "/inference/v1/generate": (b"data: ", lambda error: "broke off" in error["error"]["message"]),
    "/v1/messages": (b"event: error\ndata: ", lambda error: error["type"] == "error" and error["error"]["message"]),
    "/v1/responses": (b"event: error\ndata: ", lambda error: error["type"] == "error" and error["code"]),
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("inside", [False, True])
async def test_a_cut_stream_ends_with_one_error_event_in_the_routes_own_protocol(path: str, inside: bool) -> None:
    mark, check = DIALECTS[path]
    first = b'event: x\ndata: {"type":"response.created"}\n\n'
    part = b'event: x\ndata: {"type":"resp' if inside else b""

    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SSE_HEAD + chunk(first + part))
        await asyncio.sleep(0.02)
        wire.reset()

    async with FaultEngine(script) as one, FaultEngine(script) as two, proxy_for(one, two) as app:
        got = await ask(app.url, post(path, b'{"stream":true}'))
        assert not got.complete
        assert got.body.startswith(first + part)
        rest = got.body[len(first + part) :]
        if inside:
            assert rest.startswith(b"\n\n")
            rest = rest[2:]
        assert rest.startswith(mark)
        assert rest.endswith(b"\n\n")
        assert check(json.loads(rest[len(mark) :]))
        assert rest.count(b"data: ") == 1
        # Nothing is sent again after the first byte.
        assert len(one.requests) + len(two.requests) == 1


@pytest.mark.parametrize("form", ["stream", "stream to the end"])
async def test_a_client_of_http_1_0_gets_the_error_event_then_a_reset(form: str) -> None:
    """Its answer ends with its connection, so a plain end of it would look whole."""
    data = FORMS[form]
    at = data.index(EVENTS[3]) + len(EVENTS[3]) + (2 if form == "stream" else 0)
    async with FaultEngine(cut_after(at, data)) as engine, proxy_for(engine, max_attempts=1) as app:
        async with Client.to(app.url) as client:
            await client.send(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
            body = (await client.reader.readuntil(b"}}\n\n")).partition(b"\r\n\r\n")[2]
            assert body.startswith(b"".join(EVENTS[:4]) + b'data: {"error":')
            with pytest.raises(ConnectionResetError):
                await client.reader.read()


async def test_a_stored_response_that_is_streamed_again_breaks_off_in_its_own_protocol() -> None:
    first = b'event: response.created\ndata: {"type":"response.created"}\n\n'
    async with FaultEngine(cut_after(len(SSE_HEAD + chunk(first)), SSE_HEAD + chunk(first))) as engine:
        async with proxy_for(engine) as app:
            got = await ask(app.url, get("/v1/responses/resp_1?stream=true&starting_after=0"))
    assert not got.complete
    mark, check = DIALECTS["/v1/responses"]
    assert got.body.startswith(first + mark)
    assert check(json.loads(got.body[len(first + mark) :]))


async def test_an_error_event_after_the_first_token_is_passed_on_once() -> None:
    failed = b'data: {"error":{"message":"dead","type":"InternalServerError","code":500}}\n\n'
    data = sse(EVENTS[0], failed, b"data: [DONE]\n\n")
    async with FaultEngine(reply(data)) as one, FaultEngine(reply(data)) as two, proxy_for(one, two) as app:
        got = await ask(app.url, post("/v1/completions", b"{}"))
        assert got.body == EVENTS[0] + failed + b"data: [DONE]\n\n"
        assert len(one.requests) + len(two.requests) == 1


async def test_a_cut_inside_the_first_event_is_mended() -> None:
    data = sse(*EVENTS, b"data: [DONE]\n\n")
    at = data.index(b'data: {"id"') + 4
    async with FaultEngine(cut_after(at, data)) as bad, FaultEngine(reply(data)) as good:
        async with proxy_for(bad, good, policy="round_robin") as app:
            for _ in range(4):
                assert (await ask(app.url, post("/v1/completions", b"{}"))).body == WHOLE_STREAM


async def test_a_cut_of_json_inside_its_body_is_a_reset_for_the_client() -> None:
    engine = FaultEngine(cut_after(150, FORMS["length"]))
    async with engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", b"{}"))
        got = await client.reply()
        assert not got.complete


async def test_a_connection_that_was_cut_serves_no_further_request() -> None:
    engine = FaultEngine(cut_after(150, FORMS["length"]))
    async with engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", b"{}") + post("/v1/completions", b"{}"))
        assert not (await client.reply()).complete
        with pytest.raises(ConnectionError):
            await client.reply()


async def test_a_read_limit_cuts_a_silent_stream_but_not_a_paused_one() -> None:
    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SSE_HEAD + chunk(EVENTS[0]))
        await wire.gone.wait()

    async with FaultEngine(script) as engine, proxy_for(engine, read_timeout=0.1) as app:
        async with Client.to(app.url) as client:
            await client.send(post("/v1/completions", b"{}"))
            await client.reader.readuntil(EVENTS[0])
            app.plane.gate.close("a trainer")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.reader.readuntil(b'"error"'), 0.4)
            app.plane.gate.open()
            await asyncio.wait_for(client.reader.readuntil(b'"error"'), 5)
