from __future__ import annotations

import pytest

from proxy.core.calls import CALLS
from tests.tools import route_walk
from tests.tools.route_walk import SIDES, Knock, is_control, proxied, section, table, walk


@pytest.fixture
async def walked():
    return await walk()


async def test_no_control_route_opens_without_the_control_token_and_the_security_page_says_so(walked):
    print(table(walked))
    assert walked.open_control == []
    assert walked.reached == set()
    assert walked.leaked == set(), "no engine sees the control token"
    assert section(table(walked)) == route_walk.PAGE.read_text(), "run python -m tests.tools.route_walk --write"
    for side in (SIDES[0], SIDES[2]):
        found = walked.found[side]
        calls = {call.path: found[Knock(call.method, call.path, True, True)] for call in CALLS.values()}
        assert set(calls.values()) == {("401", "401", "open")}, "the right token opens each of them"
    assert {results for knock, results in walked.found[SIDES[1]].items() if knock.control} == {("403", "403", "403")}


async def test_the_walk_would_see_an_open_control_route(monkeypatch):
    monkeypatch.setattr("proxy.control.plane._PUBLIC", frozenset({"/pause", "/fleet/engines"}))
    found = {(side, knock.method, knock.path) for side, knock in (await walk()).open_control if knock.served}
    opened = ("/pause", "/pause/", "/fleet/engines", "/fleet/engines/")
    assert found == {(side, "POST", path) for side in (SIDES[0], SIDES[2]) for path in opened}


async def test_what_counts_as_control():
    assert is_control("GET", "/weight_info", served=True)
    assert is_control("PUT", "/pause/", served=False)
    assert is_control("DELETE", "/fleet/engines/{engine}", served=True)
    assert is_control("POST", "/fleet/new", served=True), "a route that is added later and writes"
    assert not is_control("GET", "/fleet/syncs", served=True)
    assert not is_control("POST", "/v1/completions", served=True)


@pytest.mark.parametrize("key", [None, "engine-key"])
async def test_a_data_request_that_carries_the_control_token_goes_on_without_it(key):
    async with proxied(engine_api_key=key) as (app, engine), route_walk.aiohttp.ClientSession() as session:
        headers = {"Authorization": f"bearer  {route_walk.TOKEN} "}
        async with session.post(f"{app.url}/v1/completions", json={}, headers=headers) as answer:
            assert answer.status == 200
        told = {name.lower(): value for name, value in engine.calls("/v1/completions")[-1].headers}
        assert told.get("authorization") == (key and f"Bearer {key}")
        async with session.post(f"{app.url}/v1/completions", json={}, headers={"Authorization": "Bearer x"}) as answer:
            assert answer.status == 200
        told = {name.lower(): value for name, value in engine.calls("/v1/completions")[-1].headers}
        assert told["authorization"] == "Bearer x"


async def test_head_of_the_event_stream_has_no_body(demo):
    async with demo.session.head(f"{demo.url}/fleet/events") as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        assert answer.headers["Server"] == "fleetgate"
    assert (await demo.get("/health"))[0] == 200
