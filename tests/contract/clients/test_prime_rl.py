"""prime-rl with ``base_url`` and ``admin_base_url`` at the proxy."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from engine_launcher.sim import model
from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.faults import Fault
from tests.contract.clients.conftest import SimFleet, held, sim_fleet
from tests.contract.clients.framework_engines import PrimeEngine
from tests.contract.clients.using import ClientError, Clients
from tests.tools.rig import eventually
from tests.tools.tcp_fault_proxy import TcpFaultProxy

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

SIZES = (1, 2, 1)
SETTINGS = {"fanout_paths": "/init_broadcaster=rank_offset,/load_lora_adapter", "probe_interval": 0.2}


@pytest_asyncio.fixture(loop_scope="module")
async def fleet() -> AsyncIterator[SimFleet]:
    async with sim_fleet(*(SimConfig(world_size=size) for size in SIZES), kind=PrimeEngine, **SETTINGS) as running:
        yield running


async def generate(fleet: SimFleet, ids: list[int], session: str | None = None) -> tuple[list[int], str]:
    body = {
        "model": "tiny",
        "token_ids": ids,
        "cache_salt": "7",
        "sampling_params": {"max_tokens": 8, "temperature": 0.0, "logprobs": 1},
    }
    headers = {"X-Session-ID": session} if session else {}
    async with fleet.http.post("/inference/v1/generate", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["token_ids"], answer.headers["X-Fleetgate-Engine"]


async def test_ready(clients: Clients, fleet: SimFleet) -> None:
    assert await clients("replaying_prime_rl.ready", url=f"{fleet.url}/v1", model="tiny") is True
    assert await fleet.get("/liveness") == {"status": "ok"}


async def test_ranks_count_from_zero_and_the_world_stays_as_it_is(clients: Clients, fleet: SimFleet) -> None:
    assert await clients("replaying_prime_rl.init_broadcaster", url=fleet.url, world_size=sum(SIZES)) == 200
    assert [engine.broadcaster["rank_offset"] for engine in fleet.engines] == [0, 1, 3]
    assert {engine.broadcaster["inference_world_size"] for engine in fleet.engines} == {sum(SIZES)}


async def test_updates_by_directory(clients: Clients, fleet: SimFleet) -> None:
    await clients("replaying_prime_rl.init_broadcaster", url=fleet.url, world_size=sum(SIZES))
    versions = set()
    for step in range(3):
        found = await clients("replaying_prime_rl.update_weights", url=f"{fleet.url}/v1", weight_dir=f"/ckpt/{step}")
        assert found == {"status": "ok"}
        assert [engine.core.weights for engine in fleet.engines] == [f"/ckpt/{step}"] * 3
        assert await fleet.states() == ["ready"] * 3
        assert (await generate(fleet, [1, 2]))[0] == model.generate(f"/ckpt/{step}", [1, 2], 8)
        versions.add((await fleet.get("/weight_info"))["weight_version"])
    assert len(versions - {"default"}) == 3, "each update is told apart from the last, though nobody labels it"
    queries = {call["query"] for calls in fleet.calls("/pause") for call in calls}
    assert queries == {"mode=keep&clear_cache=false"}
    assert [json.loads(call["body"]) for call in fleet.calls("/update_weights")[0]] == [
        {"weight_dir": f"/ckpt/{step}"} for step in range(3)
    ]


async def test_two_updates_without_a_directory_are_two(clients: Clients, fleet: SimFleet) -> None:
    # NIXL pulls: the same body at each step.
    await clients("replaying_prime_rl.init_broadcaster", url=fleet.url, world_size=sum(SIZES))
    for _ in range(2):
        await clients("replaying_prime_rl.update_weights", url=fleet.url, weight_dir=None)
    assert [len(engine.updates) for engine in fleet.engines] == [2, 2, 2]


async def test_rollouts_are_held_in_the_pause_and_resume_always_comes(clients: Clients, fleet: SimFleet) -> None:
    await clients("replaying_prime_rl.init_broadcaster", url=fleet.url, world_size=sum(SIZES))
    fleet.faults(Fault(path="/update_weights", action="delay", seconds=1.0))
    updating = clients.start("replaying_prime_rl.update_weights", url=fleet.url, weight_dir="/ckpt/held")
    await eventually(lambda: all(fleet.calls("/update_weights")), "the update runs")
    asking = asyncio.ensure_future(generate(fleet, [3]))
    await held(fleet, 1)
    await updating
    assert (await asking)[0] == model.generate("/ckpt/held", [3], 8)


async def test_a_partial_failure_is_final_and_nobody_serves_mixed_weights(clients: Clients, fleet: SimFleet) -> None:
    await clients("replaying_prime_rl.init_broadcaster", url=fleet.url, world_size=sum(SIZES))
    await clients("replaying_prime_rl.update_weights", url=fleet.url, weight_dir="/ckpt/0")
    fleet.faults(Fault(path="/update_weights", action="status", status=500), engine=1)
    with pytest.raises(ClientError) as raised:
        await clients("replaying_prime_rl.update_weights", url=fleet.url, weight_dir="/ckpt/1")
    assert raised.value.status == 424
    assert [len(calls) for calls in fleet.calls("/update_weights")] == [2, 2, 2]
    assert [len(calls) for calls in fleet.calls("/resume")] == [2, 2, 2]
    serving = [e.core.weights for e, s in zip(fleet.engines, await fleet.states(), strict=True) if s == "ready"]
    assert len(set(serving)) <= 1
    assert "/ckpt/0" not in serving
    fleet.faults()
    await clients("replaying_prime_rl.init_broadcaster", url=fleet.url, world_size=sum(SIZES))
    await clients("replaying_prime_rl.update_weights", url=fleet.url, weight_dir="/ckpt/2")
    assert await fleet.states() == ["ready"] * 3


async def test_what_it_sends_again_after_a_lost_connection_runs_once(clients: Clients, fleet: SimFleet) -> None:
    await clients("replaying_prime_rl.init_broadcaster", url=fleet.url, world_size=sum(SIZES))
    port = urlsplit(fleet.url).port
    assert port is not None
    slow = Fault(path="/update_weights", action="delay", seconds=2.5)
    for index in range(3):
        fleet.faults(replace(slow), engine=index)
    async with TcpFaultProxy("127.0.0.1", port) as wire:
        updating = clients.start("replaying_prime_rl.update_weights", url=wire.url, weight_dir="/ckpt/again")
        await eventually(lambda: all(fleet.calls("/update_weights")), "the update runs")
        assert wire.drop_all()
        assert await updating == {"status": "ok"}
    assert [engine.updates for engine in fleet.engines] == [["/ckpt/again"]] * 3
    assert await fleet.states() == ["ready"] * 3


async def test_an_adapter_of_the_same_name_is_replaced_on_all_or_fenced(clients: Clients, fleet: SimFleet) -> None:
    for step in (1, 2):
        found = await clients("replaying_prime_rl.load_lora", url=fleet.url, name="policy", path=f"/lora/{step}")
        assert found == 200
        assert [engine.adapters for engine in fleet.engines] == [{"policy": f"/lora/{step}"}] * 3
    fleet.faults(Fault(path="/load_lora_adapter", action="status", status=500), engine=0)
    assert await clients("replaying_prime_rl.load_lora", url=fleet.url, name="policy", path="/lora/3") == 424
    assert (await fleet.states())[0] == "fenced"
    # It loads what it lacks before it is let in.
    fleet.faults()
    await eventually(lambda: fleet.engines[0].adapters == {"policy": "/lora/3"}, "caught up")


async def test_sessions(fleet: SimFleet) -> None:
    homes = {name: {(await generate(fleet, [1], name))[1] for _ in range(3)} for name in ("a", "b", "c", "d")}
    assert all(len(engines) == 1 for engines in homes.values())
    async with fleet.http.post("/finish_session", params={"session_id": "a"}) as answer:
        assert answer.status == 200


async def test_its_concurrency_controller_sees_engines_apart(fleet: SimFleet) -> None:
    # It sums samples by the label `engine` alone (`orchestrator/inference_metrics.py`), so three that say "0" would be
    # one engine with three times the load.
    for engine in fleet.engines:
        engine.core.speed.tokens_per_second = 0.5
    running = [asyncio.ensure_future(generate(fleet, [index])) for index in range(6)]
    await eventually(lambda: sum(engine.core.unfinished for engine in fleet.engines) == 6, "all run")
    async with fleet.http.get("/metrics") as answer:
        page = await answer.text()
    for engine in fleet.engines:
        engine.core.speed.tokens_per_second = 0.0
    await asyncio.gather(*running)
    gauges: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    blocks: dict[str, int] = {}
    for family in text_string_to_metric_families(page):
        if not family.name.startswith("vllm:"):
            continue
        for sample in family.samples:
            name = sample.labels.get("engine", "0")
            if family.name == "vllm:cache_config_info":
                blocks[name] = int(sample.labels["num_gpu_blocks"])
            elif family.type == "gauge":
                gauges[name][sample.name] += sample.value
    assert len(gauges) == 3
    assert set(blocks) == set(gauges)
    load = [values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"] for values in gauges.values()]
    assert sum(load) == 6.0
    assert min(load) >= 1.0
    assert all(values["vllm:kv_cache_usage_perc"] <= 1.0 for values in gauges.values())
