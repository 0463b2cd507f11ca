"""What goes in comes out: path, query, fields and bodies, byte for byte, in both directions."""

from __future__ import annotations

import asyncio
import gzip
import random

import pytest

from tests.tools.fault_engine import FaultEngine, answer_bytes
from tests.tools.fault_scripts import chunked, close_delimited, cut_after, echo, reply
from tests.tools.rig import Client, ask, get, post, proxy_for

BODY = b'{"prompt":"x", "unknown_field": [1, 2.50, 1e5, "\\u00e9"],  "n":1}'

TARGETS = [
    "/v1/completions?a=1&a=2&b=&c",
    "/v1/completions?x=%20y+z&%2F=%2f",
    "/v1/completions?q=a%0Ab%00",
    "/v1/completions?",
    "/v1/completions??a=?",
    "/v1/completions?a=1&&b=2&",
    "/v1/completions?a[]=1&b={x}|y^`<>",
    "/v1/completions/",
    "/v1/models/Qwen%2FQwen3-0.6B",
    "/v1/a%2Fb/c%252Fd;p=1,2",
    "/v1/models/~a.b-c_d!$&'()*+,;=:@",
    "/v1/models/a//b",
    "/x?url=http://other/pause",
]


@pytest.mark.parametrize("target", TARGETS)
async def test_targets_are_kept_to_the_letter(target: str) -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        assert (await ask(app.url, post(target, BODY))).status == 200
        assert engine.requests[0].target == target


async def test_random_targets_are_kept_to_the_letter() -> None:
    rng = random.Random(7)
    plain = "abcXYZ019-._~!$&'()*+,;=:@[]|"
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        for _ in range(1000):
            parts = [
                f"%{rng.randrange(256):02{rng.choice('xX')}}" if rng.random() < 0.3 else rng.choice(plain + "/?")
                for _ in range(rng.randrange(1, 60))
            ]
            target = "/v1/models/t?" + "".join(parts)
            await client.send(get(target))
            assert (await client.reply()).status == 200
            assert engine.requests[-1].target == target


async def test_fields_keep_order_case_duplicates_and_empty_values() -> None:
    fields = [
        "X-B: 1",
        "x-a: 2",
        "X-B: 3",
        "X-Empty:",
        "X-TRIM:   a b  ",
        "Accept: a, b",
        "Cookie: a=1; b=\xe9",
        "X-B: 1",
    ]
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        await ask(app.url, post("/v1/completions", BODY, *fields))
        seen = engine.requests[0].fields
        assert seen[0][0] == b"Host"
        assert [
            pair for pair in seen if pair[0].lower().startswith((b"x-a", b"x-b", b"x-e", b"x-t", b"acc", b"coo"))
        ] == [
            (b"X-B", b"1"),
            (b"x-a", b"2"),
            (b"X-B", b"3"),
            (b"X-Empty", b""),
            (b"X-TRIM", b"a b  "),
            (b"Accept", b"a, b"),
            (b"Cookie", b"a=1; b=\xe9"),
            (b"X-B", b"1"),
        ]


async def test_hop_by_hop_fields_end_here_in_both_directions() -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nTrailer: X-T\r\n"
        b"Proxy-Authenticate: Basic\r\nUpgrade: h2c\r\nX-Kept: 1\r\nX-Forwarded-For: 10.0.0.1\r\n"
        b"Content-Length: 2\r\n\r\n{}"
    )
    sent = [
        "Connection: close, X-Secret ,X-Forwarded-For, X-Request-Id",
        "X-Secret: 1",
        "Keep-Alive: timeout=5",
        "TE: trailers",
        "Trailer: X-T",
        "Proxy-Authorization: Basic eDp5",
        "Proxy-Connection: keep-alive",
        "X-Kept: 1",
    ]
    async with FaultEngine(reply(answer)) as engine, proxy_for(engine) as app:
        got = await ask(app.url, post("/v1/completions", BODY, *sent))
        names = {name.lower() for name, _ in engine.requests[0].fields}
        assert names == {
            b"host",
            b"content-type",
            b"content-length",
            b"x-kept",
            b"x-request-id",
            b"x-forwarded-for",
            b"x-forwarded-proto",
            b"via",
        }
        for name in ("X-Hop", "Keep-Alive", "Trailer", "Proxy-Authenticate", "Upgrade", "X-Forwarded-For"):
            assert got.field(name) is None
        assert got.field("X-Kept") == "1"
        assert got.field("X-Fleetgate-Engine") == engine.id
        assert got.field("X-Fleetgate-Attempts") == "1"
        assert got.field("X-Fleetgate-Weight-Version")
        assert got.field("X-Request-Id") == engine.requests[0].field("X-Request-Id")


async def test_forwarding_fields() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        await ask(
            app.url, post("/v1/completions", BODY, "X-Forwarded-For: 10.1.1.1", "Via: 1.0 edge", "X-Request-Id: a/b")
        )
        seen = engine.requests[0]
        assert seen.field("X-Forwarded-For") == "10.1.1.1, 127.0.0.1"
        assert seen.field("X-Forwarded-Proto") == "http"
        assert (seen.field("Via") or "").startswith("1.0 edge, 1.1 fleetgate-")
        assert seen.field("X-Request-Id") == "a/b"
        assert seen.field("Host") == engine.id


