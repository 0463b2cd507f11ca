"""Engines as a policy sees them."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class One:
    id: str
    inflight: int = 0
    weight: float = 1.0


def fleet(*inflight: int, weights: tuple[float, ...] = ()) -> list[One]:
    weights = weights or (1.0,) * len(inflight)
    return [
        One(f"10.0.0.{n}:8000", load, weight) for n, (load, weight) in enumerate(zip(inflight, weights, strict=True))
    ]


def take(policy, candidates, count, *, key=None, now=0.0, prompt=b""):
    """Place this many requests, all of which keep running; the index of each one's engine."""
    out = []
    for _ in range(count):
        chosen = policy.select(candidates, key, now, prompt)
        chosen.inflight += 1
        out.append(candidates.index(chosen))
    return out
