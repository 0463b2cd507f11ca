"""Sentences of docs/contract.md about control calls and weights, checked from outside the process."""

import asyncio
import json

import pytest

from tests.scenarios.blackbox.conftest import JSON, answer, complete, fleet, states, states_are, until
from tests.scenarios.blackbox.engine import Engine


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause?mode=keep&clear_cache=false", {"status": "paused"}),
        ("/resume", {"status": "resumed"}),
        ("/sleep?level=1", {"status": "sleeping", "level": 1}),
        ("/wake_up?tags=weights&tags=kv_cache", {"status": "awake", "tags": None}),
        ("/reset_prefix_cache", {"success": True}),
        ("/start_weight_update", {"message": "Weight update started"}),
        ("/start_draft_weight_update", {"message": "Draft weight update started"}),
    ],
)
async def test_a_call_goes_to_every_engine_as_it_came_and_answers_as_vllm_does(path, body):
    async with fleet(3) as (engines, http, _):
        async with http.post(path) as reply:
            assert reply.status == 200
            assert await reply.json() == body
            assert "Content-Length" in reply.headers
        for engine in engines:
            (seen,) = engine.calls(path.partition("?")[0])
            assert seen.path == path
            assert seen.body == b""


async def test_update_weights_reaches_every_engine_once_with_the_same_bytes():
    raw = b'{ "update_info" : {"names": ["a"], "x": 1.50} , "unknown": [1,2] }'
    async with fleet(3) as (engines, http, _):
        async with http.post("/update_weights", data=raw, headers=JSON) as reply:
            assert reply.status == 200
            assert await reply.json() == {"message": "Weights updated"}
        assert [[item.body for item in engine.calls("/update_weights")] for engine in engines] == [[raw]] * 3


async def test_world_size_is_the_sum_and_ranks_are_shifted_by_it():
    engines = [await Engine(name, world_size=size).start() for name, size in (("a", 2), ("b", 1), ("c", 4))]
    import aiohttp

    from tests.scenarios.blackbox.conftest import ready, run_proxy

    try:
        flags = [flag for engine in engines for flag in ("--engine", engine.url)]
        async with run_proxy(*flags) as proxy, aiohttp.ClientSession(proxy.url) as http:
            await until(lambda: ready(http))
            async with http.get("/get_world_size") as reply:
                assert await reply.json() == {"world_size": 7}
            async with http.request("GET", "/get_world_size/", data=b"{}") as reply:
                assert await reply.json() == {"world_size": 7}
            info = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 8}
            async with http.post("/init_weight_transfer_engine", json={"init_info": info}) as reply:
                assert reply.status == 200
                assert await reply.json() == {"message": "Weight transfer initialized"}
            sent = [json.loads(engine.calls("/init_weight_transfer_engine")[0].body)["init_info"] for engine in engines]
            assert [item["rank_offset"] for item in sent] == [1, 3, 4]
            assert all(item["world_size"] == 8 for item in sent)
            parts = [{"rank": index} for index in range(7)]
            async with http.post("/update_weights", json={"update_info": parts}) as reply:
                assert reply.status == 200
            slices = [json.loads(engine.calls("/update_weights")[0].body)["update_info"] for engine in engines]
            assert slices == [parts[:2], parts[2:3], parts[3:]]
    finally:
        for engine in engines:
            await engine.stop()


async def test_partial_failure_is_424_names_the_engine_and_fences_it():
    async with fleet(3, "--hold-timeout", "0.5") as (engines, http, _):
        engines[1].overrides["/update_weights"] = answer(500, {"error": {"message": "boom"}})
        async with http.post("/update_weights", json={"update_info": {}}) as reply:
            assert reply.status == 424
            assert reply.headers["x-should-retry"] == "false"
            report = await reply.json()
        assert engines[1].id in report["error"]["message"]
        assert report["engines"][engines[1].id]["status"] == 500
        assert report["engines"][engines[0].id]["status"] == 200
        seen = await states(http)
        assert seen[engines[1].id] == "fenced"
        async with http.post("/resume") as reply:
            assert reply.status in (200, 424)
        # The others hold weights that no label names, so nobody may answer until a whole round.
        status, _, headers = await complete(http)
        assert (status, headers["X-Fleetgate-Error"]) == (503, "hold_timeout")
        assert not any(engine.calls("/v1/completions") for engine in engines)


