"""No hidden caps: thousands of streams and slow requests at once, and what each of them costs."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.tools.fault_engine import FaultEngine, Request, Wire, answer_bytes
from tests.tools.fault_scripts import SSE_HEAD, chunk
from tests.tools.rig import Client, ask, eventually, get, memory, post, proxy_for

BODY = b'{"prompt":"' + b"x" * 500 + b'"}'

pytestmark = pytest.mark.timeout(180)


class Barrier:
    """Answers nobody before it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def json(self, wire: Wire, request: Request) -> None:
        await self.opened.wait()
        await wire.send(answer_bytes(200, b"{}"))

    async def stream(self, wire: Wire, request: Request) -> None:
        await wire.send(SSE_HEAD + chunk(b'data: {"id":1}\n\n'))
        await self.opened.wait()
        await wire.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def open_clients(url: str, count: int, stack: list[Client], closing: list[object]) -> None:
    for start in range(0, count, 200):
        made = [Client.to(url) for _ in range(min(200, count - start))]
        closing.extend(made)
        stack.extend(await asyncio.gather(*[one.__aenter__() for one in made]))


async def close_clients(closing: list) -> None:
    await asyncio.gather(*[one.__aexit__(None, None, None) for one in closing])


async def test_two_thousand_slow_requests_reach_the_engines_at_once() -> None:
    barrier = Barrier()
    engines = [FaultEngine(barrier.json) for _ in range(4)]
    clients: list[Client] = []
    closing: list[object] = []
    async with engines[0], engines[1], engines[2], engines[3], proxy_for(*engines) as app:
        await open_clients(app.url, 2000, clients, closing)
        before = memory()
        for client in clients:
            client.writer.write(post("/v1/completions", BODY))
        await eventually(lambda: sum(engine.running for engine in engines) == 2000, "all at once", 60)
        assert max(engine.running for engine in engines) - min(engine.running for engine in engines) <= 1
        print(f"\nopen requests, engines and clients in the same process: {(memory() - before) / 2000:.0f} bytes each")
        barrier.opened.set()
        assert {(await client.reply()).status for client in clients} == {200}
        await close_clients(closing)


async def test_1300_streams_start_within_a_second_and_finish_while_health_stays_fast() -> None:
    barrier = Barrier()
    engines = [FaultEngine(barrier.stream) for _ in range(4)]
    clients: list[Client] = []
    closing: list[object] = []
    async with engines[0], engines[1], engines[2], engines[3], proxy_for(*engines) as app:
        await open_clients(app.url, 1300, clients, closing)
        began = time.monotonic()
        for client in clients:
            client.writer.write(post("/v1/completions", BODY))
        await asyncio.gather(*[client.reader.readuntil(b'data: {"id":1}\n\n') for client in clients])
        print(f"\n1,300 streams had their first event after {time.monotonic() - began:.2f} s (engines and clients too)")
        looks = []
        for _ in range(20):
            began = time.monotonic()
            assert (await ask(app.url, get("/health"))).status == 200
            looks.append(time.monotonic() - began)
        print(
            f"/health under 1,300 streams: median {sorted(looks)[10] * 1000:.1f} ms, worst {max(looks) * 1000:.1f} ms"
        )
        barrier.opened.set()
        ends = await asyncio.gather(*[client.reader.readuntil(b"0\r\n\r\n") for client in clients])
        assert all(b"[DONE]" in end for end in ends)
        await close_clients(closing)


async def test_memory_of_held_requests() -> None:
    barrier = Barrier()
    clients: list[Client] = []
    closing: list[object] = []
    async with FaultEngine(barrier.json) as engine, proxy_for(engine) as app:
        app.plane.gate.close("a trainer")
        await open_clients(app.url, 2000, clients, closing)
        before = memory()
        for client in clients:
            client.writer.write(post("/v1/completions", BODY))
        await eventually(lambda: app.plane.gate.held == 2000, "all held", 60)
        print(f"\nheld requests with 500-byte bodies: {(memory() - before) / 2000:.0f} bytes each")
        assert app.plane.gate.held_bytes == 2000 * len(BODY)
        barrier.opened.set()
        app.plane.gate.open()
        assert {(await client.reply()).status for client in clients} == {200}
        await close_clients(closing)


@pytest.mark.parametrize("policy", ["least_inflight", "round_robin", "sticky", "power_of_two"])
async def test_equal_prompts_without_a_session_spread(policy: str) -> None:
    barrier = Barrier()
    engines = [FaultEngine(barrier.json) for _ in range(4)]
    async with engines[0], engines[1], engines[2], engines[3], proxy_for(*engines, policy=policy) as app:
        asked = [asyncio.ensure_future(ask(app.url, post("/v1/completions", BODY))) for _ in range(64)]
        await eventually(lambda: sum(engine.running for engine in engines) == 64)
        assert max(engine.running for engine in engines) <= 24
        barrier.opened.set()
        assert {one.status for one in await asyncio.gather(*asked)} == {200}


async def test_a_cap_per_engine_is_never_exceeded() -> None:
    barrier = Barrier()
    engines = [FaultEngine(barrier.json) for _ in range(2)]
    async with engines[0], engines[1], proxy_for(*engines, max_inflight=5) as app:
        asked = [asyncio.ensure_future(ask(app.url, post("/v1/completions", BODY))) for _ in range(50)]
        await eventually(lambda: app.plane.gate.held == 40)
        barrier.opened.set()
        assert {one.status for one in await asyncio.gather(*asked)} == {200}
        assert [engine.peak <= 5 for engine in engines] == [True, True]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/responses"])
async def test_a_session_stays_on_its_engine_on_every_route(path: str) -> None:
    barrier = Barrier()
    barrier.opened.set()
    engines = [FaultEngine(barrier.json) for _ in range(4)]
    async with engines[0], engines[1], engines[2], engines[3], proxy_for(*engines) as app:
        for session in range(4):
            used = {
                (await ask(app.url, post(path, BODY, f"X-Session-ID: s{session}"))).field("X-Fleetgate-Engine")
                for _ in range(5)
            }
            assert len(used) == 1
