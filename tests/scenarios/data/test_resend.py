"""A connection that fails or stays silent before the first byte is mended elsewhere or later; never after that byte."""

from __future__ import annotations

import asyncio

import pytest

from tests.tools.fault_engine import FaultEngine, Request, Wire, answer_bytes
from tests.tools.fault_scripts import SSE_HEAD, chunk, close_when_idle, cut_after, echo, poison_idle, reply, silent
from tests.tools.rig import Client, ask, eventually, get, post, proxy_for
from tests.tools.tcp_fault_proxy import TcpFaultProxy

BODY = b'{"prompt":"x"}'
STREAM = b'{"prompt":"x","stream":true}'
GOOD = answer_bytes(200, b'{"ok":1}')


async def test_re_sends_never_storm() -> None:
    """Engines that die under every request: re-sends stay within the budget."""
    engines = [FaultEngine(cut_after(0, b"")), FaultEngine(cut_after(0, b""))]
    async with engines[0], engines[1]:
        async with proxy_for(*engines, retry_ratio=0.2, retry_floor=0.1, backoff_base=0.001) as app:
            got = await asyncio.gather(*[ask(app.url, post("/v1/completions", BODY)) for _ in range(50)])
            assert {one.status for one in got} == {502}
            sent = sum(len(engine.requests) for engine in engines)
            # One free re-send each and one for a connection that had been idle, then a fifth of the requests and the
            # floor over ten seconds.
            assert sent <= 50 + 50 + 50 + 10 + 1


async def test_a_refused_connection_goes_elsewhere_for_any_method() -> None:
    async with FaultEngine(echo()) as alive, FaultEngine(echo()) as dead:
        async with proxy_for(dead, alive, probe_interval=60.0, policy="round_robin") as app:
            await dead.stop()
            for data in (post("/v1/completions", BODY), get("/v1/models"), post("/v1/unknown", BODY)) * 2:
                got = await ask(app.url, data)
                assert got.status == 200
                assert got.field("X-Fleetgate-Engine") == alive.id


async def test_a_fresh_connection_that_dies_unanswered_goes_elsewhere() -> None:
    async with FaultEngine(cut_after(0, b"", rst=True)) as bad, FaultEngine(echo()) as good:
        async with proxy_for(bad, good, policy="round_robin") as app:
            for _ in range(4):
                assert (await ask(app.url, post("/v1/completions", BODY))).status == 200
            assert len(good.requests) == 4


async def test_an_unknown_post_is_not_run_twice() -> None:
    bad = [FaultEngine(cut_after(0, b"")), FaultEngine(cut_after(0, b""))]
    async with bad[0], bad[1], proxy_for(*bad) as app:
        assert (await ask(app.url, post("/v1/unknown", BODY))).status == 502
        assert sum(len(engine.requests) for engine in bad) == 1
        assert (await ask(app.url, post("/tokenize", BODY))).status == 502
        assert sum(len(engine.requests) for engine in bad) == 3


async def test_an_idle_connection_that_the_engine_closed_costs_nothing() -> None:
    async with (
        FaultEngine(close_when_idle(echo(), 0.02)) as engine,
        proxy_for(engine) as app,
        Client.to(app.url) as client,
    ):
        for _ in range(100):
            await client.send(post("/v1/completions", BODY))
            assert (await client.reply()).status == 200
            await asyncio.sleep(0.02)


async def test_bytes_on_an_idle_connection_are_nobodys_answer() -> None:
    evil = answer_bytes(200, b"EVIL")
    async with FaultEngine(poison_idle(echo(), evil)) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        for _ in range(20):
            await client.send(post("/v1/completions", BODY))
            got = await client.reply()
            assert b"EVIL" not in got.body
            assert got.body.endswith(BODY)
            # Bytes that come while the next request runs could not be told from its answer by anybody.
            await asyncio.sleep(0.03)


async def test_two_answers_to_one_request_do_not_serve_the_next() -> None:
    evil = answer_bytes(200, b"EVIL")
    async with FaultEngine(reply(GOOD + evil)) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        for _ in range(5):
            await client.send(post("/v1/completions", BODY))
            assert (await client.reply()).body == b'{"ok":1}'
        assert len({id(request.wire) for request in engine.requests}) == 5


async def test_all_engines_down_for_a_while_costs_no_client_an_error() -> None:
    engines = [FaultEngine(echo()), FaultEngine(echo())]
    async with engines[0], engines[1], proxy_for(*engines, probe_interval=0.2) as app:
        for engine in engines:
            await engine.stop(reset=True)
        asked = [asyncio.ensure_future(ask(app.url, post("/v1/completions", BODY))) for _ in range(50)]
        await eventually(lambda: app.plane.gate.held == 50, "all held")
        await asyncio.sleep(1.0)
        assert not any(one.done() for one in asked)
        for engine in engines:
            await engine.start()
        assert {one.status for one in await asyncio.wait_for(asyncio.gather(*asked), 10)} == {200}


async def test_a_black_hole_slows_nobody_else() -> None:
    """One engine accepts and never answers, another one's packets vanish: the rest is as quick as ever."""
    async with FaultEngine(echo()) as good, FaultEngine(echo()) as behind:
        async with TcpFaultProxy("127.0.0.1", behind.port) as hole:
            settings = {"connect_timeout": 0.5, "probe_timeout": 0.2, "probe_interval": 0.2, "probe_fall": 2}
            async with proxy_for(good, hole.url, **settings) as app:
                hole.black_hole = True
                stuck = app.fleet.engines[f"127.0.0.1:{hole.port}"]
                asked = [asyncio.ensure_future(ask(app.url, post("/v1/completions", BODY))) for _ in range(20)]
                await eventually(lambda: len(good.requests) >= 10, "the good engine's share")
                await eventually(lambda: str(stuck.state) == "down", "found out")
                for _ in range(20):
                    got = await asyncio.wait_for(ask(app.url, post("/v1/completions", BODY)), 1)
                    assert got.field("X-Fleetgate-Engine") == good.id
                hole.drop_all()
                hole.black_hole = False
                assert {one.status for one in await asyncio.wait_for(asyncio.gather(*asked), 5)} == {200}


