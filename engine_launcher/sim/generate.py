"""``POST /inference/v1/generate``: token ids in, token ids out."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engine_launcher.sim import parsing, serving, tokenizer
from engine_launcher.sim.errors import BadRequestError, HttpError, ValidationError, WireError, missing
from engine_launcher.sim.replies import EventStream, error_reply, json_reply
from engine_launcher.sim.sequences import Candidates, Delta, Generation, SequenceState

DISABLED_MESSAGE = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


async def handle(request: web.Request) -> web.StreamResponse:
    """Serve one request."""
    engine = serving.engine_of(request)
    if not engine.config.scale_out:
        return error_reply(WireError(403, DISABLED_MESSAGE, "PermissionDeniedError"))
    body = await parsing.json_body(request)
    prompt = _prompt(body)
    params = body.get("sampling_params")
    if not isinstance(params, dict):
        raise missing("sampling_params", body)
    name, tag = serving.resolve_model(engine, body)
    logprobs = parsing.integer(params, "logprobs", None)
    sampling = parsing.sampling(
        params,
        engine.config,
        prompt_tokens=len(prompt),
        default_max_tokens=None,
        candidates=0 if logprobs is None else max(logprobs, 1),
    )
    answer = _Answer(f"generate-tokens-{serving.base_id(request, body)}", serving.now(), name, body, prompt)
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
        await stream.event(error.payload())
    await stream.write(serving.DONE)
    return await stream.end()


async def abort(request: web.Request) -> web.StreamResponse:
    """Serve ``POST /inference/v1/abort_requests``: abort in the background, answer at once."""
    engine = serving.engine_of(request)
    if not engine.config.scale_out:
        return error_reply(WireError(403, DISABLED_MESSAGE, "PermissionDeniedError"))
    body = await parsing.optional_json(request)
    ids = body.get("request_ids") if isinstance(body, dict) else None
    if ids is None:
        raise HttpError(400, "Missing 'request_ids' in request body")
    engine.core.abort_ids([str(id_) for id_ in ids])
    return web.Response(status=200)


def _prompt(body: parsing.Body) -> list[int]:
    if "token_ids" not in body:
        raise missing("token_ids", body)
    tokens = body["token_ids"]
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        problem = {
            "type": "list_type",
            "loc": "body.token_ids",
            "msg": "Input should be a valid list",
            "input": f"<{type(tokens).__name__}>",
        }
        raise ValidationError(problem)
    if not tokens:
        short: dict[str, Any] = {
            "type": "too_short",
            "loc": "body.token_ids",
            "msg": "List should have at least 1 item after validation, not 0",
            "input": "<list of 0 items>",
            "ctx": {"field_type": "List", "min_length": 1, "actual_length": 0},
        }
        raise ValidationError(short)
    for token in tokens:
        if not tokenizer.in_vocabulary(token):
            raise BadRequestError(f"Token id {token} is out of vocabulary")
    return tokens


def _logprobs(tokens: list[int], candidates: list[Candidates]) -> dict[str, Any] | None:
    if not candidates:
        return None
    content: list[dict[str, Any]] = []
    for token, found in zip(tokens, candidates, strict=True):
        ranked = [{"token_id": other, "logprob": value, "rank": rank} for rank, (other, value) in enumerate(found, 1)]
        content.append({"token_id": token, "logprob": found[0][1], "rank": 1, "top_logprobs": ranked})
    return {"content": content}


class _Answer:
    """The parts of one answer that do not change from chunk to chunk."""

    def __init__(self, id_: str, created: int, name: str, body: parsing.Body, prompt: list[int]) -> None:
        self.id = id_
        self._created = created
        self._model = name
        self._prompt = prompt
        self._token_ids = bool(body.get("return_token_ids"))
        self.include_usage, self._continuous = serving.stream_usage(body)
        self._counts: dict[int, int] = {}
        self._begun = False

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the answer of a request that is not streamed."""
        return {
            "request_id": self.id,
            "model": self._model,
            "created": self._created,
            "usage": serving.usage(generation.prompt_tokens, generation.completion_tokens),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": self._prompt if self._token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [self._choice(sequence) for sequence in generation.sequences],
        }

    def _choice(self, sequence: SequenceState) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.tokens,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": sequence.spans(),
            "logprobs": _logprobs(sequence.tokens, sequence.candidates),
        }

    async def send(self, stream: EventStream, deltas: list[Delta]) -> None:
        """Send one chunk a delta."""
        for delta in deltas:
            await stream.event(self._chunk(delta), tokens=len(delta.tokens))

    def _chunk(self, delta: Delta) -> dict[str, Any]:
        count = self._counts.get(delta.index, 0) + len(delta.tokens)
        self._counts[delta.index] = count
        chunk: dict[str, Any] = {
            "request_id": self.id,
            "usage": serving.usage(len(self._prompt), count) if self._continuous else None,
        }
        if self._token_ids and not self._begun:
            chunk["prompt_token_ids"] = self._prompt
        self._begun = True
        chunk["output_mode"] = "tokens"
        chunk["choices"] = [
            {
                "index": delta.index,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
                "token_ids": delta.tokens,
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": delta.spans,
                "logprobs": _logprobs(delta.tokens, delta.candidates),
            }
        ]
        return chunk

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """Return the last chunk of a stream that asked for usage."""
        return {
            "request_id": self.id,
            "usage": serving.usage(generation.prompt_tokens, generation.completion_tokens, details=False),
            "output_mode": "tokens",
            "choices": [],
        }
