"""What ``slow_start`` does to an engine that comes back with an empty cache: ``python -m benchmarks.simulate.slow_start``.

One engine of a fleet at work comes after 60 s. The mean of all rollouts, and the mean and the longest turn among those
that were sent to the newcomer in its first 15 s, beside the turns that others got in that time.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.simulate import traces
from benchmarks.simulate.engine import Request, SimEngine
from benchmarks.simulate.policies import POLICIES
from benchmarks.simulate.world import World

LENGTHS = (0.0, 5.0, 10.0, 30.0, 55.0)
WATCHED = 15.0
"""Seconds after the coming in which turns are looked at."""


class Watched(World):
    """A world that keeps the seconds of each turn around the coming of an engine."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._sent: dict[Request, float] = {}
        self.new: list[float] = []
        self.others: list[float] = []

    def _dispatch(self, request: Request) -> None:
        super()._dispatch(request)
        if 0 <= self.now - self.trace.join_at < WATCHED:
            self._sent[request] = self.now

    def _finished(self, engine: SimEngine, done: list[Request]) -> None:
        for request in done:
            if request in self._sent:
                turns = self.new if engine is self.engines[-1] else self.others
                turns.append(self.now - self._sent.pop(request))
        super()._finished(engine, done)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate.slow_start", description=__doc__)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--policies", type=lambda text: text.split(","), default=["sticky", "least_inflight", "prefix"])
    parser.add_argument("--sessions", type=int, default=48, help="per engine")
    parser.add_argument("--seeds", type=int, default=5, help="the mean over so many traces")
    args = parser.parse_args()
    print("| policy | ramp | rollouts | turns on the newcomer | longest | turns elsewhere |\n|---|--:|--:|--:|--:|--:|")
    for policy in args.policies:
        for seconds in LENGTHS:
            rollouts, new, others, longest = [], [], [], []
            for seed in range(1, args.seeds + 1):
                trace = traces.make("restarted", args.engines, args.sessions, seed)
                trace.absent = 1
                world = Watched(trace, POLICIES[policy](), policy, args.engines, slow_start=seconds)
                rollouts.append(world.run().mean)
                new += world.new
                others += world.others
                longest.append(max(world.new))
            cells = [sum(each) / len(each) for each in (rollouts, new, longest, others)]
            print(f"| {policy} | {seconds:g} s | {' | '.join(f'{cell:.1f} s' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
