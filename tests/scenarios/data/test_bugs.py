"""A bug anywhere in the proxy ends in an error or a cut for its own client, never in silence, never for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from proxy.data.attempt import Attempt
from proxy.data.exchange import Exchange
from proxy.data.relay import Relay
from tests.scenarios.data import wire_forms as forms
from tests.tools.fault_engine import FaultEngine, answer_bytes
from tests.tools.fault_scripts import SSE_HEAD, cut_after, echo, in_turn, reply, sse
from tests.tools.rig import Client, ask, eventually, get, post, proxy_for

BODY = b'{"prompt":"x"}'


class Bug(Exception):
    """The planted one."""


def once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Raises at its first call."""
    calls = iter([True])

    def broken(*args: Any, **named: Any) -> Any:
        if next(calls, False):
            raise Bug
        return original(*args, **named)

    return broken


PLACES = [
    (Exchange, "begin"),
    (Exchange, "body_data"),
    (Exchange, "body_end"),
    (Exchange, "_dispatch"),
    (Exchange, "_try_engine"),
    (Exchange, "failed"),
    (Exchange, "_again"),
    (Exchange, "_resend"),
    (Exchange, "finished"),
    (Attempt, "start"),
    (Attempt, "_send"),
    (Attempt, "on_head"),
    (Attempt, "on_data"),
    (Attempt, "on_end"),
    (Attempt, "on_failure"),
    (Attempt, "relay"),
    (Relay, "begin"),
    (Relay, "data"),
    (Relay, "end"),
]


@pytest.mark.parametrize(("owner", "name"), PLACES)
async def test_a_bug_never_leaves_a_client_waiting(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = reply(forms.refused("/v1/completions", forms.BUSY, "Service Unavailable"))
    # The first answer is cut, the second one refuses, the third is good: most of the code is passed.
    script = in_turn(cut_after(0, b""), busy, reply(sse(b'data: {"id":1}\n\n', b"data: [DONE]\n\n")), echo())
    async with FaultEngine(script) as engine, proxy_for(engine, backoff_base=0.001) as app:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, once(getattr(owner, name)))
            async with Client.to(app.url) as client:
                await client.send(post("/v1/completions", BODY))
                try:
                    got = await asyncio.wait_for(client.reply(), 5)
                    assert got.status == 500 or not got.complete
                except ConnectionError:
                    pass
        assert (await ask(app.url, post("/v1/completions", BODY))).status == 200
        assert next(iter(app.fleet)).inflight == 0


@pytest.mark.parametrize("name", ["admitted", "_try_engine"])
async def test_a_bug_at_the_gate_holds_nobody_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FaultEngine(echo()) as engine, proxy_for(engine) as app:
        app.plane.gate.close("a trainer")
        asked = [asyncio.ensure_future(ask(app.url, post("/v1/completions", BODY))) for _ in range(10)]
        await eventually(lambda: app.plane.gate.held == 10)
        monkeypatch.setattr(Exchange, name, once(getattr(Exchange, name)))
        app.plane.gate.open()
        got = sorted(one.status for one in await asyncio.wait_for(asyncio.gather(*asked), 5))
        assert got == [200] * 9 + [500]


@pytest.mark.parametrize("name", ["is_dead", "is_paused", "suspect", "watch_paused"])
async def test_a_bug_in_the_watch_is_an_error_for_one_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paused = reply(forms.refused("/v1/completions", forms.PAUSED, "ServiceUnavailableError"))
    script = in_turn(cut_after(len(SSE_HEAD), SSE_HEAD), paused, echo())
    async with FaultEngine(script) as engine, proxy_for(engine, backoff_base=0.001) as app:
        prober = app.plane.watch
        monkeypatch.setattr(prober, name, once(getattr(prober, name)))
        got = await asyncio.wait_for(ask(app.url, post("/v1/completions", BODY)), 5)
        assert got.status in (200, 500, 502)
        monkeypatch.undo()
        assert (await asyncio.wait_for(ask(app.url, post("/v1/completions", BODY)), 5)).status == 200


async def test_a_bug_with_a_queued_request_reaches_only_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FaultEngine(reply(answer_bytes(200, b"{}"))) as engine, proxy_for(engine) as app:
        async with Client.to(app.url) as client:
            calls = iter([False, True])
            begin = Exchange.begin

            def broken(self: Exchange) -> None:
                if next(calls, False):
                    raise Bug
                begin(self)

            monkeypatch.setattr(Exchange, "begin", broken)
            await client.send(post("/v1/completions", BODY) + post("/v1/completions", BODY) + get("/v1/models"))
            assert (await client.reply()).status == 200
            assert (await client.reply()).status == 500
            assert (await client.reply()).status == 200
