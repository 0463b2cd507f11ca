"""The OpenAI SDK, as programs use it: sync and async, completions, chat and responses, streamed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI, OpenAI

MODEL = "tiny"


def _fields(route: str, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
    common: dict[str, Any] = {"model": MODEL, "temperature": 0.0, "stream": stream}
    if route == "completions":
        return {**common, "prompt": prompt, "max_tokens": tokens}
    if route == "chat":
        return {**common, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    return {**common, "input": prompt, "max_output_tokens": tokens}


def _create(client: Any, route: str) -> Callable[..., Any]:
    resource = {"completions": client.completions, "chat": client.chat.completions, "responses": client.responses}
    return resource[route].create


class StreamFailed(Exception):
    """What a program makes of an ``error`` event of the Responses protocol, which the SDK hands on as an event."""


class _Gathered:
    """Puts a stream, or a whole answer, into one shape."""

    def __init__(self, route: str) -> None:
        self._route = route
        self.text = ""
        self.finish: str | None = None
        self.events = 0

    def whole(self, answer: Any) -> None:
        if self._route == "responses":
            self.text, self.finish = answer.output_text, answer.status
            return
        choice = answer.choices[0]
        self.text = choice.text if self._route == "completions" else choice.message.content
        self.finish = choice.finish_reason

    def event(self, event: Any) -> None:
        self.events += 1
        if self._route == "responses":
            if event.type == "error":
                raise StreamFailed(event.message)
            if event.type == "response.output_text.delta":
                self.text += event.delta
            elif event.type in ("response.completed", "response.incomplete"):
                self.finish = event.response.status
            return
        for choice in event.choices:
            self.text += (choice.text if self._route == "completions" else choice.delta.content) or ""
            self.finish = choice.finish_reason or self.finish

    def result(self) -> dict[str, Any]:
        return {"text": self.text, "finish": self.finish, "events": self.events}


def ask(
    url: str,
    route: str,
    *,
    prompt: str = "Hi",
    tokens: int = 20,
    stream: bool = False,
    max_retries: int = 0,
    timeout: float = 60.0,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One question with the sync client."""
    with OpenAI(base_url=f"{url}/v1", max_retries=max_retries, timeout=timeout) as client:
        answer = _create(client, route)(**_fields(route, prompt, tokens, stream), extra_headers=headers, **more)
        found = _Gathered(route)
        if not stream:
            found.whole(answer)
            return found.result()
        for event in answer:
            found.event(event)
        return found.result()


async def ask_async(
    url: str, route: str, *, prompt: str = "Hi", tokens: int = 20, stream: bool = False, count: int = 1
) -> list[dict[str, Any]]:
    """``count`` questions at once with one async client."""
    async with AsyncOpenAI(base_url=f"{url}/v1", max_retries=0, timeout=60.0) as client:

        async def one() -> dict[str, Any]:
            answer = await _create(client, route)(**_fields(route, prompt, tokens, stream))
            found = _Gathered(route)
            if not stream:
                found.whole(answer)
                return found.result()
            async for event in answer:
                found.event(event)
            return found.result()

        return await asyncio.gather(*(one() for _ in range(count)))


def headers_of(url: str, *, request_id: str) -> dict[str, str]:
    """The header fields of one answer, as the SDK shows them."""
    with OpenAI(base_url=f"{url}/v1", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            **_fields("chat", "Hi", 3, stream=False), extra_headers={"X-Request-Id": request_id}
        )
        return dict(raw.headers)


def leave(url: str, *, tokens: int, events: int) -> int:
    """Read a few events of a long stream, then close it; returns how many were read."""
    with OpenAI(base_url=f"{url}/v1", max_retries=0) as client:
        stream = client.chat.completions.create(**_fields("chat", "Hi", tokens, stream=True))
        read = 0
        for _ in stream:
            read += 1
            if read >= events:
                break
        stream.close()
        return read


def models(url: str) -> list[str]:
    """``client.models.list()``."""
    with OpenAI(base_url=f"{url}/v1", max_retries=0) as client:
        return [model.id for model in client.models.list()]