async def test_forwarding_fields_of_strangers_are_dropped() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine, trusted_proxies=["10.0.0.0/8"]) as app:
        await ask(app.url, post("/v1/completions", BODY, "X-Forwarded-For: 6.6.6.6", "X-Forwarded-Proto: https"))
        assert engine.requests[0].field("X-Forwarded-For") == "127.0.0.1"
        assert engine.requests[0].field("X-Forwarded-Proto") == "http"


async def test_the_forwarded_scheme_of_a_trusted_proxy_is_kept() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        for sent in ("https", ""):
            await ask(app.url, post("/v1/completions", BODY, f"X-Forwarded-Proto: {sent}"))
        fields = [[value for name, value in one.fields if name == b"X-Forwarded-Proto"] for one in engine.requests]
        assert fields == [[b"https"], [b"http"]]


async def test_an_id_that_is_named_as_hop_by_hop_is_replaced() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        got = await ask(app.url, post("/v1/completions", BODY, "Connection: X-Request-Id", "X-Request-Id: a"))
        ids = [value for name, value in engine.requests[0].fields if name.lower() == b"x-request-id"]
        assert ids == [(got.field("X-Request-Id") or "").encode()]
        assert ids != [b"a"]


async def test_a_refusal_of_a_head_carries_its_id() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        for wrong in ("Expect: tea", "X-A: " + "a" * 9000):
            got = await ask(app.url, post("/v1/completions", BODY, "X-Request-Id: mine", wrong))
            assert got.status in (417, 431)
            assert got.field("X-Request-Id") == "mine"


async def test_a_loop_is_noticed() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        await ask(app.url, get("/v1/models"))
        got = await ask(app.url, get("/v1/models", f"Via: {engine.requests[0].field('Via')}"))
        assert got.status == 508


@pytest.mark.parametrize("size", [0, 1, 65536, 3_000_000])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_bodies_are_kept_to_the_byte(size: int, framing: str) -> None:
    body = random.Random(size).randbytes(size)
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        if framing == "length":
            await client.send(post("/v1/completions", body))
        else:
            await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            for start in range(0, size, 70_001):
                piece = body[start : start + 70_001]
                await client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await client.send(b"0\r\n\r\n")
        got = await client.reply()
        assert got.status == 200
        assert engine.requests[0].body == body
        assert engine.requests[0].field("Content-Length") == str(size)
        assert got.body.endswith(body)


async def test_a_body_too_big_to_keep_is_streamed_with_its_framing() -> None:
    body = random.Random(1).randbytes(400_000)
    async with FaultEngine(echo()) as engine, proxy_for(engine, replay_limit=1000) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", body))
        assert (await client.reply()).body.endswith(body)
        assert engine.requests[0].field("Content-Length") == str(len(body))
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 9999):
            piece = body[start : start + 9999]
            await client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await client.send(b"0\r\n\r\n")
        assert (await client.reply()).status == 200
        assert engine.requests[1].body == body
        assert engine.requests[1].field("Transfer-Encoding") == "chunked"


async def test_compressed_bodies_pass_untouched() -> None:
    zipped = gzip.compress(BODY * 100)
    answer = answer_bytes(200, zipped, extra=b"Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n")
    async with FaultEngine(reply(answer)) as engine, proxy_for(engine) as app:
        got = await ask(app.url, post("/v1/completions", zipped, "Content-Encoding: gzip", "Accept-Encoding: br"))
        assert engine.requests[0].body == zipped
        assert engine.requests[0].field("Content-Encoding") == "gzip"
        assert engine.requests[0].field("Accept-Encoding") == "br"
        assert got.body == zipped
        assert got.field("Content-Encoding") == "gzip"
        assert got.field("Content-Length") == str(len(zipped))


async def test_multipart_passes_untouched() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\0\x01RIFF\r\n--b--\r\n'
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        await ask(app.url, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert engine.requests[0].body == body
        assert engine.requests[0].field("Content-Type") == "multipart/form-data; boundary=b"


@pytest.mark.parametrize(
    "answer", [b"Content-Length: 123\r\n", b"Transfer-Encoding: chunked\r\n", b"", b"Content-Length: 0\r\n"]
)
async def test_head_has_no_body_and_does_not_wait_for_one(answer: bytes) -> None:
    async with FaultEngine(reply(b"HTTP/1.1 200 OK\r\nX-A: 1\r\n" + answer + b"\r\n")) as engine:
        async with proxy_for(engine) as app, Client.to(app.url) as client:
            for _ in range(2):
                await client.send(b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
                got = await asyncio.wait_for(client.reply(head=True), 2)
                assert got.status == 200
                assert got.field("X-A") == "1"
                if b"123" in answer:
                    assert got.field("Content-Length") == "123"
            assert [request.method for request in engine.requests] == ["HEAD", "HEAD"]


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body(status: int) -> None:
    async with FaultEngine(reply(b"HTTP/1.1 %d X\r\nETag: a\r\n\r\n" % status)) as engine:
        async with proxy_for(engine) as app, Client.to(app.url) as client:
            for _ in range(2):
                await client.send(get("/v1/models"))
                got = await asyncio.wait_for(client.reply(), 2)
                assert got.status == status
                assert got.field("Content-Length") is None
                assert got.field("Transfer-Encoding") is None


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "PATCH", "DELETE", "GET"])
async def test_every_method_passes(method: str) -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        data = f"{method} /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc".encode()
        assert (await ask(app.url, data)).status == 200
        assert engine.requests[0].method == method
        assert engine.requests[0].body == b"abc"


