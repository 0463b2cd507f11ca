"""vLLM's ``HTTPVLLMWeightSyncClient``, unmodified, against the proxy in front of two and three engines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from engine_launcher.errors import UsageError
from engine_launcher.fleet import EngineFleet
from engine_launcher.settings import FleetSpec
from engine_launcher.sim import model as sim_model
from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.faults import Fault
from engine_launcher.sim.trainer import SimTrainer
from engine_launcher.trainer_process import TrainerProcess
from engine_launcher.vllm_engine import locate
from tests.contract.clients.conftest import REQUIRE, SimFleet, sim_fleet
from tests.contract.clients.using import ClientError, Clients
from tests.tools.process import proxy_process

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PROMPT = list(b"the quick brown fox")
TOKENS = 60
NEW = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[4]]}


async def greedy(http: aiohttp.ClientSession, url: str) -> list[int]:
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}}
    async with http.post(f"{url}/inference/v1/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["token_ids"]


# Simulated engines: a rendezvous that blocks as NCCL's does, and unequal world sizes


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 1), (2, 1, 4)], ids=str)
async def test_syncs_reach_every_rank(torch_clients: Clients, sizes: tuple[int, ...]) -> None:
    async with (
        sim_fleet(*(SimConfig(world_size=size) for size in sizes)) as fleet,
        SimTrainer(1 + sum(sizes)) as trainer,
    ):
        await torch_clients("using_vllm.call", url=fleet.url, calls=[("init_weight_transfer_engine", [init(trainer)])])
        await asyncio.wait_for(trainer.wait_joined(), 20)
        assert trainer.ranks == list(range(1, 1 + sum(sizes)))
        for step in range(3):
            weights, version = f"weights-{step}", f"step-{step}"
            calls = [("start_weight_update", []), ("update_weights", [NEW]), ("finish_weight_update", [version])]
            syncing = torch_clients.start("using_vllm.call", url=fleet.url, calls=calls)
            await asyncio.gather(asyncio.wait_for(trainer.broadcast(weights), 20), syncing)
            assert await fleet.get("/weight_info") == {"weight_version": version}
            assert await fleet.states() == ["ready"] * len(sizes)
            expected = sim_model.generate(weights, PROMPT, TOKENS)
            assert [await greedy(fleet.http, engine.url) for engine in fleet.engines] == [expected] * len(sizes)
            assert await greedy(fleet.http, fleet.url) == expected
            checked = await fleet.post("/weight_checker", {"action": "checksum"})
            assert checked["checksums"]
            assert "match" not in checked
        await torch_clients("using_vllm.call", url=fleet.url, calls=[("shutdown_weight_transfer_engine", [])])
        assert [engine.transfer.group for engine in fleet.engines] == [None] * len(sizes)


def init(trainer: SimTrainer) -> dict[str, Any]:
    """What vLLM's trainer engines send: always offset 1, and the whole world."""
    return trainer.init_info(rank_offset=1)


@pytest_asyncio.fixture(loop_scope="module")
async def pair() -> AsyncIterator[SimFleet]:
    async with sim_fleet(SimConfig(), SimConfig(world_size=2)) as fleet:
        yield fleet


INIT = ("init_weight_transfer_engine", [{"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1,
                                         "world_size": 4}])  # fmt: skip


async def test_bodies_pass_as_the_client_made_them(torch_clients: Clients, pair: SimFleet) -> None:
    calls = [INIT, ("start_weight_update", []), ("update_weights", [NEW]), ("finish_weight_update", [])]
    await torch_clients("using_vllm.call", url=pair.url, calls=[*calls, ("shutdown_weight_transfer_engine", [])])
    for path in ("/start_weight_update", "/finish_weight_update", "/shutdown_weight_transfer_engine"):
        for (got,) in pair.calls(path):
            assert got["body"] == "", path
            assert "content-type" not in {name.lower() for name, _ in got["headers"]}, path
    for (got,) in pair.calls("/update_weights"):
        assert json.loads(got["body"]) == {"update_info": NEW}
    # A finish without a label: the proxy gave one, so that a restarted engine can be told apart.
    assert await pair.get("/weight_info") == {"weight_version": "u1"}


