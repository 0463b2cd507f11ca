"""The simulated engine over HTTP: what only it has, since its likeness to vLLM is tested in tests/contract."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from engine_launcher.sim import model
from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.replies import GARBAGE
from engine_launcher.sim.server import SimEngine

COMPLETION = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
STREAM = {**COMPLETION, "stream": True}


class Client:
    """One engine and a session to it."""

    def __init__(self, engine: SimEngine, session: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.session = session

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, str]:
        async with self.session.post(self.engine.url + path, json=body, **kwargs) as answer:
            return answer.status, await answer.text()

    async def get(self, path: str) -> Any:
        async with self.session.get(self.engine.url + path) as answer:
            return await answer.json()

    async def fault(self, **rule: Any) -> None:
        status, text = await self.post("/sim/faults", [rule])
        assert status == 200, text


@pytest.fixture
async def client(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    settings = getattr(request, "param", {})
    engine = SimEngine(SimConfig(**settings))
    await engine.start()
    try:
        # POSTs on a connection that a fault closed must not be retried behind the test's back.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            yield Client(engine, session)
    finally:
        await engine.stop()


async def test_an_answer_can_be_recomputed(client: Client) -> None:
    _, text = await client.post("/v1/completions", COMPLETION)
    expected = model.generate(model.base_weights(0), list(b"hello"), 8)
    assert json.loads(text)["choices"][0]["token_ids"] == expected


async def test_status_fault_with_headers_and_body(client: Client) -> None:
    await client.fault(path="/pause", action="status", status=429, headers={"Retry-After": "2"}, body={"a": 1}, times=1)
    async with client.session.post(client.engine.url + "/pause") as answer:
        assert (answer.status, answer.headers["Retry-After"], await answer.json()) == (429, "2", {"a": 1})
    assert client.engine.core.paused == "no"
    assert (await client.post("/pause"))[0] == 200


async def test_a_fault_after_the_call_lets_it_take_effect(client: Client) -> None:
    await client.fault(path="/pause", action="cut", when="after")
    with pytest.raises(aiohttp.ClientError):
        await client.post("/pause?mode=keep")
    assert client.engine.core.paused == "all"


@pytest.mark.parametrize("action", ["cut", "reset", "garbage"])
async def test_connection_faults(client: Client, action: str) -> None:
    await client.fault(path="/v1/*", action=action)
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        await client.post("/v1/completions", COMPLETION)
    assert (await client.get("/is_paused")) == {"is_paused": False}


async def test_success_false(client: Client) -> None:
    await client.fault(path="/reset_prefix_cache", action="success_false")
    assert await client.post("/reset_prefix_cache") == (200, '{"success":false}')


async def test_a_hang_ends_with_the_client(client: Client) -> None:
    await client.fault(path="/resume", action="hang")
    with pytest.raises(asyncio.TimeoutError):
        await client.post("/resume", timeout=aiohttp.ClientTimeout(total=0.1))
    await asyncio.sleep(0.05)
    assert client.engine.disconnects == 1


@pytest.mark.parametrize("action", ["cut", "reset", "hang"])
async def test_a_stream_breaks_after_tokens(client: Client, action: str) -> None:
    seconds = 0.01 if action == "hang" else None
    await client.fault(path="/v1/completions", action=action, after_tokens=3, seconds=seconds)
    received = b""
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        async with client.session.post(client.engine.url + "/v1/completions", json=STREAM) as answer:
            async for chunk in answer.content.iter_any():
                received += chunk
    if action != "reset":
        assert received.count(b"data: ") == 3


async def test_garbage_can_come_inside_a_stream(client: Client) -> None:
    await client.fault(path="/v1/completions", action="garbage", after_tokens=1)
    # A plain socket: aiohttp's client waits for ever when a chunk's head is garbage.
    reader, writer = await asyncio.open_connection("127.0.0.1", client.engine.port)
    body = json.dumps(STREAM).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(head.encode() + b"\r\n" + body)
    received = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert received.endswith(GARBAGE)
    assert received.count(b"data: ") == 1


async def test_a_stream_breaks_after_bytes(client: Client) -> None:
    await client.fault(path="/v1/completions", action="cut", after_bytes=100)
    received = b""
    with pytest.raises(aiohttp.ClientPayloadError):
        async with client.session.post(client.engine.url + "/v1/completions", json=STREAM) as answer:
            async for chunk in answer.content.iter_any():
                received += chunk
    assert len(received) == 100


async def test_a_whole_answer_breaks_after_bytes(client: Client) -> None:
    await client.fault(path="/v1/completions", action="cut", after_bytes=10)
    with pytest.raises(aiohttp.ClientPayloadError):
        await client.post("/v1/completions", COMPLETION)


async def test_an_error_event_ends_a_stream_cleanly(client: Client) -> None:
    await client.fault(path="/v1/completions", action="error_event", after_tokens=2, status=503)
    _, text = await client.post("/v1/completions", STREAM)
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[2])["error"]["code"] == 503
    assert events[3:] == ["[DONE]"]


async def test_death_closes_everything(client: Client) -> None:
    await client.fault(path="/v1/completions", action="die", after_tokens=1)
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        await client.post("/v1/completions", STREAM)
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.post("/resume")


async def test_a_restart_forgets(client: Client) -> None:
    await client.post("/sim/version", {"version": "v7", "weights": "w7"})
    await client.post("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1, "world_size": 2}})
    before = await client.get("/sim/state")
    port = client.engine.port
    await client.engine.restart()
    after = await client.get("/sim/state")
    assert client.engine.port == port
    assert (after["version"], after["weights"], after["transfer"]["group"]) == ("default", "base-0", None)
    assert before["transfer"]["group"] == {"rank_offset": 1, "world_size": 2}
    assert after["process_start_time_seconds"] > before["process_start_time_seconds"]


async def test_the_log_has_what_was_sent(client: Client) -> None:
    raw = b'{"request_ids":  ["a"]}'
    url = client.engine.url + "/abort_requests?x=1&x=2"
    async with client.session.post(url, data=raw, headers={"X-Odd": "Value"}):
        pass
    await client.post("/v1/completions", COMPLETION)
    (entry,) = await client.get("/sim/log")
    assert (entry["path"], entry["query"], entry["body"]) == ("/abort_requests", "x=1&x=2", raw.decode())
    assert ["X-Odd", "Value"] in entry["headers"]
    assert entry["status"] == 200
    everything = await client.get("/sim/log?all=1")
    assert [each["path"] for each in everything] == ["/abort_requests", "/v1/completions"]
    async with client.session.delete(client.engine.url + "/sim/log"):
        pass
    assert await client.get("/sim/log") == []


async def test_speed_can_be_changed_while_running(client: Client) -> None:
    await client.post("/sim/speed", {"tokens_per_second": 0.001})
    request = asyncio.ensure_future(client.post("/v1/completions", COMPLETION))
    async with asyncio.timeout(10):
        state = await client.get("/sim/state")
        while state["generation_tokens"] == 0:
            state = await client.get("/sim/state")
    assert (state["running"], state["generation_tokens"]) == (1, 1)
    await client.post("/abort_requests", {})
    assert json.loads((await request)[1])["choices"][0]["finish_reason"] == "abort"


async def test_a_wrong_fault_is_explained(client: Client) -> None:
    status, text = await client.post("/sim/faults", [{"action": "explode"}])
    assert status == 400
    assert "unknown fault action" in text


@pytest.mark.parametrize("client", [{"extra_control_paths": ("/areal_update",)}], indirect=True)
async def test_an_extra_control_path_sets_the_weights(client: Client) -> None:
    assert (await client.post("/areal_update", {"path": "/ckpt/7"}))[0] == 200
    assert client.engine.core.weights == "/ckpt/7"
    assert [entry["path"] for entry in await client.get("/sim/log")] == ["/areal_update"]


@pytest.mark.parametrize("client", [{"world_size": 2, "data_parallel_size": 2}], indirect=True)
async def test_world_size_counts_replicas(client: Client) -> None:
    assert await client.get("/get_world_size") == {"world_size": 4}
    assert await client.get("/get_world_size?include_dp=false") == {"world_size": 2}
    _, text = await client.post("/weight_checker", {"action": "checksum"})
    prefixes = {name.split(":model")[0].split(":lm_")[0] for name in json.loads(text)["checksums"]}
    assert prefixes == {f"dp{dp}:pp0:pcp0:tp{tp}" for dp in (0, 1) for tp in (0, 1)}


@pytest.mark.parametrize("client", [{"compat": "0.32"}], indirect=True)
async def test_before_0_33_a_paused_engine_is_silent(client: Client) -> None:
    await client.post("/pause?mode=abort")
    with pytest.raises(asyncio.TimeoutError):
        await client.post("/v1/completions", COMPLETION, timeout=aiohttp.ClientTimeout(total=0.1))
    await client.post("/resume")
    assert (await client.post("/v1/completions", COMPLETION))[0] == 200
    assert (await client.get("/version")) == {"version": "0.32.0"}


async def test_embeddings_and_pooling(client: Client) -> None:
    _, text = await client.post("/v1/embeddings", {"input": ["a", "b", "a"]})
    vectors = [each["embedding"] for each in json.loads(text)["data"]]
    assert vectors[0] == vectors[2] != vectors[1]
    _, text = await client.post("/pooling", {"input": "a"})
    assert json.loads(text)["data"][0]["data"] == vectors[0]
    _, text = await client.post("/v1/embeddings", {"input": "a", "encoding_format": "base64"})
    assert isinstance(json.loads(text)["data"][0]["embedding"], str)


async def test_transcription(client: Client) -> None:
    async def send(raw: bytes) -> tuple[int, Any]:
        form = aiohttp.FormData()
        form.add_field("file", raw, filename="a.wav", content_type="audio/wav")
        form.add_field("model", "tiny")
        async with client.session.post(client.engine.url + "/v1/audio/transcriptions", data=form) as answer:
            return answer.status, await answer.json()

    one, same, other = await send(b"abc"), await send(b"abc"), await send(b"abd")
    assert one == same
    assert one[0] == 200
    assert one[1]["text"] != other[1]["text"]


async def test_realtime(client: Client) -> None:
    async with client.session.ws_connect(client.engine.url + "/v1/realtime") as socket:
        assert (await socket.receive_json())["type"] == "session.created"
        await socket.send_json({"type": "session.update", "x": 1})
        assert await socket.receive_json() == {"type": "session.update", "x": 1}
        await socket.send_bytes(b"\0\1")
        assert await socket.receive_bytes() == b"\0\1"
        await socket.send_json({"type": "input_audio_buffer.commit"})
        assert [(await socket.receive_json())["type"] for _ in range(2)] == [
            "transcription.delta",
            "transcription.done",
        ]


async def test_many_streams_at_once_are_all_right(client: Client) -> None:
    async def one(index: int) -> list[int]:
        tokens: list[int] = []
        body = {**STREAM, "prompt": f"prompt {index}"}
        async with client.session.post(client.engine.url + "/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
        return tokens

    answers = await asyncio.gather(*(one(index) for index in range(60)))
    weights = model.base_weights(0)
    assert answers == [model.generate(weights, list(f"prompt {index}".encode()), 8) for index in range(60)]
    assert client.engine.core.unfinished == 0
