"""Generation requests in every dialect, for the tests that look at what happens to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from .conftest import Target
from .wire import Answer, Connection

SETTLE_SECONDS = 0.3
"""Long enough for a request to be running, short enough for one of `LONG` tokens to run on."""
LONG = 1500
"""Tokens of a request that is still running after `SETTLE_SECONDS`, at about 1000 tokens/s."""
SILENT_SECONDS = 1.0
"""How long a request is watched to say that it stays silent."""


@dataclass(frozen=True)
class Dialect:
    """One generation route."""

    name: str
    path: str
    limit: tuple[str, ...]
    """Where the token limit is."""
    fields: dict[str, Any]

    def body(self, tokens: int = 4, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = {**self.fields, **more}
        if len(self.limit) == 1:
            found[self.limit[0]] = tokens
        else:
            found[self.limit[0]] = {**found[self.limit[0]], self.limit[1]: tokens}
        return found


_CONVERSATION = [{"role": "user", "content": "Count the fish."}]
_GREEDY = {"temperature": 0, "ignore_eos": True}
COMPLETIONS = Dialect(
    "completions",
    "/v1/completions",
    ("max_tokens",),
    {"model": "tiny", "prompt": "One fish", "return_token_ids": True, "return_weight_versions": True, **_GREEDY},
)
CHAT = Dialect(
    "chat",
    "/v1/chat/completions",
    ("max_tokens",),
    {"model": "tiny", "messages": _CONVERSATION, "return_token_ids": True, "return_weight_versions": True, **_GREEDY},
)
GENERATE = Dialect(
    "generate",
    "/inference/v1/generate",
    ("sampling_params", "max_tokens"),
    {"token_ids": [79, 110, 101], "sampling_params": _GREEDY},
)
RESPONSES = Dialect(
    "responses",
    "/v1/responses",
    ("max_output_tokens",),
    {"model": "tiny", "input": "Count the fish.", "temperature": 0},
)
MESSAGES = Dialect(
    "messages", "/v1/messages", ("max_tokens",), {"model": "tiny", "messages": _CONVERSATION, "temperature": 0}
)
DIALECTS = [COMPLETIONS, CHAT, GENERATE, RESPONSES, MESSAGES]
CHOICES = [COMPLETIONS, CHAT, GENERATE]
"""Those whose answers have choices, token ids and weight versions."""


@asynccontextmanager
async def running(
    engine: Target, dialect: Dialect, tokens: int = LONG, headers: dict[str, str] | None = None, **more: Any
) -> AsyncIterator[asyncio.Task[Answer]]:
    """A request that runs while the block is executed."""
    task = asyncio.ensure_future(engine.call("POST", dialect.path, dialect.body(tokens, **more), headers))
    try:
        await asyncio.sleep(SETTLE_SECONDS)
        assert not task.done(), "the request was meant to be running still"
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_idle(engine: Target) -> None:
    """Return when no request runs: an engine needs a moment to notice that a client has left."""
    async with asyncio.timeout(10):
        while True:
            page = (await engine.get("/metrics")).body
            if b'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in page:
                return
            await asyncio.sleep(0.1)


@asynccontextmanager
async def sent(engine: Target, dialect: Dialect, **more: Any) -> AsyncIterator[Connection]:
    """A request that was sent; its connection is open while the block is executed."""
    async with engine.connect() as connection:
        await connection.send("POST", dialect.path, dialect.body(**more), engine.headers())
        yield connection


@asynccontextmanager
async def paused(engine: Target, mode: str) -> AsyncIterator[None]:
    """The engine is paused while the block is executed."""
    answer = await engine.post(f"/pause?mode={mode}")
    assert (answer.status, answer.json()) == (200, {"status": "paused"})
    try:
        yield
    finally:
        answer = await engine.post("/resume")
        assert (answer.status, answer.json()) == (200, {"status": "resumed"})


def last_choice(answer: Answer) -> dict[str, Any]:
    """The choice that says how the answer ended, streamed or not."""
    if answer.media_type == "text/event-stream":
        chunks = [data for _, data in answer.events() if data != "[DONE]" and data.get("choices")]
        return chunks[-1]["choices"][0]
    return answer.json()["choices"][0]


def token_ids(answer: Answer) -> list[int]:
    """All token ids of the first choice, streamed or not."""
    if answer.media_type != "text/event-stream":
        return answer.json()["choices"][0]["token_ids"]
    chunks = [data for _, data in answer.events() if data != "[DONE]" and data.get("choices")]
    return [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
