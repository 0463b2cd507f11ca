"""A server that is behind with its streams as vLLM's is with 2,048 rollouts: for `behind.py`, in vLLM's environment.

As in vLLM the core makes tokens at its own pace, whatever the API server does; that one handles each token of each
request (here `COST` of nothing but time), hands it to the request's stream, and lets streams that are slow have several
at once. What it cannot handle waits, and rollouts wait with it.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict

STEP: Final = 0.04
"""Seconds of a step of the core, which gives each request a token."""
COST: Final = 80e-6
"""Seconds of the server's processor for a token, before it is written: 12,500 a second at most."""
TURN: Final = 128
"""Tokens handled before other tasks get their turn (vLLM: VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)."""


class Asked(BaseModel):
    """A request, as far as it matters."""

    model_config = ConfigDict(extra="allow")
    prompt: list[int]
    max_tokens: int


class Request:
    """What the core owes it, and what its stream has not written yet."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.ready = 0
        self.event = asyncio.Event()


running: list[Request] = []
guard = threading.Lock()
outputs: deque[list[Request]] = deque()


def core() -> None:
    """Steps for ever."""
    due = time.monotonic()
    while True:
        due += STEP
        time.sleep(max(0.0, due - time.monotonic()))
        with guard:
            step = list(running)
            for each in step:
                each.left -= 1
            running[:] = [each for each in running if each.left > 0]
        if step:
            outputs.append(step)


async def handle() -> None:
    """The core's outputs, in their order."""
    while True:
        if not outputs:
            await asyncio.sleep(0.002)
            continue
        step = outputs.popleft()
        for first in range(0, len(step), TURN):
            for each in step[first : first + TURN]:
                end = time.perf_counter() + COST
                while time.perf_counter() < end:
                    pass
                each.ready += 1
                each.event.set()
            await asyncio.sleep(0)


@asynccontextmanager
async def life(_: FastAPI) -> AsyncIterator[None]:
    """Core and handler beside the server."""
    threading.Thread(target=core, daemon=True).start()
    task = asyncio.ensure_future(handle())
    yield
    task.cancel()


app = FastAPI(lifespan=life)


def event(body: Any) -> str:
    """One event of the stream."""
    return f"data: {body if isinstance(body, str) else json.dumps(body, separators=(',', ':'))}\n\n"


@app.post("/v1/completions")
async def completions(asked: Asked) -> StreamingResponse:
    """A streamed completion in vLLM's form."""
    request = Request(asked.max_tokens)
    with guard:
        running.append(request)

    async def stream() -> AsyncIterator[str]:
        sent = 0
        while sent < asked.max_tokens:
            await request.event.wait()
            request.event.clear()
            count, request.ready = request.ready, 0
            sent += count
            reason = "length" if sent >= asked.max_tokens else None
            choice = {"index": 0, "text": "abc" * count, "logprobs": None, "finish_reason": reason}
            yield event({"id": "cmpl-1", "object": "text_completion", "model": "policy", "choices": [choice]})
        yield event({"choices": [], "usage": {"prompt_tokens": len(asked.prompt), "completion_tokens": sent}})
        yield event("[DONE]")

    return StreamingResponse(stream(), media_type="text/event-stream")


@app.get("/metrics")
async def metrics() -> PlainTextResponse:
    """What the proxy looks at."""
    return PlainTextResponse(f'vllm:num_requests_running{{engine="0"}} {len(running)}\n')


@app.api_route("/{path:path}", methods=["GET", "POST"])
async def other(path: str) -> dict[str, Any]:
    """Whatever else the proxy asks."""
    answers = {"is_paused": {"is_paused": False}, "get_world_size": {"world_size": 1}}
    return answers.get(path, {"weight_version": "default"})
