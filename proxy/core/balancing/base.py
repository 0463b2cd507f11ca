"""What a policy is, and what all policies share.

Load is requests at an engine per unit of its weight (its world size), the request that is about to be placed counted
in, so that a server of four workers gets four times the work from the first request on. A policy has no clock and does
no I/O; the caller reserves the slot (`Candidate.inflight` rises) before it asks for the next engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What a policy sees of an engine."""

    @property
    def id(self) -> str:
        """Unique and stable: two proxies give an engine the same one."""

    @property
    def inflight(self) -> int:
        """Requests that hold a slot."""

    @property
    def weight(self) -> float:
        """Share of the load relative to others, above zero."""


C = TypeVar("C", bound=Candidate)

_weight: Callable[[Candidate], float] = attrgetter("weight")


class Balancer(Protocol):
    """A policy."""

    @property
    def prompt_bytes(self) -> int:
        """Bytes of a prompt that the policy wants to see; 0: it never looks."""

    def select(self, candidates: Sequence[C], key: bytes | None, now: float, prompt: bytes = b"") -> C:
        """The engine for a request.

        Args:
            candidates: eligible engines, at least one.
            key: the session of the request, or None.
            now: seconds, monotonic.
            prompt: the first `prompt_bytes` of the prompt as it stands in the body; empty where nobody looked.
        """

    def finish(self, key: bytes) -> bool:
        """A session is over; True if it was known."""

    def forget(self, engine_id: str) -> None:
        """An engine left or restarted: nothing draws sessions or prompts there any more."""

    def emptied(self, engine_id: str, running: int = 0) -> None:
        """An engine goes on, but what it had cached is gone.

        Args:
            engine_id: which.
            running: requests that run on there: what they hold is computed again.
        """


class Stateless:
    """Base of policies that remember neither sessions nor prompts."""

    prompt_bytes = 0

    def finish(self, key: bytes) -> bool:  # noqa: ARG002 - the form of a policy
        """No session is known."""
        return False

    def forget(self, engine_id: str) -> None:
        """Nothing is remembered of an engine."""

    def emptied(self, engine_id: str, running: int = 0) -> None:
        """Caches do not matter here."""


class Shares:
    """The weights of the candidates, looked at again only when the list is another one.

    The fleet replaces its list of eligible engines on every change, so identity tells; most fleets have engines of one
    size, where a pick need not divide.
    """

    __slots__ = ("_count", "_seen", "total", "weights")

    def __init__(self) -> None:
        self._seen: Sequence[Candidate] | None = None
        self._count = 0
        self.weights: list[float] | None = None
        """Weight of each candidate in order; None while all are equal."""
        self.total = 0.0
        """Sum of the weights."""

    def look(self, candidates: Sequence[Candidate]) -> bool:
        """Take in the weights of a list; True if it is another one than the last time."""
        if candidates is self._seen and len(candidates) == self._count:
            return False
        weights = list(map(_weight, candidates))
        self._seen = candidates
        self._count = len(weights)
        self.total = sum(weights)
        self.weights = None if weights.count(weights[0]) == len(weights) else weights
        return True
