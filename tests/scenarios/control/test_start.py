"""Calls that come before the proxy has heard every engine for the first time."""

import pytest

from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import proxy_for


async def test_a_resume_before_the_first_looks_are_over_lets_nobody_in_who_missed_the_updates():
    engines = [await MockEngine().start() for _ in range(4)]
    async with proxy_for(engines) as first:
        await first.sync("w1", "v1")
    await engines[0].restart()
    engines[3].fail("/health", "hang")
    async with proxy_for(engines, wait=False, probe_timeout=2) as second:
        await second.until(lambda: sum(engine.alive for engine in second.plane.fleet) == 3)
        await second.call("/pause")
        await second.call("/resume")
        assert second.states() == ["fenced", "fenced", "fenced", "starting"]
        engines[3].heal()
        await second.until(lambda: second.states()[:3] == ["fenced", "ready", "ready"])
    for mock in engines:
        await mock.kill()


@pytest.mark.parametrize("named", [False, True])
async def test_a_sync_before_the_first_looks_are_over_repeats_no_automatic_label(named):
    engines = [await MockEngine().start() for _ in range(3)]
    async with proxy_for(engines) as first:
        await first.sync("w1")
        await first.sync("w2", "v2")
    engines[2].fail("/health", "hang")
    async with proxy_for(engines, wait=False, probe_timeout=2) as second:
        await second.until(lambda: sum(engine.alive for engine in second.plane.fleet) == 2)
        if named:
            await second.sync("w2.1", "v3")
        await second.sync("w3")
        assert second.plane.fleet.version != "u1"
        engines[2].heal()
    for mock in engines:
        await mock.kill()


async def test_a_sync_before_the_first_looks_are_over_is_not_outvoted_by_them():
    engines = [await MockEngine(version="v0", weights="w0").start() for _ in range(3)]
    engines[2].fail("/health", "hang")
    async with proxy_for(engines, wait=False, probe_timeout=2) as fleet:
        await fleet.until(lambda: sum(engine.alive for engine in fleet.plane.fleet) == 2)
        await fleet.sync("w1", "v1")
        engines[2].heal()
        await fleet.until(lambda: fleet.engine(2).alive)
        await fleet.until(lambda: fleet.states() == ["ready", "ready", "fenced"])
        assert fleet.plane.fleet.version == "v1"
    for mock in engines:
        await mock.kill()


async def test_an_automatic_label_that_only_a_restarted_engine_showed_is_not_used_again():
    engines = [await MockEngine().start() for _ in range(2)]
    async with proxy_for(engines) as first:
        await first.sync("w1")
    await engines[1].restart()
    async with proxy_for(engines) as second:
        await second.sync("w3")
        assert second.plane.fleet.version not in ("u1", "u2")
        assert {mock.version for mock in engines} == {second.plane.fleet.version}
    for mock in engines:
        await mock.kill()
