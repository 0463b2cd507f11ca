"""The reference: what a proxy costs that is written in the obvious way with aiohttp's server and client."""

from __future__ import annotations

import itertools
import sys

import aiohttp
from aiohttp import web

HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}


def make_app(engines: list[str]) -> web.Application:
    """An application that passes each request to the next engine."""
    app = web.Application(client_max_size=1 << 30)
    turn = itertools.cycle(engines)

    async def session(app: web.Application):
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as client:
            app["client"] = client
            yield

    async def relay(request: web.Request) -> web.StreamResponse:
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP]
        body = await request.read()
        client: aiohttp.ClientSession = request.app["client"]
        async with client.request(
            request.method, next(turn) + request.raw_path, headers=headers, data=body or None
        ) as upstream:
            answer = web.StreamResponse(status=upstream.status)
            for name, value in upstream.headers.items():
                if name.lower() not in HOP:
                    answer.headers.add(name, value)
            if upstream.content_length is not None:
                answer.content_length = upstream.content_length
            await answer.prepare(request)
            async for piece in upstream.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
            return answer

    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{path:.*}", relay)
    return app


if __name__ == "__main__":
    web.run_app(make_app(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
