"""Control calls that fail on some engines: 424 that names them, and only whole engines serve afterwards."""

import asyncio

import pytest

from tests.scenarios.control.rig import rig

UPDATE = {"update_info": {"names": ["w"]}}


async def test_a_failed_pause_keeps_the_gate_closed_and_names_the_engine():
    async with rig(3) as fleet:
        fleet.engines[1].fail("/pause", status=500)
        data = await fleet.call("/pause?mode=keep", status=424)
        assert fleet.engines[1].id in data["message"]
        assert fleet.engines[0].id not in data["message"]
        assert data["engines"][fleet.engines[1].id]["status"] == 500
        assert data["error"]["code"] == "partial_failure"
        assert fleet.data.gate.closed
        assert fleet.states() == ["ready", "fenced", "ready"]
        fleet.engines[1].heal()
        await fleet.call("/pause?mode=keep")
        await fleet.call("/resume")
        assert not fleet.data.gate.closed
        await fleet.until_state(1, "ready")


async def test_clients_are_told_not_to_retry_a_partial_failure():
    async with rig(2) as fleet:
        fleet.engines[1].fail("/pause", status=500)
        async with fleet.http.post(fleet.base + "/pause") as response:
            assert response.status == 424
            assert response.headers["x-should-retry"] == "false"
            assert response.headers["X-Fleetgate-Error"] == "partial_failure"


async def test_a_bad_request_that_all_refuse_is_passed_on_and_fences_nobody():
    async with rig(3) as fleet:
        data = await fleet.call("/pause?mode=nonsense", status=400)
        assert "mode" in data["error"]["message"]
        assert fleet.states() == ["ready"] * 3
        assert not fleet.data.gate.closed


@pytest.mark.parametrize("kind", ["status", "drop"])
async def test_a_lost_resume_is_tried_again(kind):
    async with rig(2) as fleet:
        await fleet.call("/pause")
        fleet.engines[1].fail("/resume", kind, times=1)
        await fleet.call("/resume")
        assert [mock.paused for mock in fleet.engines] == [False, False]
        await fleet.until(lambda: fleet.states() == ["ready", "ready"] and len(fleet.plane.fleet.eligible) == 2)


async def test_an_engine_that_does_not_resume_is_fenced_and_the_others_go_on():
    async with rig(2) as fleet:
        await fleet.call("/pause")
        fleet.engines[1].fail("/resume", status=500)
        data = await fleet.call("/resume", status=424)
        assert fleet.engines[1].id in data["message"]
        assert not fleet.data.gate.closed
        assert fleet.states() == ["ready", "fenced"]
        assert await fleet.get("/is_paused") == {"is_paused": True}
        fleet.engines[1].heal()
        await fleet.until_state(1, "ready")
        assert not fleet.engines[1].paused


