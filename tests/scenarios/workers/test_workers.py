"""Several workers on one port are one proxy: one gate, one fleet, one set of counts."""

import asyncio
import json
import os
import signal

import aiohttp
from aiohttp import web

from tests.scenarios.blackbox.conftest import fleet, states, until


async def one(url, index=0, **headers):
    """A request on a connection of its own, so that the kernel may give it to any worker."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{url}/v1/completions", json={"prompt": "x", "stream": bool(index % 2)}, headers=headers
        ) as reply,
    ):
        await reply.read()
        return reply.status, reply.headers.get("X-Fleetgate-Engine"), reply.headers["X-Request-Id"]


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(item) for item in file.read().split()]


def makers(answers):
    """The processes that answered, by the prefix of the ids that they made."""
    return {answer[2].split("-")[1] for answer in answers}


async def many(url, count=24):
    return await asyncio.gather(*(one(url, index) for index in range(count)))


async def test_a_pause_closes_the_gate_of_every_worker():
    async with fleet(2, "--workers", "2") as (engines, http, proxy):
        answers = await many(proxy.url)
        assert {status for status, *_ in answers} == {200}
        assert len(makers(answers)) == 2
        async with http.post("/pause?mode=keep") as reply:
            assert await reply.json() == {"status": "paused"}
        for engine in engines:
            engine.seen.clear()
        held = [asyncio.ensure_future(one(proxy.url, index)) for index in range(16)]

        async def all_held():
            async with http.get("/fleet") as reply:
                return (await reply.json())["gate"]["held_requests"] == 16

        await until(all_held)
        assert not any(engine.calls("/v1/completions") for engine in engines)
        async with http.post("/update_weight_version", json={"new_version": "v1"}) as reply:
            assert reply.status == 200
        async with http.post("/resume") as reply:
            assert reply.status == 200
        assert {status for status, *_ in await asyncio.gather(*held)} == {200}


async def test_what_a_pause_holds_can_be_resumed_while_the_proxy_drains():
    async with fleet(2, "--workers", "2", "--drain-timeout", "60") as (_, http, proxy):
        async with http.post("/pause?mode=keep"):
            pass
        held = [asyncio.ensure_future(one(proxy.url, index)) for index in range(8)]

        async def all_held():
            async with http.get("/fleet") as reply:
                return (await reply.json())["gate"]["held_requests"] == 8

        await until(all_held)
        proxy.process.terminate()

        async def drains():
            async with http.get("/ready") as reply:
                return (await reply.json())["problem"] == "the proxy stops"

        await until(drains)
        async with http.post("/resume") as reply:
            assert reply.status == 200
        assert {status for status, *_ in await asyncio.gather(*held)} == {200}
        assert await asyncio.wait_for(proxy.process.wait(), 20) == 0


async def test_a_session_stays_on_its_engine_whichever_worker_gets_it():
    async with fleet(3, "--workers", "2") as (_, http, proxy):
        for name in ("s1", "s2", "s3", "s4"):
            first = await one(proxy.url, **{"X-Session-ID": name})
            await asyncio.sleep(0.05)
            later = [await one(proxy.url, **{"X-Session-ID": name}) for _ in range(8)]
            assert {engine for _, engine, _ in later} == {first[1]}
        async with http.post("/finish_session?session_id=s1") as reply:
            assert (await reply.json())["status"] == "finished"


async def test_aborts_and_counts_are_the_fleets():
    async with fleet(2, "--workers", "2") as (engines, http, proxy):
        for engine in engines:
            engine.tokens, engine.token_delay = 1, 1.0
        running = [asyncio.ensure_future(one(proxy.url, **{"X-Request-Id": f"r{i}"})) for i in range(4)]
        await until(lambda: sum(engine.running for engine in engines) == 4)
        async with http.post("/abort_requests", json={"request_ids": ["r0", "r1", "r3", "nobody"]}) as reply:
            assert await reply.json() == {"status": "aborted", "aborted": 3}
        await asyncio.gather(*running)

        async def counted():
            async with http.get("/metrics") as reply:
                page = await reply.text()
            return 'fleetgate_requests_total{code="200",route="/v1/completions"} 4.0' in page

        await until(counted)


async def test_a_restarted_engine_is_fenced_for_every_worker():
    async with fleet(2, "--workers", "2") as (engines, http, proxy):
        async with http.post("/update_weight_version", json={"new_version": "v5"}):
            pass
        await engines[1].restart()
        engines[1].seen.clear()
        answers = await many(proxy.url, 40)
        assert {engine for _, engine, _ in answers} == {engines[0].id}
        assert not engines[1].calls("/v1/completions")

        async def fenced():
            return (await states(http))[engines[1].id] == "fenced"

        await until(fenced)


async def test_a_worker_that_dies_is_replaced_and_loses_only_its_own():
    async with fleet(2, "--workers", "2") as (_, http, proxy):
        await many(proxy.url)
        async with http.post("/pause?mode=keep"):
            pass
        workers = children(proxy.process.pid)
        os.kill(workers[0], signal.SIGKILL)
        await until(lambda: len(set(children(proxy.process.pid)) - {workers[0]}) == 2)

        async def both_hold():
            # The new worker must know that the gate is closed before it takes its first request.
            done, waiting = await asyncio.wait([asyncio.ensure_future(one(proxy.url)) for _ in range(8)], timeout=0.5)
            for task in waiting:
                task.cancel()
            assert not [task for task in done if task.exception() is None]
            return True

        await until(both_hold)
        async with aiohttp.ClientSession(proxy.url) as session, session.post("/resume") as reply:
            assert reply.status == 200

        async def both_answer():
            answers = await asyncio.gather(*(one(proxy.url) for _ in range(24)), return_exceptions=True)
            return all(isinstance(item, tuple) for item in answers) and len(makers(answers)) == 2

        await until(both_answer)


async def test_workers_end_with_the_director():
    async with fleet(1, "--workers", "2") as (_, _http, proxy):
        workers = children(proxy.process.pid)
        assert len(workers) == 2
        proxy.process.kill()
        await proxy.process.wait()

        def gone():
            return not any(os.path.exists(f"/proc/{pid}/task") and _running(pid) for pid in workers)

        await until(gone)


def _running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_stop_drains_every_worker():
    async with fleet(2, "--workers", "2") as (engines, _http, proxy):
        for engine in engines:
            engine.tokens, engine.token_delay = 1, 1.0
        running = [asyncio.ensure_future(one(proxy.url)) for _ in range(6)]
        await until(lambda: sum(engine.running for engine in engines) == 6)
        assert await proxy.stop() == 0
        assert {status for status, *_ in await asyncio.gather(*running)} == {200}


async def test_an_engine_that_a_worker_leaves_out_is_told_by_the_director():
    async def cut(engine, request):
        request.transport.abort()
        return web.Response()

    async def keep_asking(url):
        while True:
            await many(url, 4)

    async with fleet(2, "--workers", "2", "--outlier-failures", "2") as (engines, http, proxy):
        engines[0].overrides["/v1/completions"] = cut
        async with http.get("/fleet/events") as events:
            asking = asyncio.ensure_future(keep_asking(proxy.url))
            async with asyncio.timeout(20):
                async for line in events.content:
                    if line == b"event: engine_left_out\n":
                        break
            told = json.loads((await events.content.readline()).removeprefix(b"data: "))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert told["engine"] == engines[0].url.removeprefix("http://")
        assert told["seconds"] > 0
