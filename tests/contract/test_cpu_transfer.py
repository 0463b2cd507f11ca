"""Real tensors from a real trainer into two real vLLM servers, over the CPU backend and without a proxy between."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from engine_launcher.errors import LauncherError, UsageError
from engine_launcher.fleet import EngineFleet
from engine_launcher.settings import FleetSpec
from engine_launcher.trainer_process import TrainerProcess
from engine_launcher.vllm_engine import locate

PROMPT = list(b"the quick brown fox")
TOKENS = 200

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return locate(None, os.environ)
    except UsageError as error:
        if os.environ.get("FLEETGATE_REQUIRE_VLLM") == "1":
            pytest.fail(str(error))
        pytest.skip(f"real vLLM is not here: {error}")


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    # 14 MB of weights, so that the stream is cut into several pieces.
    sizes = ["--hidden", "256", "--intermediate", "4096"]
    subprocess.run([python, "-m", "engine_launcher.tiny_model", str(path), *sizes], check=True, timeout=300)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineFleet]:
    spec = FleetSpec(
        count=2,
        model=model,
        log_dir=tmp_path_factory.mktemp("engines"),
        environment={"FLEETGATE_TRANSFER_TIMEOUT": "10"},
    )
    async with EngineFleet(spec) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def trainer(python: Path, model: Path, fleet: EngineFleet, tmp_path: Path) -> AsyncIterator[TrainerProcess]:
    async with TrainerProcess(python, model, fleet.urls, log=tmp_path / "trainer.log") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    # uvicorn closes a connection after an unhandled exception, without saying so in the answer.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as opened:
        yield opened


async def post(session: aiohttp.ClientSession, url: str, body: dict | None = None) -> tuple[int, dict]:
    async with session.post(url, json=body) as answer:
        return answer.status, await answer.json()


async def greedy(session: aiohttp.ClientSession, url: str, tokens: int = TOKENS) -> list[int]:
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}}
    status, answer = await post(session, f"{url}/inference/v1/generate", body)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


async def test_tokens_after_a_sync_are_those_of_the_new_weights(
    fleet: EngineFleet, trainer: TrainerProcess, session: aiohttp.ClientSession
) -> None:
    answer = await trainer.ask("init")
    assert answer["world_size"] == 3
    for seed in (1, 2):
        sent = await trainer.ask("send", seed=seed)
        print(f"seed {seed}: {sent['bytes']} bytes to two servers in {sent['seconds'] * 1000:.0f} ms")
        expected = (await trainer.ask("greedy", seed=seed, prompt=PROMPT, tokens=TOKENS))["output"]
        for url in fleet.urls:
            output = await greedy(session, url)
            assert output == expected
            others = [{"seed": seed + 1, "start": 0, "end": TOKENS}]
            wrong = await trainer.ask("judge", prompt=PROMPT, output=output, spans=others)
            assert len(wrong["mismatches"]) > TOKENS / 2


@pytest.mark.parametrize("clear_cache", [True, False])
async def test_a_request_frozen_across_a_sync_is_judged_token_by_token(
    clear_cache: bool, fleet: EngineFleet, trainer: TrainerProcess, session: aiohttp.ClientSession
) -> None:
    await trainer.ask("init")
    await trainer.ask("send", seed=3)
    running = [asyncio.ensure_future(greedy_spans(session, url)) for url in fleet.urls]
    await asyncio.sleep(1)
    label = f"4, cache cleared: {clear_cache}"
    query = f"mode=keep&clear_cache={str(clear_cache).lower()}"
    started = time.monotonic()
    await asyncio.gather(*(post(session, f"{url}/pause?{query}") for url in fleet.urls))
    sent = await trainer.ask("send", seed=4)
    await asyncio.gather(*(post(session, f"{url}/update_weight_version", {"new_version": label}) for url in fleet.urls))
    await asyncio.gather(*(post(session, f"{url}/resume") for url in fleet.urls))
    print(f"pause {time.monotonic() - started:.3f} s, of which sending {sent['seconds']:.3f} s")
    for output, spans in await asyncio.gather(*running):
        assert len(spans) == 2
        assert spans[1]["version"] == label
        seeded = [
            {"seed": seed, "start": span["start"], "end": span["end"]} for seed, span in zip((3, 4), spans, strict=True)
        ]
        asked = {"prompt": PROMPT, "output": output, "kept_cache": not clear_cache}
        judged = await trainer.ask("judge", spans=seeded, **asked)
        assert judged["mismatches"] == []
        # The judge must be able to tell: with the weights swapped it objects.
        swapped = [{**each, "seed": 7 - each["seed"]} for each in seeded]
        judged = await trainer.ask("judge", spans=swapped, **asked)
        assert len(judged["mismatches"]) > len(output) / 2


async def test_a_transfer_that_breaks_off_leaves_the_old_weights_and_the_next_one_works(
    fleet: EngineFleet, trainer: TrainerProcess, session: aiohttp.ClientSession
) -> None:
    await trainer.ask("init")
    await trainer.ask("send", seed=5)
    before = [await greedy(session, url, 50) for url in fleet.urls]
    with pytest.raises(LauncherError, match="told to break off after 3 tensors"):
        await trainer.ask("send", seed=6, break_after=3)
    assert [await greedy(session, url, 50) for url in fleet.urls] == before
    await trainer.ask("send", seed=7)
    expected = (await trainer.ask("greedy", seed=7, prompt=PROMPT, tokens=50))["output"]
    assert [await greedy(session, url, 50) for url in fleet.urls] == [expected, expected]


async def test_an_engine_says_what_it_waited_for(
    fleet: EngineFleet, trainer: TrainerProcess, session: aiohttp.ClientSession
) -> None:
    url = fleet.urls[0]
    await post(session, f"{url}/shutdown_weight_transfer_engine")
    await post(session, f"{url}/start_weight_update")
    status, answer = await post(session, f"{url}/update_weights", {"update_info": {}})
    assert status == 500
    assert "call /init_weight_transfer_engine first" in answer["error"]["message"]
    info = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 3}
    status, answer = await post(session, f"{url}/init_weight_transfer_engine", {"init_info": info})
    assert status == 500
    assert "no trainer answers at 127.0.0.1:9" in answer["error"]["message"]
    status, answer = await post(
        session, f"{url}/init_weight_transfer_engine", {"init_info": {**info, "rank_offset": 3}}
    )
    assert status == 500
    assert "outside a group of 3" in answer["error"]["message"]
    await trainer.ask("init")
    await post(session, f"{url}/start_weight_update")
    status, answer = await post(session, f"{url}/update_weights", {"update_info": {}})
    assert status == 500
    assert "waiting for the trainer to begin a round" in answer["error"]["message"]
    await trainer.ask("send", seed=8)


async def greedy_spans(session: aiohttp.ClientSession, url: str) -> tuple[list[int], list[dict]]:
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0, "max_tokens": 1200, "ignore_eos": True}}
    status, answer = await post(session, f"{url}/inference/v1/generate", body)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"], answer["choices"][0]["weight_versions"]
