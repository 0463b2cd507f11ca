"""SkyRL's ``RemoteInferenceClient``, replayed with the library that it uses: ``proxy_url`` and ``server_urls`` = proxy.

Shapes from ``skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

from engine_launcher.sim import model
from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.faults import Fault
from tests.contract.clients.conftest import SimFleet, sim_fleet
from tests.contract.clients.framework_engines import SkyEngine

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

SIZES = (2, 2, 2)
SETTINGS = {
    "allow_collective_rpc": True,
    "fanout_paths": "/fetch_weights,/skyrl/v1/load_lora_adapter",
    "probe_interval": 0.2,
}
PROBES = 1.0
"""Seconds: several probes of each engine, after any of which a wrongly fenced one would be let in."""


class SkyClient:
    """The calls of SkyRL's client: one session with 2 s keep-alive and no limit in time."""

    def __init__(self, url: str) -> None:
        self.url = url
        connector = aiohttp.TCPConnector(limit=50_000, keepalive_timeout=2)
        self.session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def control(self, path: str, body: Any = None, method: str = "POST", **params: Any) -> Any:
        """It reads a body only where ``Content-Length`` says that there is one."""
        async with self.session.request(method, self.url + path, json=body, params=params) as answer:
            found = await answer.json() if answer.content_length else None
            if answer.status >= 400 and found is not None:
                raise aiohttp.ClientResponseError(
                    answer.request_info, answer.history, status=answer.status, message=found["error"]["message"]
                )
            answer.raise_for_status()
            return found

    async def rpc(self, method: str, **kwargs: Any) -> Any:
        body: dict[str, Any] = {"method": method}
        return await self.control("/collective_rpc", body | ({"kwargs": kwargs} if kwargs else {}))

    async def sync(self, names: list[str]) -> None:
        """What the broadcast sender does around its NCCL broadcast, and the trainer around it."""
        await self.control("/pause", mode="keep", clear_cache="false")
        try:
            await self.rpc("skyrl_start_weight_update", is_checkpoint_format=True)
            info = {"names": names, "dtype_names": ["float32"], "shapes": [[4]], "packed": True}
            await self.rpc("update_weights_nccl", update_info=info)
            await self.rpc("skyrl_finish_weight_update")
        finally:
            await self.control("/resume")

    async def generate(self, ids: list[int], session: str | None = None, **more: Any) -> tuple[list[int], str]:
        """Token ids, and the engine that made them; a 4xx or 5xx with a JSON body is final."""
        body = {"sampling_params": {"temperature": 0, "max_tokens": 8}, "model": "tiny", "token_ids": ids, **more}
        headers = {"Content-Type": "application/json"} | ({"X-Session-ID": session} if session else {})
        async with self.session.post(f"{self.url}/inference/v1/generate", json=body, headers=headers) as answer:
            found = orjson.loads(await answer.read())
            assert answer.status == 200, found
            return found["choices"][0]["token_ids"], answer.headers["X-Fleetgate-Engine"]


@pytest_asyncio.fixture(loop_scope="module")
async def fleet() -> AsyncIterator[SimFleet]:
    async with sim_fleet(*(SimConfig(world_size=size) for size in SIZES), kind=SkyEngine, **SETTINGS) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def sky(fleet: SimFleet) -> AsyncIterator[SkyClient]:
    client = SkyClient(fleet.url)
    yield client
    await client.session.close()


