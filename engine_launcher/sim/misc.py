"""The smaller routes: models, tokens, embeddings, audio, health, metrics, server information, realtime."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
import uuid
from typing import Any

from aiohttp import WSMsgType, web

from engine_launcher.sim import metrics, model, parsing, serving, tokenizer
from engine_launcher.sim.chat import read_messages
from engine_launcher.sim.errors import BadRequestError, HttpError, ValidationError, WireError, missing
from engine_launcher.sim.replies import error_reply, json_reply
from engine_launcher.sim.sequences import Generation, Sampling
from engine_launcher.sim.serving import engine_of

EMBEDDING_SIZE = 8
"""Numbers of an embedding; short, since only their being right matters here."""
TRANSCRIPT_TOKENS = 24
"""Tokens of a made-up transcript."""


async def health(request: web.Request) -> web.Response:
    """``GET /health``: 200 in every pause mode, 503 once the engine process is gone."""
    return web.Response(status=503 if engine_of(request).core.dead else 200)


async def ping(request: web.Request) -> web.Response:
    """``GET /ping`` and ``POST /ping``."""
    return await health(request)


async def version(request: web.Request) -> web.Response:
    """``GET /version``."""
    return json_reply({"version": engine_of(request).config.version})


async def load(request: web.Request) -> web.Response:
    """``GET /load``."""
    return json_reply({"server_load": engine_of(request).core.unfinished})


async def scale_elastic_ep(request: web.Request) -> web.Response:
    """``POST /scale_elastic_ep``: refused, there is nothing to scale."""
    body = await parsing.json_body(request)
    if body.get("new_data_parallel_size") is None:
        raise HttpError(400, "new_data_parallel_size is required")
    raise HttpError(500, "Scale failed")


async def is_scaling_elastic_ep(request: web.Request) -> web.Response:
    """``POST /is_scaling_elastic_ep``."""
    del request
    idle = {"phase": "idle", "epoch": None, "error": None, "requested_data_parallel_size": None}
    return json_reply({"is_scaling_elastic_ep": False, **idle})


async def metrics_page(request: web.Request) -> web.Response:
    """``GET /metrics``."""
    return web.Response(
        body=metrics.page(engine_of(request)).encode(),
        headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"},
    )


async def server_info(request: web.Request) -> web.Response:
    """``GET /server_info``."""
    engine = engine_of(request)
    backend = engine.config.weight_transfer_backend
    config: Any = {
        "model_config": {
            "model": engine.config.model_name,
            "dtype": "torch.float32",
            "max_model_len": engine.config.max_model_len,
        },
        "parallel_config": {
            "tensor_parallel_size": engine.config.world_size,
            "data_parallel_size": engine.config.data_parallel_size,
        },
        "weight_transfer_config": None if backend is None else {"backend": backend},
    }
    if request.query.get("config_format", "text") == "text":
        config = str(config)
    return json_reply({"vllm_config": config, "vllm_env": {"VLLM_SERVER_DEV_MODE": True}, "system_env": {}})


async def models(request: web.Request) -> web.Response:
    """``GET /v1/models``."""
    engine = engine_of(request)
    base = engine.config.model_name
    cards = [_card(base, f"/models/{base}", None, engine.config.max_model_len)]
    cards += [_card(name, path, base, None) for name, path in engine.adapters.items()]
    return json_reply({"object": "list", "data": cards})


def _card(name: str, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.now(),
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": length,
        "permission": [
            {
                "id": f"modelperm-{uuid.uuid4().hex[:16]}",
                "object": "model_permission",
                "created": serving.now(),
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


async def tokenize(request: web.Request) -> web.Response:
    """``POST /tokenize``."""
    engine = engine_of(request)
    body = await parsing.json_body(request)
    if "messages" in body:
        text = tokenizer.render_chat(
            read_messages(body), add_generation_prompt=parsing.flag(body, "add_generation_prompt", default=True)
        )
    elif isinstance(body.get("prompt"), str):
        text = body["prompt"]
    else:
        raise missing("prompt", body)
    serving.resolve_model(engine, body)
    tokens = tokenizer.encode(text)
    return json_reply(
        {
            "count": len(tokens),
            "max_model_len": engine.config.max_model_len,
            "tokens": tokens,
            "token_strs": [tokenizer.symbol(token) for token in tokens] if body.get("return_token_strs") else None,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """``POST /detokenize``."""
    body = await parsing.json_body(request)
    if "tokens" not in body:
        raise missing("tokens", body)
    serving.resolve_model(engine_of(request), body)
    tokens = body["tokens"]
    if not isinstance(tokens, list):
        raise ValidationError(
            {"type": "list_type", "loc": "body.tokens", "msg": "Input should be a valid list", "input": str(tokens)}
        )
    return json_reply({"prompt": tokenizer.decode(tokens, skip_special=False)})


def _inputs(body: parsing.Body) -> list[list[int]]:
    given = body.get("input", body.get("prompt"))
    if given is None and "messages" in body:
        return [tokenizer.encode(tokenizer.render_chat(read_messages(body)))]
    if given is None:
        raise missing("input", body)
    if isinstance(given, str):
        return [tokenizer.encode(given)]
    if isinstance(given, list) and given and all(isinstance(item, int) for item in given):
        return [given]
    if isinstance(given, list):
        return [tokenizer.encode(item) if isinstance(item, str) else list(item) for item in given]
    raise BadRequestError("input must be a string, a list of strings, or token ids", "input")


def embed(weights: str, tokens: list[int]) -> list[float]:
    """Return an embedding: like a token, a pure function of the weights and the input."""
    state = model.fold_all(tokens, model.weights_seed(weights))
    raw = hashlib.sha256(state.to_bytes(8, "big")).digest()
    return [int.from_bytes(raw[i * 4 : i * 4 + 4], "big") / 2**32 for i in range(EMBEDDING_SIZE)]


async def embeddings(request: web.Request) -> web.Response:
    """``POST /v1/embeddings``."""
    return await _pooled(request, prefix="embd", kind="embedding", field="embedding")


async def pooling(request: web.Request) -> web.Response:
    """``POST /pooling``."""
    return await _pooled(request, prefix="pool", kind="pooling", field="data")


async def _pooled(request: web.Request, *, prefix: str, kind: str, field: str) -> web.Response:
    engine = engine_of(request)
    body = await parsing.json_body(request)
    inputs = _inputs(body)
    name, tag = serving.resolve_model(engine, body)
    # One token stands for the forward pass, so that pause, speed and queue limits hold here too.
    generation = Generation(stream=False, weights_tag=tag)
    for index, tokens in enumerate(inputs):
        generation.add(f"{prefix}-{serving.base_id(request, body)}-{index}", tokens, Sampling(max_tokens=1))
    try:
        await serving.run_to_end(engine, generation)
    except WireError as error:
        return error_reply(error)
    vectors = [embed(f"{engine.core.weights}{tag}", tokens) for tokens in inputs]
    data = [
        {
            "index": index,
            "object": kind,
            field: base64.b64encode(struct.pack(f"<{EMBEDDING_SIZE}f", *vector)).decode()
            if body.get("encoding_format") == "base64"
            else vector,
        }
        for index, vector in enumerate(vectors)
    ]
    return json_reply(
        {
            "id": f"{prefix}-{serving.base_id(request, body)}",
            "object": "list",
            "created": serving.now(),
            "model": name,
            "data": data,
            "usage": {
                "prompt_tokens": generation.prompt_tokens,
                "total_tokens": generation.prompt_tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }
    )


async def transcriptions(request: web.Request) -> web.Response:
    """``POST /v1/audio/transcriptions``: multipart; the transcript depends on the weights and the file's bytes."""
    engine = engine_of(request)
    if not request.content_type.startswith("multipart/"):
        raise WireError(400, "1 validation error:\n  the body is not multipart/form-data", "Bad Request", "body.file")
    form = await request.post()
    upload = form.get("file")
    if upload is None:
        raise missing("file")
    if isinstance(upload, web.FileField):
        raw = await asyncio.to_thread(upload.file.read)
    else:
        raw = upload.encode() if isinstance(upload, str) else bytes(upload)
    wanted = form.get("model")
    _, tag = serving.resolve_model(engine, {"model": wanted if isinstance(wanted, str) else None})
    prompt = list(hashlib.sha256(raw).digest())
    generation = Generation(stream=False, weights_tag=tag)
    sampling = Sampling(max_tokens=TRANSCRIPT_TOKENS, ignore_eos=True)
    generation.add(f"transcribe-{serving.base_id(request, {})}", prompt, sampling)
    try:
        await serving.run_to_end(engine, generation)
    except WireError as error:
        return error_reply(error)
    text = next(iter(generation.sequences)).text
    if form.get("response_format") == "text":
        return web.Response(text=text)
    return json_reply({"text": text, "usage": {"type": "duration", "seconds": 1 + len(raw) // 32000}})


async def realtime(request: web.Request) -> web.WebSocketResponse:
    """``GET /v1/realtime``: greets, echoes, and answers a commit with generated text."""
    engine = engine_of(request)
    socket = web.WebSocketResponse(max_msg_size=0)
    await socket.prepare(request)
    engine.sockets.add(socket)
    try:
        await socket.send_json({"type": "session.created", "id": f"sess-{uuid.uuid4().hex}", "created": serving.now()})
        async for message in socket:
            if message.type == WSMsgType.BINARY:
                await socket.send_bytes(message.data)
            elif message.type == WSMsgType.TEXT:
                await _realtime_event(request, socket, message.data)
    finally:
        engine.sockets.discard(socket)
    return socket


async def _realtime_event(request: web.Request, socket: web.WebSocketResponse, text: str) -> None:
    if '"input_audio_buffer.commit"' not in text:
        await socket.send_str(text)
        return
    engine = engine_of(request)
    generation = Generation(stream=False)
    sampling = Sampling(max_tokens=TRANSCRIPT_TOKENS, ignore_eos=True)
    generation.add(f"rt-{serving.base_id(request, {})}", tokenizer.encode(text), sampling)
    try:
        await serving.run_to_end(engine, generation)
    except WireError as error:
        await socket.send_json({"type": "error", "error": error.message, "code": str(error.status)})
        return
    transcript = next(iter(generation.sequences)).text
    await socket.send_json({"type": "transcription.delta", "delta": transcript})
    await socket.send_json({"type": "transcription.done", "text": transcript})


def routes() -> list[web.RouteDef]:
    """Return the routes of this module."""
    return [
        web.get("/health", health),
        web.get("/ping", ping),
        web.post("/ping", ping),
        web.get("/version", version),
        web.get("/load", load),
        web.get("/metrics", metrics_page),
        web.post("/scale_elastic_ep", scale_elastic_ep),
        web.post("/is_scaling_elastic_ep", is_scaling_elastic_ep),
        web.get("/v1/models", models),
        web.post("/tokenize", tokenize),
        web.post("/detokenize", detokenize),
        web.post("/v1/embeddings", embeddings),
        web.post("/pooling", pooling),
        web.post("/v1/audio/transcriptions", transcriptions),
        web.get("/v1/realtime", realtime),
    ]
