"""What an open connection, an open request and a held request cost the proxy, in bytes of resident memory.

``python -m tests.scenarios.memory [--count 2000]``: the proxy is a process of its own, so nothing else is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import aiohttp
import uvloop

from tests.tools.fault_engine import FaultEngine, Request, Wire
from tests.tools.fault_scripts import SSE_HEAD, chunk
from tests.tools.process import ProxyProcess, proxy_process
from tests.tools.rig import Client, eventually, post

BODY = b'{"stream":true,"prompt":"' + b"x" * 475 + b'"}'


async def measure(count: int) -> None:
    """Print the figures."""
    going = asyncio.Event()

    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SSE_HEAD + chunk(b'data: {"id":1}\n\n'))
        await going.wait()
        await wire.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    engines = [FaultEngine(script) for _ in range(4)]
    async with engines[0], engines[1], engines[2], engines[3]:
        for what in ("open", "held"):
            # A new process each time: memory that was used once and given back would hide what is used again.
            async with proxy_process(*[engine.url for engine in engines]) as proxy:
                going.set()
                async with Client.to(proxy.url) as client:
                    for _ in range(200):
                        await client.send(post("/v1/completions", BODY))
                        assert (await client.reply()).complete
                going.clear()
                await one(proxy, engines, going, count, what)


async def one(proxy: ProxyProcess, engines: list[FaultEngine], going: asyncio.Event, count: int, what: str) -> None:
    """One figure."""
    made = [Client.to(proxy.url) for _ in range(count)]
    base = proxy.memory
    clients: list[Client] = []
    for start in range(0, count, 200):
        clients += await asyncio.gather(*[one.__aenter__() for one in made[start : start + 200]])
    connected = proxy.memory
    async with aiohttp.ClientSession() as session:
        names = [engine["id"] for engine in (await proxy.fleet(session))["engines"]]
        if what == "held":
            for name in names:
                async with session.post(f"{proxy.url}/fleet/engines/{name}/drain") as answer:
                    assert answer.status == 200, await answer.text()
        for client in clients:
            client.writer.write(post("/v1/completions", BODY))
        if what == "held":
            while (await proxy.fleet(session))["gate"]["held_requests"] < count:
                await asyncio.sleep(0.1)
        else:
            await eventually(lambda: sum(engine.running for engine in engines) == count, "all open", 120)
        busy = proxy.memory
        going.set()
        if what == "held":
            for name in names:
                async with session.post(f"{proxy.url}/fleet/engines/{name}/admit") as answer:
                    assert answer.status == 200, await answer.text()
    for client in clients:
        assert (await client.reply()).complete
    await asyncio.gather(*[one.__aexit__(None, None, None) for one in made])
    print(
        f"{count} {what} requests with {len(BODY)}-byte bodies: {(connected - base) / count / 1024:.1f} KiB for each idle "
        f"connection, {(busy - base) / count / 1024:.1f} KiB in all for each {what} request "
        f"(resident {base >> 20} -> {busy >> 20} MiB)",
        flush=True,
    )


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=2000)
    uvloop.run(measure(parser.parse_args().count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
