"""An asynchronous RL loop against one URL: rollouts in flight all the time, weights replaced in the middle of them."""

import asyncio
import sys
from collections import Counter

import aiohttp

from proxy.client import AsyncFleetClient

ROLLOUTS, BATCH, STEPS = 16, 8, 5


async def rollout(http: aiohttp.ClientSession, finished: asyncio.Queue) -> None:
    """One worker: it knows one URL, and nothing of engines, pauses or versions."""
    body = {"prompt": "2 + 2 =", "max_tokens": 200, "ignore_eos": True, "return_weight_versions": True}
    while True:
        async with http.post("/v1/completions", json=body) as answer:
            await finished.put((await answer.json())["choices"][0])


async def train(url: str) -> None:
    """The trainer: a batch of finished rollouts, new weights, a sync; then the next batch."""
    finished: asyncio.Queue = asyncio.Queue()
    http = aiohttp.ClientSession(url, raise_for_status=True)
    async with http, AsyncFleetClient(url) as fleet, asyncio.TaskGroup() as group:
        world = 1 + await fleet.world_size()
        await fleet.init_weight_transfer({"rank_offset": 1, "world_size": world})
        workers = [group.create_task(rollout(http, finished)) for _ in range(ROLLOUTS)]
        for step in range(1, STEPS + 1):
            batch = [await finished.get() for _ in range(BATCH)]
            tokens = Counter()
            for choice in batch:
                for span in choice["weight_versions"]:
                    tokens[span["version"]] += span["end"] - span["start"]
            print(f"step {step}: tokens by weight version {dict(tokens)}")
            async with fleet.sync(version=f"step-{step}") as sync:
                await sync.update({"sim_weights": f"weights of step {step}"})
            print(f"  the fleet has {sync.result.version}; engines that fell out: {sync.result.fallen or 'none'}")
        for worker in workers:
            worker.cancel()


asyncio.run(train(sys.argv[1]))
