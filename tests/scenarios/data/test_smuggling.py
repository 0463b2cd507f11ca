"""Framing attacks, each sent raw to the real front: refused, closed, and not a byte reaches an engine (RFC 9112)."""

from __future__ import annotations

import asyncio

import pytest

from tests.tools.fault_engine import FaultEngine, answer_bytes
from tests.tools.fault_scripts import echo, reply
from tests.tools.rig import Client, ask, post, proxy_for

BODY = b'{"prompt":"x"}'
INNER = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Evil: smuggled\r\nContent-Length: 2\r\n\r\n{}"


def request(*lines: bytes, start: bytes = b"POST /v1/completions HTTP/1.1", host: bytes | None = b"Host: a") -> bytes:
    """A head of these lines; the caller adds the body."""
    head = [start] if host is None else [start, host]
    return b"\r\n".join([*head, *lines]) + b"\r\n\r\n"


CL = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"

VECTORS: dict[str, tuple[bytes, int]] = {
    # Two framings, or one that readers read differently
    "CL and TE": (request(CL, CHUNKED) + CHUNKS, 400),
    "TE and CL": (request(CHUNKED, CL) + CHUNKS, 400),
    "two CL that differ": (request(b"Content-Length: 2", b"Content-Length: 3") + b"{} ", 400),
    "two CL that agree": (request(b"Content-Length: 2", b"Content-Length: 2") + b"{}", 400),
    "CL list": (request(b"Content-Length: 2, 2") + b"{}", 400),
    "CL +1": (request(b"Content-Length: +2") + b"{}", 400),
    "CL -1": (request(b"Content-Length: -2") + b"{}", 400),
    "CL hex": (request(b"Content-Length: 0x2") + b"{}", 400),
    "CL octal-looking with sign": (request(b"Content-Length: 2 2") + b"{}", 400),
    "CL empty": (request(b"Content-Length: ") + b"{}", 400),
    "CL underscore digits": (request(b"Content-Length: 1_0") + b"{}", 400),
    "CL over 64 bit": (request(b"Content-Length: 99999999999999999999999") + b"{}", 400),
    "CL letters": (request(b"Content-Length: two") + b"{}", 400),
    "CL float": (request(b"Content-Length: 2.0") + b"{}", 400),
    "TE xchunked": (request(b"Transfer-Encoding: xchunked") + CHUNKS, 400),
    "TE chunked, identity": (request(b"Transfer-Encoding: chunked, identity") + CHUNKS, 400),
    "TE gzip, chunked": (request(b"Transfer-Encoding: gzip, chunked") + CHUNKS, 501),
    "TE identity": (request(b"Transfer-Encoding: identity") + CHUNKS, 400),
    "TE chunked chunked": (request(b"Transfer-Encoding: chunked, chunked") + CHUNKS, 400),
    "TE two lines": (request(CHUNKED, CHUNKED) + CHUNKS, 400),
    "TE two lines, second identity": (request(CHUNKED, b"Transfer-Encoding: identity") + CHUNKS, 400),
    "TE quoted": (request(b'Transfer-Encoding: "chunked"') + CHUNKS, 400),
    "TE with a tab inside": (request(b"Transfer-Encoding: chun\tked") + CHUNKS, 400),
    "TE vertical tab": (request(b"Transfer-Encoding: \x0bchunked") + CHUNKS, 400),
    "TE empty": (request(b"Transfer-Encoding: ") + CHUNKS, 400),
    "TE on HTTP/1.0": (request(CHUNKED, start=b"POST /v1/completions HTTP/1.0") + CHUNKS, 400),
    "TE space before colon": (request(b"Transfer-Encoding : chunked") + CHUNKS, 400),
    "CL underscore name": (request(b"Content_Length: 2") + b"{}", 400),
    "TE underscore name": (request(CL, b"Transfer_Encoding: chunked") + BODY, 400),
    "CL dotted name": (request(CL, b"Content.Length: 2") + BODY, 400),
    "forged forwarding by an underscore name": (request(CL, b"X_Forwarded_For: 6.6.6.6") + BODY, 400),
    # Lines
    "obs-fold": (request(b"X-A: a\r\n b", CL) + BODY, 400),
    "obs-fold of TE": (request(b"Transfer-Encoding:\r\n chunked") + CHUNKS, 400),
    "space before colon": (request(b"X-A : a", CL) + BODY, 400),
    "tab before colon": (request(b"X-A\t: a", CL) + BODY, 400),
    "space before first field": (request(b" X-A: a", CL) + BODY, 400),
    "no colon": (request(b"X-A", CL) + BODY, 400),
    "empty name": (request(b": a", CL) + BODY, 400),
    "bare LF between fields": (b"POST /v1/completions HTTP/1.1\r\nHost: a\nContent-Length: 2\r\n\r\n{}", 400),
    "bare LF after the start line": (b"POST /v1/completions HTTP/1.1\nHost: a\r\nContent-Length: 2\r\n\r\n{}", 400),
    "bare LF ends the head": (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\n{}", 400),
    "LF LF": (b"POST /v1/completions HTTP/1.1\nHost: a\nContent-Length: 2\n\n{}", 400),
    "bare CR in a value": (request(b"X-A: a\rb", CL) + BODY, 400),
    "CR before a field": (request(b"\rX-A: a", CL) + BODY, 400),
    "NUL in a value": (request(b"X-A: a\0b", CL) + BODY, 400),
    "NUL in a name": (request(b"X-\0A: a", CL) + BODY, 400),
    "control character in a value": (request(b"X-A: a\x01b", CL) + BODY, 400),
    "8-bit name": (request(b"X-\xe9: a", CL) + BODY, 400),
    "parenthesis in a name": (request(b"X-(A): a", CL) + BODY, 400),
    # Host and target
    "no Host": (request(CL, host=None) + BODY, 400),
    "two Hosts": (request(b"Host: b", CL) + BODY, 400),
    "two equal Hosts": (request(b"Host: a", CL) + BODY, 400),
    "Host list": (request(CL, host=b"Host: a, b") + BODY, 400),
    "Host with a path": (request(CL, host=b"Host: a/b") + BODY, 400),
    "Host with userinfo": (request(CL, host=b"Host: u@a") + BODY, 400),
    "absolute target of another host": (request(CL, start=b"POST http://b/v1/completions HTTP/1.1") + BODY, 400),
    "absolute target without path characters": (request(CL, start=b"POST http://b?x HTTP/1.1") + BODY, 400),
    "target without slash": (request(CL, start=b"POST v1/completions HTTP/1.1") + BODY, 400),
    "asterisk target": (request(CL, start=b"POST * HTTP/1.1") + BODY, 400),
    "target with a fragment": (request(CL, start=b"POST /v1/completions#a HTTP/1.1") + BODY, 400),
    "target with a quote": (request(CL, start=b'POST /v1/"completions HTTP/1.1') + BODY, 400),
    "8-bit target": (request(CL, start=b"POST /v1/\xe9 HTTP/1.1") + BODY, 400),
    "space in the target": (request(CL, start=b"POST /v1/com pletions HTTP/1.1") + BODY, 400),
    "tab in the start line": (request(CL, start=b"POST\t/v1/completions HTTP/1.1") + BODY, 400),
    "NUL in the target": (request(CL, start=b"POST /v1/\0 HTTP/1.1") + BODY, 400),
    "CONNECT": (request(start=b"CONNECT engine:8000 HTTP/1.1"), 405),
    "CONNECT with a path": (request(start=b"CONNECT /v1/completions HTTP/1.1"), 405),
    # Version and method
    "HTTP/2.0": (request(CL, start=b"POST /v1/completions HTTP/2.0") + BODY, 505),
    "HTTP/0.9": (request(CL, start=b"POST /v1/completions HTTP/0.9") + BODY, 505),
    "HTTP/1.2": (request(CL, start=b"POST /v1/completions HTTP/1.2") + BODY, 400),
    "HTTP/01.1": (request(CL, start=b"POST /v1/completions HTTP/01.1") + BODY, 400),
    "lower-case http": (request(CL, start=b"POST /v1/completions http/1.1") + BODY, 400),
    "no version": (b"POST /v1/completions\r\nHost: a\r\n\r\n", 505),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "unknown method": (request(CL, start=b"EVIL /v1/completions HTTP/1.1") + BODY, 400),
    "lower-case method": (request(CL, start=b"post /v1/completions HTTP/1.1") + BODY, 400),
    "garbage": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    # Chunks
    "chunk size 0x": (request(CHUNKED) + b"0x2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size +": (request(CHUNKED) + b"+2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size -": (request(CHUNKED) + b"-2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size empty": (request(CHUNKED) + b"\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size letters": (request(CHUNKED) + b"zz\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size over 64 bit": (request(CHUNKED) + b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size with an underscore": (request(CHUNKED) + b"1_0\r\n{}\r\n0\r\n\r\n", 400),
    "space before the chunk size": (request(CHUNKED) + b" 2\r\n{}\r\n0\r\n\r\n", 400),
    "space after the chunk size": (request(CHUNKED) + b"2 \r\n{}\r\n0\r\n\r\n", 400),
    "LF in a chunk extension": (request(CHUNKED) + b"2;a\n{}\r\n0\r\n\r\n", 400),
    "bare LF after the chunk size": (request(CHUNKED) + b"2\n{}\r\n0\r\n\r\n", 400),
    "bare CR after the chunk size": (request(CHUNKED) + b"2\r{}\r\n0\r\n\r\n", 400),
    "chunk data too long": (request(CHUNKED) + b"2\r\n{}}\r\n0\r\n\r\n", 400),
    "chunk data ends with LF": (request(CHUNKED) + b"2\r\n{}\n0\r\n\r\n", 400),
    "LF in the last chunk": (request(CHUNKED) + b"2\r\n{}\r\n0\n\r\n", 400),
    # Sizes
    "header line of 9000 bytes": (request(b"X-A: " + b"a" * 9000, CL) + BODY, 431),
    "header name of 9000 bytes": (request(b"a" * 9000 + b": x", CL) + BODY, 431),
    "200 header fields": (request(*[b"X-%d: a" % n for n in range(200)], CL) + BODY, 431),
    "URL of 9000 bytes": (request(CL, start=b"POST /" + b"a" * 9000 + b" HTTP/1.1") + BODY, 414),
    "head of 100 KiB": (request(*[b"X-%d: " % n + b"a" * 1100 for n in range(100)], CL) + BODY, 431),
    "header without end": (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 200_000, 431),
    "URL without end": (b"POST /" + b"a" * 200_000, 414),
    # Expectations
    "Expect other": (request(CL, b"Expect: 200-ok") + BODY, 417),
    "Expect list": (request(CL, b"Expect: 100-continue, x") + BODY, 417),
}


@pytest.mark.parametrize("name", VECTORS)
async def test_refused_and_nothing_reaches_an_engine(name: str) -> None:
    data, status = VECTORS[name]
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(data)
        answer = await asyncio.wait_for(client.reply(), 5)
        assert answer.status == status, answer
        assert answer.field("X-Fleetgate-Error")
        assert answer.field("X-Request-Id")
        assert answer.field("Connection") == "close"
        # What follows on the connection is never read as a request.
        await client.send(INNER)
        assert await asyncio.wait_for(client.closed(), 5)
        assert engine.requests == []


async def test_trailers_without_end_are_refused() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(request(CHUNKED) + b"2\r\n{}\r\n0\r\n")
        for _ in range(40):
            await client.send(b"X-A: " + b"a" * 5000 + b"\r\n")
        answer = await asyncio.wait_for(client.reply(), 5)
        assert answer.status == 431
        assert engine.requests == []


async def test_trailers_are_dropped() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        answer = await ask(app.url, request(CHUNKED) + b"2\r\n{}\r\n0\r\nX-Evil: a\r\n\r\n")
        assert answer.status == 200
        assert b"X-Evil" not in answer.body
        assert engine.requests[0].body == b"{}"
        assert engine.requests[0].field("Content-Length") == "2"


async def test_chunk_extensions_are_dropped() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        answer = await ask(app.url, request(CHUNKED) + b"2;a=b\r\n{}\r\n0\r\n\r\n")
        assert answer.status == 200
        assert engine.requests[0].raw_body == b"{}"


@pytest.mark.parametrize("kind", ["length", "chunked"])
async def test_an_early_answer_never_lets_the_rest_of_the_body_become_a_request(kind: str) -> None:
    """The engine answers before it has the body; the rest of the body looks like a request of its own."""
    engine = FaultEngine(reply(answer_bytes(413, b'{"error":{"message":"no","code":413}}')), reads_body=False)
    async with engine, proxy_for(engine, replay_limit=0) as app, Client.to(app.url) as client:
        if kind == "length":
            await client.send(request(b"Content-Length: %d" % (len(INNER) + 1)) + b"x")
            rest = INNER
        else:
            await client.send(request(CHUNKED) + b"1\r\nx\r\n")
            rest = b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)
        answer = await client.reply()
        assert answer.status == 413
        assert answer.field("Connection") == "close"
        await client.send(rest)
        assert await asyncio.wait_for(client.closed(), 5)
        assert len(engine.requests) == 1
        # Nor may the engine's connection serve again: it still waits for the rest of the body.
        engine.script = echo()
        engine.reads_body = True
        assert (await ask(app.url, post("/v1/completions", BODY))).status == 200
        assert engine.requests[-1].wire is not engine.requests[0].wire


@pytest.mark.parametrize("token", [b"h2c", b"websocket"])
async def test_bytes_after_the_body_of_an_upgrade_that_is_not_made_are_never_a_request(token: bytes) -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        head = request(b"Connection: Upgrade", b"Upgrade: " + token, CL)
        await client.send(head + BODY + INNER)
        answer = await client.reply()
        assert (answer.status, answer.field("Connection")) == (200, "close")
        assert await asyncio.wait_for(client.closed(), 5)
        assert [one.body for one in engine.requests] == [BODY]


async def test_a_broken_body_behind_an_upgrade_that_is_not_made_is_refused() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(request(b"Connection: Upgrade", b"Upgrade: h2c", CHUNKED) + b"2\r\n{}\r\nzz\r\n")
        assert (await client.reply()).status == 400
        assert await asyncio.wait_for(client.closed(), 5)
        assert engine.requests == []


@pytest.mark.parametrize("token", [b"h2c", b"websocket2", b"TLS/1.0"])
async def test_bytes_after_an_upgrade_that_is_not_made_are_never_a_request(token: bytes) -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + token, b"HTTP2-Settings: AAMAAABk")
        await client.send(request(*upgrade, start=b"GET /v1/models HTTP/1.1") + INNER)
        answer = await client.reply()
        assert answer.status == 200
        assert b"pgrade" not in answer.body
        assert b"HTTP2-Settings" not in answer.body
        assert await asyncio.wait_for(client.closed(), 5)
        assert len(engine.requests) == 1


async def test_a_websocket_that_the_engine_declines_carries_no_request() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        upgrade = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x", b"Sec-WebSocket-Version: 13")
        await client.send(request(*upgrade, start=b"GET /v1/realtime HTTP/1.1") + INNER)
        assert (await client.reply()).status == 200
        assert await asyncio.wait_for(client.closed(), 5)
        assert len(engine.requests) == 1


async def test_pipelined_requests_are_answered_in_order_and_garbage_behind_them_once() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        bodies = [b'{"n":%d}' % n for n in range(40)]
        await client.send(b"".join(post("/v1/completions", body) for body in bodies) + b"\0garbage\r\n\r\n" + INNER)
        for body in bodies:
            assert (await client.reply()).body.endswith(body)
        assert (await client.reply()).status == 400
        assert await asyncio.wait_for(client.closed(), 5)
        assert len(engine.requests) == 40


async def test_a_broken_body_behind_a_running_request_costs_only_itself() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", BODY) + request(CHUNKED) + b"2\r\n{}\r\nzz\r\n")
        assert (await client.reply()).status == 200
        assert (await client.reply()).status == 400
        assert await asyncio.wait_for(client.closed(), 5)
        assert len(engine.requests) == 1


async def test_bytes_after_the_last_request_of_a_connection_are_ignored() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", BODY, "Connection: close") + INNER)
        assert (await client.reply()).status == 200
        assert await asyncio.wait_for(client.closed(), 5)
        assert len(engine.requests) == 1


ENGINE_VECTORS: dict[str, bytes] = {
    "CL and TE": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "two CL that differ": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    "CL list": b"HTTP/1.1 200 OK\r\nContent-Length: 2, 3\r\n\r\n{} ",
    "TE gzip": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "space before colon": b"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\n{}",
    "NUL": b"HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 2\r\n\r\n{}",
    "garbage": b"\x15\x03\x01\x00\x02\x02\x16",
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "head without end": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
    "101 that nobody asked for": b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nHTTP/1.1 200 OK\r\n",
}


@pytest.mark.parametrize("name", ENGINE_VECTORS)
async def test_an_engine_whose_answer_is_ambiguous_is_a_bad_gateway(name: str) -> None:
    async with FaultEngine(reply(ENGINE_VECTORS[name])) as engine, proxy_for(engine, max_attempts=1) as app:
        answer = await ask(app.url, post("/v1/completions", BODY))
        assert answer.status == 502
        assert answer.field("X-Fleetgate-Error") == "engine_broken"
        assert answer.complete
