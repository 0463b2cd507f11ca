"""LoRA, aborts, checksums, remote calls, credentials."""

import asyncio

import pytest
from aiohttp import web

from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import FakeRequest, rig

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


async def test_an_adapter_is_loaded_everywhere_and_the_text_stays_plain():
    async with rig(2) as fleet:
        text = await fleet.call(LOAD, json={"lora_name": "a", "lora_path": "/x"})
        assert text == "Success: LoRA adapter 'a' added successfully."
        assert [list(mock.loaded) for mock in fleet.engines] == [["a"], ["a"]]


async def test_half_a_load_is_undone():
    async with rig(3) as fleet:
        fleet.engines[1].fail(LOAD, times=1)
        data = await fleet.call(LOAD, json={"lora_name": "a", "lora_path": "/x"}, status=424)
        assert fleet.engines[1].id in data["message"]
        assert [list(mock.loaded) for mock in fleet.engines] == [[], [], []]
        assert fleet.states() == ["ready"] * 3


async def test_half_an_unload_is_undone():
    async with rig(2) as fleet:
        await fleet.call(LOAD, json={"lora_name": "a", "lora_path": "/x"})
        fleet.engines[1].fail(UNLOAD, times=1)
        await fleet.call(UNLOAD, json={"lora_name": "a"}, status=424)
        assert [list(mock.loaded) for mock in fleet.engines] == [["a"], ["a"]]
        assert fleet.states() == ["ready"] * 2


async def test_a_reload_under_the_same_name_that_fails_fences_that_engine_until_it_has_it():
    async with rig(2) as fleet:
        await fleet.call(LOAD, json={"lora_name": "a", "lora_path": "/1"})
        fleet.engines[1].fail(LOAD)
        await fleet.call(LOAD, json={"lora_name": "a", "lora_path": "/2", "load_inplace": True}, status=424)
        assert fleet.states() == ["ready", "fenced"]
        await asyncio.sleep(0.3)
        assert fleet.states() == ["ready", "fenced"]
        fleet.engines[1].heal()
        await fleet.until_state(1, "ready")
        assert fleet.engines[1].loaded == {"a": "/2"}


async def test_a_restarted_engine_gets_the_adapters_it_misses_before_it_serves():
    async with rig(2) as fleet:
        await fleet.call(LOAD, json={"lora_name": "a", "lora_path": "/x"})
        await fleet.restart(1)
        await fleet.until_state(1, "ready")
        assert fleet.engines[1].loaded == {"a": "/x"}


async def test_an_adapter_nobody_has_is_refused_as_vllm_does():
    async with rig(2) as fleet:
        data = await fleet.call(UNLOAD, json={"lora_name": "none"}, status=404)
        assert "cannot be found" in data["error"]["message"]
        assert fleet.states() == ["ready"] * 2


async def test_servers_without_adapter_routes_are_named_with_what_is_missing():
    async with rig(engines=[MockEngine(), MockEngine(lora=False)]) as fleet:
        data = await fleet.call(LOAD, json={"lora_name": "a", "lora_path": "/x"}, status=424)
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in data["message"]


async def test_abort_all_is_summed_with_what_is_held():
    async with rig(2) as fleet:
        held = FakeRequest("r1", "/v1/completions", None)
        fleet.data.tracker.requests = [held, FakeRequest("r2", "/v1/completions", fleet.engine(0))]
        assert await fleet.call("/abort_requests", json={}) == {"status": "aborted", "aborted": 5}
        assert held.aborted


async def test_ids_go_to_whom_they_run_at_in_the_engines_own_form():
    async with rig(2) as fleet:
        fleet.data.tracker.requests = [
            FakeRequest("r1", "/v1/completions", fleet.engine(0)),
            FakeRequest("r2", "/v1/chat/completions", fleet.engine(1)),
            FakeRequest("r3", "/inference/v1/generate", fleet.engine(1)),
            FakeRequest("r4", "/v1/completions", None),
        ]
        data = await fleet.call(
            "/abort_requests", json={"request_ids": ["cmpl-r1-0", "r2", "generate-tokens-r3", "r4", "ghost"]}
        )
        assert data == {"status": "aborted", "aborted": 4}
        assert fleet.engines[0].calls("/abort_requests")[0].json() == {"request_ids": ["cmpl-r1-0"]}
        assert fleet.engines[1].calls("/abort_requests")[0].json() == {
            "request_ids": ["chatcmpl-r2", "generate-tokens-r3"]
        }
        assert fleet.data.tracker.requests[3].aborted
        assert await fleet.call("/abort_requests", json={"request_ids": ["ghost"]}) == {
            "status": "aborted",
            "aborted": 0,
        }


async def test_a_completion_of_many_prompts_is_aborted_whole():
    async with rig(1) as fleet:
        fleet.data.tracker.requests = [FakeRequest("r1", "/v1/completions", fleet.engine(0), prompts=2)]
        assert (await fleet.call("/abort_requests", json={"request_ids": ["r1"]}))["aborted"] == 1
        await fleet.call("/abort_requests", json={"request_ids": ["cmpl-r1-1"]})
        sent = [call.json()["request_ids"] for call in fleet.engines[0].calls("/abort_requests")]
        assert sent == [["cmpl-r1-0", "cmpl-r1-1"], ["cmpl-r1-1"]]


