"""Sentences of docs/contract.md about control calls and weights, checked from outside the process."""

import asyncio
import json

import pytest
from aiohttp import web

from tests.scenarios.blackbox.conftest import fleet, states, until
from tests.scenarios.blackbox.engine import Engine

JSON = {"Content-Type": "application/json"}


def answer(status, body):
    async def handler(engine, request):
        return web.json_response(body, status=status)

    return handler


async def complete(http, **headers):
    async with http.post("/v1/completions", json={"prompt": "p"}, headers=headers) as reply:
        return reply.status, await reply.json(), reply.headers


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


async def states_are(http, engine, state):
    return (await states(http))[engine] == state


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


async def test_m2n_is_refused_for_several_engines():
    async with fleet(2) as (engines, http, _):
        info = {"init_info": {"rank_offset": 1, "dst_mesh_dims": [2], "source_digest": "x", "params": []}}
        async with http.post("/init_weight_transfer_engine", json=info) as reply:
            assert reply.status == 409
        assert not any(engine.calls("/init_weight_transfer_engine") for engine in engines)


async def test_collective_rpc_is_off_until_allowed():
    async with fleet(2) as (engines, http, _):
        async with http.post("/collective_rpc", json={"method": "x"}) as reply:
            assert reply.status == 403
        assert not any(engine.calls("/collective_rpc") for engine in engines)
    async with fleet(2, "--allow-collective-rpc") as (_, http, _proxy):
        async with http.post("/collective_rpc", json={"method": "x"}) as reply:
            assert await reply.json() == {"results": ["e0", "e1"]}


async def test_lora_loads_are_all_or_none():
    async with fleet(2) as (engines, http, _):
        body = {"lora_name": "a", "lora_path": "/x"}
        async with http.post("/v1/load_lora_adapter", json=body) as reply:
            assert reply.status == 200
            assert (await reply.text()).startswith("Success")
            assert reply.content_type == "text/plain"
        engines[1].overrides["/v1/load_lora_adapter"] = answer(500, {"error": "no"})
        async with http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "/x"}) as reply:
            assert reply.status == 424
        (undone,) = engines[0].calls("/v1/unload_lora_adapter")
        assert json.loads(undone.body)["lora_name"] == "b"


async def test_success_false_is_not_hidden():
    async with fleet(2) as (engines, http, _):
        engines[1].overrides["/reset_prefix_cache"] = answer(200, {"success": False})
        async with http.post("/reset_prefix_cache") as reply:
            assert reply.status == 424
            assert engines[1].id in (await reply.json())["error"]["message"]


async def test_an_engine_without_rl_routes_is_plain():
    engines = [await Engine("rl").start(), await Engine("plain", rl=False).start()]
    import aiohttp

    from tests.scenarios.blackbox.conftest import ready, run_proxy

    try:
        flags = [flag for engine in engines for flag in ("--engine", engine.url)]
        async with run_proxy(*flags) as proxy, aiohttp.ClientSession(proxy.url) as http:
            await until(lambda: ready(http))
            assert set((await states(http)).values()) == {"ready"}
            async with http.post("/pause") as reply:
                assert reply.status == 424
                message = (await reply.json())["error"]["message"]
                assert engines[1].id in message
                assert "VLLM_SERVER_DEV_MODE" in message
    finally:
        for engine in engines:
            await engine.stop()


async def test_a_hung_leg_ends_with_a_report():
    async with fleet(2, "--pause-timeout", "1") as (engines, http, _):
        engines[1].delays["/pause"] = 30
        async with http.post("/pause?mode=keep") as reply:
            assert reply.status == 424
            data = await reply.json()
        assert engines[1].id in data["error"]["message"]
        assert engines[0].id in data["engines"]


async def test_down_engines_are_not_a_failure():
    async with fleet(3) as (engines, http, _):
        await engines[2].stop()
        await until(lambda: states_are(http, engines[2].id, "down"))
        async with http.post("/pause") as reply:
            assert reply.status == 200
        async with http.post("/resume") as reply:
            assert reply.status == 200


