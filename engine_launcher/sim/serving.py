"""What every generation route does alike: identify, admit, run, stream, and give up when the client goes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from engine_launcher.sim import tokenizer
from engine_launcher.sim.errors import BadRequestError, WireError
from engine_launcher.sim.replies import ENGINE, EventStream
from engine_launcher.sim.sequences import Candidates, Delta, Generation

if TYPE_CHECKING:
    from engine_launcher.sim.server import SimEngine

FINGERPRINT = "vllm-sim"
DONE = b"data: [DONE]\n\n"


def engine_of(request: web.Request) -> SimEngine:
    """Return the engine that serves ``request``."""
    return request.app[ENGINE]


def base_id(request: web.Request, body: Mapping[str, Any]) -> str:
    """Return the id that the request is known by: the client's ``X-Request-Id``, else the body's, else a new one."""
    given = request.headers.get("X-Request-Id")
    if given is not None:
        return given
    wanted = body.get("request_id")
    return wanted if isinstance(wanted, str) and wanted else uuid.uuid4().hex


def resolve_model(engine: SimEngine, body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the served name and the weights tag (empty for the base model) that a request asks for.

    Raises:
        WireError: 404, there is no such model.

    """
    name = body.get("model")
    if not name or name == engine.config.model_name:
        return engine.config.model_name, ""
    adapter = engine.adapters.get(name)
    if adapter is not None:
        return str(name), f"+lora:{adapter}"
    raise WireError(
        404,
        f"The model `{name}` does not exist. Valid aliases: {engine.config.model_name}.",
        "NotFoundError",
        "model",
    )


def usage(prompt_tokens: int, completion_tokens: int, *, details: bool = True) -> dict[str, Any]:
    """Return the token counts of an answer."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if details:
        counts["prompt_tokens_details"] = None
        counts["completion_tokens_details"] = None
    return counts


def now() -> int:
    """Return the wall-clock time in whole seconds, for ``created``."""
    return int(time.time())


def stream_usage(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a stream ends with a usage chunk, and whether each chunk carries one."""
    options = body.get("stream_options") or {}
    wanted = bool(options.get("include_usage"))
    return wanted, wanted and bool(options.get("continuous_usage_stats"))


def check_stream_options(body: Mapping[str, Any]) -> None:
    """Refuse stream options without a stream.

    Raises:
        WireError: 400.

    """
    if body.get("stream_options") and not body.get("stream"):
        raise BadRequestError(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)", "stream_options"
        )


async def run_to_end(engine: SimEngine, generation: Generation) -> None:
    """Run a request whose answer is not streamed.

    Raises:
        WireError: refused, or failed on the way.

    """
    await engine.core.turn()
    engine.core.submit(generation)
    try:
        await generation.finished()
    finally:
        engine.core.abandon(generation)


async def run_stream(
    engine: SimEngine,
    generation: Generation,
    stream: EventStream,
    send: Callable[[list[Delta]], Awaitable[None]],
) -> None:
    """Run a streamed request, handing each batch of deltas to ``send``.

    Raises:
        WireError: refused, or failed on the way; nothing more is sent by this function.

    """
    await stream.begin()
    # vLLM renders the prompt in a thread between its two looks at the queue limits, so that a burst passes the first.
    await asyncio.sleep(0)
    await engine.core.turn()
    engine.core.submit(generation)
    try:
        while True:
            await generation.wait()
            if generation.error is not None:
                raise generation.error
            await send(generation.drain())
            if generation.live == 0 and not generation.deltas:
                return
            if stream.broken:
                return
            if engine.core.speed.tokens_per_second == 0:
                # A client that reads slower than the engine writes must not starve the other streams.
                await asyncio.sleep(0)
    finally:
        engine.core.abandon(generation)


def completion_logprobs(
    tokens: list[int], candidates: list[Candidates], *, offset: int, as_ids: bool
) -> dict[str, Any]:
    """Return log probabilities in the shape of ``/v1/completions``."""
    names = [_name(token, as_ids=as_ids) for token in tokens]
    offsets: list[int] = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "text_offset": offsets,
        "token_logprobs": [found[0][1] for found in candidates],
        "tokens": names,
        "top_logprobs": [{_name(token, as_ids=as_ids): value for token, value in found} for found in candidates],
    }


def chat_logprobs(
    tokens: list[int], candidates: list[Candidates], *, top: int, as_ids: bool
) -> dict[str, list[dict[str, Any]]]:
    """Return log probabilities in the shape of ``/v1/chat/completions``."""
    content: list[dict[str, Any]] = []
    for token, found in zip(tokens, candidates, strict=True):
        entry = _entry(token, found[0][1], as_ids=as_ids)
        entry["top_logprobs"] = [_entry(other, value, as_ids=as_ids) for other, value in found[:top]]
        content.append(entry)
    return {"content": content}


def _name(token: int, *, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else tokenizer.piece(token)


def _entry(token: int, value: float, *, as_ids: bool) -> dict[str, Any]:
    name = _name(token, as_ids=as_ids)
    return {"token": name, "logprob": value, "bytes": list(name.encode("utf-8", "replace"))}
