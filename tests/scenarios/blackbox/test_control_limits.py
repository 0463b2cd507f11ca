"""The control plane of the contract, part two: what is refused, aborted, held back and found at start."""

import asyncio
import json

import pytest
from aiohttp import web

from tests.scenarios.blackbox.conftest import answer, complete, fleet, states, states_are, until
from tests.scenarios.blackbox.engine import Engine


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

    from tests.scenarios.blackbox.conftest import complete, ready, run_proxy

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
