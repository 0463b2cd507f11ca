"""``/v1/realtime``: frames both ways, close codes, early frames, and ends on either side."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

import aiohttp
import pytest
from aiohttp import WSMsgType, web

from tests.tools.fault_engine import FaultEngine, Request, Wire
from tests.tools.fault_scripts import echo
from tests.tools.rig import Client, ask, eventually, get, proxy_for

UPGRADE = (
    b"GET /v1/realtime?model=a HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: realtime\r\n\r\n"
)
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)


class WebSocketEngine:
    """A real WebSocket server behind the proxy."""

    def __init__(self) -> None:
        self.closed_with: list[int | None] = []
        self.app = web.Application()
        self.app.router.add_get("/v1/realtime", self.handle)
        self.app.router.add_get("/health", self.health)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0, protocols=("realtime",))
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.TEXT and message.data.startswith("close "):
                await socket.close(code=int(message.data.split()[1]), message=b"as asked")
            elif message.type is WSMsgType.TEXT:
                await socket.send_str(message.data)
            elif message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data)
        self.closed_with.append(socket.close_code)
        return socket

    async def __aenter__(self) -> Self:
        self.runner = web.AppRunner(self.app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


async def test_frames_and_close_codes_pass_both_ways() -> None:
    async with WebSocketEngine() as engine, proxy_for(engine.url) as app, aiohttp.ClientSession() as session:
        async with session.ws_connect(f"{app.url}/v1/realtime", protocols=("realtime",), max_msg_size=0) as socket:
            assert socket.protocol == "realtime"
            big = bytes(range(256)) * 8000
            for _ in range(5):
                await socket.send_str("hello")
                await socket.send_bytes(big)
                assert (await socket.receive()).data == "hello"
                assert (await socket.receive()).data == big
            await socket.close(code=4001)
        await eventually(lambda: engine.closed_with == [4001])
        async with session.ws_connect(f"{app.url}/v1/realtime") as socket:
            await socket.send_str("close 4002")
            message = await socket.receive()
            assert message.type is WSMsgType.CLOSE
            assert message.data == 4002
        await eventually(lambda: not len(app.plane.tracker))


async def test_a_close_frame_right_before_the_end_of_the_connection_arrives() -> None:
    got = bytearray()

    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SWITCH)
        while not wire.gone.is_set():
            await wire.more()
            got.extend(wire.buffer)
            wire.buffer.clear()

    async with FaultEngine(script) as engine, proxy_for(engine) as app:
        async with Client.to(app.url) as client:
            await client.send(UPGRADE)
            assert (await client.reply()).status == 101
            await client.send(b"\x88\x82\0\0\0\0\x03\xe8")
        await eventually(lambda: bytes(got) == b"\x88\x82\0\0\0\0\x03\xe8")


async def test_frames_sent_before_the_answer_reach_the_engine_in_order() -> None:
    async def script(wire: Wire, request: Request) -> None:
        await asyncio.sleep(0.05)
        await wire.send(SWITCH + b"from the engine")
        data = await wire.exactly(20)
        await wire.send(data)
        await wire.gone.wait()

    async with FaultEngine(script) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(UPGRADE + b"early frame")
        await asyncio.sleep(0.02)
        await client.send(b" and more")
        assert (await client.reply()).status == 101
        assert await client.reader.readexactly(15) == b"from the engine"
        assert await client.reader.readexactly(20) == b"early frame and more"
        seen = engine.requests[0]
        assert seen.target == "/v1/realtime?model=a"
        assert (seen.field("Connection"), seen.field("Upgrade")) == ("Upgrade", "websocket")
        assert seen.field("Sec-WebSocket-Protocol") == "realtime"


@pytest.mark.parametrize("side", ["client", "engine", "engine that closes in order"])
async def test_the_end_of_one_side_is_the_end_of_the_other(side: str) -> None:
    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SWITCH)
        if side == "engine":
            wire.reset()
        elif side != "client":
            await wire.send(b"\x88\x02\x03\xe8")
            wire.close()
        await wire.gone.wait()

    async with FaultEngine(script) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(UPGRADE)
        assert (await client.reply()).status == 101
        if side == "client":
            client.writer.close()
            await asyncio.wait_for(engine.requests[0].wire.gone.wait(), 2)
        else:
            last = b"" if side == "engine" else b"\x88\x02\x03\xe8"
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(client.reader.read(), 2) == last
        await eventually(lambda: not len(app.plane.tracker))
        assert next(iter(app.fleet)).inflight == 0


async def test_a_slow_reader_holds_the_engine_back_in_a_tunnel() -> None:
    sent = 0

    async def script(wire: Wire, request: Request) -> None:
        nonlocal sent
        await wire.send(SWITCH)
        while True:
            await wire.send(b"x" * 65536)
            sent += 65536

    async with FaultEngine(script) as engine, proxy_for(engine) as app, Client.to(app.url, limit=65536) as client:
        await client.send(UPGRADE)
        assert (await client.reply()).status == 101
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 64 << 20
        client.writer.transport.abort()


async def test_a_refused_upgrade_is_an_ordinary_answer() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(UPGRADE)
        got = await client.reply()
        assert got.status == 200
        assert got.complete
        assert got.field("Connection") == "close"


async def test_an_upgrade_that_nobody_asked_for_is_a_bad_gateway() -> None:
    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SWITCH)
        await wire.gone.wait()

    async with FaultEngine(script) as engine, proxy_for(engine, max_attempts=1) as app:
        assert (await ask(app.url, get("/v1/models"))).status == 502
