"""HTTP habits: keep-alive, ids, keys, media types, the metrics page."""

from __future__ import annotations

import asyncio
import re

import pytest

from . import shapes
from .conftest import API_KEY, Target
from .traffic import COMPLETIONS, DIALECTS, GENERATE, running

METRICS = [
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:engine_sleep_state",
]


async def test_idle_connection_is_closed_without_a_word(guarded: Target) -> None:
    async with guarded.connect() as connection:
        assert (await connection.call("GET", "/health")).status == 200
        async with asyncio.timeout(20):
            assert await connection.reader.read() == b""


async def test_connection_is_kept_between_requests(engine: Target) -> None:
    async with engine.connect() as connection:
        for _ in range(3):
            assert (await connection.call("GET", "/health")).status == 200


async def test_request_id_is_part_of_the_answers_id(engine: Target) -> None:
    answer = await engine.call("POST", COMPLETIONS.path, COMPLETIONS.body(), {"X-Request-Id": "abc"})
    assert answer.json()["id"] == "cmpl-abc"
    assert "x-request-id" not in answer.headers
    answer = await engine.call("POST", GENERATE.path, GENERATE.body(), {"X-Request-Id": "abc"})
    assert answer.json()["request_id"] == "generate-tokens-abc"


@pytest.mark.parametrize("name", ["X-Session-ID", "X-data-parallel-rank"])
async def test_routing_headers_are_taken(engine: Target, name: str) -> None:
    answer = await engine.call("POST", COMPLETIONS.path, COMPLETIONS.body(), {name: "0"})
    assert answer.status == 200


async def test_request_id_is_echoed_when_asked_for(guarded: Target) -> None:
    answer = await guarded.call("POST", COMPLETIONS.path, COMPLETIONS.body(), {"X-Request-Id": "abc"})
    assert answer.headers["x-request-id"] == "abc"
    answer = await guarded.call("POST", COMPLETIONS.path, COMPLETIONS.body(stream=True), {"X-Request-Id": "abc"})
    assert answer.headers["x-request-id"] == "abc"


@pytest.mark.parametrize("value", [None, "Bearer wrong", "Basic x"])
async def test_key_guards_the_data_plane(guarded: Target, value: str | None) -> None:
    headers = {} if value is None else {"Authorization": value}
    for path in ("/v1/completions", "/v1/models", "/inference/v1/generate"):
        async with guarded.connect() as connection:
            answer = await connection.call("POST", path, COMPLETIONS.body(), headers)
        assert (answer.status, answer.json()) == (401, {"error": "Unauthorized"})


async def test_key_leaves_other_routes_open(guarded: Target) -> None:
    for path in ("/health", "/metrics", "/version"):
        async with guarded.connect() as connection:
            assert (await connection.call("GET", path)).status == 200
    async with guarded.connect() as connection:
        answer = await connection.call("POST", "/tokenize", {"prompt": "x"})
    assert answer.status == 200
    async with guarded.connect() as connection:
        answer = await connection.call("GET", "/v1/models", headers={"Authorization": f"bearer {API_KEY}"})
    assert answer.status == 200


async def test_only_json_is_taken(engine: Target, record: bool) -> None:
    answer = await engine.call("POST", "/v1/completions", COMPLETIONS.body(), {"Content-Type": "text/plain"})
    assert answer.status == 400
    shapes.check("bad-media-type", answer, record=record)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
async def test_streams_are_chunked_event_streams(engine: Target, dialect: object) -> None:
    answer = await engine.post(dialect.path, dialect.body(stream=True))  # type: ignore[attr-defined]
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.whole


async def test_whole_answers_have_a_length(engine: Target) -> None:
    answer = await engine.post(COMPLETIONS.path, COMPLETIONS.body())
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.body)


async def test_control_calls_have_a_length(engine: Target) -> None:
    for path in ("/reset_prefix_cache", "/reset_mm_cache", "/resume"):
        assert "content-length" in (await engine.post(path)).headers


@pytest.mark.parametrize("name", METRICS)
async def test_metrics_page_has(engine: Target, name: str) -> None:
    await engine.post(COMPLETIONS.path, COMPLETIONS.body())
    page = (await engine.get("/metrics")).body.decode()
    samples = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    assert samples
    if name.startswith("vllm:"):
        assert all('engine="0"' in line and 'model_name="tiny"' in line for line in samples)


async def test_metrics_count_running_requests(engine: Target) -> None:
    async with running(engine, COMPLETIONS):
        page = (await engine.get("/metrics")).body.decode()
        found = re.search(r"^vllm:num_requests_running\{[^}]*\} (\S+)$", page, re.MULTILINE)
        assert found is not None
        assert float(found[1]) == 1.0
