"""AReaL's remote vLLM engine, replayed with one address, the proxy's.

Shapes from ``areal/engine/vllm_remote.py``, ``areal/infra/remote_inf_engine.py`` and ``areal/infra/utils/http.py``: a
new connection for each request, and every answer that is not a 2xx is asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from engine_launcher.sim import model
from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.faults import Fault
from tests.contract.clients.conftest import SimFleet, sim_fleet
from tests.contract.clients.framework_engines import ArealEngine
from tests.tools.rig import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

SIZES = (1, 2, 1)
RETRIES = 3
"""``request_retries`` of its configuration."""
SETTINGS = {"fanout_paths": "/areal_init_weights_update_group=rank_offset,/areal_*", "probe_interval": 0.2}


class Areal:
    """Its request function, with a shorter pause between tries."""

    def __init__(self, url: str) -> None:
        self.url = url
        connector = aiohttp.TCPConnector(limit=0, use_dns_cache=False, force_close=True)
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=3600), read_bufsize=10 << 20, connector=connector
        )
        self.tries = 0

    async def ask(self, path: str, body: Any, tries: int = RETRIES) -> Any:
        last: Exception | None = None
        for _ in range(tries):
            self.tries += 1
            try:
                async with self.session.post(self.url + path, json=body) as answer:
                    answer.raise_for_status()
                    assert answer.content_type == "application/json"
                    return await answer.json()
            except (TimeoutError, aiohttp.ClientError) as error:
                last = error
                await asyncio.sleep(0.1)
        raise RuntimeError(f"Failed after {tries} retries each. Endpoint: {path}. Last error: {last!r}")

    async def rollout(self, prompt: list[int], tokens: int) -> tuple[list[int], list[str]]:
        """Its loop: an aborted answer is asked on with what it has, until a real stop."""
        made: list[int] = []
        reasons: list[str] = []
        while not reasons or (reasons[-1] == "abort" and len(made) < tokens):
            body = {
                "prompt": prompt + made,
                "max_tokens": tokens - len(made),
                "temperature": 0.0,
                "top_p": 1.0,
                "stop_token_ids": [],
                "ignore_eos": True,
                "skip_special_tokens": True,
                "return_tokens_as_token_ids": True,
                "logprobs": 0,
                "use_beam_search": False,
                "stream": False,
            }
            choice = (await self.ask("/v1/completions", body))["choices"][0]
            made += [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
            reasons.append(choice["finish_reason"])
        return made, reasons

    async def init(self) -> Any:
        body = {
            "master_address": "127.0.0.1",
            "master_port": "29500",
            "rank_offset": 1,
            "world_size": sum(SIZES) + 1,
            "backend": "nccl",
            "group_name": "update_weight_group",
        }
        return await self.ask("/areal_init_weights_update_group", body, tries=1)

    async def send(self, *buckets: str) -> None:
        for name in buckets:
            meta = {"names": [name], "dtypes": ["bfloat16"], "shapes": [[4]], "group_name": "update_weight_group"}
            await self.ask("/areal_set_update_weight_meta", meta, tries=1)
            await self.ask("/areal_update_weights_xccl", {}, tries=1)


@pytest_asyncio.fixture(loop_scope="module")
async def fleet() -> AsyncIterator[SimFleet]:
    async with sim_fleet(*(SimConfig(world_size=size) for size in SIZES), kind=ArealEngine, **SETTINGS) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def areal(fleet: SimFleet) -> AsyncIterator[Areal]:
    client = Areal(fleet.url)
    yield client
    await client.session.close()


async def test_each_engine_gets_its_own_ranks(areal: Areal, fleet: SimFleet) -> None:
    assert (await areal.init())["success"] is True
    assert [engine.broadcaster["rank_offset"] for engine in fleet.engines] == [1, 2, 4]
    assert {engine.broadcaster["world_size"] for engine in fleet.engines} == {sum(SIZES) + 1}
    assert {engine.broadcaster["master_port"] for engine in fleet.engines} == {"29500"}


async def test_buckets_with_the_same_empty_body_are_all_received(areal: Areal, fleet: SimFleet) -> None:
    await areal.init()
    await areal.ask("/areal_pause_generation", {})
    await areal.send("bucket-1", "bucket-2", "bucket-3")
    await areal.ask("/areal_continue_generation", {})
    assert [engine.updates for engine in fleet.engines] == [["bucket-1", "bucket-2", "bucket-3"]] * 3
    assert await fleet.states() == ["ready"] * 3
    versions = {engine.core.version for engine in fleet.engines}
    assert len(versions) == 1
    assert versions != {"default"}, "an update without a label gets one, so that a restart shows"


async def test_rollouts_go_through_a_pause_and_are_stitched(areal: Areal, fleet: SimFleet) -> None:
    for engine in fleet.engines:
        engine.core.speed.tokens_per_second = 100.0
    rolling = [asyncio.ensure_future(areal.rollout([index], 60)) for index in range(9)]
    await eventually(lambda: all(engine.core.unfinished for engine in fleet.engines), "all engines work")
    await areal.ask("/areal_pause_generation", {})
    await eventually(lambda: not any(engine.core.running for engine in fleet.engines), "all aborted")
    late = asyncio.ensure_future(areal.rollout([99], 5))
    await areal.ask("/areal_update_weights", {"model_path": "/disk/1"})
    await areal.ask("/areal_continue_generation", {})
    results = await asyncio.gather(*rolling)
    assert all(len(made) == 60 for made, _ in results)
    assert any("abort" in reasons for _, reasons in results)
    assert (await late)[0] == model.generate("/disk/1", [99], 5)
    assert await fleet.states() == ["ready"] * 3


async def test_what_it_sends_again_runs_once(areal: Areal, fleet: SimFleet) -> None:
    # Any status but a 2xx is sent again at once, 424 too: the answer comes from memory, not from a second fan-out.
    fleet.faults(Fault(path="/areal_update_weights", action="status", status=500), engine=1)
    with pytest.raises(RuntimeError, match="424"):
        await areal.ask("/areal_update_weights", {"model_path": "/disk/2"})
    assert areal.tries == RETRIES
    assert [len(calls) for calls in fleet.calls("/areal_update_weights")] == [1, 1, 1]
    states = await fleet.states()
    assert states[1] == "fenced"
    assert {each.core.weights for each, state in zip(fleet.engines, states, strict=True) if state == "ready"} <= {
        "/disk/2"
    }
    fleet.faults()
    await areal.ask("/areal_update_weights", {"model_path": "/disk/3"})
    assert await fleet.states() == ["ready"] * 3


async def test_a_failure_said_inside_the_answer_counts(areal: Areal, fleet: SimFleet) -> None:
    failed = {"success": False, "message": "TP rank: 0 failed. reason: no such file"}
    fleet.faults(Fault(path="/areal_update_weights", action="status", status=400, body=failed), engine=0)
    with pytest.raises(RuntimeError, match="424"):
        await areal.ask("/areal_update_weights", {"model_path": "/disk/4"})
    assert (await fleet.states())[0] == "fenced"


async def test_a_restarted_engine_has_no_group_and_stays_out(areal: Areal, fleet: SimFleet) -> None:
    await areal.init()
    await areal.send("trained")
    await fleet.engines[2].restart()
    await asyncio.sleep(1.0)
    assert await fleet.states() == ["ready", "ready", "fenced"]
    with pytest.raises(RuntimeError, match="409"):
        await areal.send("next")
    await areal.init()
    await areal.send("next")
    assert await fleet.states() == ["ready"] * 3
    assert [engine.core.weights for engine in fleet.engines] == ["next"] * 3


async def test_adapters_and_sleep(areal: Areal, fleet: SimFleet) -> None:
    body = {"lora_name": "policy-v1", "lora_path": "/lora/1"}
    async with areal.session.post(f"{fleet.url}/v1/load_lora_adapter", json=body) as answer:
        # It parses what is called JSON, and reads anything else as it is; vLLM gives this text no type.
        assert answer.status == 200
        assert answer.content_type != "application/json"
        assert b"added successfully" in await answer.read()
    assert [engine.adapters for engine in fleet.engines] == [{"policy-v1": "/lora/1"}] * 3
    assert (await areal.ask("/sleep", {}))["status"] == "sleeping"
    assert (await areal.ask("/wake_up?tags=weights&tags=kv_cache", {}))["status"] == "awake"
    assert {call["query"] for calls in fleet.calls("/wake_up") for call in calls} == {"tags=weights&tags=kv_cache"}
