"""The aiohttp side of the shared port: whole requests only, in turn with data requests, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from tests.tools.fault_engine import FaultEngine, Request, Wire
from tests.tools.fault_scripts import SSE_HEAD, chunk, echo, silent, stream
from tests.tools.rig import Client, ask, eventually, get, post, proxy_for

BODY = b'{"prompt":"x"}'


async def test_control_bodies_in_every_framing() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        head = b"POST /pause HTTP/1.1\r\nHost: a\r\n"
        for data in (
            head + b"\r\n",
            head + b"Content-Length: 2\r\n\r\n{}",
            head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
            head + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
        ):
            await client.send(data)
            got = await client.reply()
            # The engine has no RL routes, so the call is answered with a report; what matters is that it is answered.
            assert got.status in (200, 424)
            assert got.complete
            assert got.field("Content-Length")
        await client.send(post("/resume", b""))
        assert (await client.reply()).status in (200, 424)
        app.plane.gate.open()


async def test_head_and_http_10() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        got = await ask(app.url, b"HEAD /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (got.status, got.body) == (200, b"")
        async with Client.to(app.url) as client:
            await client.send(b"GET /health HTTP/1.0\r\n\r\n")
            got = await client.reply()
            assert got.status == 200
            assert await asyncio.wait_for(client.closed(), 2)


async def test_a_control_body_over_the_limit() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, max_control_body=1024) as app:
        got = await ask(app.url, post("/pause", b"x" * 2000))
        assert (got.status, got.field("X-Fleetgate-Error")) == (413, "body_too_large")
        assert not app.plane.gate.closed


async def test_the_event_stream_ends_with_its_client_and_leaves_nothing() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        before = len(asyncio.all_tasks())
        for _ in range(20):
            async with Client.to(app.url) as client:
                await client.send(get("/fleet/events"))
                head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 2)
                assert b"text/event-stream" in head
        await eventually(lambda: len(asyncio.all_tasks()) <= before + 2, "its tasks ended")
        await eventually(lambda: app.listener._web_side._handed == {}, "no request is handed over any more")


async def test_a_list_of_events_to_a_client_of_http_10_has_no_chunks() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(b"GET /fleet/events HTTP/1.0\r\n\r\n")
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        app.fleet.emit("test", n=1)
        line = await client.reader.readuntil(b"\n\n")
        assert line.split(b":")[0] in (b"", b"id", b"event", b"data")


async def test_a_slow_control_call_holds_up_nobody_else() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        async with Client.to(app.url) as watching:
            await watching.send(get("/fleet/events"))
            await watching.reader.readuntil(b"\r\n\r\n")
            for _ in range(20):
                assert (await ask(app.url, post("/v1/completions", BODY))).status == 200


async def test_control_calls_answer_while_data_requests_of_the_same_process_hang() -> None:
    async with FaultEngine(silent()) as engine, proxy_for(engine) as app:
        async with Client.to(app.url) as client:
            await client.send(post("/v1/completions", BODY))
            await eventually(lambda: len(engine.requests) == 1)
            fleet = json.loads((await ask(app.url, get("/fleet"))).body)
            assert fleet["engines"][0]["inflight"] == 1
            metrics = await ask(app.url, get("/metrics"))
            assert metrics.complete
            assert b"fleetgate_inflight_requests" in metrics.body


async def test_a_disguised_control_path_is_refused_and_reaches_nobody() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        for path in (
            "/%70ause",
            "//pause",
            "/v1/../pause",
            "/pause;x=1",
            "/pause%0a",
            "/./resume",
            "/fleet/..%2fpause",
        ):
            got = await ask(app.url, post(path, b""))
            assert (got.status, got.field("X-Fleetgate-Error")) == (400, "path_refused"), path
        assert engine.requests == []
        assert not app.plane.gate.closed


async def test_stopping_lets_running_answers_end_and_takes_no_more() -> None:
    going = asyncio.Event()

    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SSE_HEAD + chunk(b'data: {"id":1}\n\n'))
        await going.wait()
        await wire.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with FaultEngine(script) as engine, proxy_for(engine) as app:
        async with Client.to(app.url) as client, Client.to(app.url) as idle:
            await client.send(post("/v1/completions", BODY))
            await client.reader.readuntil(b'{"id":1}')
            stop = asyncio.ensure_future(app.listener._server.stop())
            assert await asyncio.wait_for(idle.closed(), 2)
            assert (await ask(app.url, post("/v1/completions", BODY))).status == 503
            going.set()
            await asyncio.wait_for(client.reader.readuntil(b"0\r\n\r\n"), 2)
            assert await asyncio.wait_for(client.closed(), 2)
            await stop
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", int(app.url.rpartition(":")[2]))


async def test_stopping_cuts_what_does_not_end() -> None:
    async with FaultEngine(stream(10_000, 0.01)) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", BODY))
        await client.reader.readuntil(b"data: ")
        stop = asyncio.ensure_future(app.listener._server.stop())
        got, _ = await asyncio.gather(client._to_end(), stop)
        assert not got[0].endswith(b"0\r\n\r\n")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of this test")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    arguments = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", "-x509", *arguments, *names, "-keyout", key, "-out", cert], check=True, capture_output=True
    )
    return cert, key


async def test_tls_carries_answers_cuts_and_refusals(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    trust = ssl.create_default_context(cafile=str(cert))
    async with FaultEngine(echo()) as engine, proxy_for(engine, tls_cert=cert, tls_key=key, max_body=5000) as app:
        connector = aiohttp.TCPConnector(ssl=trust)
        async with aiohttp.ClientSession(connector=connector) as session:
            url = app.url.replace("127.0.0.1", "localhost")
            for _ in range(3):
                async with session.post(f"{url}/v1/completions", data=BODY) as answer:
                    assert answer.status == 200
                    assert (await answer.read()).endswith(BODY)
                assert engine.requests[-1].field("X-Forwarded-Proto") == "https"
                async with session.get(f"{url}/health") as answer:
                    assert answer.status == 200
            async with session.post(f"{url}/v1/completions", data=b"x" * 6000) as answer:
                assert answer.status == 413

            async def cut(wire: Wire, request: Request) -> None:
                await wire.send(SSE_HEAD + chunk(b'data: {"id":1}\n\n'))
                wire.reset()

            engine.script = cut
            with pytest.raises(aiohttp.ClientError):
                async with session.post(f"{url}/v1/completions", data=BODY) as answer:
                    await answer.read()
