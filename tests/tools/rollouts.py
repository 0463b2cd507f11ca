"""Rollouts on every generation route, streamed or not, each judged token by token.

The simulated model is a pure function, so every answer is either exactly right, an honest part (the engine says that it
aborted it), visibly broken, or wrong.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp

from engine_launcher.sim.model import EOS, base_weights, fold, fold_all, token_at, weights_seed
from engine_launcher.sim.tokenizer import decode, encode, render_chat

ROUTES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/messages", "/v1/responses")


class Verdict(StrEnum):
    """What became of a rollout."""

    WHOLE = "whole"
    ABORTED = "aborted"
    """The engine ended it early and said so (or, on messages and responses, vLLM has no way to say so)."""
    BROKEN = "broken"
    """It broke off after it had begun, and the client can see that."""
    REFUSED = "refused"
    """An error before the first byte of an answer."""
    WRONG = "wrong"
    """Tokens that the weights would not have chosen, or a part that passes for the whole."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict and, where it is a bad one, why."""

    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout.

    Attributes:
        path: route.
        stream: events or one JSON.
        body: what is sent.
        expected: the text that the weights choose; None to judge by form alone (a real model).
        known_length: whether the end token is ignored, so that ``expected`` is the exact answer.
    """

    path: str
    stream: bool
    body: dict[str, Any]
    expected: str | None

    async def run(self, session: aiohttp.ClientSession, url: str, headers: dict[str, str] | None = None) -> Outcome:
        """Send it and judge the answer."""
        data = bytearray()
        status = 0
        try:
            async with session.post(url + self.path, json=self.body, headers=headers) as answer:
                status = answer.status
                async for piece in answer.content.iter_any():
                    data += piece
        except (aiohttp.ClientError, ConnectionError) as error:
            if status == 200:
                return Outcome(Verdict.BROKEN, f"{type(error).__name__} after {len(data)} bytes")
            return Outcome(Verdict.REFUSED, f"{type(error).__name__}: {error}")
        if status != 200:
            tries = answer.headers.get("X-Fleetgate-Attempts", "?")
            return Outcome(Verdict.REFUSED, f"{status} after {tries} attempts: {bytes(data[:300])!r}")
        try:
            text, ended, error_seen = read_stream(self.path, data) if self.stream else read_json(self.path, data)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            return Outcome(Verdict.WRONG, f"unreadable: {error!r}: {bytes(data[:300])!r}")
        if error_seen:
            return Outcome(Verdict.BROKEN if text else Verdict.REFUSED, "an error event")
        if self.expected is None:
            return Outcome(Verdict.WHOLE if ended != "abort" else Verdict.ABORTED)
        if text == self.expected and ended != "abort":
            return Outcome(Verdict.WHOLE)
        silent = self.path in ("/v1/messages", "/v1/responses")
        if self.expected.startswith(text) and (ended == "abort" or silent):
            return Outcome(Verdict.ABORTED)
        return Outcome(Verdict.WRONG, f"{self.path} stream={self.stream} {ended=}: {text!r} is not {self.expected!r}")


def expected_text(prompt: Sequence[int], count: int, *, seed: int, ignore_eos: bool) -> str:
    """What an engine with the base weights of ``seed`` answers."""
    weights = weights_seed(base_weights(seed))
    state = fold_all(prompt)
    tokens: list[int] = []
    for _ in range(count):
        token = token_at(weights, state)
        if token == EOS and not ignore_eos:
            break
        tokens.append(token)
        state = fold(state, token)
    return decode(tokens)


def make(rng: random.Random, *, longest: int, shortest: int = 10, seed: int | None = 0, model: str = "tiny") -> Rollout:
    """A random rollout; ``seed`` None leaves the tokens unchecked."""
    path = rng.choice(ROUTES)
    stream = rng.random() < 0.5
    count = rng.randrange(shortest, longest)
    words = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(1, 80)))
    body: dict[str, Any] = {"model": model, "temperature": 0}
    ignore_eos = True
    if path == "/v1/completions":
        prompt = encode(words)
        body |= {"prompt": prompt, "max_tokens": count, "ignore_eos": True}
    elif path == "/inference/v1/generate":
        prompt = encode(words)
        body |= {"token_ids": prompt, "sampling_params": {"max_tokens": count, "ignore_eos": True, "temperature": 0}}
        del body["temperature"]
    else:
        messages = [{"role": "user", "content": words}]
        prompt = encode(render_chat(messages))
        if path == "/v1/chat/completions":
            body |= {"messages": messages, "max_tokens": count, "ignore_eos": True}
        else:
            ignore_eos = False
            body |= (
                {"messages": messages, "max_tokens": count}
                if path == "/v1/messages"
                else {
                    "input": words,
                    "max_output_tokens": count,
                }
            )
    if stream:
        body["stream"] = True
    expected = None if seed is None else expected_text(prompt, count, seed=seed, ignore_eos=ignore_eos)
    return Rollout(path, stream, body, expected)


def read_json(path: str, data: bytes | bytearray) -> tuple[str, str | None, bool]:
    """Text, finish reason, and whether it is an error."""
    answer = json.loads(data)
    if answer.get("error"):
        return "", None, True
    if path == "/v1/messages":
        return "".join(part["text"] for part in answer["content"]), answer.get("stop_reason"), False
    if path == "/v1/responses":
        texts = [part["text"] for item in answer["output"] for part in item["content"]]
        return "".join(texts), answer["status"], False
    choice = answer["choices"][0]
    if path == "/v1/completions":
        return choice["text"], choice["finish_reason"], False
    if path == "/v1/chat/completions":
        return choice["message"]["content"] or "", choice["finish_reason"], False
    return decode(choice["token_ids"]), choice["finish_reason"], False


def read_stream(path: str, data: bytes | bytearray) -> tuple[str, str | None, bool]:
    """The same of an event stream.

    Raises:
        ValueError: it ends cleanly without the mark of a whole stream.
    """
    text: list[str] = []
    ended: str | None = None
    whole = False
    begun = ""
    for event in bytes(data).split(b"\n\n"):
        payload = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if not payload:
            continue
        if payload == b"[DONE]":
            whole = True
            continue
        item = json.loads(payload)
        if item.get("error") or item.get("type") == "error":
            return "".join(text) or begun, None, True
        begun = "(no token yet)"
        if path == "/v1/messages":
            if item["type"] == "content_block_delta":
                text.append(item["delta"]["text"])
            whole = whole or item["type"] == "message_stop"
        elif path == "/v1/responses":
            if item["type"] == "response.output_text.delta":
                text.append(item["delta"])
            whole = whole or item["type"] in ("response.completed", "response.incomplete")
        elif item.get("choices"):
            choice = item["choices"][0]
            ended = choice.get("finish_reason") or ended
            if path == "/v1/completions":
                text.append(choice["text"])
            elif path == "/v1/chat/completions":
                text.append(choice["delta"].get("content") or "")
            else:
                text.append(decode(choice.get("token_ids") or []))
    if not whole:
        raise ValueError("the stream ended in order, but without its last event")
    return "".join(text), ended, False
