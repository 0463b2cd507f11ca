"""The proxy died in the middle of a sync and another one begins: whose weights do the engines hold?"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import Rig, proxy_for, rig

HALF_DONE = "left half done"


async def engines_with(version: str | None, *, count: int = 2) -> list[MockEngine]:
    """Engines that took one whole sync."""
    engines = [await MockEngine().start() for _ in range(count)]
    async with proxy_for(engines) as fleet:
        await fleet.sync("w1", version)
    return engines


async def begin(fleet: Rig, *, updates: int, **kw: Any) -> None:
    await fleet.call("/pause?mode=keep")
    await fleet.call("/start_weight_update")
    for number in range(updates):
        await fleet.call("/update_weights", json={"update_info": {"names": [f"w2.{number}"]}}, **kw)


async def engines_left_by_a_proxy(version: str | None, *, updates: int) -> list[MockEngine]:
    """Engines that took one whole sync and are in the middle of another one."""
    engines = await engines_with(version)
    async with proxy_for(engines) as first:
        await begin(first, updates=updates)
    return engines


@asynccontextmanager
async def last_proxy_for(engines: list[MockEngine], **settings: Any) -> AsyncIterator[Rig]:
    """The engines end with it."""
    async with proxy_for(engines, **settings) as last:
        yield last
    for mock in engines:
        await mock.kill()


async def engines_whose_first_failed() -> list[MockEngine]:
    """Three engines in a broken round: the update failed on the first, and the session is open at the others."""
    engines = await engines_with("v1", count=3)
    engines[0].fail("/update_weights", status=500)
    async with proxy_for(engines) as first:
        await begin(first, updates=1, status=424)
        await first.call("/resume")
    engines[0].heal()
    return engines


@pytest.mark.parametrize("version", [None, "v1"])
@pytest.mark.parametrize("updates", [0, 1])
async def test_a_resume_lets_nobody_serve_who_is_in_the_middle_of_an_update(version, updates):
    engines = await engines_left_by_a_proxy(version, updates=updates)
    async with proxy_for(engines) as second:
        assert await second.get("/weight_info") == {"weight_version": version or "u1"}
        assert second.plane.gate.closed
        await second.call("/resume")
        assert second.states() == ["fenced", "fenced"]
        assert all(HALF_DONE in engine.reason for engine in second.plane.fleet)
        await second.sync("w3", "v3")
        assert second.states() == ["ready", "ready"]
        await second.until(lambda: not any(engine.history for engine in second.plane.fleet))
    async with last_proxy_for(engines) as third:
        assert third.states() == ["ready", "ready"]


async def test_the_trainer_may_end_the_update_through_the_next_proxy():
    engines = await engines_left_by_a_proxy("v1", updates=1)
    async with last_proxy_for(engines) as second:
        await second.call("/update_weights", json={"update_info": {"names": ["w2.1"]}})
        await second.call("/finish_weight_update", json={"weight_version": "v2"})
        await second.call("/resume")
        assert second.states() == ["ready", "ready"]
        assert second.plane.fleet.version == "v2"


async def test_an_update_that_failed_is_remembered_while_the_round_is_open_elsewhere():
    engines = await engines_whose_first_failed()
    async with last_proxy_for(engines) as second:
        assert second.states() == ["fenced", "fenced", "fenced"]


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("label", [None, "v2"])
async def test_whole_rounds_leave_no_doubt(paused, label):
    """Nor do automatic labels among the trainer's own."""
    engines = await engines_with(label)
    async with proxy_for(engines) as first:
        await first.sync("w2")
        if paused:
            await first.call("/pause")
    async with last_proxy_for(engines) as second:
        await second.call("/resume")
        assert second.states() == ["ready", "ready"]


async def test_an_engine_that_comes_later_is_judged_too():
    engines = await engines_with("v1", count=3)
    async with proxy_for(engines[2:]) as other:
        await begin(other, updates=1)
        await other.call("/resume")
    async with proxy_for(engines[:2]) as second:
        await second.call("/fleet/engines", json={"url": engines[2].url}, status=201)
        late = second.plane.fleet.engines[engines[2].id]
        await second.until(lambda: HALF_DONE in late.reason)
        assert second.states() == ["ready", "ready"]
        assert late.state == "fenced"
    for mock in engines:
        await mock.kill()


@pytest.mark.parametrize("kind", ["status", "slow"])
async def test_an_engine_whose_counts_cannot_be_read_at_once_is_looked_at_again(kind):
    engines = await engines_left_by_a_proxy("v1", updates=1)
    engines[0].fail("/metrics", kind, seconds=0.5, times=2)
    async with last_proxy_for(engines, probe_timeout=0.2) as second:
        await second.call("/resume")
        await second.until(lambda: second.states() == ["fenced", "fenced"])
        assert all(HALF_DONE in engine.reason for engine in second.plane.fleet)


async def test_an_engine_whose_counts_can_never_be_read_is_served_in_the_end():
    mock = MockEngine()
    mock.fail("/metrics")
    async with rig(engines=[mock]) as fleet:
        await fleet.until_state(0, "ready")