async def test_control_calls_answer_json_with_a_length(sky: SkyClient, fleet: SimFleet) -> None:
    assert await sky.control("/get_world_size", {}, "GET") == {"world_size": sum(SIZES)}
    for calls in fleet.calls("/get_world_size"):
        assert [(call["method"], call["body"]) for call in calls] == [("GET", "{}")]
    assert await sky.control("/pause", mode="keep", clear_cache="false") == {"status": "paused"}
    assert [call["query"] for calls in fleet.calls("/pause") for call in calls] == ["mode=keep&clear_cache=false"] * 3
    assert await sky.control("/resume") == {"status": "resumed"}
    assert await sky.control("/sleep", level="1", tags=["weights", "kv_cache"]) == {"status": "sleeping", "level": 1}
    assert await sky.control("/wake_up", tags=["weights", "kv_cache"]) == {
        "status": "awake",
        "tags": ["weights", "kv_cache"],
    }
    assert await sky.control("/reset_prefix_cache", {"reset_running_requests": False}) == {"success": True}
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 7}
    assert await sky.control("/init_weight_transfer_engine", {"init_info": info})
    groups = [engine.transfer.group for engine in fleet.engines]
    assert [group and group.rank_offset for group in groups] == [1, 3, 5]
    assert await sky.control("/fetch_weights", {"target_version": 3, "sync_dir": "/d"})
    assert [len(calls) for calls in fleet.calls("/fetch_weights")] == [1, 1, 1]


async def test_syncs_over_worker_methods_reach_all(sky: SkyClient, fleet: SimFleet) -> None:
    for step in range(3):
        results = await sky.rpc("check_health")
        assert results == {"results": [None] * sum(SIZES)}
        await sky.sync([f"w{step}"])
        assert [engine.core.weights for engine in fleet.engines] == [f"w{step}"] * 3
        assert await fleet.states() == ["ready"] * 3
        ids, _ = await sky.generate([1, 2, 3])
        assert ids == model.generate(f"w{step}", [1, 2, 3], 8)
    # Equal bodies within seconds of each other (start, finish) are calls of their own, not re-sent ones.
    assert [len(calls) for calls in fleet.calls("/collective_rpc")] == [12, 12, 12]


async def test_a_request_frozen_by_keep_goes_on_after_the_sync(sky: SkyClient, fleet: SimFleet) -> None:
    for engine in fleet.engines:
        engine.core.speed.tokens_per_second = 10.0
    running = asyncio.ensure_future(sky.generate([5]))
    while not sum(engine.core.unfinished for engine in fleet.engines):
        await asyncio.sleep(0.01)
    await sky.sync(["frozen"])
    ids, _ = await running
    assert len(ids) == 8


async def test_an_engine_that_lost_the_weights_of_worker_methods_stays_out(sky: SkyClient, fleet: SimFleet) -> None:
    # Labels say nothing here: they are `default` before and after.
    await sky.sync(["new"])
    await fleet.engines[1].restart()
    await asyncio.sleep(PROBES)
    assert await fleet.states() == ["ready", "fenced", "ready"]
    for _ in range(6):
        ids, _ = await sky.generate([1, 2, 3])
        assert ids == model.generate("new", [1, 2, 3], 8)


async def test_an_engine_that_failed_a_worker_method_stays_out(sky: SkyClient, fleet: SimFleet) -> None:
    await sky.sync(["old"])
    await sky.rpc("skyrl_start_weight_update", is_checkpoint_format=True)
    await sky.rpc("update_weights_nccl", update_info={"names": ["half"]})
    fleet.faults(Fault(path="/collective_rpc", action="status", status=500, times=1), engine=2)
    with pytest.raises(aiohttp.ClientResponseError) as raised:
        await sky.rpc("skyrl_finish_weight_update")
    assert raised.value.status == 424
    assert fleet.engines[2].url.removeprefix("http://") in raised.value.message
    assert [engine.core.weights for engine in fleet.engines] == ["half", "half", "old"]
    # Neither time nor a worker method that it can do gives it the weights that it lacks.
    await asyncio.sleep(PROBES)
    await sky.rpc("check_health")
    await asyncio.sleep(PROBES)
    assert await fleet.states() == ["ready", "ready", "fenced"]
    await sky.sync(["whole"])
    assert (await fleet.states())[2] == "fenced", "worker methods tell the proxy nothing about weights"
    await sky.control("/weight_checker", {"action": "checksum"})
    await asyncio.sleep(PROBES)
    assert await fleet.states() == ["ready"] * 3