async def test_majority_decides_at_start_and_a_tie_fences_all():
    import aiohttp

    from tests.scenarios.blackbox.conftest import ready, run_proxy

    engines = [await Engine(str(i), version=v).start() for i, v in enumerate(("v2", "v2", "default", "default", "v1"))]
    flags = [flag for engine in engines for flag in ("--engine", engine.url)]
    try:
        async with run_proxy(*flags) as proxy, aiohttp.ClientSession(proxy.url) as http:
            await until(lambda: ready(http))
            assert list((await states(http)).values()) == ["ready", "ready", "fenced", "fenced", "fenced"]
        engines[1].version = "v1"
        engines[4].version = "default"
        async with run_proxy(*flags) as proxy, aiohttp.ClientSession(proxy.url) as http:
            await asyncio.sleep(0.5)
            assert set((await states(http)).values()) == {"fenced"}
            async with http.get("/ready") as reply:
                assert reply.status == 503
    finally:
        for engine in engines:
            await engine.stop()


async def test_a_restarted_proxy_goes_on_paused():
    import aiohttp

    from tests.scenarios.blackbox.conftest import ready, run_proxy

    engines = [await Engine(str(i), version="v3").start() for i in range(2)]
    flags = [flag for engine in engines for flag in ("--engine", engine.url)]
    try:
        async with run_proxy(*flags) as proxy, aiohttp.ClientSession(proxy.url) as http:
            await until(lambda: ready(http))
            async with http.post("/pause?mode=keep") as reply:
                assert reply.status == 200
            proxy.process.kill()
            await proxy.process.wait()
        async with run_proxy(*flags) as proxy, aiohttp.ClientSession(proxy.url) as http:
            async with http.get("/is_paused") as reply:
                assert await reply.json() == {"is_paused": True}
            async with http.get("/weight_info") as reply:
                assert await reply.json() == {"weight_version": "v3"}
            held = asyncio.ensure_future(complete(http))
            await asyncio.sleep(0.3)
            assert not held.done()
            async with http.post("/resume") as reply:
                assert reply.status == 200
            assert (await held)[0] == 200
    finally:
        for engine in engines:
            await engine.stop()


async def test_abort_counts_what_really_ran():
    async with fleet(2) as (engines, http, _):
        for engine in engines:
            engine.tokens, engine.token_delay = 1, 1.0
        running = [asyncio.ensure_future(complete(http, **{"X-Request-Id": f"r{i}"})) for i in range(2)]
        await until(lambda: sum(engine.running for engine in engines) == 2)
        async with http.post("/abort_requests", json={"request_ids": ["r0", "nobody"]}) as reply:
            assert await reply.json() == {"status": "aborted", "aborted": 1}
        assert sum(len(engine.calls("/abort_requests")) for engine in engines) == 1
        async with http.post("/abort_requests", json={}) as reply:
            assert await reply.json() == {"status": "aborted", "aborted": 2}
        await asyncio.gather(*running)


async def test_max_pause_resumes_by_itself():
    async with fleet(2, "--max-pause", "0.5") as (engines, http, _):
        async with http.post("/pause") as reply:
            assert reply.status == 200
        status, _, _ = await complete(http)
        assert status == 200
        assert not any(engine.paused for engine in engines)


async def test_update_while_asleep_is_refused():
    async with fleet(2) as (engines, http, _):
        async with http.post("/sleep?level=1") as reply:
            assert reply.status == 200
        async with http.post("/update_weights", json={"update_info": {}}) as reply:
            assert reply.status == 409
        assert not any(engine.calls("/update_weights") for engine in engines)


async def test_custom_fanout_paths_shift_their_rank_field():
    flags = ("--fanout-paths", "/init_broadcaster=rank_offset", "--fanout-paths", "/areal_*")
    async with fleet(2, *flags) as (engines, http, _):
        for engine in engines:
            engine.overrides["/init_broadcaster"] = answer(200, {"status": "ok"})
            engine.overrides["/areal_pause_generation"] = answer(200, {"ok": True})
        body = {"rank_offset": 0, "inference_world_size": 2}
        async with http.post("/init_broadcaster", json=body) as reply:
            assert reply.status == 200
        sent = [json.loads(engine.calls("/init_broadcaster")[0].body)["rank_offset"] for engine in engines]
        assert sent == [0, 1]
        async with http.post("/areal_pause_generation") as reply:
            assert reply.status == 200
        assert [len(engine.calls("/areal_pause_generation")) for engine in engines] == [1, 1]


