"""The demo's client takes nothing but a complete answer for one."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.demo.client import ClientError, Kind, Piece, ask, request_body

STREAMED = Kind("completions", True)
WHOLE = Kind("completions", False)


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


FIRST = event(token_ids=[5], finish_reason=None, weight_versions=None)
LAST = event(token_ids=[6], finish_reason="length", weight_versions=[{"version": "a", "start": 0, "end": 2}])
DONE = b"data: [DONE]\n\n"


async def answered(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], kind: Kind) -> Piece:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        return await ask(session, str(server.make_url("")).rstrip("/"), kind, request_body(kind, "m", [1, 2], 2))


def streaming(*chunks: bytes, cut: bool = False) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


async def test_a_whole_stream_gives_tokens_and_spans() -> None:
    piece = await answered(streaming(FIRST, LAST, DONE), STREAMED)
    assert (piece.prompt, piece.tokens, piece.finish) == ([1, 2], [5, 6], "length")
    assert piece.spans == [{"version": "a", "start": 0, "end": 2}]


async def test_events_may_be_split_anywhere() -> None:
    raw = FIRST + LAST + DONE
    piece = await answered(streaming(*(raw[index : index + 1] for index in range(len(raw)))), STREAMED)
    assert piece.tokens == [5, 6]


@pytest.mark.parametrize(
    ("chunks", "cut", "said"),
    [
        ((FIRST, LAST), False, "cut after 2 tokens"),
        ((FIRST, DONE), False, "without a finish_reason"),
        ((FIRST,), True, "Payload"),
        ((FIRST, b'data: {"error": {"message": "no", "code": 503}}\n\n', DONE), False, "error event after 1 tokens"),
        ((LAST, DONE, LAST), False, r"after \[DONE\]"),
    ],
    ids=["no DONE", "no finish", "connection cut", "error event", "event after DONE"],
)
async def test_a_stream_that_is_not_whole_is_an_error(chunks: tuple[bytes, ...], cut: bool, said: str) -> None:
    with pytest.raises(ClientError, match=said):
        await answered(streaming(*chunks, cut=cut), STREAMED)


async def test_a_refusal_is_an_error_with_what_was_said() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "paused"}}, status=503)

    with pytest.raises(ClientError, match=r"503.*paused"):
        await answered(handler, WHOLE)


def test_each_route_is_asked_in_its_own_words() -> None:
    assert request_body(Kind("generate", True), "m", [1], 9)["sampling_params"]["max_tokens"] == 9
    assert request_body(Kind("chat", False), "m", "hi", 9)["messages"] == [{"role": "user", "content": "hi"}]
    assert request_body(Kind("completions", False), "m", [1], 9)["return_weight_versions"] is True