async def test_a_round_that_is_open_somewhere_is_an_update_although_all_labels_are_the_default():
    engines = await engines_with("v1", count=3)
    async with proxy_for(engines[:2]) as first:
        await begin(first, updates=1)
    for mock in engines:
        mock.version = "default"
    async with last_proxy_for(engines) as second:
        await second.call("/resume")
        assert second.states() == ["fenced", "fenced", "fenced"]
        await second.sync("w3")
        assert second.states() == ["ready", "ready", "ready"]


async def test_an_engine_that_is_heard_late_tells_what_those_heard_before_were_in():
    """One whose update failed is in doubt because the round is open at others, whose cores did not answer at first."""
    engines = await engines_whose_first_failed()
    for mock in engines[1:]:
        mock.fail("/weight_info", times=3)
    async with last_proxy_for(engines) as second:
        await second.until(lambda: second.states() == ["fenced", "fenced", "fenced"])
        assert all(HALF_DONE in engine.reason for engine in second.plane.fleet)


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_part_of_what_another_proxy_began_is_no_whole_update(resumed):
    engines = await engines_left_by_a_proxy("v1", updates=1)
    async with last_proxy_for(engines) as second:
        if resumed:
            await second.call("/resume")
        part = {"update_info": {"names": ["w2.1"]}}
        await second.call("/update_weights", json=part, status=409 if resumed else 200)
        await second.call("/resume")
        assert second.states() == ["fenced", "fenced"]


async def test_engines_that_are_added_in_the_middle_of_a_round_are_in_it():
    engines = await engines_left_by_a_proxy("v1", updates=1)
    async with proxy_for([]) as second:
        for mock in engines:
            await second.call("/fleet/engines", json={"url": mock.url}, status=201)
        await second.until(lambda: all(HALF_DONE in engine.reason for engine in second.plane.fleet))
        await second.call("/update_weights", json={"update_info": {"names": ["w2.1"]}})
        await second.call("/resume")
        assert all(engine.state == "fenced" for engine in second.plane.fleet)
    for mock in engines:
        await mock.kill()


async def test_an_update_that_failed_after_its_proxy_died_is_in_doubt():
    """The engines closed their sessions themselves, and nobody was there to mark them."""
    engines = await engines_left_by_a_proxy("v1", updates=0)
    for mock in engines:
        mock.counts["/update_weights", "5xx"] += 1
        mock.session = False
    async with last_proxy_for(engines) as second:
        await second.call("/resume")
        assert second.states() == ["fenced", "fenced"]
        await second.until(lambda: all(mock.version == "fleetgate-unfinished:v1" for mock in engines))


async def test_a_failure_outside_any_round_does_not_hide_an_open_one():
    engines = await engines_with("v1")
    for mock in engines:
        mock.counts["/update_weights", "5xx"] += 1
    async with proxy_for(engines) as first:
        await begin(first, updates=1)
    async with last_proxy_for(engines) as second:
        await second.call("/resume")
        assert second.states() == ["fenced", "fenced"]


async def test_a_label_goes_ahead_only_to_engines_in_a_session():
    engines = await engines_left_by_a_proxy("v1", updates=1)
    await engines[0].restart()
    async with last_proxy_for(engines) as second:
        await second.call("/finish_weight_update", status=424)
        given = [[call.json()["new_version"] for call in mock.calls("/update_weight_version")] for mock in engines]
        assert given[0] == ["fleetgate-unfinished:default"]
        assert given[1][0].startswith("u")


async def test_an_engine_that_sleeps_is_not_forgotten_with_the_proxy():
    engines = await engines_with("v1")
    async with proxy_for(engines) as first:
        await first.call("/sleep?level=1")
    async with last_proxy_for(engines) as second:
        await second.call("/start_weight_update", status=409)
        await second.call("/resume")
        assert second.plane.fleet.eligible == []
        await second.call("/wake_up")
        assert len(second.plane.fleet.eligible) == 2


async def test_whoever_holds_nobodys_weights_has_no_vote_where_others_do():
    engines = await engines_with("v1")
    engines[0].version = "fleetgate-unfinished:v0"
    async with last_proxy_for(engines) as second:
        assert second.plane.fleet.version == "v1"
        assert second.states() == ["fenced", "ready"]


async def test_an_open_round_at_the_start_is_over_with_the_next_whole_one():
    """Who is merely behind, and comes later, is not in doubt for it."""
    engines = await engines_with("v1", count=3)
    for path, status in (("/start_weight_update", "2xx"), ("/update_weights", "5xx")):
        engines[2].counts[path, status] += 1  # a round that failed once, and was put right
    async with proxy_for(engines) as first:
        await begin(first, updates=1)
    async with last_proxy_for(engines) as second:
        await second.sync("w3", "v3")
        assert second.states() == ["ready", "ready", "ready"]
        await second.call(f"/fleet/engines/{engines[2].id}", method="DELETE")
        await second.call("/fleet/engines", json={"url": engines[2].url}, status=201)
        await second.until(lambda: second.states() == ["ready", "ready", "ready"])
        assert engines[2].version == "v3"
