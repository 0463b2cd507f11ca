"""Scripts for `tests.tools.fault_engine`, and the bytes that they write."""

from __future__ import annotations

import asyncio

from tests.tools.fault_engine import Request, Script, Wire, answer_bytes

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(*pieces: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % kind
    return head + b"".join(chunk(piece) for piece in pieces) + b"0\r\n\r\n"


def sse(*events: bytes) -> bytes:
    """A whole chunked event stream."""
    return chunked(*events, kind=b"text/event-stream")


def close_delimited(body: bytes, *, kind: bytes = b"application/json", version: bytes = b"1.0") -> bytes:
    return b"HTTP/%b 200 OK\r\nContent-Type: %b\r\n\r\n" % (version, kind) + body


# Scripts


def reply(data: bytes) -> Script:
    """Always the same bytes."""

    async def script(wire: Wire, request: Request) -> None:
        await wire.send(data)

    return script


def echo() -> Script:
    """Answers with the exact bytes that came."""

    async def script(wire: Wire, request: Request) -> None:
        await wire.send(answer_bytes(200, request.raw, kind=b"application/octet-stream"))

    return script


def silent() -> Script:
    """Never answers."""

    async def script(wire: Wire, request: Request) -> None:
        await wire.gone.wait()

    return script


def cut_after(count: int, data: bytes, *, rst: bool = False) -> Script:
    """The first ``count`` bytes of ``data``, then the end of the connection."""

    async def script(wire: Wire, request: Request) -> None:
        if count:
            await wire.send(data[:count])
        if rst:
            # A reset takes unsent bytes with it.
            await asyncio.sleep(0.01)
            wire.reset()
        else:
            wire.close()
        await wire.gone.wait()

    return script


def close_delimited_reply(data: bytes) -> Script:
    """``data``, then a clean end of the connection."""
    return cut_after(len(data), data)


def slow(data: bytes, piece: int, seconds: float) -> Script:
    """``data`` in pieces with pauses between."""

    async def script(wire: Wire, request: Request) -> None:
        for start in range(0, len(data), piece):
            await wire.send(data[start : start + piece])
            await asyncio.sleep(seconds)

    return script


def stream(count: int, seconds: float, event: bytes = b'data: {"id":"x","choices":[{"text":"a"}]}\n\n') -> Script:
    """``count`` events with pauses, then ``[DONE]``."""

    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SSE_HEAD)
        for _ in range(count):
            await wire.send(chunk(event))
            await asyncio.sleep(seconds)
        await wire.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return script


def in_turn(*scripts: Script) -> Script:
    """The first request gets the first script, and so on; the last one stays."""
    calls = iter(range(10**9))

    async def script(wire: Wire, request: Request) -> None:
        await scripts[min(next(calls), len(scripts) - 1)](wire, request)

    return script


def close_when_idle(then: Script, seconds: float) -> Script:
    """Answers, then closes the connection after so much idleness, as uvicorn does."""

    async def script(wire: Wire, request: Request) -> None:
        await then(wire, request)
        served = wire.served

        def strike() -> None:
            if wire.served == served and not wire.buffer:
                wire.close()

        asyncio.get_running_loop().call_later(seconds, strike)

    return script


def poison_idle(then: Script, data: bytes) -> Script:
    """Answers, then pushes bytes that nobody asked for."""

    async def script(wire: Wire, request: Request) -> None:
        await then(wire, request)
        await asyncio.sleep(0.01)
        await wire.send(data)

    return script