async def test_the_report_header_adds_each_leg():
    async with fleet(2) as (engines, http, _):
        async with http.post("/pause", headers={"X-Fleetgate-Report": "1"}) as reply:
            data = await reply.json()
        assert data["status"] == "paused"
        assert set(data["engines"]) == {engine.id for engine in engines}
        for leg in data["engines"].values():
            assert leg["status"] == 200
            assert leg["body"] == {"status": "paused"}
            assert leg["seconds"] >= 0


async def test_a_wrong_mode_is_the_trainers_fault_and_fences_nobody():
    async with fleet(2) as (_, http, _proxy):
        async with http.post("/pause?mode=nonsense") as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["param"] == "query.mode"
        assert set((await states(http)).values()) == {"ready"}


async def test_the_gate_closes_before_the_first_engine_and_opens_after_the_last():
    async with fleet(2) as (engines, http, _):
        engines[1].delays["/pause"] = 1.0
        pausing = asyncio.ensure_future(http.post("/pause?mode=keep"))
        await until(lambda: engines[0].calls("/pause"))
        held = asyncio.ensure_future(complete(http))
        await asyncio.sleep(0.3)
        assert not engines[0].calls("/v1/completions")
        assert (await pausing).status == 200
        engines[1].delays["/resume"] = 0.5
        resuming = asyncio.ensure_future(http.post("/resume"))
        await until(lambda: engines[0].calls("/resume"))
        await asyncio.sleep(0.1)
        assert not any(engine.calls("/v1/completions") for engine in engines)
        assert (await resuming).status == 200
        assert (await held)[0] == 200


async def test_the_gate_stays_closed_when_a_pause_failed():
    async with fleet(2, "--hold-timeout", "0.5") as (engines, http, _):
        engines[1].overrides["/pause"] = answer(500, {"error": "no"})
        async with http.post("/pause") as reply:
            assert reply.status == 424
        status, body, headers = await complete(http)
        assert status == 503
        assert body["error"]["code"] == "hold_timeout"
        assert headers["X-Fleetgate-Error"] == "hold_timeout"
        assert "Retry-After" in headers
        async with http.get("/is_paused") as reply:
            assert await reply.json() == {"is_paused": True}


async def test_versions_disagree_visibly():
    async with fleet(2) as (engines, http, _):
        async with http.post("/update_weight_version", json={"new_version": "v1"}) as reply:
            assert await reply.json() == {"success": True, "new_version": "v1"}
        async with http.get("/weight_info") as reply:
            assert await reply.json() == {"weight_version": "v1"}
        engines[1].version = "v0"
        async with http.get("/weight_info") as reply:
            data = await reply.json()
        assert data["weight_version"] is None
        assert data["versions"] == {engines[0].id: "v1", engines[1].id: "v0"}


async def test_a_restarted_engine_gets_nothing_until_a_whole_sync():
    async with fleet(2) as (engines, http, _):
        async with http.post("/update_weight_version", json={"new_version": "v5"}):
            pass
        await engines[1].restart()
        await asyncio.sleep(0.3)
        engines[1].seen.clear()
        for _ in range(50):
            status, body, headers = await complete(http)
            assert (status, body["engine"], body["version"]) == (200, "e0", "v5")
            assert headers["X-Fleetgate-Weight-Version"] == "v5"
        await until(lambda: states_are(http, engines[1].id, "fenced"))
        assert not engines[1].calls("/v1/completions")
        # A label alone says nothing about the weights of a process that restarted.
        for path, body in (
            ("/pause?mode=keep", None),
            ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1, "world_size": 3}}),
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {}}),
            ("/finish_weight_update", {"weight_version": "v6"}),
            ("/resume", None),
        ):
            async with http.post(path, json=body) as reply:
                assert reply.status == 200, (path, await reply.text())
        await until(lambda: states_are(http, engines[1].id, "ready"))
        names = {(await complete(http))[1]["engine"] for _ in range(10)}
        assert names == {"e0", "e1"}


