"""Clients, proxy and engines on one clock."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.simulate.engine import Request, SimEngine
from benchmarks.simulate.traces import Session, Trace
from proxy.core.balancing import Balancer
from proxy.core.balancing.slow_start import SlowStart

TOKENS_PER_BYTE = 16
"""A byte stands for this many tokens in what a policy sees of a prompt (of real text it is a quarter of one)."""

SAMPLE_SECONDS = 0.25
"""Simulated seconds between two looks at the imbalance."""


@dataclass(slots=True)
class Result:
    """What one run showed. Times in seconds; a completion is a rollout from its first request to its last token."""

    policy: str
    trace: str
    engines: int
    completions: list[float] = field(default_factory=list)
    makespan: float = 0.0
    hits: float = 0.0
    imbalance: float = 0.0
    requests: int = 0
    moves: int = 0

    def quantile(self, share: float) -> float:
        ordered = sorted(self.completions)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def mean(self) -> float:
        return sum(self.completions) / len(self.completions)

    def row(self) -> dict[str, Any]:
        return {
            "trace": self.trace,
            "engines": self.engines,
            "policy": self.policy,
            "mean": self.mean,
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "makespan": self.makespan,
            "hits": self.hits,
            "imbalance": self.imbalance,
            "requests": self.requests,
            "moves": self.moves,
        }


@dataclass(eq=False, slots=True)
class _Running:
    session: Session
    key: bytes | None
    started: float
    turn: int = 0
    segments: list[tuple[object, int]] = field(default_factory=list)
    engine: SimEngine | None = None


class World:
    """One run of a trace under a policy."""

    def __init__(self, trace: Trace, policy: Balancer, name: str, engines: int, slow_start: float = 0.0) -> None:
        self.trace = trace
        self.slow_start = SlowStart(slow_start)
        self.policy = policy
        sizes = trace.sizes or [1]
        # The slow ones are spread over the fleet and present from the start.
        every = engines // trace.slow if trace.slow else 0
        self.engines = [
            SimEngine(
                f"10.0.0.{n}:8000",
                size=float(sizes[n % len(sizes)]),
                slowdown=5.0 if every and n % every == 0 else 1.0,
            )
            for n in range(engines)
        ]
        self.eligible = self.engines[: engines - trace.absent]
        self.result = Result(name, trace.name, engines)
        self.now = 0.0
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = 0
        self._next = 0
        self._open = 0
        self._held: list[Request] = []
        self._closed = False
        self._bytes: dict[object, bytes] = {}
        self._inflight = 0
        self._sample_at = SAMPLE_SECONDS
        self._peaks = 0.0
        self._means = 0.0

    def run(self) -> Result:
        """From the first request to the last answer."""
        trace = self.trace
        for _ in range(min(trace.concurrency, len(trace.sessions))):
            self._start_session()
        for engine in self.eligible:
            self.slow_start.came(engine.id, self.now)
        if trace.absent:
            self._at(trace.join_at, "join", None)
        if trace.sync_every:
            self._at(trace.sync_every, "sync", None)
        while self._open:
            time, _, kind, what = heapq.heappop(self._events)
            if kind == "engine":
                engine, version = what
                if engine.version != version:
                    continue
                self._pass(time)
                self._finished(engine, engine.step(time))
                self._watch(engine)
            else:
                self._pass(time)
                getattr(self, f"_on_{kind}")(what)
        result = self.result
        result.makespan = self.now
        tokens = sum(engine.prompt_tokens for engine in self.engines)
        result.hits = sum(engine.hit_tokens for engine in self.engines) / tokens
        result.imbalance = self._peaks / self._means if self._means else 1.0
        return result

    def _pass(self, time: float) -> None:
        self.now = time
        # Imbalance while there is more work to start: in the tail of a batch some engines must be idle.
        if time >= self._sample_at and self._next < len(self.trace.sessions):
            self._sample_at = time + SAMPLE_SECONDS
            self._peaks += max([engine.inflight / engine.size for engine in self.eligible])
            self._means += self._inflight / sum([engine.size for engine in self.eligible])

    def _at(self, time: float, kind: str, what: Any) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, kind, what))

    def _watch(self, engine: SimEngine) -> None:
        time = engine.next_change()
        if time is not None:
            self._at(time, "engine", (engine, engine.version))

    def _start_session(self) -> None:
        session = self.trace.sessions[self._next]
        self._next += 1
        self._open += 1
        key = b"session-%d" % session.number if session.keyed else None
        self._send(_Running(session, key, self.now, segments=list(session.shared)))

    def _send(self, running: _Running) -> None:
        session = running.session
        turn = session.turns[running.turn]
        if turn.prompt:
            running.segments.append((("seen", session.number, running.turn), turn.prompt))
        request = Request(
            running.key,
            list(running.segments),
            (("said", session.number, running.turn), turn.answer),
            session=running,
        )
        self.result.requests += 1
        if self._closed:
            self._held.append(request)
        else:
            self._dispatch(request)

    def _dispatch(self, request: Request) -> None:
        wanted = self.policy.prompt_bytes
        prompt = self._prompt(request, wanted) if wanted else b""
        engine = self.policy.select(self.eligible, request.key, self.now, prompt)
        engine.inflight += 1
        self._inflight += 1
        request.engine = engine
        running: Any = request.session
        if running.engine is not None and running.engine is not engine:
            self.result.moves += 1
        running.engine = engine
        engine.arrive(request, self.now)
        self._watch(engine)

    def _prompt(self, request: Request, wanted: int) -> bytes:
        out: list[bytes] = []
        size = 0
        for name, tokens in request.segments:
            piece = self._bytes.get(name)
            if piece is None:
                piece = self._bytes[name] = Random(repr(name)).randbytes(max(1, tokens // TOKENS_PER_BYTE))
            out.append(piece)
            size += len(piece)
            if size >= wanted:
                break
        return b"".join(out)[:wanted]

    def _finished(self, engine: SimEngine, done: list[Request]) -> None:
        for request in done:
            engine.inflight -= 1
            self._inflight -= 1
            running: Any = request.session
            session = running.session
            turn = session.turns[running.turn]
            running.segments.append(request.answer)
            running.turn += 1
            if running.turn < len(session.turns):
                self._at(self.now + turn.tools, "turn", running)
                continue
            self.result.completions.append(self.now - running.started)
            self._open -= 1
            if running.key is not None and self.trace.finishes:
                self.policy.finish(running.key)
            if self._next < len(self.trace.sessions):
                self._start_session()

    def _on_turn(self, running: _Running) -> None:
        self._send(running)

    def _on_join(self, _: None) -> None:
        self.eligible = list(self.engines)
        for engine in self.engines:
            self.slow_start.came(engine.id, self.now)
        self._on_ramp(None)

    def _on_ramp(self, _: None) -> None:
        """As `proxy.fleet.ramps` does it: the list is another one, so that policies look at the weights again."""
        shares = self.slow_start.shares(self.now)
        for engine in self.engines:
            engine.weight = engine.size * shares.get(engine.id, 1.0)
        self.eligible = list(self.eligible)
        if shares:
            self._at(self.now + self.slow_start.step, "ramp", None)

    def _on_sync(self, _: None) -> None:
        self._closed = True
        for engine in self.engines:
            engine.freeze(self.now, frozen=True)
            self.policy.emptied(engine.id, engine.inflight)
        self._at(self.now + self.trace.sync_seconds, "resume", None)

    def _on_resume(self, _: None) -> None:
        self._closed = False
        for engine in self.engines:
            engine.freeze(self.now, frozen=False)
            self._watch(engine)
        held, self._held = self._held, []
        for request in held:
            self._dispatch(request)
        self._at(self.now + self.trace.sync_every, "sync", None)
