"""A full queue, the death of the engine process, and a restart."""

from __future__ import annotations

import asyncio

import pytest

from . import shapes
from .conftest import QUEUE_LIMIT, Target
from .traffic import CHAT, COMPLETIONS, DIALECTS, LONG, Dialect, running, until_idle
from .wire import Answer

TRIES = 3
"""Of filling the queue: on a loaded machine what fills it may have ended before the one too many arrives."""
DEAD = "The server had an error while processing your request."
OPEN_TO_ALL = [dialect for dialect in DIALECTS if dialect.name != "generate"]
"""The guarded server has no scale-out routes."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", OPEN_TO_ALL, ids=lambda dialect: dialect.name)
async def test_full_queue_refuses(guarded: Target, record: bool, dialect: Dialect, stream: bool) -> None:
    for _ in range(TRIES):
        await until_idle(guarded)
        async with running(guarded, COMPLETIONS), running(guarded, COMPLETIONS):
            answer = await guarded.post(dialect.path, dialect.body(stream=stream))
        if answer.status != 200:
            break
    # Before the response is begun, so that a stream too is refused with a status.
    assert answer.status == 503
    assert "retry-after" not in answer.headers
    shapes.check(f"busy-{dialect.name}{'-stream' if stream else ''}", answer, record=record)


async def test_choices_count_as_slots(guarded: Target) -> None:
    await until_idle(guarded)
    answer = await guarded.post(COMPLETIONS.path, COMPLETIONS.body(n=QUEUE_LIMIT + 1, temperature=1))
    assert answer.status == 503


async def test_a_burst_of_streams_is_refused_one_way_or_the_other(guarded: Target) -> None:
    # Several may pass the first look at the queue together and fail at the second, inside a 200.
    await until_idle(guarded)
    answers = await asyncio.gather(
        *(guarded.post(COMPLETIONS.path, COMPLETIONS.body(LONG // 2, stream=True)) for _ in range(QUEUE_LIMIT + 6))
    )
    forms = {_form(answer) for answer in answers}
    assert "answered" in forms
    assert forms <= {"answered", "503", "error event"}
    assert forms & {"503", "error event"}


def _form(answer: Answer) -> str:
    if answer.status != 200:
        return str(answer.status)
    first = answer.events()[0][1]
    return "error event" if "error" in first and first["error"]["code"] == 503 else "answered"


@pytest.mark.kills
async def test_death_of_the_engine_process(guarded: Target, record: bool) -> None:
    await until_idle(guarded)
    async with (
        running(guarded, COMPLETIONS, LONG) as whole,
        running(guarded, CHAT, LONG, stream=True) as stream,
    ):
        await guarded.kill_core()
        cut, streamed = await asyncio.gather(whole, stream)
    assert (cut.status, cut.json()["error"]["message"]) == (500, DEAD)
    shapes.check("dead-completions", cut, record=record)
    assert streamed.whole, "the chunked body ends cleanly although the answer is cut"
    assert streamed.events()[-1][1] == "[DONE]"
    assert streamed.events()[-2][1]["error"] == {
        "message": DEAD,
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    async with asyncio.timeout(30):
        while True:
            try:
                assert (await guarded.get("/health")).status in (0, 503)
            except ConnectionRefusedError:
                break
            except ConnectionError:
                pass
            await asyncio.sleep(0.1)


async def _start_time(engine: Target) -> float:
    page = (await engine.get("/metrics")).body.decode()
    (line,) = [line for line in page.splitlines() if line.startswith("process_start_time_seconds ")]
    return float(line.split()[1])


@pytest.mark.kills
async def test_a_restart_shows_in_the_label_and_the_start_time(engine: Target) -> None:
    await engine.post("/update_weight_version", {"new_version": "before"})
    before = await _start_time(engine)
    await engine.restart()
    assert (await engine.get("/weight_info")).json() == {"weight_version": "default"}
    assert await _start_time(engine) > before
