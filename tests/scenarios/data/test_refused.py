"""What an engine refuses before the first byte waits, goes elsewhere or belongs to the client, in whatever form it is said."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.scenarios.data import wire_forms as forms
from tests.tools.fault_engine import FaultEngine, Request, Script, Wire, answer_bytes
from tests.tools.fault_scripts import SSE_HEAD, chunk, cut_after, in_turn, reply, silent, sse
from tests.tools.rig import Client, ask, eventually, post, proxy_for

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
