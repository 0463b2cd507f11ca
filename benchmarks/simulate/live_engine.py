"""A simulated engine whose prompts take time too: ``python -m benchmarks.simulate.live_engine [--slowdown 5]``.

`engine_launcher.sim` generates tokens at a set speed but computes prompts for nothing. Here a prompt costs what is not
in the prefix cache, one prompt after the other in chunks, each of which delays the step that it rides on. The cache is
that of the simulator: blocks, the least recently used given up first. ``X-Sim-Hit: HIT/TOKENS`` says what was found.
"""

from __future__ import annotations

import argparse
import asyncio
import json

import uvloop
from aiohttp import web

from benchmarks.simulate.engine import PrefixCache, Request
from engine_launcher.sim import completions
from engine_launcher.sim.__main__ import serve
from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.server import SimEngine

BLOCK = 16
"""Tokens of a block of vLLM's prefix cache."""
PREFILL = 12_500.0
"""Prompt tokens a second; half of the simulator's, as is the speed of decoding, to spare the machine."""
CHUNK = 205.0
"""Tokens of a prompt that ride on one step: a tenth of the simulator's, as are the prompts."""
KV_TOKENS = 40_000
"""Room of an engine: about what the sessions of a balanced fleet need."""
TOKENS_PER_SECOND = 75.0
STEP_OVERHEAD = 0.0006


class TimedEngine(SimEngine):
    """An engine whose prompts take time."""

    def __init__(self, slowdown: float) -> None:
        super().__init__(
            SimConfig(tokens_per_second=TOKENS_PER_SECOND / slowdown, step_overhead_seconds=STEP_OVERHEAD * slowdown),
            exit_on_death=True,
        )
        self._chunk_seconds = CHUNK / PREFILL * slowdown
        self._cache = PrefixCache(KV_TOKENS)
        self._turn = asyncio.Lock()

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post(route.path, self._complete) if route.path == "/v1/completions" else route
            for route in super()._routes()
        ]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        prompt = body["prompt"]
        turn = Request(None, _blocks(prompt), (object(), int(body["max_tokens"])))
        async with self._turn:
            # Where even the running requests fill the room, vLLM would wait or recompute; here the room is stretched.
            self._cache.admit(turn, force=True)
            await self._compute(len(prompt) - turn.hit)
        try:
            response = await completions.handle(request)
        finally:
            self._cache.release(turn)
        response.headers["X-Sim-Hit"] = f"{turn.hit}/{len(prompt)}"
        return response

    async def _compute(self, tokens: int) -> None:
        speed, core = self.core.speed, self.core
        plain = speed.tokens_per_second
        speed.tokens_per_second = 1 / (1 / plain + self._chunk_seconds)
        try:
            await asyncio.sleep(tokens / CHUNK * speed.step_seconds(len(core.running)))
        finally:
            speed.tokens_per_second = plain


def _blocks(prompt: list[int]) -> list[tuple[object, int]]:
    out: list[tuple[object, int]] = []
    last = 0
    for at in range(0, len(prompt) - BLOCK + 1, BLOCK):
        last = hash((last, *prompt[at : at + BLOCK]))
        out.append((last, BLOCK))
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slowdown", type=float, default=1.0)
    uvloop.run(serve(TimedEngine(parser.parse_args().slowdown)))