async def test_a_first_byte_limit_sends_elsewhere_and_says_504_when_nobody_is_left() -> None:
    async with FaultEngine(silent()) as stuck, FaultEngine(echo()) as good:
        async with proxy_for(stuck, good, policy="round_robin", first_byte_timeout=0.1) as app:
            for _ in range(2):
                assert (await ask(app.url, post("/v1/completions", BODY))).status == 200
        async with proxy_for(stuck, first_byte_timeout=0.05, max_attempts=2, backoff_base=0.001) as app:
            got = await ask(app.url, post("/v1/completions", BODY))
            assert got.status == 504
            assert got.field("X-Fleetgate-Error") == "engine_timeout"


@pytest.mark.parametrize("field", ["X-Any: 1", "X-Fleetgate-No-Retry: 1"])
async def test_a_first_byte_limit_does_not_count_a_pause(field: str) -> None:
    going = asyncio.Event()

    async def frozen(wire: Wire, request: Request) -> None:
        await going.wait()
        await wire.send(GOOD)

    async with FaultEngine(frozen) as engine, proxy_for(engine, first_byte_timeout=0.5) as app:
        asked = asyncio.ensure_future(ask(app.url, post("/v1/completions", BODY, field)))
        await eventually(lambda: len(engine.requests) == 1)
        app.plane.gate.close("a trainer")
        await asyncio.sleep(0.8)
        app.plane.gate.open()
        going.set()
        got = await asked
        assert (got.status, got.field("X-Fleetgate-Attempts")) == (200, "1")
        assert len(engine.requests) == 1


async def test_a_body_that_was_not_kept_is_not_sent_twice_but_waits_for_a_connection() -> None:
    big = b"x" * 200_000
    async with FaultEngine(cut_after(0, b"")) as bad, FaultEngine(echo()) as good:
        async with proxy_for(bad, replay_limit=1000) as app:
            got = await ask(app.url, post("/v1/completions", big))
            assert got.status == 502
            assert len(bad.requests) == 1
        async with proxy_for(good, bad, replay_limit=1000, policy="round_robin", probe_interval=60.0) as app:
            await bad.stop()
            for _ in range(3):
                got = await ask(app.url, post("/v1/completions", big))
                assert got.status == 200
                assert got.field("X-Fleetgate-Engine") == good.id


async def test_a_stale_connection_never_costs_a_big_body() -> None:
    big = b"x" * 200_000
    async with FaultEngine(close_when_idle(echo(), 0.005)) as engine, proxy_for(engine, replay_limit=1000) as app:
        async with Client.to(app.url) as client:
            for _ in range(20):
                await client.send(post("/v1/completions", big))
                assert (await client.reply()).status == 200
                await asyncio.sleep(0.005)


async def test_an_engine_that_stays_down_with_open_connections_gives_its_requests_up() -> None:
    """Stopped, not dead: nothing on its connections says so. Unanswered requests go elsewhere, streams are cut."""

    async def stuck(wire: Wire, request: Request) -> None:
        if b"stream" in request.body:
            await wire.send(SSE_HEAD + chunk(b'data: {"id":1}\n\n'))
        await wire.gone.wait()

    settings = {"probe_interval": 0.1, "probe_timeout": 0.1, "probe_fall": 2, "down_timeout": 0.3}
    async with FaultEngine(stuck) as bad, FaultEngine(reply(GOOD)) as good:
        async with proxy_for(bad, good, policy="round_robin", **settings) as app:
            asked = [asyncio.ensure_future(ask(app.url, post("/v1/completions", BODY))) for _ in range(10)]
            streams = [asyncio.ensure_future(ask(app.url, post("/v1/completions", STREAM))) for _ in range(10)]
            await eventually(lambda: len(bad.requests) == 10)
            bad.probes = False
            assert {one.status for one in await asyncio.wait_for(asyncio.gather(*asked), 20)} == {200}
            cut = [one for one in await asyncio.wait_for(asyncio.gather(*streams), 20) if b'"error"' in one.body]
            assert len(cut) == 5
            assert not any(one.complete for one in cut)
            await eventually(
                lambda: bad.running == 0 or all(request.path != "/v1/completions" for request in bad.requests[10:])
            )
            bad.probes = True


async def test_an_engine_that_comes_back_in_time_keeps_its_requests() -> None:
    going = asyncio.Event()

    async def slow_answer(wire: Wire, request: Request) -> None:
        await going.wait()
        await wire.send(GOOD)

    settings = {"probe_interval": 0.1, "probe_timeout": 0.1, "probe_fall": 2, "down_timeout": 1.0}
    async with FaultEngine(slow_answer) as engine, proxy_for(engine, **settings) as app:
        asked = asyncio.ensure_future(ask(app.url, post("/v1/completions", BODY)))
        await eventually(lambda: len(engine.requests) == 1)
        engine.healthy = False
        await eventually(lambda: str(next(iter(app.fleet)).state) == "down")
        engine.healthy = True
        await eventually(lambda: str(next(iter(app.fleet)).state) == "ready")
        await asyncio.sleep(1.0)
        going.set()
        got = await asked
        assert (got.status, got.field("X-Fleetgate-Attempts")) == (200, "1")
