"""The trainer names the weights by a call of its own: it may be lost, or reach some only."""

import asyncio

from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import proxy_for, rig
from tests.scenarios.control.test_labels import labels


async def test_the_trainers_label_is_tried_again_and_may_be_sent_again():
    async with rig(2) as fleet:
        await fleet.sync("w1")
        fleet.engines[1].fail("/update_weight_version", "lost", times=1)
        await fleet.call("/update_weight_version", json={"new_version": "v1"})
        assert labels(fleet) == ["v1", "v1"]
        fleet.engines[1].fail("/update_weight_version", "lost")
        await fleet.call("/update_weight_version", json={"new_version": "v1.1"}, status=424)
        await fleet.until(lambda: fleet.states() == ["fenced", "fenced"])
        fleet.engines[1].heal()
        await fleet.call("/pause")
        await fleet.call("/update_weight_version", json={"new_version": "v1.1"})
        await fleet.call("/resume")
        assert labels(fleet) == ["v1.1", "v1.1"]
        await fleet.until(lambda: fleet.states() == ["ready", "ready"])


async def test_an_engine_that_had_the_trainers_label_first_is_in_when_the_others_get_it():
    engines = [await MockEngine(version="v1").start() for _ in range(3)]
    engines[0].version = "v2"
    async with proxy_for(engines) as fleet:
        assert fleet.states() == ["fenced", "ready", "ready"]
        await fleet.call("/update_weight_version", json={"new_version": "v2"})
        assert fleet.states() == ["ready", "ready", "ready"]
    for mock in engines:
        await mock.kill()


async def test_an_engine_that_has_the_label_before_the_others_stays_in():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/update_weight_version", "slow", seconds=0.4, times=1)
        label = asyncio.ensure_future(fleet.call("/update_weight_version", json={"new_version": "v1.1"}))
        await fleet.until(lambda: labels(fleet) == ["v1.1", "v1"])
        while not label.done():
            assert fleet.states() == ["ready", "ready"]
            await asyncio.sleep(0.02)
        await label
        assert fleet.states() == ["ready", "ready"]


async def test_a_tainted_engine_that_takes_a_whole_update_is_not_marked_before_it_is_let_in():
    """It is looked at between its label and the end of the call."""
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/update_weights", times=1)
        await fleet.call("/update_weights", json={"weight_dir": "/step_2"}, status=424)
        assert fleet.engine(1).tainted
        fleet.engines[0].fail("/update_weight_version", "slow", seconds=0.5, times=3)
        await fleet.call("/update_weights", json={"weight_dir": "/step_3"})
        assert labels(fleet) == ["u2", "u2"]
        await asyncio.sleep(0.2)
        assert labels(fleet) == ["u2", "u2"]
        assert fleet.states() == ["ready", "ready"]
