"""A failure before the first byte is mended: elsewhere, later, or after the pause; never after that byte."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.scenarios.data import wire_forms as forms
from tests.tools.fault_engine import FaultEngine, Request, Script, Wire, answer_bytes
from tests.tools.fault_scripts import (
    SSE_HEAD,
    chunk,
    close_when_idle,
    cut_after,
    echo,
    in_turn,
    poison_idle,
    reply,
    silent,
    sse,
)
from tests.tools.rig import Client, ask, eventually, get, post, proxy_for
from tests.tools.tcp_fault_proxy import TcpFaultProxy

BODY = b'{"prompt":"x"}'
STREAM = b'{"prompt":"x","stream":true}'
GOOD = answer_bytes(200, b'{"ok":1}')
GOOD_STREAM = sse(b'data: {"id":"1"}\n\n', b"data: [DONE]\n\n")


def until_resumed(engine: FaultEngine, refusal: bytes, then: Script) -> Script:
    """Refuses while ``engine.paused``."""

    async def script(wire: Wire, request: Request) -> None:
        if not engine.paused:
            await then(wire, request)
        elif refusal == SSE_HEAD:
            await cut_after(len(refusal), refusal)(wire, request)
        else:
            await wire.send(refusal)

    return script


def paused_forms() -> list[tuple[str, bool]]:
    return [(path, False) for path in forms.PLAIN] + [(path, True) for path in forms.STREAMED]


@pytest.mark.parametrize(("path", "streamed"), paused_forms())
@pytest.mark.parametrize("who", ["somebody", "proxy"])
async def test_paused_in_every_form_waits_and_is_sent_again(path: str, streamed: bool, who: str) -> None:
    engine = FaultEngine(silent(), paused=False)
    if streamed and path == "/v1/responses":
        refusal = forms.CUT_STREAM
    elif streamed:
        refusal = forms.refused_stream(path, forms.PAUSED, "ServiceUnavailableError")
    else:
        refusal = forms.refused(path, forms.PAUSED, "ServiceUnavailableError")
    good = GOOD_STREAM if streamed else GOOD
    engine.script = until_resumed(engine, refusal, reply(good))
    async with engine, proxy_for(engine, pause_watch_interval=0.05) as app:
        engine.paused = True
        asked = asyncio.ensure_future(ask(app.url, post(path, STREAM if streamed else BODY)))
        if who == "proxy":
            # The engine refuses what had passed the gate just before it closed.
            await engine.next_request()
            app.plane.gate.close("a trainer")
        await eventually(lambda: app.plane.gate.held == 1, "held")
        assert not asked.done()
        engine.paused = False
        app.plane.gate.open()
        got = await asyncio.wait_for(asked, 5)
        assert got.status == 200
        assert got.complete
        assert got.body == (b'data: {"id":"1"}\n\ndata: [DONE]\n\n' if streamed else b'{"ok":1}')
        assert app.fleet.engines[engine.id].failures == 0
        assert str(app.fleet.engines[engine.id].state) == "ready"


@pytest.mark.parametrize(("path", "streamed"), paused_forms())
async def test_overload_in_every_form_is_tried_elsewhere(path: str, streamed: bool) -> None:
    refusal = (forms.refused_stream if streamed else forms.refused)(path, forms.BUSY, "Service Unavailable")
    good = GOOD_STREAM if streamed else GOOD
    engines = [FaultEngine(reply(refusal)), FaultEngine(reply(refusal)), FaultEngine(reply(good))]
    async with engines[0], engines[1], engines[2], proxy_for(*engines, policy="round_robin") as app:
        for _ in range(3):
            got = await ask(app.url, post(path, STREAM if streamed else BODY, "X-Session-ID: s"))
            assert got.status == 200
            assert b"busy" not in got.body
            assert got.field("X-Fleetgate-Engine") == engines[2].id
            assert int(got.field("X-Fleetgate-Attempts") or 0) <= 3


async def test_tried_engines_are_not_tried_again_while_others_are_left_session_or_not() -> None:
    busy = reply(forms.refused("/v1/completions", forms.BUSY, "Service Unavailable"))
    engines = [FaultEngine(busy), FaultEngine(busy), FaultEngine(busy), FaultEngine(reply(GOOD))]
    async with engines[0], engines[1], engines[2], engines[3], proxy_for(*engines) as app:
        for session in range(8):
            for engine in engines:
                engine.requests.clear()
            got = await ask(app.url, post("/v1/completions", BODY, f"X-Session-ID: s{session}"))
            assert got.status == 200
            assert max(len(engine.requests) for engine in engines) <= 1


async def test_overload_everywhere_backs_off_and_then_the_engines_own_answer_is_passed_on() -> None:
    busy = forms.refused("/v1/completions", forms.BUSY, "Service Unavailable")
    engine = FaultEngine(reply(busy))
    async with engine, proxy_for(engine, max_attempts=4, backoff_base=0.001) as app:
        got = await ask(app.url, post("/v1/completions", BODY))
        assert got.status == 503
        assert b"currently busy" in got.body
        assert got.field("X-Fleetgate-Attempts") == "4"
        assert len(engine.requests) == 4


async def test_retry_after_is_honoured_and_bounded() -> None:
    busy = forms.refused("/v1/completions", forms.BUSY, "Service Unavailable")
    one = busy.replace(b"\r\n\r\n", b"\r\nRetry-After: 1\r\n\r\n", 1)
    long = busy.replace(b"\r\n\r\n", b"\r\nRetry-After: 3600\r\n\r\n", 1)
    engine = FaultEngine(in_turn(reply(one), reply(GOOD), reply(long), reply(GOOD)))
    async with engine, proxy_for(engine, max_retry_after=1.2) as app:
        for least in (1.0, 1.2):
            began = time.monotonic()
            assert (await ask(app.url, post("/v1/completions", BODY))).status == 200
            assert least <= time.monotonic() - began < least + 2


async def test_the_header_that_switches_re_sends_off() -> None:
    busy = forms.refused("/v1/completions", forms.BUSY, "Service Unavailable")
    engines = [FaultEngine(reply(busy)), FaultEngine(reply(busy))]
    async with engines[0], engines[1], proxy_for(*engines) as app:
        got = await ask(app.url, post("/v1/completions", BODY, "X-Fleetgate-No-Retry: 1"))
        assert got.status == 503
        assert got.field("X-Fleetgate-Attempts") == "1"


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


async def test_a_500_of_a_dead_engine_is_sent_again_and_that_of_a_live_one_is_passed_on() -> None:
    failed = forms.error(forms.FAILED, "InternalServerError", 500)
    for answer, body in (
        (answer_bytes(500, failed), BODY),
        (sse(b"data: " + failed + b"\n\n", b"data: [DONE]\n\n"), STREAM),
    ):
        async with FaultEngine(reply(answer)) as bad, FaultEngine(reply(GOOD)) as good:
            async with proxy_for(bad, good, policy="round_robin", probe_interval=60.0) as app:
                live = [await ask(app.url, post("/v1/completions", body)) for _ in range(2)]
                assert sorted(b"error" in one.body for one in live) == [False, True]
                assert str(app.fleet.engines[bad.id].state) == "ready"
                bad.healthy = False
                after = [await ask(app.url, post("/v1/completions", body)) for _ in range(4)]
                assert not any(b"error" in one.body for one in after)


async def test_a_500_of_a_process_that_was_replaced_meanwhile_is_sent_again() -> None:
    failed = answer_bytes(500, forms.error(forms.FAILED, "InternalServerError", 500))

    async def fail_and_be_replaced(wire: Wire, request: Request) -> None:
        await wire.send(failed)
        app.fleet.engines[engine.id].boot += 1  # what the prober does when the process that answers is another one

    async with FaultEngine(in_turn(fail_and_be_replaced, reply(GOOD))) as engine, proxy_for(engine) as app:
        got = await ask(app.url, post("/v1/completions", BODY))
        assert (got.status, len(engine.requests)) == (200, 2)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
async def test_4xx_is_passed_on_and_is_no_strike(status: int) -> None:
    body = forms.error("about the request: generation is paused", "BadRequestError", status)
    async with FaultEngine(reply(answer_bytes(status, body))) as engine, proxy_for(engine) as app:
        for _ in range(20):
            got = await ask(app.url, post("/v1/completions", BODY))
            assert got.status == status
            assert got.body == body
        engine.script = reply(GOOD)
        assert (await ask(app.url, post("/v1/completions", BODY))).status == 200
        assert len(engine.requests) == 21


async def test_a_400_as_the_first_event_is_passed_on() -> None:
    body = forms.error("generation is paused, says the prompt", "BadRequestError", 400)
    async with FaultEngine(reply(sse(b"data: " + body + b"\n\n"))) as engine, proxy_for(engine) as app:
        got = await ask(app.url, post("/v1/completions", STREAM))
        assert got.body == b"data: " + body + b"\n\n"
        assert len(engine.requests) == 1


@pytest.mark.parametrize("piece", [1, 7])
async def test_the_first_event_is_recognised_however_it_is_split(piece: int) -> None:
    refusal = forms.refused_stream("/v1/completions", forms.BUSY, "Service Unavailable")

    async def trickle(wire: Wire, request: Request) -> None:
        for start in range(0, len(refusal), piece):
            await wire.send(refusal[start : start + piece])
            await asyncio.sleep(0)

    async with FaultEngine(trickle) as bad, FaultEngine(reply(GOOD_STREAM)) as good:
        async with proxy_for(bad, good, policy="round_robin") as app:
            for _ in range(4):
                got = await ask(app.url, post("/v1/completions", STREAM))
                assert got.body == b'data: {"id":"1"}\n\ndata: [DONE]\n\n'


ODD_REFUSALS = {
    "key on a second line": b"data: {\ndata: " + forms.error(forms.PAUSED, "X", 503)[1:] + b"\n\n",
    "an empty line of data": b"data: \ndata: " + forms.error(forms.PAUSED, "X", 503) + b"\n\n",
    "called message": b"event: message\ndata: " + forms.error(forms.PAUSED, "X", 503) + b"\n\n",
    "key not first": b'data: {"id":"1",' + forms.error(forms.PAUSED, "X", 503)[1:] + b"\n\n",
}


@pytest.mark.parametrize("form", ODD_REFUSALS)
@pytest.mark.parametrize("split", [False, True])
async def test_a_pause_is_told_from_a_token_in_odd_events_too(form: str, split: bool) -> None:
    refusal = ODD_REFUSALS[form]
    pieces = [refusal[at : at + 1] for at in range(len(refusal))] if split else [refusal]
    engine = FaultEngine(silent(), paused=False)

    async def refuse(wire: Wire, request: Request) -> None:
        if not engine.paused:
            await reply(GOOD_STREAM)(wire, request)
            return
        await wire.send(SSE_HEAD)
        for piece in pieces:
            await wire.send(chunk(piece))
            await asyncio.sleep(0)
        await wire.send(b"0\r\n\r\n")

    engine.script = refuse
    async with engine, proxy_for(engine, pause_watch_interval=0.05) as app:
        engine.paused = True
        asked = asyncio.ensure_future(ask(app.url, post("/v1/completions", STREAM)))
        await eventually(lambda: app.plane.gate.held == 1, "held")
        engine.paused = False
        assert (await asyncio.wait_for(asked, 5)).body == b'data: {"id":"1"}\n\ndata: [DONE]\n\n'


async def test_a_first_token_is_not_delayed_by_the_look_at_it() -> None:
    """The engine sends the first event, the beginning of another one, and stops: the client has them already."""
    first = b'data: {"id":"cmpl-1"}\n\ndata: {"id":"cmpl-1","obj'

    async def script(wire: Wire, request: Request) -> None:
        await wire.send(SSE_HEAD + chunk(first))
        await wire.gone.wait()

    async with FaultEngine(script) as engine, proxy_for(engine) as app, Client.to(app.url) as client:
        await client.send(post("/v1/completions", STREAM))
        await asyncio.wait_for(client.reader.readuntil(first), 2)


async def test_a_first_event_of_many_megabytes_passes_exactly() -> None:
    event = b'data: {"object":"text_completion","logprobs":"' + b"x" * 8_000_000 + b'"}\n\n'
    async with FaultEngine(reply(sse(event))) as engine, proxy_for(engine) as app:
        got = await ask(app.url, post("/v1/completions", STREAM))
        assert got.complete
        assert got.body == event


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


@pytest.mark.parametrize("refused", [forms.PAUSED, forms.BUSY])
async def test_a_body_with_images_is_sent_again_whole(refused: str) -> None:
    """Rollouts with images are tens of megabytes long; by default they are kept like any other."""
    body = b'{"prompt":"' + b"x" * 30_000_000 + b'"}'
    once = in_turn(reply(forms.refused("/v1/completions", refused, "ServiceUnavailableError")), reply(GOOD))
    async with FaultEngine(once, paused=False) as engine, proxy_for(engine, pause_watch_interval=0.05) as app:
        got = await ask(app.url, post("/v1/completions", body))
        assert (got.status, got.body) == (200, b'{"ok":1}')
        assert [len(request.body) for request in engine.requests] == [len(body)] * 2
        assert engine.requests[1].body == body


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
