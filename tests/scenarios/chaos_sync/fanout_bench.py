"""``python -m tests.scenarios.chaos_sync.fanout_bench``: what a control call costs beyond its slowest engine.

One process listens on as many ports as there are engines and answers with a few bytes, so that the real proxy, in a
process of its own, is what is measured. The overhead is the proxy's own figure (``fleetgate_fanout_overhead_seconds``):
the time of the whole call less that of the slowest leg. What the client saw is printed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

import aiohttp
import uvloop

from tests.scenarios.chaos_sync.proxy_run import ProxyRun

ANSWERS = {
    "/health": b"",
    "/weight_info": b'{"weight_version":"v1"}',
    "/is_paused": b'{"is_paused":false}',
    "/get_world_size": b'{"world_size":1}',
    "/metrics": b"process_start_time_seconds 1764460000.25\n",
    "/pause": b'{"status":"paused"}',
    "/resume": b'{"status":"resumed"}',
}


class Mock(asyncio.Protocol):
    """An engine that answers each request at once, in one write."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + size:
                return
            path = self.buffer.split(b" ", 2)[1].split(b"?")[0].decode()
            self.buffer = self.buffer[end + 4 + size :]
            body = ANSWERS.get(path, b"{}")
            kind = b"text/plain" if path == "/metrics" else b"application/json"
            self.transport.write(  # type: ignore[attr-defined]
                b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)
            )


def quantile(values: list[float], share: float) -> float:
    """The value below which this share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def bench(engines: int, calls: int) -> int:
    """Measure and print; returns the exit code."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Mock, "127.0.0.1", 0) for _ in range(engines)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    proxy = ProxyRun(urls, {})
    await proxy.start()
    try:
        async with aiohttp.ClientSession(proxy.url) as session:
            while not await _all_ready(session):
                await asyncio.sleep(0.1)
            print(f"{engines} engines in one process, {calls} calls of each kind, one at a time; milliseconds")
            print(
                f"{'call':28} {'overhead p50':>12} {'p99':>8} {'slowest leg p50':>16} {'p99':>8} {'client p50':>11} {'p99':>8}"
            )
            for path in ("/pause", "/start_weight_update", "/resume"):
                await _measure(session, path, calls)
    finally:
        code = await proxy.stop()
        for server in servers:
            server.close()
    return code


async def _all_ready(session: aiohttp.ClientSession) -> bool:
    async with session.get("/fleet") as answer:
        return all(engine["eligible"] for engine in (await answer.json())["engines"])


async def _measure(session: aiohttp.ClientSession, path: str, calls: int) -> None:
    overheads: list[float] = []
    slowest: list[float] = []
    seen: list[float] = []

    async def listen(ready: asyncio.Event) -> None:
        async with session.get("/fleet/events", timeout=aiohttp.ClientTimeout(total=None)) as answer:
            kind = b""
            async for raw in answer.content:
                ready.set()
                if raw.startswith(b"event:"):
                    kind = raw[6:].strip()
                elif raw.startswith(b"data:") and kind == b"control_call":
                    data = json.loads(raw[5:])
                    if "/" + data["call"] == path:
                        overheads.append(1e3 * data["overhead_seconds"])
                        slowest.append(1e3 * (data["seconds"] - data["overhead_seconds"]))

    ready = asyncio.Event()
    listener = asyncio.ensure_future(listen(ready))
    await ready.wait()
    for number in range(calls):
        if path == "/start_weight_update":
            # A second start is refused inside a round; a pause begins anew.
            async with session.post("/pause") as answer:
                assert answer.status == 200, await answer.text()
        began = time.perf_counter()
        async with session.post(path, json={"n": number}) as answer:
            assert answer.status == 200, await answer.text()
        seen.append(1e3 * (time.perf_counter() - began))
    while len(overheads) < calls:
        await asyncio.sleep(0.01)
    listener.cancel()
    print(
        f"{path:28} {quantile(overheads, 0.5):12.2f} {quantile(overheads, 0.99):8.2f} "
        f"{quantile(slowest, 0.5):16.2f} {quantile(slowest, 0.99):8.2f} "
        f"{quantile(seen, 0.5):11.2f} {quantile(seen, 0.99):8.2f}",
        flush=True,
    )


def main() -> int:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--calls", type=int, default=300)
    given = parser.parse_args()
    return uvloop.run(bench(given.engines, given.calls))


if __name__ == "__main__":
    sys.exit(main())
