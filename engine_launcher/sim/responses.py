"""``POST /v1/responses``: OpenAI's newer dialect."""

from __future__ import annotations

import uuid
from typing import Any

from aiohttp import web

from engine_launcher.sim import parsing, serving, tokenizer
from engine_launcher.sim.errors import ValidationError, WireError, missing
from engine_launcher.sim.replies import EventStream, error_reply, json_reply
from engine_launcher.sim.sequences import Delta, Generation


def _prompt(body: parsing.Body) -> list[int]:
    if "input" not in body:
        raise missing("input", body)
    given = body["input"]
    if isinstance(given, str):
        conversation = [{"role": "user", "content": given}]
    elif isinstance(given, list) and all(isinstance(item, dict) for item in given):
        conversation = [item for item in given if item.get("type", "message") == "message"]
    else:
        raise ValidationError(
            {"type": "string_type", "loc": "body.input", "msg": "Input should be a valid string", "input": str(given)}
        )
    if body.get("instructions"):
        conversation.insert(0, {"role": "system", "content": body["instructions"]})
    return tokenizer.encode(tokenizer.render_chat(conversation))


async def handle(request: web.Request) -> web.StreamResponse:
    """Serve one request."""
    engine = serving.engine_of(request)
    body = await parsing.json_body(request)
    prompt = _prompt(body)
    name, tag = serving.resolve_model(engine, body)
    sampling = parsing.sampling(
        body,
        engine.config,
        prompt_tokens=len(prompt),
        default_max_tokens=None,
        max_tokens_fields=("max_output_tokens",),
    )
    wanted = body.get("request_id")
    id_ = wanted if isinstance(wanted, str) and wanted else f"resp_{uuid.uuid4().hex[:16]}"
    answer = _Answer(id_, serving.now(), name, body, sampling.max_tokens)
    generation = Generation(stream=bool(body.get("stream")), weights_tag=tag)
    generation.add(id_, prompt, sampling)
    if not generation.stream:
        try:
            await serving.run_to_end(engine, generation)
        except WireError as error:
            return error_reply(error)
        return json_reply(answer.whole(generation))

    stream = EventStream(request)
    engine.core.check_admission(generation.live)
    try:
        await answer.run(engine, generation, stream)
    except WireError:
        # vLLM has no handler for a failure inside this stream: two events are out, and the connection is cut.
        stream.break_off()
    return await stream.end()


def _final(generation: Generation) -> str:
    return _status(next(iter(generation.sequences)).finish_reason)


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


class _Answer:
    """One response object, whole or as the event sequence that builds it."""

    def __init__(self, id_: str, created: int, name: str, body: parsing.Body, max_tokens: int) -> None:
        self._id = id_
        self._created = created
        self._model = name
        self._body = body
        self._max_tokens = max_tokens
        self._item_id = f"msg_{uuid.uuid4().hex[:16]}"
        self._number = 0
        self._text = ""

    def _response(self, status: str, output: list[dict[str, Any]], counts: dict[str, Any] | None) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": self._model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "temperature": float(body.get("temperature", 1.0)),
            "tool_choice": body.get("tool_choice", "auto" if body.get("tools") else "none"),
            "tools": body.get("tools", []),
            "top_p": float(body.get("top_p", 1.0)),
            "background": bool(body.get("background", False)),
            "max_output_tokens": self._max_tokens,
            "max_tool_calls": body.get("max_tool_calls"),
            "previous_response_id": body.get("previous_response_id"),
            "prompt": body.get("prompt"),
            "prompt_cache_options": None,
            "prompt_cache_key": body.get("prompt_cache_key"),
            "prompt_cache_retention": None,
            "reasoning": body.get("reasoning"),
            "safety_identifier": body.get("safety_identifier"),
            "service_tier": body.get("service_tier", "auto"),
            "status": status,
            "text": body.get("text"),
            "top_logprobs": body.get("top_logprobs"),
            "truncation": body.get("truncation", "disabled"),
            "usage": counts,
            "user": body.get("user"),
            "presence_penalty": float(body.get("presence_penalty", 0.0)),
            "frequency_penalty": float(body.get("frequency_penalty", 0.0)),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [self._part(text)]
        return {
            "id": self._item_id,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    @staticmethod
    def _part(text: str, *, opening: bool = False) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": [] if opening else None}

    @staticmethod
    def _counts(generation: Generation) -> dict[str, Any]:
        return {
            "input_tokens": generation.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": 0,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": generation.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": generation.prompt_tokens + generation.completion_tokens,
        }

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the finished response."""
        sequence = next(iter(generation.sequences))
        status = _status(sequence.finish_reason)
        return self._response(status, [self._item(status, sequence.text)], self._counts(generation))

    async def _event(
        self, stream: EventStream, kind: str, *, tokens: int = 0, last: dict[str, Any] | None = None, **fields: Any
    ) -> None:
        payload = {**fields, "sequence_number": self._number, **(last or {}), "type": kind}
        self._number += 1
        await stream.event(payload, name=kind, tokens=tokens)

    async def run(self, engine: Any, generation: Generation, stream: EventStream) -> None:
        """Stream the response.

        Raises:
            WireError: refused, or failed on the way.

        """
        opened: list[bool] = []
        opening = self._response("in_progress", [], None)
        await self._event(stream, "response.created", response=opening)
        await self._event(stream, "response.in_progress", response=opening)

        async def send(deltas: list[Delta]) -> None:
            if not opened and deltas:
                opened.append(True)
                await self._open(stream)
            for delta in deltas:
                if delta.text:
                    self._text += delta.text
                    await self._event(
                        stream,
                        "response.output_text.delta",
                        tokens=len(delta.tokens),
                        content_index=0,
                        delta=delta.text,
                        item_id=self._item_id,
                        logprobs=[],
                        output_index=0,
                    )

        await serving.run_stream(engine, generation, stream, send)
        if not stream.broken:
            await self._close(stream, generation)

    async def _open(self, stream: EventStream) -> None:
        await self._event(stream, "response.output_item.added", item=self._item("in_progress", None), output_index=0)
        await self._event(
            stream,
            "response.content_part.added",
            content_index=0,
            item_id=self._item_id,
            output_index=0,
            part=self._part("", opening=True),
        )

    async def _close(self, stream: EventStream, generation: Generation) -> None:
        place: dict[str, Any] = {"content_index": 0, "item_id": self._item_id, "output_index": 0}
        await self._event(
            stream,
            "response.output_text.done",
            content_index=0,
            item_id=self._item_id,
            logprobs=[],
            output_index=0,
            last={"text": self._text},
        )
        await self._event(stream, "response.content_part.done", **place, part=self._part(self._text))
        await self._event(
            stream, "response.output_item.done", item=self._item(_final(generation), self._text), output_index=0
        )
        whole = self.whole(generation)
        await self._event(stream, f"response.{whole['status']}", response=whole)
