"""Both routes to a server that is behind with its streams, on a laptop: who waits longer, and what it costs.

``python benchmarks/gpu/behind.py --server-python .engine/bin/python`` for both routes at once; ``--turns`` for each
alone, straight, proxy, proxy, straight. ``--fresh`` counts only rollouts that began in the window, as the GPU run does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

import aiohttp
import rig
from rig import Control, Load, Server, cpu_seconds, quantile

from engine_launcher.ports import free_ports


def summary(rows: list[dict[str, Any]]) -> str:
    """Of whole rollouts."""
    tokens = sum(each["tokens"] for each in rows)
    if not tokens:
        return "nothing ended"
    first = [each["first"] - each["started"] for each in rows]
    whole = [each["ended"] - each["started"] for each in rows]
    return (
        f"{len(rows)} rollouts of {tokens / len(rows):.1f} tokens, {1000 * sum(whole) / tokens:.2f} ms/token,"
        f" first token p50 {quantile(first, 0.5):.3f} p99 {quantile(first, 0.99):.3f} s,"
        f" rollout p50 {quantile(whole, 0.5):.2f} p99 {quantile(whole, 0.99):.2f} s"
    )


async def cell(args: argparse.Namespace, urls: list[str], server: Server, proxy: Server) -> None:
    """One load."""
    load = Load()
    try:
        await load.start(urls, args.in_flight, 2, 5, stream=True, median=48, longest=512)
        await asyncio.sleep(args.ramp)
        start = time.time()
        pids = [each.process.pid for each in (server, proxy) if each.process]
        before = [cpu_seconds(each) for each in pids]
        await asyncio.sleep(args.window)
        end = time.time()
        cores = [(cpu_seconds(pid) - old) / (end - start) for pid, old in zip(pids, before, strict=True)]
        rows = await load.stop()
    finally:
        load.kill()
    print(f"cores: server {cores[0]:.2f}, proxy {cores[1]:.2f}", flush=True)
    for url in urls:
        mine = [each for each in rows if each["url"] == url and start <= each["ended"] <= end]
        good = [each for each in mine if each["outcome"] == "length" and (not args.fresh or each["started"] >= start)]
        name = "proxy" if url == proxy.url else "straight"
        print(f"  {name}: {summary(good)}, errors {sum(each['outcome'] != 'length' for each in mine)}", flush=True)


async def main() -> None:
    """Start a server and a proxy, and load them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-python", default=".engine/bin/python", help="has fastapi and uvicorn")
    parser.add_argument("--in-flight", type=int, default=768)
    parser.add_argument("--ramp", type=float, default=60.0)
    parser.add_argument("--window", type=float, default=60.0)
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path(".gpu/behind"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    ports = free_ports("127.0.0.1", 2)
    argv = [args.server_python, "-m", "uvicorn", "behind_server:app", "--port", str(ports[0])]
    argv += ["--log-level", "warning", "--timeout-keep-alive", "120"]
    server = Server("server", argv, {**os.environ, "PYTHONPATH": str(rig.HERE)}, args.work)
    proxy = Server("proxy", [sys.executable, "-m", "proxy", "--port", str(ports[1])], dict(os.environ), args.work)
    server.url, proxy.url = (f"http://127.0.0.1:{port}" for port in ports)
    proxy.argv += ["--engine", server.url]
    try:
        async with aiohttp.ClientSession() as session:
            for each in (server, proxy):
                await each.start()
                await each.healthy(session, rig.PROXY_WAIT)
            for _ in range(round(10 * rig.PROXY_WAIT)):
                if (await Control(proxy.url, session).get("/fleet"))["ready"]:
                    break
                await asyncio.sleep(0.1)
        routes = [[server.url], [proxy.url], [proxy.url], [server.url]] if args.turns else [[server.url, proxy.url]]
        for urls in routes * args.repeat:
            await cell(args, urls, server, proxy)
            await asyncio.sleep(3)
    finally:
        for each in (server, proxy):
            each.kill()


if __name__ == "__main__":
    asyncio.run(main())
