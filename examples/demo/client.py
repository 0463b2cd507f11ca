"""One request of an RL client, streamed or not, on each of three routes; everything that is not a good answer raises.

Nothing here knows of a proxy: these are plain vLLM requests with ``return_token_ids`` and ``return_weight_versions``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import aiohttp

Route = Literal["completions", "chat", "generate"]

PATHS: Final[dict[Route, str]] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/inference/v1/generate",
}

SILENCE_LIMIT: Final = 300.0
"""Seconds without a byte after which a client would give up: far beyond any sync of a tiny model."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to ask."""

    route: Route
    stream: bool

    def __str__(self) -> str:
        return f"{self.route} {'streamed' if self.stream else 'whole'}"


KINDS: Final = tuple(Kind(route, stream) for route in PATHS for stream in (True, False))


class ClientError(Exception):
    """What a client of the fleet sees go wrong."""


@dataclass(slots=True)
class Piece:
    """One answer: a whole rollout, or the part of it until an abort."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    """vLLM's ``weight_versions``: ``{"version", "start", "end"}`` over the tokens."""
    finish: str | None = None


def request_body(kind: Kind, model: str, prompt: list[int] | str, max_tokens: int) -> dict[str, Any]:
    """The body of a greedy request; ``prompt`` is the user's message on the chat route, token ids elsewhere."""
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    body: dict[str, Any] = {"model": model, "stream": kind.stream, "return_token_ids": True}
    if kind.route == "generate":
        return {**body, "token_ids": prompt, "sampling_params": sampling}
    body |= {**sampling, "return_weight_versions": True}
    if kind.route == "chat":
        return {**body, "messages": [{"role": "user", "content": prompt}]}
    return {**body, "prompt": prompt}


async def ask(
    session: aiohttp.ClientSession,
    base: str,
    kind: Kind,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
) -> Piece:
    """Send one request and read all of its answer; raises ``ClientError`` for anything but a complete one."""
    given = body.get("prompt") or body.get("token_ids") or []
    piece = Piece(list(given))
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_LIMIT)
    try:
        async with session.post(base + PATHS[kind.route], json=body, headers=headers, timeout=timeout) as answer:
            if answer.status != 200:
                raise ClientError(f"status {answer.status}: {(await answer.text())[:300]}")
            if kind.stream:
                await _read_stream(answer, piece)
            else:
                _take(piece, await answer.json(content_type=None))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ClientError(f"{type(error).__name__}: {error}") from error
    if piece.finish is None:
        raise ClientError("the answer ended without a finish_reason")
    return piece


async def _read_stream(answer: aiohttp.ClientResponse, piece: Piece) -> None:
    done = False
    async for data in _events(answer):
        if done:
            raise ClientError(f"an event after [DONE]: {data[:200]!r}")
        if data == b"[DONE]":
            done = True
        else:
            _take(piece, json.loads(data))
    if not done:
        raise ClientError(f"the stream was cut after {len(piece.tokens)} tokens")


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The ``data`` of each event. Chunks, not lines: a line with logprobs can be longer than aiohttp reads at once."""
    buffered = b""
    async for chunk in answer.content.iter_any():
        buffered += chunk
        *whole, buffered = buffered.split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data: "):
                    yield line[6:]


def _take(piece: Piece, part: dict[str, Any]) -> None:
    """Add a chunk, or a whole answer, to a piece."""
    if "error" in part:
        raise ClientError(f"an error event after {len(piece.tokens)} tokens: {json.dumps(part['error'])[:300]}")
    if part.get("prompt_token_ids"):
        piece.prompt = part["prompt_token_ids"]
    for choice in part.get("choices", ()):
        if choice.get("prompt_token_ids"):
            piece.prompt = choice["prompt_token_ids"]
        piece.tokens += choice.get("token_ids") or []
        piece.spans = choice.get("weight_versions") or piece.spans
        piece.finish = choice.get("finish_reason") or piece.finish
