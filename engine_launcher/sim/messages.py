"""``POST /v1/messages``: the Anthropic dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from engine_launcher.sim import parsing, serving, tokenizer
from engine_launcher.sim.chat import read_messages
from engine_launcher.sim.errors import WireError, missing
from engine_launcher.sim.replies import EventStream, json_reply
from engine_launcher.sim.sequences import Delta, Generation, SequenceState

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def _prompt(body: parsing.Body) -> list[int]:
    conversation: list[Mapping[str, Any]] = list(read_messages(body))
    if body.get("system"):
        conversation.insert(0, {"role": "system", "content": body["system"]})
    return tokenizer.encode(tokenizer.render_chat(conversation))


async def handle(request: web.Request) -> web.StreamResponse:
    """Serve one request."""
    engine = serving.engine_of(request)
    body = await parsing.json_body(request)
    for field in ("model", "messages", "max_tokens"):
        if field not in body:
            raise missing(field, body)
    prompt = _prompt(body)
    generation = Generation(stream=bool(body.get("stream")))
    try:
        name, generation.weights_tag = serving.resolve_model(engine, body)
        sampling = parsing.sampling(
            {**body, "stop": body.get("stop_sequences")},
            engine.config,
            prompt_tokens=len(prompt),
            default_max_tokens=None,
        )
        id_ = f"chatcmpl-{serving.base_id(request, body)}"
        generation.add(id_, prompt, sampling)
        if generation.stream:
            engine.core.check_admission(generation.live)
        else:
            await serving.run_to_end(engine, generation)
    except WireError as error:
        return json_reply(error.anthropic(), error.status)
    if not generation.stream:
        return json_reply(_whole(id_, name, generation))

    stream = EventStream(request)
    writer = _Writer(stream, id_, name, len(prompt))
    try:
        await serving.run_stream(engine, generation, stream, writer.send)
        await writer.finish(generation)
    except WireError as error:
        await stream.event(error.anthropic(), name="error")
    return await stream.end()


async def count_tokens(request: web.Request) -> web.Response:
    """Serve ``POST /v1/messages/count_tokens``."""
    body = await parsing.json_body(request)
    try:
        serving.resolve_model(serving.engine_of(request), body)
    except WireError as error:
        return json_reply(error.anthropic(), error.status)
    count = len(_prompt(body))
    return json_reply({"input_tokens": count, "context_management": {"original_input_tokens": count}})


def _stop_reason(finish_reason: str | None, stop_reason: int | str | None) -> str | None:
    if isinstance(stop_reason, str):
        return "stop_sequence"
    return _STOP_REASONS.get(finish_reason or "")


def _whole(id_: str, name: str, generation: Generation) -> dict[str, Any]:
    sequence: SequenceState = next(iter(generation.sequences))
    answer: dict[str, Any] = {
        "id": id_,
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": sequence.text}],
        "model": name,
    }
    reason = _stop_reason(sequence.finish_reason, sequence.stop_reason)
    if reason is not None:
        answer["stop_reason"] = reason
    if isinstance(sequence.stop_reason, str):
        answer["stop_sequence"] = sequence.stop_reason
    answer["usage"] = {"input_tokens": generation.prompt_tokens, "output_tokens": generation.completion_tokens}
    return answer


class _Writer:
    """Writes the event sequence of a streamed message."""

    def __init__(self, stream: EventStream, id_: str, name: str, prompt_tokens: int) -> None:
        self._stream = stream
        self._id = id_
        self._model = name
        self._prompt_tokens = prompt_tokens
        self._begun = False
        self._block = False
        self._last: Delta | None = None

    async def _event(self, payload: dict[str, Any], *, tokens: int = 0) -> None:
        await self._stream.event(payload, name=payload["type"], tokens=tokens)

    async def send(self, deltas: list[Delta]) -> None:
        """Send the opening events once, then one text delta for each delta that has text."""
        if not self._begun and deltas:
            self._begun = True
            message: dict[str, Any] = {
                "id": self._id,
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": self._model,
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": self._prompt_tokens, "output_tokens": 0},
            }
            await self._event({"type": "message_start", "message": message})
        for delta in deltas:
            self._last = delta
            if not delta.text:
                continue
            if not self._block:
                self._block = True
                start = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
                await self._event(start)
            part = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": delta.text}, "index": 0}
            await self._event(part, tokens=len(delta.tokens))

    async def finish(self, generation: Generation) -> None:
        """Send the closing events."""
        if self._stream.broken:
            return
        if self._block:
            await self._event({"type": "content_block_stop", "index": 0})
        last = self._last
        delta: dict[str, Any] = {
            "stop_reason": _stop_reason(last.finish_reason, last.stop_reason) if last else None,
            "stop_sequence": last.stop_reason if last and isinstance(last.stop_reason, str) else None,
        }
        counts = {"input_tokens": generation.prompt_tokens, "output_tokens": generation.completion_tokens}
        await self._event({"type": "message_delta", "delta": delta, "usage": counts})
        await self._event({"type": "message_stop"})