async def test_options_asterisk() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        assert (await ask(app.url, b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n")).status == 200
        assert engine.requests[0].target == "*"


async def test_a_get_without_a_body_stays_without_one() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        await ask(app.url, get("/v1/models"))
        assert engine.requests[0].field("Content-Length") is None
        assert engine.requests[0].field("Transfer-Encoding") is None


async def test_expect_100_continue_is_answered_and_not_passed_on() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 2) == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"{}")
        assert (await client.reply()).status == 200
        assert engine.requests[0].field("Expect") is None


async def test_interim_answers_of_an_engine_are_skipped() -> None:
    answer = (
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + b"HTTP/1.1 100 Continue\r\n\r\n" + answer_bytes(201, b"[]")
    )
    async with FaultEngine(reply(answer)) as engine, proxy_for(engine) as app:
        got = await ask(app.url, post("/v1/completions", BODY))
        assert got.status == 201
        assert got.field("Link") is None
        assert got.body == b"[]"


async def test_status_and_reason_pass() -> None:
    answer = b"HTTP/1.1 299 Rather Odd\r\nContent-Length: 0\r\n\r\n"
    async with FaultEngine(reply(answer)) as engine, proxy_for(engine) as app:
        assert (await ask(app.url, get("/v1/models"))).head.startswith(b"HTTP/1.1 299 Rather Odd\r\n")


async def test_answers_keep_fields_and_bytes() -> None:
    extra = b"Set-Cookie: a=1\r\nset-cookie: b=2\r\nX-Empty: \r\nx-CASE: v\r\nX-8bit: \xe9\r\n"
    async with FaultEngine(reply(answer_bytes(200, b"\0\xff" * 5000, extra=extra))) as engine, proxy_for(engine) as app:
        got = await ask(app.url, post("/v1/completions", BODY))
        at = got.head.index(b"Set-Cookie")
        assert got.head[at : at + len(extra) - 2] == extra[:-2].replace(b"X-Empty: \r", b"X-Empty: \r")
        assert got.body == b"\0\xff" * 5000


async def test_an_http_10_client_gets_an_answer_that_ends_with_its_connection() -> None:
    async with (
        FaultEngine(reply(chunked(b'{"a":', b"1}"))) as engine,
        proxy_for(engine) as app,
        Client.to(app.url) as client,
    ):
        await client.send(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        got = await client.reply()
        assert got.complete
        assert got.body == b'{"a":1}'
        assert got.field("Transfer-Encoding") is None
        assert got.field("Connection") == "close"


async def test_a_close_delimited_answer_of_an_engine_is_framed() -> None:
    data = close_delimited(b'{"a":1}')
    async with (
        FaultEngine(cut_after(len(data), data)) as engine,
        proxy_for(engine) as app,
        Client.to(app.url) as client,
    ):
        for _ in range(2):
            await client.send(post("/v1/completions", BODY))
            got = await client.reply()
            assert got.complete
            assert got.body == b'{"a":1}'


async def test_an_absolute_target_of_this_host_is_a_path() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        data = b"POST http://proxy/v1/completions?a=1 HTTP/1.1\r\nHost: proxy\r\nContent-Length: 2\r\n\r\n{}"
        assert (await ask(app.url, data)).status == 200
        assert engine.requests[0].target == "/v1/completions?a=1"


async def test_requests_split_at_every_byte_are_the_same() -> None:
    data = post("/v1/completions?a=%20", BODY, "X-A: 1")
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        for byte in data:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.reply()).status == 200
        assert engine.requests[0].body == BODY
        assert engine.requests[0].field("X-A") == "1"


async def test_data_and_control_calls_share_one_connection() -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        for _ in range(3):
            await client.send(post("/v1/completions", BODY))
            assert (await client.reply()).status == 200
            await client.send(get("/health"))
            assert (await client.reply()).status == 200
            await client.send(get("/fleet"))
            got = await client.reply()
            assert got.status == 200
            assert engine.id.encode() in got.body
        await client.send(get("/health") + post("/v1/completions", BODY) + get("/metrics") + get("/v1/models"))
        assert [(await client.reply()).status for _ in range(4)] == [200] * 4
        assert len(engine.requests) == 5
