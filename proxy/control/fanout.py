"""One control call to many engines at once, each leg with a typed result.

All legs start in the same turn of the loop, because init and update are collectives: an engine that is called late
keeps every other one waiting. A leg that an engine must not get twice has a connection of its own and is never re-sent.
"""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from proxy.core.calls import Call
from proxy.core.failures import Kind
from proxy.core.merge import Leg, Outcome, outcome_of
from proxy.data.upstream import FetchError
from proxy.tasks import spawn

if TYPE_CHECKING:
    from proxy.fleet.engine import Engine

Headers = tuple[tuple[bytes, bytes], ...]

ANSWER_LIMIT = 256 << 20
"""Bytes of one engine's answer; checksums of a large model are tens of megabytes."""


NOT_FOUND = (400, 404)
"""What vLLM answers to an unload of an adapter that it has not, the former in older versions."""


@dataclass(frozen=True, slots=True)
class Shot:
    """What one engine is sent.

    Attributes:
        call: which call.
        method: HTTP method.
        target: path and query, to the letter.
        headers: end-to-end fields.
        body: None for no body at all.
        timeout: seconds for the leg, None for no limit.
        absent_ok: what it takes away may be gone already: "not found" is as good as done.
    """

    call: Call
    method: str
    target: str
    headers: Headers = ()
    body: bytes | None = None
    timeout: float | None = None
    absent_ok: bool = False

    def done_by(self, leg: Leg) -> bool:
        """Whether there is nothing left to do after this leg of it."""
        return leg.ok or (self.absent_ok and leg.status in NOT_FOUND)

    def with_body(self, body: bytes | None) -> Shot:
        """The same with another body."""
        return self if body is self.body else replace(self, body=body)


Runner = Callable[["Engine", Shot], Awaitable[Leg]]


async def fire(engine: Engine, shot: Shot) -> Leg:
    """One leg: send and wait for the whole answer. Never raises but for cancellation."""
    # Not the loop's time: uvloop counts whole milliseconds, once a turn.
    started = perf_counter()
    engine.busy += 1
    engine.calls += 1
    try:
        answer = await engine.upstream.fetch(
            shot.method,
            shot.target,
            headers=shot.headers,
            body=shot.body,
            timeout=shot.timeout,
            limit=ANSWER_LIMIT,
            repeatable=shot.call.repeatable,
        )
    except FetchError as error:
        seconds = perf_counter() - started
        return Leg(engine.id, _outcome(error), seconds=seconds, detail=error.failure.detail)
    finally:
        engine.busy -= 1
    body = _plain(answer.body, answer.head.get(b"content-encoding"))
    kind = answer.head.get(b"content-type") or b""
    return Leg(
        engine.id,
        outcome_of(shot.call, answer.status, body),
        answer.status,
        body,
        kind.decode("latin-1"),
        perf_counter() - started,
    )


def _outcome(error: FetchError) -> Outcome:
    if error.failure.kind is Kind.CONNECT or not error.sent:
        return Outcome.UNREACHABLE
    return Outcome.TIMED_OUT if error.failure.kind is Kind.TIMEOUT else Outcome.DIED


def _plain(body: bytes, coding: bytes | None) -> bytes:
    """The body without its content coding, so that it can be merged; as it is if the coding is not what it says."""
    if coding is None or coding.lower() != b"gzip":
        return body
    try:
        return gzip.decompress(body)
    except (OSError, EOFError, zlib.error):
        return body


COLLECTIVE_GRACE = 10.0
"""Seconds that the members of a collective get after the first of them failed: without it they cannot end, and a
trainer that hears of it after seconds instead of half an hour has lost little."""


class Fanout:
    """The legs of one call.

    Args:
        shots: what each engine is sent, in engine order.
        runner: how one leg is run.
        grace: seconds that the other legs get once one has failed; None lets each have its own limit.
    """

    def __init__(
        self, shots: Sequence[tuple[Engine, Shot]], runner: Runner = fire, *, grace: float | None = None
    ) -> None:
        self._shots = list(shots)
        self._runner = runner
        self._grace = grace
        self._timer: asyncio.TimerHandle | None = None
        self._lost: dict[int, Leg] = {}
        self._tasks: list[asyncio.Task[Leg]] = []
        self._left = len(self._shots)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._abandoned = False
        self._why = ""
        self._started = 0.0
        self.on_late: Callable[[Engine, Leg], None] | None = None
        """Called with a leg that ended after nobody waited for it any more."""

    @property
    def engines(self) -> list[Engine]:
        """Those that are called."""
        return [engine for engine, _ in self._shots]

    @property
    def pending(self) -> list[Engine]:
        """Those that have not answered."""
        return [engine for (engine, _), task in zip(self._shots, self._tasks, strict=False) if not task.done()]

    async def run(self) -> list[Leg]:
        """All legs, in engine order; returns when the last one ended or the call was abandoned."""
        self._started = perf_counter()
        self._tasks = [
            spawn(self._leg(engine, shot), name=f"leg {shot.call.path} {engine.id}") for engine, shot in self._shots
        ]
        for task in self._tasks:
            task.add_done_callback(self._one_over)
        if self._tasks:
            await self._over
        if self._timer is not None:
            self._timer.cancel()
        return [self._result(index) for index in range(len(self._tasks))]

    async def _leg(self, engine: Engine, shot: Shot) -> Leg:
        leg = await self._runner(engine, shot)
        if self._over.done() and self.on_late is not None:
            self.on_late(engine, leg)
        elif not leg.ok:
            self._failed(leg.engine)
        return leg

    def _one_over(self, _: asyncio.Task[Leg]) -> None:
        # Counting down costs a fan-out to many engines less than waiting for a set of tasks that shrinks by one. It is
        # not done inside the legs: one that is cancelled before its first turn never runs a line.
        self._left -= 1
        if not self._left:
            self._end()

    def _failed(self, name: str) -> None:
        if self._grace is not None and self._timer is None and self._left > 1:
            self._timer = asyncio.get_running_loop().call_later(self._grace, self._give_up, name)

    def _give_up(self, name: str) -> None:
        self._why = f"no answer {self._grace:g} s after {name} failed; without it this cannot end"
        self._end()

    def lose(self, engine: Engine) -> None:
        """The engine is gone for all that its probes know: wait for it no more."""
        for index, ((other, _), task) in enumerate(zip(self._shots, self._tasks, strict=False)):
            if other is not engine or task.done() or index in self._lost or self._over.done():
                continue
            seconds = perf_counter() - self._started
            self._lost[index] = Leg(engine.id, Outcome.DIED, seconds=seconds, detail="it went down meanwhile")
            task.cancel()
            self._failed(engine.id)

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _result(self, index: int) -> Leg:
        task = self._tasks[index]
        if index in self._lost:
            return self._lost[index]
        if task.done():
            return task.result()
        engine = self._shots[index][0]
        seconds = perf_counter() - self._started
        if self._abandoned:
            return Leg(engine.id, Outcome.ABANDONED, seconds=seconds, detail="given up because /resume came")
        return Leg(engine.id, Outcome.TIMED_OUT, seconds=seconds, detail=self._why)

    def abandon(self) -> None:
        """Stop waiting. Legs that run go on to their own limit; what they answer then changes nothing."""
        self._abandoned = True
        self._end()

    def cancel(self) -> None:
        """The proxy stops: end the legs too."""
        for task in self._tasks:
            task.cancel()
