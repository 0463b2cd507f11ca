"""The Anthropic SDK on ``/v1/messages`` through the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.faults import Fault
from tests.contract.clients.conftest import SimFleet, held, sim_fleet
from tests.contract.clients.using import ClientError, Clients

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/messages"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[SimFleet]:
    async with sim_fleet(*[SimConfig()] * 3) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unprobed() -> AsyncIterator[SimFleet]:
    """The proxy learns of a pause from refusals only, not from a probe that comes first."""
    async with sim_fleet(SimConfig(), probe_interval=3600) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(running: SimFleet) -> AsyncIterator[SimFleet]:
    yield running
    await running.restore()


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("function", ["ask", "ask_async"])
async def test_sync_and_async(clients: Clients, fleet: SimFleet, function: str, stream: bool) -> None:
    direct = await clients("using_anthropic.ask", url=fleet.engines[0].url)
    found = await clients(f"using_anthropic.{function}", url=fleet.url, stream=stream)
    assert found["text"] == direct["text"]
    assert found["tokens"] == 20
    assert found["finish"] == "max_tokens"
    assert found.get("streamed", direct["text"]) == direct["text"]


async def test_many_streams_at_once(clients: Clients, fleet: SimFleet) -> None:
    direct = await clients("using_anthropic.ask", url=fleet.engines[0].url, tokens=100)
    found = await clients("using_anthropic.many", url=fleet.url, count=30, tokens=100)
    assert {each["text"] for each in found} == {direct["text"]}


async def test_count_tokens_is_answered_in_a_pause(clients: Clients, fleet: SimFleet) -> None:
    direct = await clients("using_anthropic.count_tokens", url=fleet.engines[0].url, prompt="how many")
    await fleet.post("/pause?mode=keep")
    assert await clients("using_anthropic.count_tokens", url=fleet.url, prompt="how many") == direct


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_asked_while_paused_answered_after_resume(clients: Clients, fleet: SimFleet, mode: str) -> None:
    await fleet.post(f"/pause?mode={mode}")
    asking = [clients.start("using_anthropic.ask", url=fleet.url, stream=stream) for stream in (False, True)]
    await held(fleet, 2)
    assert not any(fleet.calls(PATH))
    await fleet.post("/resume")
    found = await asyncio.gather(*asking)
    direct = await clients("using_anthropic.ask", url=fleet.engines[0].url)
    assert [each["text"] for each in found] == [direct["text"]] * 2


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_an_engines_overloaded_error_while_paused_does_not_reach_the_sdk(
    clients: Clients, unprobed: SimFleet, stream: bool, mode: str
) -> None:
    engine = unprobed.engines[0]
    engine.log.clear()
    direct = await clients("using_anthropic.ask", url=engine.url)
    async with unprobed.http.post(f"{engine.url}/pause?mode={mode}") as answer:
        assert answer.status == 200
    asking = clients.start("using_anthropic.ask", url=unprobed.url, stream=stream)
    await held(unprobed, 1)
    refused = engine.log.entries(path=PATH)[1:]
    assert [each["status"] for each in refused] == [200 if stream else 503], "the engine did not refuse it"
    async with unprobed.http.post(f"{engine.url}/resume") as answer:
        assert answer.status == 200
    assert (await asking)["text"] == direct["text"]


async def test_a_stream_that_breaks_raises(clients: Clients, fleet: SimFleet) -> None:
    fleet.faults(Fault(path=PATH, action="reset", after_tokens=5))
    with pytest.raises(ClientError) as raised:
        await clients("using_anthropic.ask", url=fleet.url, stream=True, max_retries=2)
    assert raised.value.type == "APIStatusError", raised.value
    assert raised.value.body["error"]["type"] == "api_error"
    assert sum(len(calls) for calls in fleet.calls(PATH)) == 1, "a stream that began was asked for again"


async def test_errors_of_the_proxy_are_understood(clients: Clients) -> None:
    async with sim_fleet(SimConfig(), hold_timeout=0.5) as fleet:
        await fleet.post("/pause?mode=keep")
        for stream in (False, True):
            with pytest.raises(ClientError) as raised:
                await clients("using_anthropic.ask", url=fleet.url, stream=stream)
            assert raised.value.status == 503
            assert "paused" in raised.value.message or "held" in raised.value.message, raised.value
