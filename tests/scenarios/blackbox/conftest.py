import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from tests.scenarios.blackbox.engine import Engine

JSON = {"Content-Type": "application/json"}


class Proxy:
    def __init__(self, process, url, lines):
        self.process = process
        self.url = url
        self.lines = lines

    async def stop(self):
        if self.process.returncode is None:
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), 20)
        return self.process.returncode


@asynccontextmanager
async def run_proxy(*args: str) -> AsyncIterator[Proxy]:
    """The real command as its own process; yields when it listens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "--port", "0", *args, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    lines: list[str] = []
    url = ""
    async with asyncio.timeout(60):
        while not url:
            line = (await process.stderr.readline()).decode()
            lines.append(line)
            if not line:
                raise RuntimeError(f"the proxy ended: {lines}")
            found = re.search(r"listening on (http://\S+)", line)
            url = found.group(1) if found else ""

    async def drain():
        while line := await process.stderr.readline():
            lines.append(line.decode())

    reader = asyncio.ensure_future(drain())
    proxy = Proxy(process, url, lines)
    try:
        yield proxy
    finally:
        await proxy.stop()
        await reader


@asynccontextmanager
async def fleet(count: int = 3, *args: str, **options):
    """Engines, a proxy in front of them that is ready, and a client session."""
    engines = [await Engine(f"e{index}", **options).start() for index in range(count)]
    flags = [flag for engine in engines for flag in ("--engine", engine.url)]
    try:
        async with run_proxy(*flags, *args) as proxy, aiohttp.ClientSession(proxy.url) as http:
            await until(lambda: ready(http))
            for engine in engines:
                engine.seen.clear()
            yield engines, http, proxy
    finally:
        for engine in engines:
            await engine.stop()


async def ready(http) -> bool:
    async with http.get("/ready") as answer:
        return answer.status == 200


async def until(check, seconds: float = 20.0):
    """Wait until a condition holds; the limit only ends a hang."""
    async with asyncio.timeout(seconds):
        while True:
            result = check()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return result
            await asyncio.sleep(0.02)


async def states(http) -> dict[str, str]:
    async with http.get("/fleet") as answer:
        data = await answer.json()
    return {engine["id"]: engine["state"] for engine in data["engines"]}


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def states_are(http, engine, state):
    return (await states(http))[engine] == state


def answer(status, body):
    async def handler(engine, request):
        return web.json_response(body, status=status)

    return handler


async def complete(http, **headers):
    async with http.post("/v1/completions", json={"prompt": "p"}, headers=headers) as reply:
        return reply.status, await reply.json(), reply.headers
