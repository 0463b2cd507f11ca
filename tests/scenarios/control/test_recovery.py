"""The proxy died in the middle of a sync and another one begins: whose weights do the engines hold?"""

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
    engines = await engines_with(version)
    async with proxy_for(engines) as first:
        await begin(first, updates=updates)
    async with proxy_for(engines) as second:
        assert await second.get("/weight_info") == {"weight_version": version or "u1"}
        assert second.plane.gate.closed
        await second.call("/resume")
        assert second.states() == ["fenced", "fenced"]
        assert all(HALF_DONE in engine.reason for engine in second.plane.fleet)
        await second.sync("w3", "v3")
        assert second.states() == ["ready", "ready"]
        await second.until(lambda: not any(engine.history for engine in second.plane.fleet))
    async with proxy_for(engines) as third:
        assert third.states() == ["ready", "ready"]
    for mock in engines:
        await mock.kill()


async def test_the_trainer_may_end_the_update_through_the_next_proxy():
    engines = await engines_with("v1")
    async with proxy_for(engines) as first:
        await begin(first, updates=1)
    async with proxy_for(engines) as second:
        await second.call("/update_weights", json={"update_info": {"names": ["w2.1"]}})
        await second.call("/finish_weight_update", json={"weight_version": "v2"})
        await second.call("/resume")
        assert second.states() == ["ready", "ready"]
        assert second.plane.fleet.version == "v2"
    for mock in engines:
        await mock.kill()


async def test_an_update_that_failed_is_remembered_while_the_round_is_open_elsewhere():
    engines = await engines_whose_first_failed()
    async with proxy_for(engines) as second:
        assert second.states() == ["fenced", "fenced", "fenced"]
    for mock in engines:
        await mock.kill()


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("label", [None, "v2"])
async def test_whole_rounds_leave_no_doubt(paused, label):
    """Nor do automatic labels among the trainer's own."""
    engines = await engines_with(label)
    async with proxy_for(engines) as first:
        await first.sync("w2")
        if paused:
            await first.call("/pause")
    async with proxy_for(engines) as second:
        await second.call("/resume")
        assert second.states() == ["ready", "ready"]
    for mock in engines:
        await mock.kill()


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
    engines = await engines_with("v1")
    async with proxy_for(engines) as first:
        await begin(first, updates=1)
    engines[0].fail("/metrics", kind, seconds=0.5, times=2)
    async with proxy_for(engines, probe_timeout=0.2) as second:
        await second.call("/resume")
        await second.until(lambda: second.states() == ["fenced", "fenced"])
        assert all(HALF_DONE in engine.reason for engine in second.plane.fleet)
    for mock in engines:
        await mock.kill()


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
    async with proxy_for(engines) as second:
        await second.call("/resume")
        assert second.states() == ["fenced", "fenced", "fenced"]
        await second.sync("w3")
        assert second.states() == ["ready", "ready", "ready"]
    for mock in engines:
        await mock.kill()


async def test_an_engine_that_is_heard_late_tells_what_those_heard_before_were_in():
    """One whose update failed is in doubt because the round is open at others, whose cores did not answer at first."""
    engines = await engines_whose_first_failed()
    for mock in engines[1:]:
        mock.fail("/weight_info", times=3)
    async with proxy_for(engines) as second:
        await second.until(lambda: second.states() == ["fenced", "fenced", "fenced"])
        assert all(HALF_DONE in engine.reason for engine in second.plane.fleet)
    for mock in engines:
        await mock.kill()
