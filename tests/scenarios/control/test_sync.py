"""Weight syncs that go well, and what stays of them."""

import asyncio
import json

import pytest

from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import proxy_for, rig


async def test_a_whole_sync_reaches_every_engine_and_sets_the_fleet_version():
    async with rig(3) as fleet:
        assert fleet.states() == ["ready"] * 3
        await fleet.sync(version="v1")
        assert [engine.version for engine in fleet.engines] == ["v1"] * 3
        assert fleet.plane.fleet.version == "v1"
        assert fleet.states() == ["ready"] * 3
        assert await fleet.get("/weight_info") == {"weight_version": "v1"}
        assert not fleet.data.gate.closed


async def test_vllm_bodies_come_back_as_they_are():
    async with rig(2) as fleet:
        assert await fleet.call("/pause?mode=keep") == {"status": "paused"}
        assert await fleet.call("/start_weight_update") == {"message": "Weight update started"}
        assert await fleet.call("/update_weights", json={"update_info": {}}) == {"message": "Weights updated"}
        assert await fleet.call("/finish_weight_update") == {"message": "Weight update finished"}
        assert await fleet.call("/update_weight_version", json={"new_version": "x"}) == {
            "success": True,
            "new_version": "x",
        }
        assert await fleet.call("/resume") == {"status": "resumed"}
        assert await fleet.get("/get_world_size") == {"world_size": 2}
        assert await fleet.get("/is_paused") == {"is_paused": False}
        assert await fleet.get("/is_sleeping") == {"is_sleeping": False}


async def test_a_finish_without_a_label_gets_the_next_automatic_one():
    async with rig(2) as fleet:
        await fleet.sync()
        assert [engine.version for engine in fleet.engines] == ["u1", "u1"]
        await fleet.sync("w2")
        assert [engine.version for engine in fleet.engines] == ["u2", "u2"]
        assert not fleet.engines[0].calls("/finish_weight_update")[0].body
        assert fleet.plane.fleet.version == "u2"


async def test_a_restarted_proxy_repeats_no_label_that_the_trainers_own_hide():
    mocks = [await MockEngine().start() for _ in range(2)]
    async with proxy_for(mocks) as first:
        await first.sync("w1")
        assert first.plane.fleet.version == "u1"
        await first.sync("w2", version="v2")
    async with proxy_for(mocks) as second:
        await second.sync("w3")
        assert second.plane.fleet.version.startswith("u")
        assert second.plane.fleet.version != "u1"
    for mock in mocks:
        await mock.kill()


async def test_a_restarted_proxy_uses_no_label_twice():
    mocks = [await MockEngine().start() for _ in range(2)]
    async with proxy_for(mocks) as first:
        await first.sync()
    async with proxy_for(mocks) as second:
        assert second.plane.fleet.version == "u1"
        await second.sync("w2")
        assert second.plane.fleet.version == "u2"
    for mock in mocks:
        await mock.kill()


async def test_labels_off_leaves_labels_alone():
    async with rig(2, label_updates="off") as fleet:
        await fleet.sync()
        assert fleet.seen("/update_weight_version") == [0, 0]
        assert fleet.plane.fleet.version == "default"
        assert fleet.states() == ["ready", "ready"]
        await fleet.restart(1)
        await asyncio.sleep(0.2)
        assert fleet.engine(1).state == "fenced"


async def test_engines_that_know_no_labels_are_tolerated():
    async with rig(2) as fleet:
        for mock in fleet.engines:
            mock.fail("/update_weight_version", status=404)
        await fleet.sync()
        assert fleet.states() == ["ready", "ready"]
        assert fleet.plane.fleet.epoch == 1


async def test_an_engine_that_ignores_the_label_of_a_finish_gets_it_by_its_own_call():
    async with rig(2) as fleet:
        fleet.engines[1].fail("/finish_weight_update", "body", status=200, body={"message": "ok"}, times=1)
        await fleet.sync(version="v1")
        assert [engine.version for engine in fleet.engines] == ["v1", "v1"]
        assert fleet.seen("/update_weight_version") == [0, 1]


async def test_a_one_shot_update_is_a_whole_round():
    async with rig(2) as fleet:
        await fleet.call("/pause?mode=keep&clear_cache=false")
        body = b'{"weight_dir":  "/tmp/step_1"}'
        await fleet.call("/update_weights", data=body)
        await fleet.call("/resume")
        assert [engine.calls("/update_weights")[0].body for engine in fleet.engines] == [body, body]
        assert fleet.plane.fleet.version == "u1"
        assert fleet.states() == ["ready", "ready"]


async def test_no_request_is_eligible_inside_a_round_even_without_a_pause():
    async with rig(2) as fleet:
        await fleet.call("/start_weight_update")
        assert fleet.plane.fleet.eligible == []
        assert fleet.states() == ["ready", "ready"]
        await fleet.call("/update_weights", json={"update_info": {"names": ["a"]}})
        await fleet.call("/finish_weight_update", json={"weight_version": "v1"})
        assert len(fleet.plane.fleet.eligible) == 2


