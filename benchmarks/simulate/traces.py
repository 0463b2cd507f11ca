"""What RL clients ask for: seeded traces, all scaled by the number of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random


@dataclass(slots=True)
class Turn:
    """New prompt tokens, answer tokens, and the seconds that tools take afterwards."""

    prompt: int
    answer: int
    tools: float = 0.0


@dataclass(eq=False, slots=True)
class Session:
    """One rollout: its turns, the prefixes that it shares, and whether it has a key."""

    number: int
    shared: list[tuple[object, int]]
    turns: list[Turn]
    keyed: bool


@dataclass(slots=True)
class Trace:
    """A workload.

    Attributes:
        name: short name.
        says: what it is, in one line.
        sessions: in the order in which the trainer starts them.
        concurrency: rollouts at once.
        slow: engines that take five times as long.
        absent: engines that join later.
        join_at: when they do (seconds).
        sync_every: seconds between weight syncs; 0: none.
        sync_seconds: how long one takes.
        sizes: world sizes of the engines, repeated; empty: all 1.
        finishes: the client says when a session is over.
    """

    name: str
    says: str
    sessions: list[Session]
    concurrency: int
    slow: int = 0
    absent: int = 0
    join_at: float = 0.0
    sync_every: float = 0.0
    sync_seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)
    finishes: bool = True


def _length(random: Random, median: float, sigma: float, low: int, high: int) -> int:
    return int(min(high, max(low, random.lognormvariate(0, sigma) * median)))


def _agent(random: Random, number: int, turns: int, *, observation: float = 800) -> Session:
    # Ten environments, each with its own long system prompt and tools.
    shared = [(("system", random.randrange(10)), 2000), (("task", number), _length(random, 500, 0.6, 50, 4000))]
    return Session(
        number,
        shared,
        [
            Turn(
                0 if turn == 0 else _length(random, observation, 0.8, 50, 8000),
                _length(random, 250, 0.9, 10, 4000),
                _length(random, 2000, 1.0, 50, 60_000) / 1000,
            )
            for turn in range(turns)
        ],
        keyed=True,
    )


def _turns(random: Random, mean: float, high: int) -> int:
    return min(high, 2 + int(random.expovariate(1 / (mean - 2))))


def _one(random: Random, median: float) -> list[Turn]:
    return [Turn(0, _length(random, median, 1.0, 20, 16_000))]


def longtail(random: Random, engines: int, each: int) -> Trace:
    sessions = [
        Session(
            n,
            [(("task", n), _length(random, 500, 0.6, 50, 4000))],
            [Turn(0, _length(random, 1200, 1.0, 20, 16_000))],
            False,
        )
        for n in range(engines * each * 3)
    ]
    return Trace("longtail", "single turns, no key, answers of lognormal length up to 16k", sessions, 64 * engines)


def groups(random: Random, engines: int, each: int) -> Trace:
    sessions = []
    for group in range(engines * each * 3 // 16):
        prompt = _length(random, 2000, 0.5, 200, 8000)
        sessions += [
            Session(
                group * 16 + n, [(("task", group), prompt)], [Turn(0, _length(random, 800, 1.0, 20, 16_000))], False
            )
            for n in range(16)
        ]
    return Trace("groups", "16 samples of each prompt, no key", sessions, 64 * engines)


def agents(random: Random, engines: int, each: int) -> Trace:
    sessions = [_agent(random, n, _turns(random, 10, 40)) for n in range(engines * each)]
    return Trace("agents", "multi-turn sessions with growing prefixes, 32 an engine", sessions, 32 * engines)


def saturated(random: Random, engines: int, each: int) -> Trace:
    trace = agents(random, engines, each * 2)
    trace.name, trace.says, trace.concurrency = (
        "saturated",
        "the same, 72 an engine: more than its memory holds",
        72 * engines,
    )
    return trace


def slow(random: Random, engines: int, each: int) -> Trace:
    trace = agents(random, engines, each)
    trace.name, trace.says = "slow", "agents; one engine in eight is five times slower"
    trace.slow = max(1, engines // 8)
    return trace


def joining(random: Random, engines: int, each: int) -> Trace:
    trace = agents(random, engines, each)
    trace.name, trace.says = "joining", "agents; half of the engines join after 60 s"
    trace.absent, trace.join_at = engines // 2, 60.0
    return trace


def restarted(random: Random, engines: int, each: int) -> Trace:
    trace = agents(random, engines, each)
    trace.name, trace.says = "restarted", "agents; one engine in eight comes back after 60 s with an empty cache"
    trace.absent, trace.join_at = max(1, engines // 8), 60.0
    return trace


def syncs(random: Random, engines: int, each: int) -> Trace:
    trace = agents(random, engines, each)
    trace.name, trace.says = "syncs", "agents; every 30 s a weight sync of 2 s that empties all caches"
    trace.sync_every, trace.sync_seconds = 30.0, 2.0
    return trace


def skewed(random: Random, engines: int, each: int) -> Trace:
    sessions = [
        _agent(random, n, 40 + random.randrange(40) if random.random() < 0.08 else _turns(random, 4, 10))
        for n in range(engines * each * 3 // 2)
    ]
    return Trace(
        "skewed",
        "agents; one session in twelve has 40 to 80 turns; no finish_session",
        sessions,
        32 * engines,
        finishes=False,
    )


def sizes(random: Random, engines: int, each: int) -> Trace:
    trace = agents(random, engines, each)
    trace.name, trace.says = "sizes", "agents; world sizes 1, 1, 2, 4"
    trace.sizes = [1, 1, 2, 4]
    trace.concurrency = 64 * engines
    trace.sessions = [_agent(random, n, _turns(random, 10, 40)) for n in range(engines * each * 2)]
    return trace


TRACES: tuple[Callable[[Random, int, int], Trace], ...] = (
    longtail,
    groups,
    agents,
    saturated,
    slow,
    joining,
    restarted,
    syncs,
    skewed,
    sizes,
)


def make(name: str, engines: int, each: int, seed: int) -> Trace:
    """A trace of this name; the same arguments give the same trace."""
    for maker in TRACES:
        if maker.__name__ == name:
            return maker(Random(f"{seed}/{name}/{engines}"), engines, each)
    raise SystemExit(f"no trace {name!r}; there are {', '.join(names())}")


def names() -> Iterator[str]:
    return (maker.__name__ for maker in TRACES)
