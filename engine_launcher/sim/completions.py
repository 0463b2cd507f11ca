"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engine_launcher.sim import parsing, serving, tokenizer
from engine_launcher.sim.errors import BadRequestError, ValidationError, WireError
from engine_launcher.sim.replies import EventStream, error_reply, json_reply
from engine_launcher.sim.sequences import Delta, Generation, SequenceState, text_of

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""


async def handle(request: web.Request) -> web.StreamResponse:
    """Serve one request."""
    engine = serving.engine_of(request)
    body = await parsing.json_body(request)
    serving.check_stream_options(body)
    prompts = _prompts(body)
    name, tag = serving.resolve_model(engine, body)
    logprobs = parsing.integer(body, "logprobs", None)
    sampling = parsing.sampling(
        body,
        engine.config,
        prompt_tokens=max(len(prompt) for prompt in prompts),
        default_max_tokens=DEFAULT_MAX_TOKENS,
        candidates=0 if logprobs is None else logprobs + 1,
    )
    answer = _Answer(f"cmpl-{serving.base_id(request, body)}", serving.now(), name, body, prompts)
    generation = Generation(stream=bool(body.get("stream")), weights_tag=tag)
    for index, prompt in enumerate(prompts):
        generation.add(f"{answer.id}-{index}", prompt, sampling)
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
        await stream.event(error.payload())
    await stream.write(serving.DONE)
    return await stream.end()


def _prompts(body: parsing.Body) -> list[list[int]]:
    prompt = body.get("prompt")
    if prompt is None or prompt in ("", []):
        raise BadRequestError(
            "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt"
        )
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if isinstance(prompt, list):
        if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            return [_checked(prompt)]
        if all(isinstance(text, str) for text in prompt):
            return [tokenizer.encode(text) for text in prompt]
        if all(isinstance(tokens, list) and tokens for tokens in prompt):
            return [_checked(tokens) for tokens in prompt]
    problem = {
        "type": "list_type",
        "loc": "body.prompt",
        "msg": "Input should be a valid list",
        "input": f"<{type(prompt).__name__}>",
    }
    raise ValidationError(problem)


def _checked(tokens: list[Any]) -> list[int]:
    for token in tokens:
        if not isinstance(token, int) or not tokenizer.in_vocabulary(token):
            raise BadRequestError(f"Token id {token} is out of vocabulary")
    return tokens


class _Answer:
    """The parts of one answer that do not change from chunk to chunk."""

    def __init__(self, id_: str, created: int, name: str, body: parsing.Body, prompts: list[list[int]]) -> None:
        self.id = id_
        self._created = created
        self._model = name
        self._prompts = prompts
        self._logprobs = body.get("logprobs") is not None
        self._as_ids = bool(body.get("return_tokens_as_token_ids"))
        self._token_ids = bool(body.get("return_token_ids"))
        self._versions = bool(body.get("return_weight_versions"))
        self._echo = bool(body.get("echo"))
        self._skip_special = body.get("skip_special_tokens") is not False
        self.include_usage, self._continuous = serving.stream_usage(body)
        self._n = int(body.get("n") or 1)
        self._offsets: dict[int, int] = {}
        self._counts: dict[int, int] = {}

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the answer of a request that is not streamed."""
        choices = [self._choice(sequence) for sequence in generation.sequences]
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": serving.FINGERPRINT,
            "usage": serving.usage(generation.prompt_tokens, generation.completion_tokens),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, sequence: SequenceState) -> dict[str, Any]:
        prompt = list(sequence.owner.prompt)
        text = text_of(sequence, skip_special=self._skip_special)
        if self._echo:
            text = tokenizer.decode(prompt) + text
        return {
            "index": sequence.index,
            "text": text,
            "logprobs": serving.completion_logprobs(sequence.tokens, sequence.candidates, offset=0, as_ids=self._as_ids)
            if self._logprobs
            else None,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.tokens if self._token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt if self._token_ids else None,
            "routed_experts": None,
            "weight_versions": sequence.spans() if self._versions else None,
        }

    async def send(self, stream: EventStream, deltas: list[Delta]) -> None:
        """Send one chunk a delta."""
        for delta in deltas:
            await stream.event(self._chunk(delta), tokens=len(delta.tokens))

    def _chunk(self, delta: Delta) -> dict[str, Any]:
        prompt = self._prompts[delta.index // self._n]
        logprobs = None
        if self._logprobs:
            offset = self._offsets.get(delta.index, 0)
            logprobs = serving.completion_logprobs(delta.tokens, delta.candidates, offset=offset, as_ids=self._as_ids)
            self._offsets[delta.index] = offset + sum(len(name) for name in logprobs["tokens"])
        chunk: dict[str, Any] = {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": delta.index,
                    "text": tokenizer.decode(prompt) + delta.text if self._echo and delta.first else delta.text,
                    "logprobs": logprobs,
                    "finish_reason": delta.finish_reason,
                    "stop_reason": delta.stop_reason,
                    "prompt_token_ids": prompt if self._token_ids and delta.first else None,
                    "token_ids": delta.tokens if self._token_ids else None,
                    "weight_versions": delta.spans if self._versions else None,
                }
            ],
        }
        if self._continuous:
            count = self._counts.get(delta.index, 0) + len(delta.tokens)
            self._counts[delta.index] = count
            chunk["usage"] = serving.usage(len(prompt), count, details=False)
        if delta.finish_reason is not None and not self.include_usage:
            chunk["system_fingerprint"] = serving.FINGERPRINT
        chunk["kv_transfer_params"] = None
        return chunk

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """Return the last chunk of a stream that asked for usage."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [],
            "usage": serving.usage(generation.prompt_tokens, generation.completion_tokens, details=False),
            "system_fingerprint": serving.FINGERPRINT,
        }