@pytest.mark.parametrize("step", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("kind", ["status", "drop"])
async def test_a_broken_round_lets_nobody_serve_unknown_weights_and_a_whole_retry_works(step, kind):
    async with rig(3) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail(step, kind, times=1)
        await fleet.call("/pause?mode=keep")
        statuses = []
        for path, body in (
            ("/start_weight_update", None),
            ("/update_weights", UPDATE),
            ("/finish_weight_update", {"weight_version": "v2"}),
        ):
            data = await fleet.call(path, json=body, status=None)
            statuses.append((path, data))
            if "error" in data:
                break
        assert statuses[-1][0] == step, statuses
        assert statuses[-1][1]["error"]["code"] in ("partial_failure", "conflict")
        assert fleet.engines[1].id in statuses[-1][1]["error"]["message"]
        await fleet.call("/resume", status=None)
        await asyncio.sleep(0.3)
        for index, mock in enumerate(fleet.engines):
            if fleet.engine(index).eligible:
                assert (mock.version, "w1" in mock.weights) == ("v1", True)
        assert fleet.plane.fleet.version == "v1"
        await fleet.sync("w3", "v3")
        assert fleet.states() == ["ready"] * 3
        assert [mock.version for mock in fleet.engines] == ["v3"] * 3
        assert all("w3" in mock.weights for mock in fleet.engines)


async def test_after_a_failed_update_the_next_steps_are_refused_before_any_engine_is_touched():
    async with rig(2) as fleet:
        await fleet.call("/start_weight_update")
        fleet.engines[1].fail("/update_weights", status=500, times=1)
        await fleet.call("/update_weights", json=UPDATE, status=424)
        before = fleet.seen("/finish_weight_update")
        data = await fleet.call("/finish_weight_update", json={"weight_version": "v9"}, status=409)
        assert "start_weight_update" in data["error"]["message"]
        assert fleet.seen("/finish_weight_update") == before
        assert [mock.version for mock in fleet.engines] == ["default", "default"]


async def test_engine_down_is_not_a_failure_but_it_comes_back_fenced_until_the_next_sync():
    async with rig(3) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.engines[2].kill()
        await fleet.until_state(2, "down")
        await fleet.sync("w2", "v2")
        await fleet.engines[2].restart()
        await fleet.until_state(2, "fenced")
        await asyncio.sleep(0.3)
        assert fleet.engine(2).state == "fenced"
        data = await fleet.get("/weight_info")
        assert data["weight_version"] is None
        assert data["versions"][fleet.engines[2].id] == "default"
        await fleet.sync("w3", "v3")
        assert fleet.states() == ["ready"] * 3


async def test_preflight_refuses_an_update_before_any_engine_is_touched():
    async with rig(3) as fleet:
        fleet.engines[1].health = 500
        data = await fleet.call("/start_weight_update", status=409)
        assert fleet.engines[1].id in data["error"]["message"]
        assert fleet.seen("/start_weight_update") == [0, 0, 0]


async def test_a_hung_update_does_not_keep_resume_and_reads_waiting():
    async with rig(3) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/pause?mode=keep")
        await fleet.call("/start_weight_update")
        fleet.engines[2].fail("/update_weights", "hang")
        update = asyncio.ensure_future(fleet.call("/update_weights", json=UPDATE, status=424))
        await fleet.until(lambda: fleet.seen("/update_weights") == [2, 2, 2])
        async with asyncio.timeout(2):
            assert await fleet.get("/is_paused") == {"is_paused": True}
            assert await fleet.get("/weight_info") == {"weight_version": "v1"}
            await fleet.get("/health")
            conflict = await fleet.call("/start_weight_update", status=409)
            assert conflict["holder"]["call"] == "/update_weights"
            await fleet.call("/resume")
            data = await update
        assert fleet.engines[2].id in data["message"]
        assert fleet.states() == ["fenced"] * 3
        assert not fleet.data.gate.closed
        fleet.engines[2].heal()
        await asyncio.sleep(0.3)
        assert fleet.states() == ["fenced"] * 3
        await fleet.sync("w2", "v2")
        assert fleet.states() == ["ready"] * 3


async def test_a_leg_over_its_limit_is_named():
    async with rig(2, control_timeout=0.2) as fleet:
        fleet.engines[0].fail("/reset_prefix_cache", "hang")
        data = await fleet.call("/reset_prefix_cache", status=424)
        assert fleet.engines[0].id in data["message"]
        assert data["engines"][fleet.engines[0].id]["outcome"] == "timed_out"


async def test_success_false_inside_a_200_is_no_success():
    async with rig(2) as fleet:
        fleet.engines[1].fail("/reset_prefix_cache", "false", times=1)
        data = await fleet.call("/reset_prefix_cache", status=424)
        assert fleet.engines[1].id in data["message"]
        await fleet.until_state(1, "ready")
        assert len(fleet.engines[1].calls("/reset_prefix_cache")) == 2


async def test_an_engine_without_rl_routes_is_served_and_named():
    async with rig(2) as fleet:
        fleet.engines[1].rl = False
        await fleet.engines[1].restart()
        await fleet.until(lambda: fleet.engine(1).plain)
        await fleet.until_state(1, "ready")
        data = await fleet.call("/pause", status=424)
        assert fleet.engines[1].id in data["message"]
        assert "VLLM_SERVER_DEV_MODE=1" in data["message"]
        assert fleet.data.gate.closed
        await fleet.call("/resume", status=424)
        assert not fleet.data.gate.closed
        assert fleet.states() == ["ready", "ready"]


async def test_with_no_engine_alive_a_pause_closes_the_gate_and_says_so():
    async with rig(1) as fleet:
        await fleet.engines[0].kill()
        await fleet.until_state(0, "down")
        data = await fleet.call("/pause", status=424)
        assert "no engine is alive" in data["message"]
        assert fleet.data.gate.closed
        await fleet.call("/start_weight_update", status=409)
        await fleet.call("/resume", status=424)
        assert not fleet.data.gate.closed


async def test_an_engine_dead_but_unnoticed_is_no_failure_of_a_pause():
    async with rig(2, probe_interval=30) as fleet:
        await fleet.engines[1].kill()
        await fleet.call("/pause")
        await fleet.until_state(1, "down")
        await fleet.call("/resume")


async def test_one_engine_that_dies_in_the_update_is_named():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/start_weight_update")
        fleet.engines[1].fail("/update_weights", "hang")
        update = asyncio.ensure_future(fleet.call("/update_weights", json=UPDATE, status=424))
        await fleet.until(lambda: fleet.seen("/update_weights") == [2, 2])
        await fleet.engines[1].kill()
        data = await update
        assert fleet.engines[1].id in data["message"]
        await fleet.until_state(1, "down")
        assert fleet.plane.fleet.eligible == []


async def test_an_unfinished_round_is_broken_by_resume():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/pause")
        await fleet.call("/start_weight_update")
        await fleet.call("/resume")
        assert fleet.states() == ["fenced", "fenced"]
        assert fleet.plane.fleet.eligible == []
        await fleet.sync("w2", "v2")
        assert fleet.states() == ["ready", "ready"]


async def test_sleep_keeps_requests_away_and_updates_out():
    async with rig(2) as fleet:
        await fleet.call("/sleep?level=1")
        assert fleet.plane.fleet.eligible == []
        data = await fleet.call("/start_weight_update", status=409)
        assert "wake_up" in data["error"]["message"]
        await fleet.call("/wake_up")
        assert len(fleet.plane.fleet.eligible) == 2
        await fleet.call("/sleep?level=2")
        await fleet.call("/wake_up")
        await asyncio.sleep(0.2)
        assert fleet.states() == ["fenced", "fenced"]
        await fleet.sync("w1", "v1")
        assert fleet.states() == ["ready", "ready"]


async def test_an_update_without_a_start_is_whole_and_fences_only_who_failed_it():
    async with rig(3) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/update_weights", times=1)
        await fleet.call("/pause?mode=keep")
        await fleet.call("/update_weights", json={"weight_dir": "/step_2"}, status=424)
        await fleet.call("/resume")
        assert fleet.states() == ["ready", "fenced", "ready"]
        assert [mock.version for mock in fleet.engines] == ["u1", "fleetgate-unfinished:v1", "u1"]
        assert sorted((await fleet.get("/weight_info"))["versions"].values()) == ["u1", "u1", "v1"]
        await asyncio.sleep(0.3)
        assert fleet.states() == ["ready", "fenced", "ready"]
        await fleet.call("/update_weights", json={"weight_dir": "/step_3"})
        assert fleet.states() == ["ready"] * 3


@pytest.mark.parametrize("kind", ["drop", "lost", "status"])
async def test_a_trainer_that_never_starts_recovers_with_its_next_update(kind):
    """Servers before the route of a start take weights by the update alone."""
    async with rig(2) as fleet:
        for mock in fleet.engines:
            mock.session = True
        for number in range(1, 5):
            failing = number == 2
            if failing:
                fleet.engines[1].fail("/update_weights", kind, times=1)
            await fleet.call("/pause")
            body = {"update_info": {"names": [f"w{number}"]}}
            await fleet.call("/update_weights", json=body, status=424 if failing else 200)
            for mock in fleet.engines:
                mock.session = True
            label = {"new_version": f"v{number}"}
            await fleet.call("/update_weight_version", json=label, status=409 if failing else 200)
            await fleet.call("/resume")
            assert fleet.states() == ["fenced" if failing else "ready"] * 2