async def test_a_list_with_an_entry_for_each_rank_is_cut_for_each_engine(
    torch_clients: Clients, pair: SimFleet
) -> None:
    infos = [{**NEW, "names": [f"rank-{rank}"]} for rank in range(3)]
    calls = [INIT, ("start_weight_update", []), ("update_weights", [infos]), ("finish_weight_update", ["v"])]
    await torch_clients("using_vllm.call", url=pair.url, calls=calls)
    got = [json.loads(call["body"])["update_info"] for (call,) in pair.calls("/update_weights")]
    assert got == [infos[:1], infos[1:]]


async def test_handles_of_an_ipc_update_go_to_all(torch_clients: Clients, pair: SimFleet) -> None:
    await torch_clients("using_vllm.call", url=pair.url, calls=[INIT, ("start_weight_update", [])])
    await torch_clients("using_vllm.update_with_handles", url=pair.url)
    bodies = [call["body"] for (call,) in pair.calls("/update_weights")]
    assert bodies[0] == bodies[1]
    assert "ipc_handles_pickled" in bodies[0]
    await torch_clients("using_vllm.call", url=pair.url, calls=[("finish_weight_update", ["ipc"])])
    assert await pair.states() == ["ready"] * 2


async def test_one_destination_mesh_cannot_be_split(torch_clients: Clients, pair: SimFleet) -> None:
    info = {"rank_offset": 1, "dst_mesh_dims": [["tp", 3]], "source_digest": "d", "params": []}
    with pytest.raises(ClientError, match="HTTPError: 4"):
        await torch_clients("using_vllm.call", url=pair.url, calls=[("init_weight_transfer_engine", [info])])
    assert pair.calls("/init_weight_transfer_engine") == [[], []], "refused before any engine was touched"


async def test_a_failure_is_an_error_of_the_client_and_a_new_round_mends_it(
    torch_clients: Clients, pair: SimFleet
) -> None:
    calls = [INIT, ("start_weight_update", []), ("update_weights", [NEW]), ("finish_weight_update", ["good"])]
    pair.faults(Fault(path="/update_weights", action="status", status=500), engine=1)
    with pytest.raises(ClientError, match="HTTPError: 424"):
        await torch_clients("using_vllm.call", url=pair.url, calls=calls)
    assert await pair.states() != ["ready"] * 2
    pair.faults()
    await torch_clients("using_vllm.call", url=pair.url, calls=calls)
    assert await pair.states() == ["ready"] * 2
    assert await pair.get("/weight_info") == {"weight_version": "good"}


async def test_a_lost_member_is_said_before_anything_is_sent(torch_clients: Clients, pair: SimFleet) -> None:
    await torch_clients("using_vllm.call", url=pair.url, calls=[INIT])
    await pair.engines[0].restart()
    with pytest.raises(ClientError, match="HTTPError: 409"):
        await torch_clients("using_vllm.call", url=pair.url, calls=[("start_weight_update", [])])
    assert pair.calls("/start_weight_update") == [[], []]


