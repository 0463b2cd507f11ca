"""An engine may end an idle connection whenever it likes: that costs it neither its place nor more looks than others."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.failures import Kind
from tests.tools.fault_engine import FaultEngine, Request, Wire, answer_bytes
from tests.tools.rig import ask, eventually, post, proxy_for

CLOSE = b"Connection: close\r\n"


class ClosingEngine(FaultEngine):
    """Closes each connection after its answer.

    Args:
        said: with ``Connection: close``.
        impatient: also one on which nothing is asked, at once.
    """

    def __init__(self, *, said: bool = False, impatient: bool = False) -> None:
        super().__init__(self._answer, probes=False, version="default")
        self.extra = CLOSE if said else b""
        self.impatient = impatient
        self.started = 1000.0

    async def _answer(self, wire: Wire, request: Request) -> None:
        if request.path == "/metrics":
            page = b"process_start_time_seconds %f\n" % self.started
            await wire.send(answer_bytes(200, page, kind=b"text/plain", extra=self.extra))
        elif request.path == "/v1/completions":
            await wire.send(answer_bytes(200, b"{}", extra=self.extra))
        else:
            head, _, body = self.probe_answer(request.path).partition(b"\r\n\r\n")
            await wire.send(head + b"\r\n" + self.extra + b"\r\n" + body)
        wire.close()

    async def on_connect(self, wire: Wire) -> None:
        if self.impatient:
            # Whoever means to ask has written by then: a connection that carries a request is never cut here.
            asyncio.get_running_loop().call_later(0.02, lambda: wire.buffer or wire.served or wire.close())

    def looks(self) -> int:
        return sum(request.path == "/health" for request in self.requests)


MANNERS = {
    "without a word": {},
    "with a word": {"said": True},
    "silent ones too": {"impatient": True},
    "with a word, silent ones too": {"said": True, "impatient": True},
}


@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)
async def test_it_is_served_and_asked_no_more_often_than_others(manner: dict[str, bool]) -> None:
    async with ClosingEngine(**manner) as engine, proxy_for(engine, probe_interval=0.1) as app:
        assert (await ask(app.url, post("/v1/completions", b"{}"))).status == 200
        # The first looks come in a row: they learn that its connections end.
        await eventually(lambda: engine.looks() >= 5)
        loop = asyncio.get_running_loop()
        looks, began = engine.looks(), loop.time()
        await eventually(lambda: engine.looks() >= looks + 6)
        assert loop.time() - began >= 5 * 0.09
        assert [one.eligible for one in app.fleet] == [True]
        assert [one.boot for one in app.fleet] == [0]


async def test_a_process_that_is_replaced_shows_at_once_where_a_silent_connection_is_kept() -> None:
    async with ClosingEngine() as engine, proxy_for(engine, probe_interval=600) as app:
        served = next(iter(app.fleet))
        await engine.stop()
        await eventually(lambda: not served.eligible)
        engine.started += 1
        await engine.start()
        await eventually(lambda: served.eligible and served.boot == 1)


@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)
async def test_a_process_that_is_replaced_unseen_shows_at_the_next_look(manner: dict[str, bool]) -> None:
    async with ClosingEngine(**manner) as engine, proxy_for(engine, probe_interval=0.1) as app:
        served = next(iter(app.fleet))
        engine.started += 1
        for wire in engine.open_wires:
            wire.reset()
        await eventually(lambda: served.boot == 1)
        await eventually(lambda: served.eligible)


async def test_a_connection_that_ended_before_its_next_request_is_news_only_where_they_are_kept() -> None:
    async def answer(wire: Wire, request: Request) -> None:
        await wire.send(answer_bytes(200, b"{}"))

    async with FaultEngine(answer) as keeps, ClosingEngine() as closes, proxy_for(keeps, closes) as app:
        known = {engine.id: engine for engine in app.fleet}
        for engine in app.fleet:
            app.control.prober.lost(engine, Kind.STALE)
        assert known[keeps.id].suspect
        assert not known[closes.id].suspect
        await eventually(lambda: len(app.fleet.eligible) == 2)
        app.control.prober.lost(known[closes.id], Kind.LOST)
        assert known[closes.id].suspect
        await eventually(lambda: len(app.fleet.eligible) == 2)