async def test_equal_checksums_let_an_engine_back_and_stale_ones_do_not(sky: SkyClient, fleet: SimFleet) -> None:
    await sky.sync(["first"])
    await sky.control("/weight_checker", {"action": "checksum"})
    fleet.faults(Fault(path="/collective_rpc", action="status", status=500), engine=2)
    # It is the only one that still has what was checked before.
    with pytest.raises(aiohttp.ClientResponseError):
        await sky.rpc("skyrl_start_weight_update", is_checkpoint_format=True)
    for engine in fleet.engines[:2]:
        engine.core.weights = "second"
    checked = await sky.control("/weight_checker", {"action": "checksum"})
    assert list(checked["differing"]) == [fleet.engines[2].url.removeprefix("http://")]
    await asyncio.sleep(PROBES)
    assert await fleet.states() == ["ready", "ready", "fenced"]
    fleet.faults()
    await fleet.engines[2].restart()
    await asyncio.sleep(PROBES)
    await sky.sync(["third"])
    assert (await fleet.states())[2] == "fenced", "worker methods tell the proxy nothing about weights"
    assert "match" not in await sky.control("/weight_checker", {"action": "checksum"})
    await asyncio.sleep(PROBES)
    assert await fleet.states() == ["ready"] * 3


async def test_sessions_stick_until_they_are_finished(sky: SkyClient, fleet: SimFleet) -> None:
    homes = {name: {(await sky.generate([1], name))[1] for _ in range(4)} for name in ("a", "b", "c", "d", "e", "f")}
    assert all(len(engines) == 1 for engines in homes.values())
    assert len({engine for engines in homes.values() for engine in engines}) == 3
    for name in homes:
        async with sky.session.post(f"{fleet.url}/finish_session", params={"session_id": name}) as answer:
            assert answer.status == 200
    async with sky.session.post(f"{fleet.url}/finish_session", params={"session_id": "never seen"}) as answer:
        assert answer.status == 200


async def test_adapters_by_its_own_path(sky: SkyClient, fleet: SimFleet) -> None:
    body = {"lora_name": "skyrl-lora", "lora_path": "/adapter/1"}
    for step in (1, 2):
        body = {**body, "lora_path": f"/adapter/{step}"}
        async with sky.session.post(f"{fleet.url}/skyrl/v1/load_lora_adapter", json=body) as answer:
            assert answer.status == 200
            assert "added successfully" in await answer.text()
        assert [engine.adapters for engine in fleet.engines] == [{"skyrl-lora": f"/adapter/{step}"}] * 3
    async with sky.session.post(f"{fleet.url}/v1/unload_lora_adapter", json={"lora_name": "skyrl-lora"}) as answer:
        assert answer.status == 200
    assert [engine.adapters for engine in fleet.engines] == [{}] * 3


async def test_a_first_load_that_fails_on_one_is_undone_where_vllm_unloads(sky: SkyClient, fleet: SimFleet) -> None:
    fleet.faults(Fault(path="/skyrl/v1/load_lora_adapter", action="status", status=404), engine=1)
    body = {"lora_name": "skyrl-lora", "lora_path": "/adapter/1"}
    async with sky.session.post(f"{fleet.url}/skyrl/v1/load_lora_adapter", json=body) as answer:
        assert answer.status == 424
        assert (await answer.json())["error"]["message"]
    assert [engine.adapters for engine in fleet.engines] == [{}] * 3
    assert await fleet.states() == ["ready"] * 3


async def test_a_wildcard_for_control_does_not_spread_generation(sky: SkyClient) -> None:
    async with sim_fleet(SimConfig(), SimConfig(), kind=SkyEngine, fanout_paths="/skyrl/*") as fleet:
        async with sky.session.post(
            f"{fleet.url}/skyrl/v1/generate", json={"model": "tiny", "prompt": [1], "max_tokens": 3}
        ) as answer:
            assert answer.status == 200
            assert "X-Fleetgate-Engine" in answer.headers
        assert sum(len(calls) for calls in fleet.calls("/skyrl/v1/generate")) == 1
