"""One life-cycle at a time, replays answered once, and trainers that go away."""

import asyncio

import aiohttp
import pytest

from tests.scenarios.control.rig import rig

UPDATE = {"update_info": {"names": ["w"]}}


async def test_a_second_caller_is_told_who_holds_the_lock():
    async with rig(2) as fleet:
        fleet.engines[0].fail("/pause", "slow", seconds=0.5)
        first = asyncio.ensure_future(fleet.call("/pause?mode=keep", headers={"X-Request-Id": "trainer-7"}))
        await fleet.until(lambda: fleet.seen("/pause") == [1, 1])
        data = await fleet.call("/pause?mode=abort", status=409)
        assert data["holder"]["call"] == "/pause"
        assert data["holder"]["request_id"] == "trainer-7"
        assert "trainer-7" in data["error"]["message"]
        shown = await fleet.get("/fleet")
        assert shown["lifecycle"]["request_id"] == "trainer-7"
        assert shown["phase"] == "pausing"
        await first
        assert (await fleet.get("/fleet"))["lifecycle"] is None
        await fleet.call("/pause?mode=abort")


async def test_a_replay_of_a_running_call_joins_it():
    async with rig(2) as fleet:
        await fleet.call("/start_weight_update")
        fleet.engines[0].fail("/update_weights", "slow", seconds=0.3)
        calls = [asyncio.ensure_future(fleet.call("/update_weights", json=UPDATE)) for _ in range(4)]
        answers = await asyncio.gather(*calls)
        assert answers == [{"message": "Weights updated"}] * 4
        assert fleet.seen("/update_weights") == [1, 1]


async def test_a_replay_of_a_call_that_just_ended_gets_its_answer():
    async with rig(2) as fleet:
        await fleet.call("/start_weight_update")
        await fleet.call("/update_weights", json=UPDATE)
        await fleet.call("/update_weights", json=UPDATE)
        assert fleet.seen("/update_weights") == [1, 1]
        await fleet.call("/update_weights", json={"update_info": {"names": ["other"]}})
        assert fleet.seen("/update_weights") == [2, 2]


async def test_a_failure_is_replayed_too():
    async with rig(2) as fleet:
        await fleet.call("/start_weight_update")
        fleet.engines[1].fail("/update_weights", times=1)
        first = await fleet.call("/update_weights", json=UPDATE, status=424)
        second = await fleet.call("/update_weights", json=UPDATE, status=424)
        assert first == second
        assert fleet.seen("/update_weights") == [1, 1]


async def test_another_life_cycle_call_in_between_ends_the_memory():
    async with rig(2) as fleet:
        await fleet.call("/update_weight_version", json={"new_version": "a"})
        await fleet.call("/update_weight_version", json={"new_version": "b"})
        await fleet.call("/update_weight_version", json={"new_version": "a"})
        assert fleet.seen("/update_weight_version") == [3, 3]


@pytest.mark.parametrize("path", ["/pause", "/resume", "/reset_prefix_cache"])
async def test_calls_that_may_run_twice_do(path):
    async with rig(2) as fleet:
        await fleet.call(path)
        await fleet.call(path)
        assert fleet.seen(path) == [2, 2]


async def test_what_was_refused_before_any_engine_was_called_may_be_asked_again():
    async with rig(2) as fleet:
        fleet.engines[1].health = 500
        await fleet.call("/start_weight_update", status=409)
        fleet.engines[1].health = 200
        await fleet.call("/start_weight_update")


async def test_a_trainer_that_goes_away_does_not_end_its_call():
    async with rig(2) as fleet:
        await fleet.call("/start_weight_update")
        fleet.engines[0].fail("/update_weights", "slow", seconds=0.4)
        with pytest.raises(TimeoutError):
            await fleet.call("/update_weights", json=UPDATE, timeout=aiohttp.ClientTimeout(total=0.1))
        assert await fleet.call("/update_weights", json=UPDATE) == {"message": "Weights updated"}
        assert fleet.seen("/update_weights") == [1, 1]
        await fleet.call("/finish_weight_update", json={"weight_version": "v1"})
        assert fleet.plane.fleet.version == "v1"


async def test_resumes_join():
    async with rig(2) as fleet:
        await fleet.call("/pause")
        fleet.engines[0].fail("/resume", "slow", seconds=0.2)
        await asyncio.gather(*(fleet.call("/resume") for _ in range(3)))
        assert fleet.seen("/resume") == [1, 1]


async def test_resume_ends_a_wait_pause_that_lasts():
    async with rig(2) as fleet:
        fleet.engines[0].fail("/pause", "hang")
        pause = asyncio.ensure_future(fleet.call("/pause?mode=wait", status=424))
        await fleet.until(lambda: fleet.seen("/pause") == [1, 1])
        await fleet.call("/resume")
        data = await pause
        assert fleet.engines[0].id in data["message"]
        assert not fleet.data.gate.closed
        assert fleet.states() == ["ready", "ready"]


async def test_a_pause_that_is_answered_after_its_resume_does_not_last():
    async with rig(2) as fleet:
        fleet.engines[0].fail("/pause", "slow", seconds=0.4)
        pause = asyncio.ensure_future(fleet.call("/pause", status=424))
        await fleet.until(lambda: fleet.seen("/pause") == [1, 1])
        await fleet.call("/resume")
        await pause
        await asyncio.sleep(0.5)
        await fleet.until(lambda: not fleet.engines[0].paused)
        await fleet.until(lambda: len(fleet.plane.fleet.eligible) == 2)