# Real vLLM servers and a real trainer


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return locate(None, os.environ)
    except UsageError as error:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(str(error))
        pytest.skip(f"real vLLM is not here: {error}")


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([python, "-m", "engine_launcher.tiny_model", str(path)], check=True, timeout=300)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineFleet]:
    spec = FleetSpec(
        count=3,
        model=model,
        log_dir=tmp_path_factory.mktemp("engines"),
        extra=("--served-model-name", "tiny", "--max-logprobs", "20"),
    )
    async with EngineFleet(spec) as running:
        yield running


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 3])
async def test_real_servers_hold_the_same_weights_after_each_sync(
    count: int, python: Path, model: Path, servers: EngineFleet, tmp_path: Path
) -> None:
    urls = servers.urls[:count]
    # The third server has the weights of none of the earlier syncs: it is fenced until the first one here.
    async with (
        proxy_process(*urls, ready=2) as proxy,
        TrainerProcess(python, model, [proxy.url], log=tmp_path / "trainer.log") as trainer,
        aiohttp.ClientSession() as http,
    ):
        assert (await trainer.ask("init"))["world_size"] == 1 + count
        for seed in (10 * count, 10 * count + 1):
            async with http.post(f"{proxy.url}/pause?mode=keep") as answer:
                assert await answer.json() == {"status": "paused"}
            await trainer.ask("send", seed=seed)
            async with http.post(f"{proxy.url}/resume") as answer:
                assert await answer.json() == {"status": "resumed"}
            expected = (await trainer.ask("greedy", seed=seed, prompt=PROMPT, tokens=TOKENS))["output"]
            assert [await greedy(http, url) for url in urls] == [expected] * count
            assert await greedy(http, proxy.url) == expected
            versions = []
            for url in (*urls, proxy.url):
                async with http.get(f"{url}/weight_info") as answer:
                    versions.append((await answer.json())["weight_version"])
            assert len(set(versions)) == 1
            assert versions[0] not in (None, "default")
            async with http.post(f"{proxy.url}/weight_checker", json={"action": "checksum"}) as answer:
                checked = await answer.json()
            assert checked["checksums"]
            assert "match" not in checked
            states = [engine["state"] for engine in (await proxy.fleet(http))["engines"]]
            assert states == ["ready"] * count


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_the_other_clients_on_real_servers(servers: EngineFleet, torch_clients: Clients) -> None:
    url = servers.urls[2]
    async with proxy_process(url) as proxy, aiohttp.ClientSession() as http:
        for route in ("completions", "chat", "responses"):
            for stream in (False, True):
                asked = {"route": route, "stream": stream}
                found = await torch_clients("using_openai.ask", url=proxy.url, **asked)
                assert found["text"] == (await torch_clients("using_openai.ask", url=url, **asked))["text"]
        for stream in (False, True):
            found = await torch_clients("using_anthropic.ask", url=proxy.url, stream=stream)
            assert found["text"] == (await torch_clients("using_anthropic.ask", url=url, stream=stream))["text"]
        assert (await torch_clients("using_trl.connect", url=proxy.url))["model"] == "tiny"
        for method, fields in (
            ("generate", {"prompts": ["Hi", "Ho"], "temperature": 0.0, "logprobs": 2}),
            ("generate", {"prompts": [[1, 2], [3]], "features": [None, None], "temperature": 0.0, "logprobs": None}),
            ("chat", {"messages": [[{"role": "user", "content": "Hi"}]] * 3, "temperature": 0.0}),
            ("get_sequence_logprobs", {"sequences": [[1, 2, 3, 4]] * 2, "prompt_lengths": [2, 3], "top_logprobs": 3}),
            ("get_world_size", {}),
            ("reset_prefix_cache", {}),
        ):
            found = await torch_clients("using_trl.call", url=proxy.url, method=method, **fields)
            direct = await torch_clients("using_trl.call", url=url, method=method, **fields)
            assert found == direct, method
        questions = [(method, {}) for method in ("wait_for_server_ready", "get_max_model_len", "get_dtype", "pause")]
        found = await torch_clients("using_trl.async_client", url=proxy.url, calls=questions)
        assert found == [None, 2048, "torch.float32", None]
        # Held by the gate in every form, and answered after resume.
        asking = [
            torch_clients.start("using_openai.ask", url=proxy.url, route=route, stream=stream)
            for route in ("completions", "chat", "responses")
            for stream in (False, True)
        ]
        asking += [torch_clients.start("using_anthropic.ask", url=proxy.url, stream=each) for each in (False, True)]
        async with asyncio.timeout(60):
            while await proxy.metric(http, "fleetgate_held_requests") < len(asking):
                await asyncio.sleep(0.05)
        await torch_clients("using_trl.async_client", url=proxy.url, calls=[("resume", {})])
        for found in await asyncio.gather(*asking):
            assert found["text"]
