"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from engine_launcher.sim import parsing, serving, tokenizer
from engine_launcher.sim.errors import ValidationError, WireError, missing
from engine_launcher.sim.replies import EventStream, error_reply, json_reply
from engine_launcher.sim.sequences import Delta, Generation, SequenceState, text_of

MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens")


async def handle(request: web.Request) -> web.StreamResponse:
    """Serve one request."""
    engine = serving.engine_of(request)
    body = await parsing.json_body(request)
    messages = read_messages(body)
    serving.check_stream_options(body)
    name, tag = serving.resolve_model(engine, body)
    prompt = tokenizer.encode(
        tokenizer.render_chat(messages, add_generation_prompt=parsing.flag(body, "add_generation_prompt", default=True))
    )
    top = (parsing.integer(body, "top_logprobs", 0) or 0) if body.get("logprobs") else 0
    sampling = parsing.sampling(
        body,
        engine.config,
        prompt_tokens=len(prompt),
        default_max_tokens=None,
        candidates=max(top, 1) if body.get("logprobs") else 0,
        max_tokens_fields=MAX_TOKENS_FIELDS,
    )
    answer = _Answer(f"chatcmpl-{serving.base_id(request, body)}", name, body, prompt, top)
    generation = Generation(stream=bool(body.get("stream")), weights_tag=tag)
    generation.add(answer.id, prompt, sampling)
    if not generation.stream:
        try:
            await serving.run_to_end(engine, generation)
        except WireError as error:
            return error_reply(error)
        return json_reply(answer.whole(generation))

    engine.core.check_admission(generation.live)
    stream = EventStream(request)
    try:
        await serving.run_stream(engine, generation, stream, lambda deltas: answer.send(stream, deltas))
        if answer.include_usage:
            await stream.event(answer.usage_chunk(generation))
    except WireError as error:
        # Only this route renames the type of a failure inside a stream; the code stays.
        await stream.event(error.payload(type_="InternalServerError" if error.status == 503 else None))
    await stream.write(serving.DONE)
    return await stream.end()


def read_messages(body: parsing.Body) -> list[Mapping[str, Any]]:
    """Return the conversation of a request.

    Raises:
        ValidationError: there is none, or it is not a list of objects.

    """
    if "messages" not in body:
        raise missing("messages", body)
    messages = body["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        problem = {
            "type": "list_type",
            "loc": "body.messages",
            "msg": "Input should be a valid list",
            "input": f"<{type(messages).__name__}>",
        }
        raise ValidationError(problem)
    return messages


class _Answer:
    """The parts of one answer that do not change from chunk to chunk."""

    def __init__(self, id_: str, name: str, body: parsing.Body, prompt: list[int], top: int) -> None:
        self.id = id_
        self._created = serving.now()
        self._model = name
        self._prompt = prompt
        self._top = top
        self._logprobs = bool(body.get("logprobs"))
        self._as_ids = bool(body.get("return_tokens_as_token_ids"))
        self._token_ids = bool(body.get("return_token_ids"))
        self._versions = bool(body.get("return_weight_versions"))
        self._skip_special = body.get("skip_special_tokens") is not False
        self.include_usage, self._continuous = serving.stream_usage(body)
        self._n = int(body.get("n") or 1)
        self._counts = [0] * self._n
        self._begun = False

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the answer of a request that is not streamed."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(sequence) for sequence in generation.sequences],
            "service_tier": None,
            "system_fingerprint": serving.FINGERPRINT,
            "usage": serving.usage(generation.prompt_tokens, generation.completion_tokens),
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt if self._token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, sequence: SequenceState) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "message": {
                "role": "assistant",
                "content": text_of(sequence, skip_special=self._skip_special),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": serving.chat_logprobs(sequence.tokens, sequence.candidates, top=self._top, as_ids=self._as_ids)
            if self._logprobs
            else None,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.tokens if self._token_ids else None,
            "routed_experts": None,
            "weight_versions": sequence.spans() if self._versions else None,
        }

    async def send(self, stream: EventStream, deltas: list[Delta]) -> None:
        """Send one chunk a delta, after one chunk with the role for each choice."""
        if not self._begun and deltas:
            self._begun = True
            for index in range(self._n):
                await stream.event(self._role_chunk(index))
        for delta in deltas:
            await stream.event(self._chunk(delta), tokens=len(delta.tokens))

    def _running_usage(self, completion_tokens: int) -> dict[str, Any]:
        counts = serving.usage(len(self._prompt), completion_tokens, details=False)
        return {**counts, "completion_tokens_details": None}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "chat.completion.chunk", "created": self._created, "model": self._model}

    def _role_chunk(self, index: int) -> dict[str, Any]:
        chunk = self._head()
        chunk["choices"] = [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ]
        if self._continuous:
            chunk["usage"] = self._running_usage(0)
        chunk["prompt_token_ids"] = self._prompt if self._token_ids else None
        chunk["prompt_text"] = None
        return chunk

    def _chunk(self, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": delta.text},
            "logprobs": serving.chat_logprobs(delta.tokens, delta.candidates, top=self._top, as_ids=self._as_ids)
            if self._logprobs
            else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        choice["token_ids"] = delta.tokens if self._token_ids else None
        if delta.finish_reason is not None:
            choice["weight_versions"] = delta.spans if self._versions else None
        chunk = self._head()
        chunk["choices"] = [choice]
        self._counts[delta.index] += len(delta.tokens)
        if self._continuous:
            chunk["usage"] = self._running_usage(self._counts[delta.index])
        if delta.finish_reason is not None and not self.include_usage:
            chunk["system_fingerprint"] = serving.FINGERPRINT
        chunk["kv_transfer_params"] = None
        return chunk

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """Return the last chunk of a stream that asked for usage."""
        chunk = self._head()
        chunk["choices"] = []
        chunk["usage"] = serving.usage(generation.prompt_tokens, generation.completion_tokens, details=False)
        chunk["system_fingerprint"] = serving.FINGERPRINT
        return chunk
