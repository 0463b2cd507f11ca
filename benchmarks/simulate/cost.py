"""What one pick costs, in CPU time, so that a busy machine matters little: ``python -m benchmarks.simulate.cost``."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.simulate.engine import SimEngine
from benchmarks.simulate.policies import DEFAULTS, consistent_hash, sticky
from proxy.core.balancing import LeastInflight, PowerOfTwo, Prefix, RoundRobin

PICKS = 10_000
KEYS = [b"session-%d" % n for n in range(2000)]
PROMPTS = [Random(n).randbytes(DEFAULTS["prefix_bytes"]) for n in range(50)]


def cost(policy: Any, engines: int, key: Callable[[int], bytes | None], prompt: Callable[[int], bytes]) -> float:
    """Microseconds of a pick among this many busy engines, the least of several rounds."""
    random = Random(1)
    fleet = [SimEngine(f"10.0.0.{n}:8000", inflight=40 + random.randrange(10)) for n in range(engines)]
    turn = 0

    def one() -> None:
        nonlocal turn
        turn += 1
        policy.select(fleet, key(turn), turn * 1e-3, prompt(turn)).inflight += 1
        # An answer ends somewhere else, which keeps the loads apart.
        fleet[turn * 7919 % engines].inflight -= 1

    return min(timeit.repeat(one, number=PICKS, repeat=5, timer=time.process_time)) / PICKS * 1e6


class _Nothing:
    def select(self, candidates: Any, *_: Any) -> Any:
        return candidates[0]


def main() -> None:
    def nobody(_: int) -> None:
        return None

    def keyed(turn: int) -> bytes:
        return KEYS[turn % len(KEYS)]

    def empty(_: int) -> bytes:
        return b""

    prefix = Prefix(
        prompt_bytes=DEFAULTS["prefix_bytes"],
        max_blocks=DEFAULTS["prefix_max_blocks"],
        margin=1.25,
        slack=2,
        min_match=0.5,
    )
    cases: list[tuple[str, Any, Any, Any]] = [
        ("sticky, no key", sticky, nobody, empty),
        ("sticky, a key", sticky, keyed, empty),
        ("least_inflight", LeastInflight, nobody, empty),
        ("round_robin", RoundRobin, nobody, empty),
        ("power_of_two", lambda: PowerOfTwo(Random(1)), nobody, empty),
        ("consistent_hash, a key", consistent_hash, keyed, empty),
        ("prefix, 32 KiB", lambda: prefix, nobody, lambda turn: PROMPTS[turn % len(PROMPTS)]),
    ]
    base = cost(_Nothing(), 8, nobody, empty)
    print("| policy | 8 engines | 64 engines |\n|---|--:|--:|")
    for name, make, key, prompt in cases:
        cells = [f"{cost(make(), engines, key, prompt) - base:.1f} us" for engines in (8, 64)]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
