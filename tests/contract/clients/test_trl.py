"""TRL's clients through the proxy: several engines look like the one server that TRL expects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from engine_launcher.sim import model
from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.faults import Fault
from tests.contract.clients.conftest import SimFleet, held, sim_fleet, until
from tests.contract.clients.using import ClientError, Clients
from tests.tools.rig import eventually
from tests.tools.tcp_fault_proxy import TcpFaultProxy

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

SIZES = (1, 2, 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[SimFleet]:
    async with sim_fleet(*(SimConfig(world_size=size) for size in SIZES)) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(running: SimFleet) -> AsyncIterator[SimFleet]:
    yield running
    await running.restore()


async def same_everywhere(fleet: SimFleet) -> str:
    """The version that all engines show, after checking that versions, weights and states agree."""
    assert await fleet.states() == ["ready"] * len(fleet.engines)
    assert len({engine.core.weights for engine in fleet.engines}) == 1
    checked = await fleet.post("/weight_checker", {"action": "checksum"})
    assert checked["checksums"]
    assert checked.get("match") is not False
    version = (await fleet.get("/weight_info"))["weight_version"]
    assert [engine.core.version for engine in fleet.engines] == [version] * len(fleet.engines)
    return version


# The client of `vllm_mode="server"`


async def test_it_connects_and_keeps_its_host(torch_clients: Clients, fleet: SimFleet) -> None:
    # An `X-Forwarded-For` in an answer would be taken for the host of the transfer group.
    found = await torch_clients("using_trl.connect", url=fleet.url)
    assert found == {"host": "127.0.0.1", "model": "tiny", "base_url": fleet.url}


@pytest.mark.parametrize("path", ["/get_world_size", "/get_world_size/"])
async def test_the_world_size_is_the_sum(torch_clients: Clients, fleet: SimFleet, path: str) -> None:
    # Older releases ask with a trailing slash.
    assert await fleet.get(path) == {"world_size": sum(SIZES)}
    assert await torch_clients("using_trl.call", url=fleet.url, method="get_world_size") == sum(SIZES)
    async with fleet.http.get("/health/") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("prompts", [["Hi", "Ho", "Hum"], [[72, 105], [72, 111]]], ids=["text", "ids"])
async def test_a_batch_of_prompts_comes_back_prompt_major(
    torch_clients: Clients, fleet: SimFleet, prompts: list[Any]
) -> None:
    fields = {"prompts": prompts, "n": 2, "max_tokens": 12, "logprobs": 2}
    found = await torch_clients("using_trl.call", url=fleet.url, method="generate", **fields)
    ids = [list(prompt.encode()) if isinstance(prompt, str) else prompt for prompt in prompts]
    assert found["prompt_ids"] == ids
    weights = fleet.engines[0].core.weights
    assert found["completion_ids"] == [model.generate(weights, each, 12) for each in ids for _ in range(2)]
    assert found == await torch_clients("using_trl.call", url=fleet.engines[1].url, method="generate", **fields)


async def test_chat_and_generation_from_features(torch_clients: Clients, fleet: SimFleet) -> None:
    messages = [[{"role": "user", "content": f"question {index}"}] for index in range(12)]
    fields = {"messages": messages, "n": 2, "max_tokens": 8}
    found = await torch_clients("using_trl.call", url=fleet.url, method="chat", **fields)
    assert found == await torch_clients("using_trl.call", url=fleet.engines[0].url, method="chat", **fields)
    assert len(found["completion_ids"]) == 24
    assert all(fleet.calls("/v1/chat/completions")), "one engine answered them all"
    # TRL reads `token` in these log probabilities where vLLM 0.33 writes `token_id`, so it is asked without.
    fields = {"prompts": [[1, 2], [3]], "features": [None, None], "temperature": 0.0, "max_tokens": 8, "logprobs": None}
    found = await torch_clients("using_trl.call", url=fleet.url, method="generate", **fields)
    weights = fleet.engines[0].core.weights
    assert found["completion_ids"] == [model.generate(weights, each, 8) for each in ([1, 2], [3])]


async def test_generation_waits_while_somebody_pauses(torch_clients: Clients, fleet: SimFleet) -> None:
    await fleet.post("/pause?mode=abort")
    asking = torch_clients.start("using_trl.call", url=fleet.url, method="generate", prompts=["Hi"], temperature=0.0)
    await held(fleet, 1)
    await fleet.post("/resume")
    assert (await asking)["completion_ids"] == [model.generate(fleet.engines[0].core.weights, list(b"Hi"), 16)]


async def test_its_own_retries_get_past_one_failure(torch_clients: Clients, fleet: SimFleet) -> None:
    for index in range(3):
        fleet.faults(Fault(path="/v1/completions", action="status", status=500, times=1), engine=index)
    asking = torch_clients.start("using_trl.call", url=fleet.url, method="generate", prompts=["Hi"], temperature=0.0)
    await eventually(lambda: any(fleet.calls("/v1/completions")), "asked", seconds=60)
    fleet.faults()
    assert (await asking)["completion_ids"] == [model.generate(fleet.engines[0].core.weights, list(b"Hi"), 16)]
    statuses = [each["status"] for calls in fleet.calls("/v1/completions") for each in calls]
    assert statuses.count(200) == 1
    assert 500 in statuses


async def test_caches_are_reset_on_all(torch_clients: Clients, fleet: SimFleet) -> None:
    assert await torch_clients("using_trl.call", url=fleet.url, method="reset_prefix_cache") is None
    assert [len(calls) for calls in fleet.calls("/reset_prefix_cache")] == [1, 1, 1]


async def test_the_communicator_asks_its_questions_before_it_needs_a_gpu(
    torch_clients: Clients, fleet: SimFleet
) -> None:
    with pytest.raises(ClientError, match="needs a CUDA device") as raised:
        await torch_clients("using_trl.init_communicator", url=fleet.url, device="cpu")
    assert raised.value.type == "NotImplementedError"
    assert sum(len(calls) for calls in fleet.calls("/server_info")) == 1
    assert [len(calls) for calls in fleet.calls("/get_world_size")] == [1, 1, 1]


@pytest.mark.parametrize("grouped", [True, False], ids=["weight_update", "each tensor"])
async def test_a_sync_reaches_all_with_its_own_rank_each(
    torch_clients: Clients, fleet: SimFleet, grouped: bool
) -> None:
    init = await torch_clients("using_trl.init_group", url=fleet.url)
    assert init["sent"]["world_size"] == sum(SIZES) + 1
    groups = [engine.transfer.group for engine in fleet.engines]
    assert [group and (group.rank_offset, group.world_size) for group in groups] == [(1, 5), (2, 5), (4, 5)]
    before = await same_everywhere(fleet)
    answers = await torch_clients("using_trl.update", url=fleet.url, step=1 + grouped, grouped=grouped)
    assert answers == [{"message": "Weights updated"}] * 2
    assert await same_everywhere(fleet) != before
    assert [len(calls) for calls in fleet.calls("/update_weights")] == [2, 2, 2]


async def test_a_failure_of_one_engine_is_raised_once_and_not_sent_again(
    torch_clients: Clients, fleet: SimFleet
) -> None:
    await torch_clients("using_trl.init_group", url=fleet.url)
    fleet.faults(Fault(path="/update_weights", action="status", status=500), engine=1)
    with pytest.raises(ClientError, match="Request failed: 424") as raised:
        await torch_clients("using_trl.update", url=fleet.url, step=3, grouped=False)
    assert fleet.engines[1].url.removeprefix("http://") in raised.value.message
    assert [len(calls) for calls in fleet.calls("/update_weights")] == [1, 1, 1]
    assert "ready" not in await fleet.states(), "weights of a half-done update are nobody's"
    fleet.faults()
    await torch_clients("using_trl.init_group", url=fleet.url)
    await torch_clients("using_trl.update", url=fleet.url, step=4, grouped=True)
    await same_everywhere(fleet)


@pytest.mark.parametrize("lost", ["while it runs", "after it ended"])
async def test_a_call_that_is_sent_again_after_a_lost_connection_runs_once(
    torch_clients: Clients, fleet: SimFleet, lost: str
) -> None:
    await torch_clients("using_trl.init_group", url=fleet.url)
    port = urlsplit(fleet.url).port
    assert port is not None
    async with TcpFaultProxy("127.0.0.1", port) as wire:
        fleet.faults(Fault(path="/update_weights", action="delay", seconds=1.0, times=1))
        for engine in fleet.engines:
            engine.faults.replace([replace(rule) for rule in engine.faults.rules])
        syncing = torch_clients.start("using_trl.update", url=wire.url, step=5, grouped=True)
        await eventually(lambda: all(fleet.calls("/update_weights")), "the update is on its way", seconds=60)
        if lost == "after it ended":
            wire.black_hole = True
            await eventually(lambda: all(calls[0]["status"] for calls in fleet.calls("/update_weights")), "answered")

            async def ended() -> bool:
                return (await fleet.get("/fleet"))["lifecycle"] is None

            await until(ended)
        assert wire.drop_all()
        wire.black_hole = False
        assert await syncing == [{"message": "Weights updated"}] * 2
    # Two tensors, so two calls for each engine, although one was sent twice by TRL.
    assert [len(calls) for calls in fleet.calls("/update_weights")] == [2, 2, 2]
    await same_everywhere(fleet)


# The async trainer


def explained(weights: Sequence[str], prompt: list[int], completion: list[int]) -> bool:
    """Whether these weights, in this order and each for a stretch or not at all, would have made the completion."""
    stage = 0
    state = model.fold_all(prompt)
    for token in completion:
        while stage < len(weights) and model.token_at(model.weights_seed(weights[stage]), state) != token:
            stage += 1
        if stage == len(weights):
            return False
        state = model.fold(state, token)
    return True


async def test_async_rollouts_run_on_through_syncs(torch_clients: Clients, fleet: SimFleet) -> None:
    await torch_clients("using_trl.init_group", url=fleet.url)
    for engine in fleet.engines:
        engine.core.speed.tokens_per_second = 300.0
    seen = [fleet.engines[0].core.weights]
    number = await torch_clients("using_trl.start_rollouts", url=fleet.url, generations=2, inflight=16, tokens=60)
    samples = await torch_clients("using_trl.take_rollouts", number=number, count=8)
    for step in range(3):
        info = {"names": [f"async.{step}"], "dtype_names": ["float32"], "shapes": [[4, 4]]}
        calls = [
            ("pause", {}),
            ("start_weight_update", {}),
            ("update_weights", {"update_info": info}),
            ("finish_weight_update", {}),
            ("resume", {}),
        ]
        assert await torch_clients("using_trl.async_client", url=fleet.url, calls=calls) == [None] * 5
        await same_everywhere(fleet)
        seen.append(fleet.engines[0].core.weights)
        async with asyncio.timeout(60):
            while not explained(seen[-1:], samples[-1]["prompt"], samples[-1]["completion"]):
                samples += await torch_clients("using_trl.take_rollouts", number=number, count=4)
    ended = await torch_clients("using_trl.stop_rollouts", number=number)
    assert ended == {"ended": True, "failed": False, "retries": 0.0}
    assert len(set(seen)) == 4
    assert all(explained(seen, sample["prompt"], sample["completion"]) for sample in samples)
    assert explained(seen[:1], samples[0]["prompt"], samples[0]["completion"])
    starts = [json.loads(each["body"]) for calls in fleet.calls("/start_weight_update") for each in calls]
    assert starts == [{"is_checkpoint_format": True}] * 9


async def test_async_questions(torch_clients: Clients, fleet: SimFleet) -> None:
    methods = ["wait_for_server_ready", "get_max_model_len", "get_dtype", "get_world_size", "get_server_info"]
    calls = [(method, {}) for method in methods]
    _, length, dtype, size, info = await torch_clients("using_trl.async_client", url=fleet.url, calls=calls)
    assert (length, dtype, size) == (SimConfig().max_model_len, "torch.float32", sum(SIZES))
    assert info["weight_transfer_config"] == {"backend": "sim"}


async def test_async_adapters_are_loaded_on_all_or_none(torch_clients: Clients, fleet: SimFleet) -> None:
    def calls(method: str, version: int, **more: Any) -> list[tuple[str, dict[str, Any]]]:
        return [(method, {"lora_name": f"policy-v{version}", **more})]

    load = calls("load_lora_adapter", 1, lora_path="/adapters/1")
    assert await torch_clients("using_trl.async_client", url=fleet.url, calls=load) == [None]
    assert [engine.adapters for engine in fleet.engines] == [{"policy-v1": "/adapters/1"}] * 3
    fleet.faults(Fault(path="/v1/load_lora_adapter", action="status", status=500), engine=2)
    with pytest.raises(ClientError, match="Request failed: 424"):
        load = calls("load_lora_adapter", 2, lora_path="/adapters/2")
        await torch_clients("using_trl.async_client", url=fleet.url, calls=load)
    assert [list(engine.adapters) for engine in fleet.engines] == [["policy-v1"]] * 3
    fleet.faults()
    # A name that is not there is no error to this client, whatever the proxy answers.
    assert await torch_clients("using_trl.async_client", url=fleet.url, calls=calls("unload_lora_adapter", 7)) == [None]
    assert await torch_clients("using_trl.async_client", url=fleet.url, calls=calls("unload_lora_adapter", 1)) == [None]
    assert [engine.adapters for engine in fleet.engines] == [{}] * 3


async def test_async_failure_names_the_engine_and_the_next_run_begins_anew(torch_clients: Clients) -> None:
    async with sim_fleet(SimConfig(), SimConfig()) as fleet:
        await torch_clients("using_trl.init_group", url=fleet.url)
        fleet.faults(Fault(path="/update_weights", action="reset"), engine=1)
        info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
        sync = [("pause", {}), ("start_weight_update", {}), ("update_weights", {"update_info": info})]
        with pytest.raises(ClientError, match="Request failed: 424") as raised:
            await torch_clients("using_trl.async_client", url=fleet.url, calls=sync)
        assert fleet.engines[1].url.removeprefix("http://") in raised.value.message
        fleet.faults()
        await torch_clients("using_trl.init_group", url=fleet.url)
        calls = [*sync, ("finish_weight_update", {}), ("resume", {})]
        assert await torch_clients("using_trl.async_client", url=fleet.url, calls=calls) == [None] * 5
        await same_everywhere(fleet)
