"""The OpenAI SDK through the proxy: what it gets is what an engine alone would have given it, pauses or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.faults import Fault
from tests.contract.clients.conftest import SimFleet, held, sim_fleet, until
from tests.contract.clients.using import ClientError, Clients
from tests.tools.rig import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTES = ("completions", "chat", "responses")
FORMS = [(route, stream) for route in ROUTES for stream in (False, True)]
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
HOLD_SECONDS = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[SimFleet]:
    async with sim_fleet(*[SimConfig()] * 3, hold_ping=0) as fleet:
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


async def reference(clients: Clients, fleet: SimFleet, route: str, **fields: Any) -> str:
    """What one engine says without a proxy."""
    direct = await clients("using_openai.ask", url=fleet.engines[0].url, route=route, **fields)
    return direct["text"]


@pytest.mark.parametrize(("route", "stream"), FORMS)
async def test_sync(clients: Clients, fleet: SimFleet, route: str, stream: bool) -> None:
    found = await clients("using_openai.ask", url=fleet.url, route=route, stream=stream)
    assert found["text"] == await reference(clients, fleet, route)
    assert len(found["text"]) == 20
    assert found["finish"] == ("incomplete" if route == "responses" else "length")
    assert (found["events"] >= 20) is stream


@pytest.mark.parametrize(("route", "stream"), FORMS)
async def test_many_at_once_with_the_async_client(clients: Clients, fleet: SimFleet, route: str, stream: bool) -> None:
    expected = await reference(clients, fleet, route, tokens=200)
    before = [engine.requests_total for engine in fleet.engines]
    for engine in fleet.engines:
        engine.core.speed.tokens_per_second = 500.0
    found = await clients("using_openai.ask_async", url=fleet.url, route=route, stream=stream, count=60, tokens=200)
    assert [each["text"] for each in found] == [expected] * 60
    assert all(engine.requests_total - old >= 15 for engine, old in zip(fleet.engines, before, strict=True))


async def test_models_and_headers(clients: Clients, fleet: SimFleet) -> None:
    assert await clients("using_openai.models", url=fleet.url) == ["tiny"]
    headers = await clients("using_openai.headers_of", url=fleet.url, request_id="sdk-1")
    assert headers["x-request-id"] == "sdk-1"
    assert headers["x-fleetgate-engine"] in [engine.url.removeprefix("http://") for engine in fleet.engines]
    assert headers["x-fleetgate-attempts"] == "1"
    assert "x-forwarded-for" not in headers


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_asked_while_paused_answered_after_resume(clients: Clients, fleet: SimFleet, mode: str) -> None:
    await fleet.post(f"/pause?mode={mode}")
    asking = [clients.start("using_openai.ask", url=fleet.url, route=r, stream=s) for r, s in FORMS]
    await held(fleet, len(FORMS))
    assert all(not calls for path in PATHS.values() for calls in fleet.calls(path)), "a held request reached an engine"
    await fleet.post("/resume")
    for (route, _), found in zip(FORMS, await asyncio.gather(*asking), strict=True):
        assert found["text"] == await reference(clients, fleet, route)


@pytest.mark.parametrize("mode", ["wait", "abort"])
@pytest.mark.parametrize(("route", "stream"), FORMS)
async def test_no_form_of_an_engines_refusal_while_paused_reaches_the_sdk(
    clients: Clients, unprobed: SimFleet, route: str, stream: bool, mode: str
) -> None:
    # Somebody pauses the engine behind the proxy's back: it refuses, each route and kind in its own form.
    engine = unprobed.engines[0]
    engine.log.clear()
    expected = await reference(clients, unprobed, route)
    async with unprobed.http.post(f"{engine.url}/pause?mode={mode}") as answer:
        assert answer.status == 200
    asking = clients.start("using_openai.ask", url=unprobed.url, route=route, stream=stream)
    await held(unprobed, 1)
    refused = engine.log.entries(path=PATHS[route])[1:]
    assert [each["status"] for each in refused] == [200 if stream else 503], "the engine did not refuse it"
    assert not asking.done()
    async with unprobed.http.post(f"{engine.url}/resume") as answer:
        assert answer.status == 200
    found = await asking
    assert found["text"] == expected
    assert await unprobed.states() == ["ready"], "a pause is no ill health"


@pytest.mark.parametrize(("route", "stream"), FORMS)
async def test_a_refusal_for_load_is_tried_on_another_engine(
    clients: Clients, fleet: SimFleet, route: str, stream: bool
) -> None:
    busy = {
        "error": {
            "message": "The engine is currently busy and cannot accept new requests. "
            "Please try again later or on a different instance.",
            "type": "Service Unavailable",
            "param": None,
            "code": 503,
        }
    }
    for index in (0, 1):
        fleet.faults(Fault(path=PATHS[route], action="status", status=503, body=busy), engine=index)
    found = [await clients("using_openai.ask", url=fleet.url, route=route, stream=stream) for _ in range(3)]
    fleet.faults()
    assert {each["text"] for each in found} == {await reference(clients, fleet, route)}


@pytest.mark.parametrize("route", ROUTES)
async def test_a_wrong_request_is_refused_once_with_the_engines_words(
    clients: Clients, fleet: SimFleet, route: str
) -> None:
    with pytest.raises(ClientError) as raised:
        await clients("using_openai.ask", url=fleet.url, route=route, max_retries=3, extra_body={"model": "absent"})
    assert (raised.value.type, raised.value.status) == ("NotFoundError", 404)
    assert "The model `absent` does not exist" in raised.value.message
    assert sum(len(calls) for calls in fleet.calls(PATHS[route])) == 1


@pytest.mark.parametrize("route", ["completions", "chat"])
async def test_an_error_of_a_living_engine_is_for_the_sdk_to_retry(
    clients: Clients, fleet: SimFleet, route: str
) -> None:
    fault = Fault(path=PATHS[route], action="status", status=500, body={"error": {"message": "no"}}, times=1)
    for index in range(3):
        fleet.faults(replace(fault), engine=index)
    with pytest.raises(ClientError) as raised:
        await clients("using_openai.ask", url=fleet.url, route=route, max_retries=0)
    assert (raised.value.type, raised.value.status) == ("InternalServerError", 500)
    found = await clients("using_openai.ask", url=fleet.url, route=route, max_retries=4)
    assert len(found["text"]) == 20


@pytest.mark.parametrize(("route", "stream"), FORMS)
async def test_an_engine_that_dies_before_its_first_byte_is_not_seen(
    clients: Clients, fleet: SimFleet, route: str, stream: bool
) -> None:
    fleet.faults(Fault(path=PATHS[route], action="reset", times=1))
    found = await clients("using_openai.ask", url=fleet.url, route=route, stream=stream, max_retries=0)
    fleet.faults()
    assert found["text"] == await reference(clients, fleet, route)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_that_breaks_raises_and_never_looks_whole(clients: Clients, fleet: SimFleet, route: str) -> None:
    fleet.faults(Fault(path=PATHS[route], action="reset", after_tokens=5))
    with pytest.raises(ClientError) as raised:
        await clients("using_openai.ask", url=fleet.url, route=route, stream=True, max_retries=2)
    assert raised.value.type == ("StreamFailed" if route == "responses" else "APIError"), raised.value
    assert sum(len(calls) for calls in fleet.calls(PATHS[route])) == 1, "a stream that began was asked for again"


async def test_a_client_that_leaves_frees_its_engine(clients: Clients, fleet: SimFleet) -> None:
    for engine in fleet.engines:
        engine.core.speed.tokens_per_second = 50.0
    before = sum(engine.core.counters.aborted_by_client for engine in fleet.engines)
    assert await clients("using_openai.leave", url=fleet.url, tokens=5000, events=3) == 3
    await eventually(lambda: sum(e.core.counters.aborted_by_client for e in fleet.engines) == before + 1, "abort")
    assert sum(engine.core.unfinished for engine in fleet.engines) == 0


async def test_the_sdks_own_timeout_frees_the_engine_too(clients: Clients, fleet: SimFleet) -> None:
    for engine in fleet.engines:
        engine.core.speed.tokens_per_second = 5.0
    with pytest.raises(ClientError) as raised:
        await clients("using_openai.ask", url=fleet.url, route="chat", timeout=0.5, max_retries=0)
    assert raised.value.type == "APITimeoutError"
    await eventually(lambda: not sum(engine.core.unfinished for engine in fleet.engines), "slot")


async def test_a_hold_past_its_limit_is_an_error_that_the_sdk_retries(clients: Clients) -> None:
    async with sim_fleet(SimConfig(), hold_timeout=HOLD_SECONDS) as fleet:
        await fleet.post("/pause?mode=keep")
        for stream in (False, True):
            with pytest.raises(ClientError) as raised:
                await clients("using_openai.ask", url=fleet.url, route="chat", stream=stream)
            assert (raised.value.type, raised.value.status) == ("InternalServerError", 503)
            assert raised.value.body["code"] == "hold_timeout"
        asking = clients.start("using_openai.ask", url=fleet.url, route="chat", max_retries=5)

        async def refused_again() -> bool:
            return await fleet.samples("fleetgate_requests_total", code="503") >= 3

        await until(refused_again)
        await fleet.post("/resume")
        assert len((await asking)["text"]) == 20


async def test_a_held_request_that_was_aborted_is_not_asked_again(clients: Clients, fleet: SimFleet) -> None:
    # The SDK sends a 409 again; `x-should-retry: false` is what keeps it from that.
    await fleet.post("/pause?mode=keep")
    headers = {"X-Request-Id": "rollout-7"}
    asking = clients.start("using_openai.ask", url=fleet.url, route="chat", max_retries=5, headers=headers)
    await held(fleet, 1)
    assert await fleet.post("/abort_requests", {"request_ids": ["rollout-7"]}) == {"status": "aborted", "aborted": 1}
    with pytest.raises(ClientError) as raised:
        await asking
    assert (raised.value.type, raised.value.status) == ("ConflictError", 409)
    assert raised.value.body["code"] == "request_aborted"
    assert not any(fleet.calls(PATHS["chat"]))