async def test_an_abort_without_a_body_is_refused_as_vllm_does():
    async with rig(2) as fleet:
        await fleet.call("/abort_requests", status=400)
        await fleet.call("/abort_requests", json={"request_ids": "x"}, status=400)
        assert fleet.states() == ["ready"] * 2


async def test_checksums_that_agree_and_that_do_not():
    async with rig(3) as fleet:
        data = await fleet.call("/weight_checker", json={"action": "checksum"})
        assert list(data) == ["checksums"]
        fleet.engines[2].weights = "other"
        data = await fleet.call("/weight_checker", json={"action": "checksum"})
        assert data["match"] is False
        assert data["differing"] == {fleet.engines[2].id: ["dp0:pp0:pcp0:tp0:w"]}
        assert data["checksums"] == {}


async def test_remote_calls_are_refused_unless_allowed():
    async with rig(2) as fleet:
        data = await fleet.call("/collective_rpc", json={"method": "x"}, status=403)
        assert "--allow-collective-rpc" in data["error"]["message"]
    async with rig(engines=[MockEngine(world_size=2), MockEngine()], allow_collective_rpc=True) as fleet:
        data = await fleet.call("/collective_rpc", json={"method": "x"})
        first, second = (str(mock.port) for mock in fleet.engines)
        assert data == {"results": [first, first, second]}


CONTROL = ["/pause", "/resume", "/update_weights", "/abort_requests", "/fleet/engines", "/fleet/engines/x/admit"]


@pytest.mark.parametrize("path", CONTROL)
async def test_control_calls_need_the_control_token(path):
    async with rig(1, control_token="s3cret", engine_api_key="data-key") as fleet:
        for header in (None, "Bearer data-key", "Basic s3cret", "Bearer s3cret2", "Bearer"):
            headers = {"Authorization": header} if header else {}
            data = await fleet.call(path, status=401, headers=headers)
            assert data["error"]["code"] == "unauthorized"
        assert fleet.seen(path) == [0]
        async with fleet.http.post(fleet.base + path, headers={"Authorization": "Bearer s3cret"}) as response:
            assert response.status != 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/fleet", "/fleet/"])
async def test_looking_needs_no_token(path):
    async with rig(1, control_token="s3cret") as fleet:
        await fleet.get(path)


async def test_reads_of_the_control_plane_need_the_token_too():
    async with rig(1, control_token="s3cret") as fleet:
        await fleet.get("/weight_info", status=401)
        await fleet.get("/weight_info", headers={"Authorization": "bearer s3cret"})


async def test_wrong_methods_and_large_bodies():
    async with rig(1, max_control_body=2048) as fleet:
        await fleet.get("/pause", status=405)
        await fleet.call("/weight_info", status=405)
        await fleet.call("/pause", data=b"x" * 4096, status=413)


async def test_finish_session_forgets_where_it_lives():
    async with rig(1) as fleet:
        fleet.data.balancer.sessions.add(b"s1")
        assert (await fleet.call("/finish_session?session_id=s1"))["status"] == "finished"
        assert (await fleet.call("/finish_session", json={"session_id": "s1"}))["status"] == "finished"
        assert (await fleet.call("/finish_session", headers={"X-Session-ID": "s2"}))["status"] == "unknown"


async def test_with_a_control_port_the_main_one_only_shows():
    async with rig(1, control_token="t") as fleet:
        runner = web.AppRunner(fleet.plane.make_app(public=True))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        for method, path, status in (
            ("POST", "/pause", 403), ("GET", "/weight_info", 403), ("POST", "/fleet/engines", 403),
            ("DELETE", "/fleet/engines/x", 403), ("GET", "/fleet", 200), ("GET", "/health", 200), ("GET", "/ready", 200),
            ("POST", "/finish_session", 200),
        ):  # fmt: skip
            async with fleet.http.request(method, base + path, headers={"Authorization": "Bearer t"}) as response:
                assert response.status == status, path
        await runner.cleanup()
        assert fleet.seen("/pause") == [0]


async def test_what_runs_at_a_half_updated_engine_is_aborted_before_it_is_resumed():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/pause?mode=keep")
        await fleet.call("/start_weight_update")
        fleet.engine(0).inflight = 2
        await fleet.call("/resume")
        assert fleet.seen("/abort_requests") == [1, 0]
        paths = [item.path for item in fleet.engines[0].seen if item.path in ("/abort_requests", "/resume")]
        assert paths[-2:] == ["/abort_requests", "/resume"]


async def test_an_engine_that_cannot_abort_stays_paused():
    async with rig(2) as fleet:
        await fleet.call("/pause?mode=keep")
        await fleet.call("/start_weight_update")
        fleet.engine(0).inflight = 1
        fleet.engines[0].fail("/abort_requests")
        data = await fleet.call("/resume", status=424)
        assert "stays paused" in data["message"]
        assert [mock.paused for mock in fleet.engines] == [True, False]


async def test_a_round_that_breaks_without_a_pause_ends_what_runs_there():
    async with rig(2) as fleet:
        await fleet.call("/start_weight_update")
        fleet.engine(0).inflight = 1
        fleet.engines[1].fail("/update_weights", times=1)
        await fleet.call("/update_weights", json={"update_info": {"names": ["w"]}}, status=424)
        await fleet.until(lambda: fleet.seen("/abort_requests") == [1, 0])
