"""Corners of the control calls: what is refused by all, what cannot be undone, what comes half-way."""

import asyncio

import pytest

from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import FakeRequest, rig

UPDATE = {"update_info": {"names": ["w"]}}
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


async def test_a_finish_that_no_start_came_before_is_the_engines_to_refuse():
    async with rig(2) as fleet:
        await fleet.call("/finish_weight_update", status=424)
        assert fleet.states() == ["fenced", "fenced"]
        await fleet.until(lambda: fleet.states() == ["ready", "ready"])


@pytest.mark.parametrize("step", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
async def test_a_step_that_all_refuse_alike_breaks_nothing(step):
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            if path == step:
                for mock in fleet.engines:
                    mock.fail(step, status=422, times=1)
                await fleet.call(step, json={"odd": 1} if step != "/update_weights" else UPDATE, status=422)
            await fleet.call(path, json={**UPDATE, "again": 1} if path == "/update_weights" else None)
        assert fleet.states() == ["ready", "ready"]
        assert fleet.plane.fleet.version == "u1"


async def test_new_weights_that_one_engine_does_not_get_labelled_keep_it_out():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/update_weight_version")
        await fleet.call("/pause")
        await fleet.call("/start_weight_update")
        await fleet.call("/update_weights", json=UPDATE)
        data = await fleet.call("/finish_weight_update", status=424)
        assert fleet.engines[1].id in data["message"]
        assert "left out of the finish" in data["message"]
        assert fleet.seen("/finish_weight_update") == [2, 1]
        fleet.engine(1).inflight = 1
        await fleet.call("/resume")
        assert fleet.seen("/abort_requests") == [0, 1]
        fleet.engine(1).inflight = 0
        await fleet.until_state(0, "ready")
        assert fleet.states() == ["ready", "fenced"]
        assert fleet.plane.fleet.version == "u1"
        fleet.engines[1].heal()
        await fleet.sync("w3", "v3")
        assert fleet.states() == ["ready", "ready"]


async def test_a_start_that_may_have_happened_taints():
    async with rig(2, control_timeout=0.2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/start_weight_update", "hang", times=1)
        await fleet.call("/start_weight_update", status=424)
        await asyncio.sleep(0.3)
        assert fleet.engine(1).tainted
        assert fleet.states() == ["fenced", "fenced"]
        await fleet.sync("w2", "v2")
        assert fleet.states() == ["ready", "ready"]


async def test_a_round_without_an_update_changes_no_weights_and_lets_nobody_back():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.engines[1].restart()
        await fleet.until(lambda: fleet.engine(1).boot == 1 and not fleet.engine(1).suspect)
        await fleet.call("/start_weight_update")
        await fleet.call("/finish_weight_update")
        assert fleet.states() == ["ready", "fenced"]
        assert fleet.plane.fleet.version == "v1"
        await fleet.call("/start_weight_update")
        await fleet.call("/finish_weight_update", json={"weight_version": "v1b"})
        assert fleet.plane.fleet.version == "v1b"
        assert fleet.states() == ["ready", "fenced"]


async def test_a_member_that_restarts_inside_a_round_breaks_it():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/start_weight_update")
        await fleet.restart(1)
        data = await fleet.call("/update_weights", json=UPDATE, status=409)
        assert fleet.engines[1].id in data["error"]["message"]
        assert fleet.seen("/update_weights") == [1, 1]


async def test_a_removed_member_breaks_its_group():
    async with rig(2) as fleet:
        await fleet.call("/init_weight_transfer_engine", json={"init_info": {"rank_offset": 1, "world_size": 3}})
        gone = fleet.engines[1].id
        await fleet.call(f"/fleet/engines/{gone}", method="DELETE")
        data = await fleet.call("/start_weight_update", status=409)
        assert f"{gone} was removed" in data["error"]["message"]
        assert "world_size 2" in data["error"]["message"]


async def test_a_group_is_released():
    async with rig(2) as fleet:
        await fleet.call("/init_weight_transfer_engine", json={"init_info": {"rank_offset": 1, "world_size": 3}})
        assert await fleet.call("/shutdown_weight_transfer_engine") == {"message": "Weight transfer shut down"}
        assert (await fleet.get("/fleet"))["group"] is None


async def test_an_init_that_all_refuse_alike_leaves_the_group_as_it_was():
    async with rig(2) as fleet:
        body = {"init_info": {"rank_offset": 1, "world_size": 3}}
        await fleet.call("/init_weight_transfer_engine", json=body)
        for mock in fleet.engines:
            mock.fail("/init_weight_transfer_engine", status=400, times=1)
        await fleet.call("/init_weight_transfer_engine", json={"init_info": {"bad": 1}}, status=400)
        await fleet.call("/start_weight_update")


async def test_resetting_weights_keeps_everybody_out_until_a_sync():
    async with rig(2) as fleet:
        for mock in fleet.engines:
            mock.fail("/weight_checker", "body", status=200, body={"status": "reset"}, times=1)
        await fleet.call("/weight_checker", json={"action": "reset"})
        assert fleet.states() == ["fenced", "fenced"]
        await fleet.sync("w1", "v1")
        assert fleet.states() == ["ready", "ready"]


async def test_a_label_goes_to_engines_that_hold_the_weights_only():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.engines[1].restart()
        await fleet.until(lambda: fleet.engine(1).boot == 1 and not fleet.engine(1).suspect)
        await fleet.call("/update_weight_version", json={"new_version": "v1-final"})
        assert [mock.version for mock in fleet.engines] == ["v1-final", "default"]
        assert fleet.states() == ["ready", "fenced"]


async def test_an_unload_of_what_the_proxy_never_loaded_is_not_undone():
    async with rig(2) as fleet:
        for mock in fleet.engines:
            mock.loaded["a"] = "/x"
        fleet.engines[1].fail(UNLOAD, times=1)
        data = await fleet.call(UNLOAD, json={"lora_name": "a"}, status=424)
        assert "not undone" in data["message"]
        assert fleet.states() == ["ready", "fenced"]


async def test_an_adapter_without_a_name_goes_on_as_it_is():
    async with rig(2) as fleet:
        for mock in fleet.engines:
            mock.fail(LOAD, status=400, times=1)
        await fleet.call(LOAD, json={"odd": 1}, status=400)
        assert fleet.states() == ["ready", "ready"]


async def test_an_abort_with_nobody_alive_still_ends_what_is_held():
    async with rig(1) as fleet:
        await fleet.engines[0].kill()
        await fleet.until_state(0, "down")
        fleet.data.tracker.requests = [FakeRequest("r", "/v1/completions", None)]
        assert await fleet.call("/abort_requests", json={}) == {"status": "aborted", "aborted": 1}
        fleet.data.tracker.requests = []
        await fleet.call("/abort_requests", json={}, status=409)


async def test_an_abort_that_fails_names_the_engine():
    async with rig(2) as fleet:
        fleet.engines[1].fail("/abort_requests")
        data = await fleet.call("/abort_requests", json={}, status=424)
        assert fleet.engines[1].id in data["message"]
        assert fleet.states() == ["ready", "ready"]
        fleet.data.tracker.requests = [FakeRequest("r", "/v1/completions", fleet.engine(1))]
        await fleet.call("/abort_requests", json={"request_ids": ["r"]}, status=424)


async def test_operators_requests_that_make_no_sense_are_refused():
    async with rig(1) as fleet:
        name = fleet.engines[0].id
        await fleet.call(f"/fleet/engines/{name}/drain")
        await fleet.call(f"/fleet/engines/{name}/drain")
        await fleet.call(f"/fleet/engines/{name}/fence")
        await fleet.call(f"/fleet/engines/{name}?drain=soon", method="DELETE", status=400)
        await fleet.call(f"/fleet/engines/{name}?drain=-1", method="DELETE", status=400)
        await fleet.engines[0].kill()
        await fleet.until_state(0, "down")
        for action in ("admit", "fence", "drain"):
            await fleet.call(f"/fleet/engines/{name}/{action}", status=409)
        await fleet.call("/fleet/engines", json=[], status=400)


async def test_a_busy_engine_gets_its_time_before_it_is_removed():
    async with rig(2) as fleet:
        engine = fleet.engine(1)
        engine.inflight = 1
        removal = asyncio.ensure_future(fleet.call(f"/fleet/engines/{engine.id}?drain=5", method="DELETE"))
        await fleet.until(lambda: engine.state == "draining")
        assert not removal.done()
        engine.inflight = 0
        assert (await removal)["idle"] is True


async def test_slow_starters_are_taken_in_when_they_answer():
    mocks = [MockEngine(), MockEngine(health=503)]
    async with rig(engines=mocks) as fleet:
        assert fleet.states()[0] == "ready"
        assert fleet.states()[1] in ("starting", "down")
        mocks[1].health = 200
        await fleet.until_state(1, "ready")


async def test_wrong_answers_to_small_questions_are_no_answers():
    mock = MockEngine()
    mock.fail("/weight_info", "body", status=200, body=["odd"])
    async with rig(engines=[mock]) as fleet:
        assert fleet.states() == ["starting"]
        mock.heal()
        await fleet.until_state(0, "ready")


async def test_a_process_that_was_replaced_while_it_finished_gets_no_label():
    async with rig(2, probe_interval=30) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/start_weight_update")
        await fleet.call("/update_weights", json=UPDATE)
        fleet.engines[1].fail("/finish_weight_update", "slow", seconds=0.3)
        finish = asyncio.ensure_future(fleet.call("/finish_weight_update", status=424))
        await fleet.until(lambda: fleet.seen("/finish_weight_update") == [2, 2])
        fleet.engines[1].start_time += 100
        fleet.engines[1].version = "default"
        data = await finish
        assert "replaced" in data["message"]
        assert [mock.version for mock in fleet.engines] == ["u1", "default"]
        await fleet.until(lambda: fleet.states() == ["ready", "fenced"])


async def test_a_process_that_was_replaced_while_its_label_hung_keeps_none():
    async with rig(2, control_timeout=2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/start_weight_update")
        await fleet.call("/update_weights", json=UPDATE)
        fleet.engines[1].fail("/update_weight_version", "hang", times=1)
        finish = asyncio.ensure_future(fleet.call("/finish_weight_update", status=409))
        await fleet.until(lambda: fleet.seen("/update_weight_version") == [1, 1])
        boot = fleet.engine(1).boot
        await fleet.engines[1].restart()
        data = await finish
        assert fleet.engine(1).boot == boot + 1
        assert f"{fleet.engines[1].id} restarted" in data["error"]["message"]
        assert fleet.engines[1].version == "default"
        assert fleet.seen("/finish_weight_update") == [1, 1]
        assert fleet.states() == ["fenced", "fenced"]
        await fleet.sync("w3")
        assert [mock.version for mock in fleet.engines] == ["u2", "u2"]
        assert fleet.states() == ["ready", "ready"]


async def test_a_label_of_the_trainer_that_met_a_replaced_process_is_taken_back():
    async with rig(2, probe_interval=30) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/update_weight_version", "slow", seconds=0.3)
        label = asyncio.ensure_future(fleet.call("/update_weight_version", json={"new_version": "v2"}, status=424))
        await fleet.until(lambda: fleet.seen("/update_weight_version") == [1, 1])
        fleet.engines[1].start_time += 100
        data = await label
        assert "replaced" in data["message"]
        assert [mock.version for mock in fleet.engines] == ["v2", "default"]
        await fleet.until(lambda: fleet.states()[1] == "fenced")


async def test_a_label_does_not_end_a_tie_or_reach_other_weights():
    async with rig(engines=[MockEngine(version="v1"), MockEngine(version="v2")]) as fleet:
        data = await fleet.call("/update_weight_version", json={"new_version": "v3"}, status=409)
        assert "tied" in data["error"]["message"]
        assert [mock.version for mock in fleet.engines] == ["v1", "v2"]
    engines = [MockEngine(version="v1"), MockEngine(version="v1"), MockEngine(version="v0", weights="old")]
    async with rig(engines=engines) as fleet:
        await fleet.call("/update_weight_version", json={"new_version": "v1-final"})
        assert [mock.version for mock in fleet.engines] == ["v1-final", "v1-final", "v0"]
        assert fleet.states() == ["ready", "ready", "fenced"]


async def test_a_process_that_is_replaced_while_others_are_looked_at_gets_no_label():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[0].fail("/metrics", "slow", seconds=0.6, times=1)
        label = asyncio.ensure_future(fleet.call("/update_weight_version", json={"new_version": "v1.1"}))
        await asyncio.sleep(0.1)
        await fleet.restart(1)
        assert not label.done()
        await label
        assert [mock.version for mock in fleet.engines] == ["v1.1", "default"]
        assert fleet.states() == ["ready", "fenced"]
