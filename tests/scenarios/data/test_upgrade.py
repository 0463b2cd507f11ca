"""An upgrade that is not taken is ignored (RFC 9110 section 7.8): its request goes on as a plain one, its body whole."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.scenarios.blackbox.conftest import fleet
from tests.tools.fault_engine import FaultEngine
from tests.tools.fault_scripts import echo
from tests.tools.rig import Client, ask, post, proxy_for

BODY = bytes(range(256)) * 40
H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
WEBSOCKET = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n"
NOT_ASKED = "Connection: keep-alive\r\nUpgrade: h2c\r\n"


def request(upgrade: str, framing: str, start: str = "POST /v1/completions HTTP/1.1") -> bytes:
    """A head with an upgrade."""
    return f"{start}\r\nHost: a\r\n{upgrade}{framing}\r\n\r\n".encode("latin-1")


def chunks(body: bytes) -> bytes:
    """A body in two chunks, with an extension and a trailer."""
    parts = (body[:1000], body[1000:])
    return b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nX-Trailer: 1\r\n\r\n"


FRAMINGS = {
    "length": (f"Content-Length: {len(BODY)}", BODY),
    "chunked": ("Transfer-Encoding: chunked", chunks(BODY)),
}


@pytest.mark.parametrize("upgrade", [H2C, WEBSOCKET, NOT_ASKED], ids=["h2c", "websocket", "not asked"])
@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("pieces", ["at once", "head first", "in pieces"])
async def test_the_body_arrives_byte_for_byte(upgrade: str, framing: str, pieces: str) -> None:
    line, body = FRAMINGS[framing]
    head = request(upgrade, line)
    sent = {
        "at once": [head + body],
        "head first": [head, body],
        "in pieces": [head[:-3], head[-3:] + body[:1], *(body[n : n + 997] for n in range(1, len(body), 997))],
    }[pieces]
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        for piece in sent:
            await client.send(piece)
            await asyncio.sleep(0)
        got = await client.reply()
        assert (got.status, got.complete) == (200, True)
        seen = engine.requests[0]
        assert seen.body == BODY
        assert seen.field("Upgrade") is None
        assert seen.field("HTTP2-Settings") is None


async def test_a_body_that_is_too_big_to_keep_arrives_too() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, replay_limit=100) as app, Client.to(app.url) as client:
        head = request(H2C, f"Expect: 100-continue\r\nContent-Length: {len(BODY)}")
        await client.send(head)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        for n in range(0, len(BODY), 1000):
            await client.send(BODY[n : n + 1000])
        assert (await client.reply()).status == 200
        assert engine.requests[0].body == BODY


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("path", ["/pause", "/v1/completions"])
async def test_a_body_over_the_limit_is_refused_as_ever(framing: str, path: str) -> None:
    line, body = FRAMINGS[framing]
    async with FaultEngine(echo()) as engine, proxy_for(engine, max_body=1024, max_control_body=1024) as app:
        got = await ask(app.url, request(H2C, line, f"POST {path} HTTP/1.1") + body)
        assert (got.status, got.field("X-Fleetgate-Error")) == (413, "body_too_large")
        assert engine.requests == []


async def test_behind_another_request_it_is_answered_in_its_turn() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", b"{}") + request(H2C, f"Content-Length: {len(BODY)}") + BODY)
        assert [(await client.reply()).status for _ in range(2)] == [200, 200]
        assert [one.body for one in engine.requests] == [b"{}", BODY]


async def test_a_connection_stays_where_nobody_asked_for_the_upgrade() -> None:
    """Without ``Connection: Upgrade`` the field means nothing (RFC 9110 section 7.8)."""
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        for upgrade in (NOT_ASKED, "Upgrade: websocket\r\n"):
            await client.send(request(upgrade, "X-A: 1", "GET /v1/models HTTP/1.1"))
            got = await client.reply()
            assert got.status == 200
            assert got.field("Connection") is None
        assert [one.field("Upgrade") for one in engine.requests] == [None, None]


async def test_a_websocket_behind_another_request_is_a_plain_one() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        first = post("/v1/completions", b"{}")
        await client.send(first + request(WEBSOCKET, "X-A: 1", "GET /v1/realtime HTTP/1.1"))
        assert [(await client.reply()).status for _ in range(2)] == [200, 200]
        assert [one.field("Upgrade") for one in engine.requests] == [None, None]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_control_calls_keep_their_body(workers: str) -> None:
    async with fleet(2, "--workers", workers) as (engines, http, proxy):
        body = b'{"new_version":"v7"}'
        for line, data in (
            (f"Content-Length: {len(body)}", body),
            ("Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)),
        ):
            got = await ask(proxy.url, request(H2C, line, "POST /update_weight_version HTTP/1.1") + data)
            assert got.status == 200, got
        async with http.get("/weight_info") as reply:
            assert json.loads(await reply.text())["weight_version"] == "v7"
        assert all(engine.calls("/update_weight_version") for engine in engines)