async def test_a_full_retry_works_after_a_failed_round():
    async with fleet(2) as (engines, http, _):

        async def round_(version):
            out = []
            for path, body in (
                ("/pause?mode=keep", None),
                ("/start_weight_update", None),
                ("/update_weights", {"update_info": {"v": version}}),
                ("/finish_weight_update", {"weight_version": version}),
                ("/resume", None),
            ):
                async with http.post(path, json=body) as reply:
                    out.append(reply.status)
            return out

        async with http.post("/init_weight_transfer_engine", json={"init_info": {"rank_offset": 1, "world_size": 3}}):
            pass
        engines[1].overrides["/finish_weight_update"] = answer(500, {"error": {"message": "no"}})
        assert (await round_("v1"))[3] == 424
        async with http.get("/weight_info") as reply:
            assert (await reply.json())["weight_version"] in (None, "default")
        del engines[1].overrides["/finish_weight_update"]
        assert await round_("v2") == [200] * 5
        await until(lambda: states_are(http, engines[1].id, "ready"))
        assert [engine.version for engine in engines] == ["v2", "v2"]


async def test_control_needs_the_token_and_data_does_not():
    async with fleet(2, "--control-token", "secret") as (engines, http, proxy):
        for headers in ({}, {"Authorization": "Bearer data-key"}):
            for method, path in (
                ("POST", "/pause"), ("POST", "/resume"), ("POST", "/update_weights"), ("POST", "/abort_requests"),
                ("POST", "/collective_rpc"), ("POST", "/fleet/engines"), ("DELETE", f"/fleet/engines/{engines[0].id}"),
                ("POST", f"/fleet/engines/{engines[0].id}/fence"), ("GET", "/get_world_size"),
            ):  # fmt: skip
                async with http.request(method, path, headers=headers) as reply:
                    assert reply.status in (401, 403), (method, path)
        assert not any(engine.calls("/pause") for engine in engines)
        async with http.post("/pause", headers={"Authorization": "Bearer secret"}) as reply:
            assert reply.status == 200
        async with http.post("/resume", headers={"Authorization": "Bearer secret"}) as reply:
            assert reply.status == 200
        # The control token is for the proxy; no engine may see it.
        for engine in engines:
            for seen in engine.seen:
                assert "secret" not in str(seen.headers)
        assert (await complete(http))[0] == 200
        assert "secret" not in "".join(proxy.lines)


@pytest.mark.parametrize(
    "path", ["/%70ause", "//pause", "/./pause", "/x/../pause", "/pause;x", "/pause%0a", "/PAUSE/../pause"]
)
async def test_a_control_path_in_disguise_reaches_no_engine(path):
    from urllib.parse import urlsplit

    async with fleet(1) as (engines, _, proxy):
        parts = urlsplit(proxy.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        line = await reader.readline()
        assert line.split()[1].startswith(b"4")
        assert not engines[0].paused
        writer.close()


async def test_wait_mode_has_no_limit_by_default_while_others_do():
    async with fleet(1, "--pause-timeout", "0.3") as (engines, http, _):
        engines[0].delays["/pause"] = 1.0
        async with http.post("/pause?mode=wait") as reply:
            assert reply.status == 200


async def test_a_lost_resume_is_retried():
    async with fleet(2) as (engines, http, _):
        async with http.post("/pause"):
            pass
        times = []

        async def first_fails(engine, request):
            times.append(1)
            if len(times) == 1:
                return web.json_response({"error": "no"}, status=500)
            engine.paused = False
            return web.json_response({"status": "resumed"})

        engines[1].overrides["/resume"] = first_fails
        async with http.post("/resume") as reply:
            assert reply.status == 200
        assert len(times) == 2
        assert not engines[1].paused


async def test_an_engine_that_flaps_has_to_answer_several_times():
    async with fleet(2, "--probe-rise", "3", "--probe-interval", "0.2") as (engines, http, _):
        await engines[1].stop()
        await until(lambda: states_are(http, engines[1].id, "down"))
        engines[1].seen.clear()
        await engines[1].start()
        await until(lambda: states_are(http, engines[1].id, "ready"))
        assert len(engines[1].calls("/health")) >= 3
