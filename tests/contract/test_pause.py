"""What happens to requests around a pause: the rejections, the silence, the abort, the freeze."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from . import shapes
from .conftest import Target
from .traffic import (
    CHOICES,
    COMPLETIONS,
    DIALECTS,
    LONG,
    SILENT_SECONDS,
    Dialect,
    last_choice,
    paused,
    running,
    sent,
    token_ids,
)
from .wire import Answer, Connection

PAUSED = "Generation is paused. Please retry after it resumes."
NAMES = [dialect.name for dialect in DIALECTS]
REJECTING = ["abort", "wait"]


@pytest.mark.parametrize("mode", REJECTING)
@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
async def test_whole_request_is_rejected(engine: Target, record: bool, dialect: Dialect, mode: str) -> None:
    async with paused(engine, mode):
        answer = await engine.post(dialect.path, dialect.body())
    assert answer.status == 503
    assert "retry-after" not in answer.headers
    assert answer.json()["error"]["message"] == PAUSED
    shapes.check(f"paused-{dialect.name}", answer, record=record)


@pytest.mark.parametrize("mode", REJECTING)
@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
async def test_stream_is_rejected_inside_a_200(engine: Target, record: bool, dialect: Dialect, mode: str) -> None:
    async with paused(engine, mode):
        answer = await engine.post(dialect.path, dialect.body(stream=True))
    assert answer.status == 200
    # The stream of /v1/responses is cut after its head; every other one ends cleanly after one error event.
    assert answer.whole == (dialect.name != "responses")
    shapes.check(f"paused-{dialect.name}-stream", answer, record=record)


@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
async def test_keep_accepts_in_silence_and_answers_after_resume(engine: Target, dialect: Dialect) -> None:
    async with sent_while_frozen(engine, dialect) as (connection, early):
        assert early == b""
        answer = await connection.receive()
    assert (answer.status, answer.whole) == (200, True)


@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
async def test_keep_sends_the_head_of_a_stream_at_once(engine: Target, dialect: Dialect) -> None:
    async with sent_while_frozen(engine, dialect, stream=True) as (connection, early):
        head, body = early.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200 ")
        events = [line for line in body.splitlines() if line.startswith(b"event: ")]
        opening = [b"event: response.created", b"event: response.in_progress"] if dialect.name == "responses" else []
        assert events == opening
        assert (body == b"") == (opening == [])
        rest = await connection.look(SILENT_SECONDS)
    assert rest.endswith(b"0\r\n\r\n")


@asynccontextmanager
async def sent_while_frozen(engine: Target, dialect: Dialect, **more: Any) -> AsyncIterator[tuple[Connection, bytes]]:
    """A request sent to a frozen engine, with what came until the engine was resumed."""
    async with contextlib.AsyncExitStack() as stack:
        async with paused(engine, "keep"):
            connection = await stack.enter_async_context(sent(engine, dialect, **more))
            early = await connection.look(SILENT_SECONDS)
        yield connection, early


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_health_and_models_answer_while_paused(engine: Target, mode: str) -> None:
    async with paused(engine, mode):
        assert (await engine.get("/health")).status == 200
        assert (await engine.get("/v1/models")).status == 200
        assert (await engine.get("/is_paused")).json() == {"is_paused": True}
        assert (await engine.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await engine.get("/is_paused")).json() == {"is_paused": False}


async def test_pausing_twice_and_resuming_twice_are_fine(engine: Target) -> None:
    async with paused(engine, "keep"):
        assert (await engine.post("/pause?mode=keep")).status == 200
    assert (await engine.post("/resume")).json() == {"status": "resumed"}


async def test_default_mode_is_abort(engine: Target) -> None:
    async with running(engine, COMPLETIONS) as request:
        assert (await engine.post("/pause")).status == 200
        answer = await request
        await engine.post("/resume")
    assert last_choice(answer)["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", CHOICES, ids=lambda dialect: dialect.name)
async def test_abort_ends_what_runs_with_its_part(engine: Target, record: bool, dialect: Dialect, stream: bool) -> None:
    async with running(engine, dialect, stream=stream) as request, paused(engine, "abort"):
        answer = await request
    choice = last_choice(answer)
    tokens = token_ids(answer)
    assert answer.status == 200
    assert answer.whole
    assert choice["finish_reason"] == "abort"
    assert 0 < len(tokens) < LONG
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": len(tokens)}]
    shapes.check(f"aborted-{dialect.name}{'-stream' if stream else ''}", answer, record=record)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_abort_of_messages(engine: Target, record: bool, stream: bool) -> None:
    dialect = next(each for each in DIALECTS if each.name == "messages")
    async with running(engine, dialect, stream=stream) as request, paused(engine, "abort"):
        answer = await request
    assert answer.status == 200
    shapes.check(f"aborted-messages{'-stream' if stream else ''}", answer, record=record)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_abort_of_responses(engine: Target, record: bool, stream: bool) -> None:
    dialect = next(each for each in DIALECTS if each.name == "responses")
    async with running(engine, dialect, stream=stream) as request, paused(engine, "abort"):
        answer = await request
    shapes.check(f"aborted-responses{'-stream' if stream else ''}", answer, record=record)


async def test_wait_returns_when_what_runs_has_ended(engine: Target) -> None:
    async with running(engine, COMPLETIONS) as request:
        pause = asyncio.ensure_future(engine.post("/pause?mode=wait"))
        answer = await request
        assert (await pause).json() == {"status": "paused"}
        await engine.post("/resume")
    assert last_choice(answer)["finish_reason"] == "length"
    assert len(token_ids(answer)) == LONG


async def test_wait_rejects_while_it_waits(engine: Target) -> None:
    async with running(engine, COMPLETIONS) as request:
        pause = asyncio.ensure_future(engine.post("/pause?mode=wait"))
        await asyncio.sleep(0.2)
        refused = await engine.post(COMPLETIONS.path, COMPLETIONS.body())
        assert not pause.done()
        await asyncio.gather(request, pause)
        await engine.post("/resume")
    assert refused.status == 503
    assert refused.json()["error"]["message"] == PAUSED


async def frozen(engine: Target, dialect: Dialect, *, stream: bool) -> Answer | None:
    """The answer to a request that was frozen across a new label; None if it ended before the pause came."""
    async with running(engine, dialect, stream=stream) as request:
        async with paused(engine, "keep"):
            if request.done():
                return None
            answer = await engine.post("/update_weight_version", {"new_version": "after"})
            assert answer.json() == {"success": True, "new_version": "after"}
        answer = await request
    await engine.post("/update_weight_version", {"new_version": "default"})
    return answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", CHOICES, ids=lambda dialect: dialect.name)
async def test_frozen_request_carries_two_versions(engine: Target, dialect: Dialect, stream: bool) -> None:
    # The first pause of a real server, or one on a busy machine, can take longer than a request: try again.
    for _ in range(4):
        answer = await frozen(engine, dialect, stream=stream)
        if answer is not None:
            break
    assert answer is not None
    first, second = last_choice(answer)["weight_versions"]
    assert (first["version"], first["start"]) == ("default", 0)
    assert (second["version"], second["end"]) == ("after", LONG)
    assert 0 < first["end"] == second["start"] < LONG


async def test_spans_are_on_the_last_chunk_only(engine: Target) -> None:
    answer = await engine.post(COMPLETIONS.path, COMPLETIONS.body(8, stream=True))
    chunks = [data["choices"][0] for _, data in answer.events() if data != "[DONE]"]
    assert [chunk["weight_versions"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]


async def test_sleeping_engine_is_silent_and_waking_resumes(engine: Target) -> None:
    answer = await engine.post("/sleep?level=0")
    assert answer.json() == {"status": "sleeping", "level": 0}
    assert (await engine.get("/is_sleeping")).json() == {"is_sleeping": True}
    async with sent(engine, COMPLETIONS) as connection:
        assert await connection.look(SILENT_SECONDS) == b""
        woken = await engine.post("/wake_up?tags=scheduling")
        assert woken.json() == {"status": "awake", "tags": ["scheduling"]}
        answer = await connection.receive()
    assert answer.status == 200
    assert (await engine.get("/is_paused")).json() == {"is_paused": False}


async def test_sleeping_for_good_is_answered_and_undone(engine: Target, record: bool) -> None:
    answer = await engine.post("/sleep?level=1&mode=abort")
    shapes.check("sleep", answer, record=record)
    answer = await engine.post("/wake_up")
    shapes.check("wake-up", answer, record=record)
    assert (await engine.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert (await engine.post(COMPLETIONS.path, COMPLETIONS.body())).status == 200


async def test_prefix_cache_reset_reports_what_happened(engine: Target, record: bool) -> None:
    async with running(engine, COMPLETIONS):
        answer = await engine.post("/reset_prefix_cache")
    assert answer.status == 200
    shapes.check("reset-prefix-cache-busy", answer, record=record)


async def test_kv_cache_can_be_released_after_a_pause(engine: Target) -> None:
    async with paused(engine, "abort"):
        answer = await engine.post("/release_kv_cache_memory")
        woken = await engine.post("/wake_up")
    assert answer.status in (200, 500)
    assert woken.status == 200
