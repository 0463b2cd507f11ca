"""A proxy dies in the middle of a sync and another one takes its place: no old label may stand for new weights."""

import asyncio

import pytest

from proxy.core.admission import UNKNOWN
from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import proxy_for

UPDATE = {"update_info": {"names": ["w2"]}}


async def mocks(count=3):
    return [await MockEngine().start() for _ in range(count)]


async def end(engines):
    for mock in engines:
        await mock.kill()


@pytest.mark.parametrize("steps", [1, 2])
async def test_a_resume_after_a_restart_inside_a_round_lets_nobody_serve_half_sent_weights(steps):
    engines = await mocks()
    async with proxy_for(engines) as first:
        await first.sync("w1", "v1")
        await first.call("/pause?mode=keep")
        await first.call("/start_weight_update")
        if steps == 2:
            await first.call("/update_weights", json=UPDATE)
    async with proxy_for(engines) as second:
        await second.call("/resume")
        assert set(second.states()) == {"fenced"}
        await second.until(lambda: {mock.version for mock in engines} == {UNKNOWN})
        await second.sync("w3", "v3")
        assert set(second.states()) == {"ready"}
        assert {mock.version for mock in engines} == {"v3"}
    await end(engines)


async def test_a_round_goes_on_after_a_restart_of_the_proxy():
    engines = await mocks()
    async with proxy_for(engines) as first:
        await first.sync("w1", "v1")
        await first.call("/pause?mode=keep")
        await first.call("/start_weight_update")
    async with proxy_for(engines) as second:
        await second.call("/update_weights", json=UPDATE)
        await second.call("/finish_weight_update", json={"weight_version": "v2"})
        await second.call("/resume")
        assert set(second.states()) == {"ready"}
        assert second.plane.fleet.version == "v2"
    await end(engines)


async def test_a_plain_pause_outlives_the_proxy_and_ends_with_a_resume():
    engines = await mocks()
    async with proxy_for(engines) as first:
        await first.sync("w1", "v1")
        await first.call("/pause?mode=keep")
    async with proxy_for(engines) as second:
        assert second.plane.gate.closed
        await second.call("/resume")
        await second.until(lambda: set(second.states()) == {"ready"})
        assert {mock.version for mock in engines} == {"v1"}
    await end(engines)


async def test_a_failed_update_is_known_to_the_next_proxy():
    engines = await mocks()
    async with proxy_for(engines) as first:
        await first.sync("w1", "v1")
        await first.call("/start_weight_update")
        engines[1].fail("/update_weights", times=1)
        await first.call("/update_weights", json=UPDATE, status=424)
        await first.until(lambda: {mock.version for mock in engines} == {UNKNOWN})
        assert (await first.get("/weight_info")) == {"weight_version": "v1"}
    async with proxy_for(engines) as second:
        await asyncio.sleep(0.1)
        assert set(second.states()) == {"fenced"}
        await second.sync("w3")
        assert set(second.states()) == {"ready"}
        assert all(mock.version.startswith("u") for mock in engines)
    await end(engines)


async def test_the_proxys_own_label_is_there_before_the_sessions_close():
    engines = await mocks()
    async with proxy_for(engines) as fleet:
        await fleet.sync("w1")
        for mock in engines:
            label, finish = mock.calls("/update_weight_version")[0], mock.calls("/finish_weight_update")[0]
            assert label.at <= finish.at
        assert {mock.version for mock in engines} == {"u1"}
    await end(engines)


async def test_an_operator_who_admits_an_engine_of_nobodys_weights_gives_it_the_fleets_label():
    engines = await mocks()
    async with proxy_for(engines) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/start_weight_update")
        engines[1].fail("/update_weights", times=1)
        await fleet.call("/update_weights", json=UPDATE, status=424)
        await fleet.until(lambda: {mock.version for mock in engines} == {UNKNOWN})
        await fleet.call(f"/fleet/engines/{engines[0].id}/admit")
        assert engines[0].version == "v1"
        assert fleet.states() == ["ready", "fenced", "fenced"]
    await end(engines)


async def test_weights_that_are_loaded_from_a_path_in_a_pause_are_nobodys_until_they_are_labelled():
    engines = await mocks()
    async with proxy_for(engines) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/pause?mode=keep")
        engines[0].fail("/update_weights", "slow", seconds=0.3)
        update = asyncio.ensure_future(fleet.call("/update_weights", json={"weight_dir": "/step_2"}))
        await fleet.until(lambda: fleet.seen("/update_weights") == [1 + 1] * 3)
        assert {mock.version for mock in engines} == {UNKNOWN}
        await update
        assert len({mock.version for mock in engines}) == 1
        assert engines[0].version.startswith("u")
        await fleet.call("/resume")
        assert set(fleet.states()) == {"ready"}
    await end(engines)