async def test_admit_by_hand():
    async with fleet(2) as (engines, http, _):
        async with http.post("/update_weight_version", json={"new_version": "v5"}):
            pass
        await engines[1].restart()
        await until(lambda: states_are(http, engines[1].id, "fenced"))
        async with http.post(f"/fleet/engines/{engines[1].id}/admit") as reply:
            assert reply.status == 200
        await until(lambda: states_are(http, engines[1].id, "ready"))


async def test_equal_checksums_admit_and_label():
    async with fleet(2) as (engines, http, _):
        async with http.post("/update_weight_version", json={"new_version": "v5"}):
            pass
        engines[0].checksums = {"dp0:pp0:pcp0:tp0:w": "aa"}
        engines[1].checksums = {"dp0:pp0:pcp0:tp0:w": "other"}
        await engines[1].restart()
        await until(lambda: states_are(http, engines[1].id, "fenced"))
        await asyncio.sleep(0.5)
        assert (await states(http))[engines[1].id] == "fenced"
        engines[1].checksums = dict(engines[0].checksums)
        async with http.post("/weight_checker", json={"action": "checksum"}) as reply:
            assert reply.status == 200
            assert (await reply.json())["checksums"] == engines[0].checksums
        await until(lambda: states_are(http, engines[1].id, "ready"))
        assert engines[1].version == "v5"


async def test_checksums_that_differ_are_said():
    async with fleet(2) as (engines, http, _):
        engines[0].checksums = {"dp0:pp0:pcp0:tp0:w": "aa"}
        engines[1].checksums = {"dp0:pp0:pcp0:tp0:w": "bb"}
        async with http.post("/weight_checker", json={"action": "checksum"}) as reply:
            data = await reply.json()
        assert data["match"] is False
        assert engines[1].id in json.dumps(data) or engines[0].id in json.dumps(data)


async def test_a_finish_without_a_label_gets_one():
    async with fleet(2) as (engines, http, _):
        for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            async with http.post(path, json={"update_info": {}} if path == "/update_weights" else None) as reply:
                assert reply.status == 200
        assert [engine.calls("/finish_weight_update")[0].body for engine in engines] == [b"", b""]
        async with http.get("/weight_info") as reply:
            assert await reply.json() == {"weight_version": "u1"}


async def test_a_lost_member_refuses_updates_before_any_engine():
    async with fleet(3) as (engines, http, _):
        info = {"init_info": {"rank_offset": 1, "world_size": 4}}
        async with http.post("/init_weight_transfer_engine", json=info) as reply:
            assert reply.status == 200
        await engines[2].stop()
        await until(lambda: states_are(http, engines[2].id, "down"))
        for path, body in (("/start_weight_update", None), ("/update_weights", {"update_info": {}})):
            async with http.post(path, json=body) as reply:
                assert reply.status == 409
                assert "3" in (await reply.json())["error"]["message"]
            assert not any(engine.calls(path) for engine in engines)


async def test_a_second_caller_gets_409_with_who_holds_it():
    async with fleet(2) as (engines, http, _):
        engines[0].delays["/update_weights"] = 1.0
        first = asyncio.ensure_future(http.post("/update_weights", json={"update_info": {"a": 1}}))
        await until(lambda: engines[0].calls("/update_weights"))
        async with http.post("/start_weight_update") as reply:
            assert reply.status == 409
            assert "/update_weights" in (await reply.json())["error"]["message"]
        async with http.get("/health") as reply:
            assert reply.status == 200
        assert (await first).status == 200


async def test_a_replay_gets_the_first_answer_and_no_second_fanout():
    async with fleet(2) as (engines, http, _):
        engines[0].delays["/update_weights"] = 0.8
        body = {"update_info": {"a": 1}}
        first = asyncio.ensure_future(http.post("/update_weights", json=body))
        await until(lambda: engines[0].calls("/update_weights"))
        first.cancel()
        async with http.post("/update_weights", json=body) as reply:
            assert reply.status == 200
        async with http.post("/update_weights", json=body) as reply:
            assert reply.status == 200
        assert [len(engine.calls("/update_weights")) for engine in engines] == [1, 1]