async def test_a_proxy_killed_between_start_and_update_lets_the_next_one_go_on():
    mocks = [await MockEngine().start() for _ in range(2)]
    async with proxy_for(mocks) as first:
        await first.sync(version="v1")
        await first.call("/pause?mode=keep")
        await first.call("/start_weight_update")
    async with proxy_for(mocks) as second:
        assert second.data.gate.closed
        assert await second.get("/is_paused") == {"is_paused": True}
        await second.get("/ready", status=503)
        await second.call("/update_weights", json={"update_info": {"names": ["w2"]}})
        assert second.plane.fleet.eligible == []
        await second.call("/finish_weight_update", json={"weight_version": "v2"})
        await second.call("/resume")
        assert second.plane.fleet.version == "v2"
        assert second.states() == ["ready", "ready"]
        await second.get("/ready")
    for mock in mocks:
        await mock.kill()


async def test_every_leg_of_a_call_starts_before_any_is_answered():
    async with rig(8) as fleet:
        for mock in fleet.engines:
            mock.fail("/pause", "slow", seconds=0.2)
        await fleet.call("/pause")
        times = [mock.calls("/pause")[0].at for mock in fleet.engines]
        assert max(times) - min(times) < 0.2


async def test_query_headers_and_body_go_on_to_the_letter():
    async with rig(2) as fleet:
        body = b'{ "a" :1,"unknown":[1.0, 2e3]}'
        head = (
            "POST /wake_up/?tags=weights&tags=kv_cache&x=%2F HTTP/1.1\nX-Custom: 1\nx-custom: 2\nX-Hop: gone\n"
            f"Content-Type: application/json\nContent-Length: {len(body)}\n"
        )
        assert b" 200 OK" in await fleet.raw(head, body)
        for mock in fleet.engines:
            seen = mock.calls("/wake_up")[0]
            assert seen.query == "tags=weights&tags=kv_cache&x=%2F"
            assert seen.body == body
            assert [v for k, v in seen.headers if k.lower() == "x-custom"] == ["1", "2"]
            assert not any(k.lower() == "x-hop" for k, _ in seen.headers)


async def test_a_get_with_a_body_keeps_it_and_a_post_without_one_stays_so():
    async with rig(2) as fleet:
        await fleet.get("/get_world_size", json={})
        assert fleet.engines[0].calls("/get_world_size")[-1].body == b"{}"
        await fleet.raw("POST /start_weight_update HTTP/1.1\n")
        seen = fleet.engines[0].calls("/start_weight_update")[0]
        assert seen.body is None
        names = {name.lower() for name, _ in seen.headers}
        assert not names & {"content-length", "transfer-encoding"}


async def test_the_report_says_what_each_engine_did():
    async with rig(2) as fleet:
        data = await fleet.call("/pause", headers={"X-Fleetgate-Report": "1"})
        assert data["status"] == "paused"
        assert set(data["engines"]) == {mock.id for mock in fleet.engines}
        leg = data["engines"][fleet.engines[0].id]
        assert leg["status"] == 200
        assert leg["body"] == {"status": "paused"}
        assert leg["seconds"] >= 0


@pytest.mark.parametrize("path", ["/reset_mm_cache", "/reset_encoder_cache"])
async def test_an_empty_answer_stays_empty_with_a_length(path):
    async with rig(2) as fleet:
        assert await fleet.call(path) in ("", None)


async def test_update_weight_version_alone_sets_the_fleet_version():
    async with rig(2) as fleet:
        await fleet.call("/update_weight_version", json={"new_version": "step0"})
        assert fleet.plane.fleet.version == "step0"
        assert fleet.states() == ["ready", "ready"]


async def test_the_pause_lease_resumes_by_itself():
    async with rig(2, max_pause=0.2, pause_warn=0.1) as fleet:
        await fleet.call("/pause")
        await fleet.until(lambda: not fleet.data.gate.closed)
        assert [mock.paused for mock in fleet.engines] == [False, False]
        kinds = [kind for kind, _ in fleet.events]
        assert "pause_overdue" in kinds
        assert "pause_lease_ended" in kinds


async def test_overhead_is_emitted_and_small():
    async with rig(4) as fleet:
        for mock in fleet.engines:
            mock.fail("/pause", "slow", seconds=0.1)
        await fleet.call("/pause")
        details = next(d for kind, d in fleet.events if kind == "control_call" and d["call"] == "pause")
        assert details["status"] == 200
        assert details["seconds"] >= 0.1
        assert 0 <= details["overhead_seconds"] < details["seconds"]
        assert {leg[2] for leg in details["legs"].values()} == {"answered"}


async def test_the_event_of_a_call_has_its_query_unless_the_path_is_a_configured_one():
    async with rig(2, fanout_paths=["/skyrl/*"]) as fleet:
        await fleet.call("/pause?mode=keep&clear_cache=false")
        await fleet.call("/skyrl/anything?key=secret", status=None)
        told = {details["call"]: details["query"] for kind, details in fleet.events if kind == "control_call"}
        assert told == {"pause": "mode=keep&clear_cache=false", "skyrl/anything": ""}


async def test_is_paused_says_so_at_once_while_the_gate_is_closed():
    async with rig(2) as fleet:
        await fleet.call("/pause")
        before = fleet.seen("/is_paused")
        assert await fleet.get("/is_paused") == {"is_paused": True}
        assert json.dumps(before)
