"""POSTs spaced so that each meets a connection which the engine is just closing: none may fail.

On one machine the end of a connection mostly arrives before the next request leaves, so the engine also plays the case
where they cross on the wire: it closes a reused connection on which a request has already arrived.

``python -m tests.scenarios.keepalive_race [--count 10000]``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter

import uvloop

from tests.tools.fault_engine import FaultEngine, Request, Wire, answer_bytes
from tests.tools.fault_scripts import close_when_idle, reply
from tests.tools.process import proxy_process
from tests.tools.rig import Client, post

IDLE = 0.05
"""Seconds of idleness after which the engine closes a connection; uvicorn's 5 would take all day."""
CLIENTS = 40
"""Side by side, so that 10,000 POSTs take seconds."""
CROSSING = 0.2
"""Share of requests on reused connections that cross with the engine's close."""
BODY = b'{"prompt":"' + b"x" * 1000 + b'"}'


async def race(count: int, seed: int) -> tuple[Counter[str], int, int]:
    """Returns what came of the POSTs, how many were sent twice, and how many connections the engine saw."""
    outcomes: Counter[str] = Counter()
    crossing = random.Random(seed)
    answer = close_when_idle(reply(answer_bytes(200, b"{}")), IDLE)

    async def script(wire: Wire, request: Request) -> None:
        if wire.served > 1 and crossing.random() < CROSSING:
            wire.close()
            await wire.gone.wait()
        else:
            await answer(wire, request)

    engine = FaultEngine(script)

    async def client(url: str, number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        async with Client.to(url) as one:
            for _ in range(count // CLIENTS):
                await one.send(post("/v1/completions", BODY))
                try:
                    got = await asyncio.wait_for(one.reply(), 30)
                    outcomes[str(got.status) if got.complete else "cut"] += 1
                except (ConnectionError, TimeoutError) as error:
                    outcomes[type(error).__name__] += 1
                    return
                await asyncio.sleep(IDLE + rng.uniform(-0.006, 0.001))

    async with engine, proxy_process(engine.url, max_inflight=0) as proxy:
        await asyncio.gather(*[client(proxy.url, number) for number in range(CLIENTS)])
        sent = len(engine.requests)
        wires = len(engine.wires)
    return outcomes, sent - sum(outcomes.values()), wires


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    outcomes, again, wires = uvloop.run(race(options.count, options.seed))
    wanted = options.count // CLIENTS * CLIENTS
    print(f"{wanted} POSTs at the edge of a {IDLE * 1000:.0f} ms idle limit in {time.monotonic() - began:.0f} s:")
    print(f"{dict(outcomes)}; {wires} connections, {again} POSTs were sent twice")
    return 0 if outcomes == Counter({"200": wanted}) else 1


if __name__ == "__main__":
    sys.exit(main())
