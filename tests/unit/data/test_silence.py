"""An engine's silence, told from one that a pause or the client makes. A clock turned by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.core.failures import Failure, Kind
from proxy.data.attempt import Attempt
from proxy.data.head import Head
from proxy.data.stages import Stage

LIMIT = 2.0


class Rig:
    """A request at an engine that says nothing; timers strike when the clock passes them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[tuple[float, Any]] = []
        self.failures: list[Failure] = []
        self.gate = SimpleNamespace(closed=False, opened_at=0.0)
        self.engine = SimpleNamespace(id="e", inflight=0, boot=0, paused=False, upstream=None, last_byte=0.0)
        self.client = SimpleNamespace(loop=self, taking=True)
        settings = SimpleNamespace(first_byte_timeout=LIMIT, read_timeout=LIMIT)
        plane = SimpleNamespace(
            gate=self.gate,
            settings=settings,
            version_header=lambda: b"v1",
            stats=SimpleNamespace(engine_answered=lambda *_: None),
        )
        exchange: Any = SimpleNamespace(
            client=self.client,
            plane=plane,
            generation=False,
            lines=b"",
            body_done=True,
            body=[],
            replayable=True,
            head=SimpleNamespace(method=b"POST"),
            relay_begins=lambda *_, **__: None,
            failed=lambda _, failure: self.failures.append(failure),
            broke_off=self.failures.append,
        )
        engine: Any = self.engine
        self.attempt = Attempt(exchange, engine)

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, then: Any, *arguments: Any) -> Any:
        item = (self.now + seconds, lambda: then(*arguments))
        self.due.append(item)
        return SimpleNamespace(cancel=lambda: self.due.remove(item))

    def begin(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        """The request is sent; RELAYING: and its answer begins."""
        monkeypatch.setattr("proxy.data.outbound.field_lines", lambda _: b"")
        monkeypatch.setattr("proxy.data.outbound.request_head", lambda *_: b"")
        conn: Any = SimpleNamespace(send=lambda *_, **__: None, has_more=False, detach=lambda: None)
        self.attempt._send(conn)
        if stage is Stage.RELAYING:
            self.attempt.on_head(Head(200, b"OK", [], None, chunked=True, keep_alive=True))
        assert self.attempt.stage is stage

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.due and self.due[0][0] <= end:
            self.now, then = self.due.pop(0)
            then()
        self.now = end

    def resume(self) -> None:
        self.gate.closed = False
        self.gate.opened_at = self.now


@pytest.fixture(params=[Stage.WAITING, Stage.RELAYING])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig()
    made.begin(request.param, monkeypatch)
    return made


def test_a_silent_engine_is_given_up_after_the_limit(rig: Rig) -> None:
    kind = Kind.TIMEOUT if rig.attempt.stage is Stage.WAITING else Kind.CUT
    rig.pass_time(LIMIT - 0.1)
    assert not rig.failures
    rig.pass_time(0.2)
    assert [failure.kind for failure in rig.failures] == [kind]
    assert not rig.due


@pytest.mark.parametrize("paused_for", [1.0, 1.9, 2.5, 100.0])
def test_the_time_of_a_pause_is_not_the_engines(rig: Rig, paused_for: float) -> None:
    rig.pass_time(0.5)
    rig.gate.closed = True
    rig.pass_time(paused_for)
    rig.resume()
    rig.pass_time(LIMIT - 0.1)
    assert not rig.failures
    rig.pass_time(LIMIT + 0.2)
    assert len(rig.failures) == 1


@pytest.mark.parametrize("who", ["somebody paused the engine", "the client reads nothing"])
def test_silence_that_others_make_is_not_the_engines(rig: Rig, who: str) -> None:
    def silence(made: bool) -> None:
        if who == "the client reads nothing":
            rig.client.taking = not made
        else:
            rig.engine.paused = made

    silence(True)
    rig.pass_time(10.0)
    silence(False)
    rig.pass_time(LIMIT - 0.1)
    assert not rig.failures
    rig.pass_time(2 * LIMIT + 0.2)
    assert len(rig.failures) == 1
