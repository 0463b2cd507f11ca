"""verl: Ray drives its servers, so only its data plane meets the proxy (``verl/trainer/main_generation_server.py``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from engine_launcher.sim.config import SimConfig
from tests.contract.clients.conftest import SimFleet, held, sim_fleet
from tests.contract.clients.using import Clients

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

SAMPLES = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[SimFleet]:
    async with sim_fleet(*[SimConfig()] * 3) as running:
        yield running


async def submit(url: str, **body: Any) -> dict[str, Any]:
    """One request with a session of its own, as verl sends it: no time limit, and a token that nobody checks."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        headers = {"Authorization": "Bearer token-abc123"}
        async with session.post(f"{url}/v1/chat/completions", headers=headers, json=body) as answer:
            return await answer.json()


async def test_a_batch_over_one_address(fleet: SimFleet) -> None:
    chats = [[{"role": "user", "content": f"question {index}"}] for index in range(16)]
    asked = [
        submit(fleet.url, model="tiny", messages=messages, max_tokens=10, temperature=0.0)
        for messages in chats
        for _ in range(SAMPLES)
    ]
    answers = await asyncio.gather(*asked)
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert all(len(set(texts[index : index + SAMPLES])) == 1 for index in range(0, len(texts), SAMPLES))
    assert all(fleet.calls("/v1/chat/completions")), "each engine answered some"
    for calls in fleet.calls("/v1/chat/completions"):
        assert ["Authorization", "Bearer token-abc123"] in [list(field) for field in calls[0]["headers"]]


async def test_agents_wait_while_something_else_replaces_the_weights(clients: Clients, fleet: SimFleet) -> None:
    await fleet.post("/pause?mode=abort")
    asking = clients.start("using_openai.ask_async", url=fleet.url, route="chat", count=8)
    await held(fleet, 8)
    await fleet.post("/resume")
    assert len({each["text"] for each in await asking}) == 1
