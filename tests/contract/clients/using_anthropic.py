"""The Anthropic SDK on ``/v1/messages``, sync and async, streamed or not."""

from __future__ import annotations

import asyncio
from typing import Any

from anthropic import Anthropic, AsyncAnthropic

MODEL = "tiny"


def _fields(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": tokens, "messages": [{"role": "user", "content": prompt}]}


def _message(message: Any) -> dict[str, Any]:
    text = "".join(block.text for block in message.content if block.type == "text")
    return {"text": text, "finish": message.stop_reason, "tokens": message.usage.output_tokens}


def ask(
    url: str,
    *,
    prompt: str = "Hi",
    tokens: int = 20,
    stream: bool = False,
    max_retries: int = 0,
    timeout: float = 60.0,
) -> dict[str, Any]:
    """One question; a stream is read with the SDK's own accumulator."""
    with Anthropic(base_url=url, max_retries=max_retries, timeout=timeout) as client:
        if not stream:
            return _message(client.messages.create(**_fields(prompt, tokens), extra_body={"temperature": 0}))
        with client.messages.stream(**_fields(prompt, tokens), extra_body={"temperature": 0}) as events:
            text = "".join(events.text_stream)
            return _message(events.get_final_message()) | {"streamed": text}


async def ask_async(url: str, *, prompt: str = "Hi", tokens: int = 20, stream: bool = False) -> dict[str, Any]:
    """The same with the async client."""
    async with AsyncAnthropic(base_url=url, max_retries=0, timeout=60.0) as client:
        if not stream:
            return _message(await client.messages.create(**_fields(prompt, tokens), extra_body={"temperature": 0}))
        async with client.messages.stream(**_fields(prompt, tokens), extra_body={"temperature": 0}) as events:
            text = "".join([part async for part in events.text_stream])
            return _message(await events.get_final_message()) | {"streamed": text}


async def many(url: str, *, count: int, tokens: int) -> list[dict[str, Any]]:
    """Streams at once."""
    return await asyncio.gather(*(ask_async(url, tokens=tokens, stream=True) for _ in range(count)))


def count_tokens(url: str, *, prompt: str) -> int:
    """``client.messages.count_tokens``."""
    with Anthropic(base_url=url, max_retries=0) as client:
        fields = {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}
        return client.messages.count_tokens(**fields).input_tokens
