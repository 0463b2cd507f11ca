"""``/abort_requests``: what it ends, and how it counts."""

from __future__ import annotations

import asyncio

import pytest

from .conftest import Target
from .traffic import CHAT, COMPLETIONS, GENERATE, LONG, Dialect, last_choice, running, until_idle

INTERNAL = [(COMPLETIONS, "cmpl-{}-0"), (CHAT, "chatcmpl-{}"), (GENERATE, "generate-tokens-{}")]


async def test_all_counts_children_and_parents(engine: Target) -> None:
    # Greedy sampling allows no second choice.
    async with running(engine, COMPLETIONS, n=2, temperature=1) as request:
        answer = await engine.post("/abort_requests", {})
        assert answer.json() == {"status": "aborted", "aborted": 3}
        reply = (await request).json()
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["abort", "abort"]


async def test_all_counts_one_for_a_plain_request(engine: Target) -> None:
    async with running(engine, COMPLETIONS) as request:
        answer = await engine.post("/abort_requests", {"request_ids": []})
        assert answer.json() == {"status": "aborted", "aborted": 1}
        assert last_choice(await request)["finish_reason"] == "abort"


async def test_unknown_ids_count_too(engine: Target) -> None:
    async with running(engine, COMPLETIONS, headers={"X-Request-Id": "mine"}) as request:
        # The client's own id is not the one that the engine knows.
        answer = await engine.post("/abort_requests", {"request_ids": ["mine", "nobody"]})
        assert answer.json() == {"status": "aborted", "aborted": 2}
        assert last_choice(await request)["finish_reason"] == "length"


@pytest.mark.parametrize(("dialect", "known_as"), INTERNAL, ids=[dialect.name for dialect, _ in INTERNAL])
async def test_the_id_it_knows(engine: Target, dialect: Dialect, known_as: str) -> None:
    async with running(engine, dialect, headers={"X-Request-Id": "mine"}) as request:
        answer = await engine.post("/abort_requests", {"request_ids": [known_as.format("mine")]})
        assert answer.json() == {"status": "aborted", "aborted": 1}
        assert last_choice(await request)["finish_reason"] == "abort"


async def test_the_same_request_id_twice_at_once(engine: Target) -> None:
    async def ask() -> int:
        answer = await engine.call("POST", COMPLETIONS.path, COMPLETIONS.body(20), {"X-Request-Id": "twin"})
        return answer.status

    assert await asyncio.gather(ask(), ask()) == [200, 200]


async def test_scale_out_route_aborts_without_a_body(engine: Target) -> None:
    async with running(engine, GENERATE, headers={"X-Request-Id": "mine"}) as request:
        answer = await engine.post("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-mine"]})
        assert (answer.status, answer.body) == (200, b"")
        assert last_choice(await request)["finish_reason"] == "abort"


async def test_a_client_that_leaves_ends_its_request(engine: Target) -> None:
    connection = engine.connect()
    await connection.__aenter__()
    await connection.send("POST", COMPLETIONS.path, COMPLETIONS.body(LONG))
    await asyncio.sleep(0.3)
    await connection.__aexit__()
    await until_idle(engine)
