"""The only place that decides whether a request is sent again, and the reasons.

| what happened                         | the engine                    | so                                          |
|---------------------------------------|-------------------------------|---------------------------------------------|
| no connection                         | saw nothing                   | another engine, any method, free of charge  |
| reused connection died, no byte came  | had closed it while idle      | again at once on a fresh one, any method    |
| fresh connection died, no byte came   | may have begun                | another engine, if running it twice is safe |
| no byte in time, or no HTTP           | may have begun                | likewise                                    |
| it left the fleet meanwhile           | may have begun                | likewise                                    |
| cut before its first event            | paused (``/v1/responses``)    | wait for the gate; else as above            |
| "generation is paused", any form      | did nothing                   | wait for the gate, free of charge           |
| refused for load                      | did nothing                   | another engine, then with back-off          |
| 500 and the engine is dead            | died with the request         | another engine                              |
| 500 and the engine lives              | it is about the request       | it belongs to the client                    |
| any byte went to the client           | -                             | never; this module is not even asked        |

Running a generation twice is safe: sampling has no side effect but its cost (RFC 9110 section 9.2.2 leaves that to
whoever knows the semantics). A POST to a route that the proxy does not know is not run twice.

The first re-send after an engine's death is free, because there can be only one a death. Everything that could repeat
draws on a budget (Finagle's and tower's retry budget): a share of the requests plus a floor, over ten seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from tenacity import RetryCallState, wait_random_exponential

from proxy.core.failures import Failure, Kind


class Action(Enum):
    """What to do about a failed attempt."""

    AGAIN = auto()
    """Send it again, after `Decision.delay` seconds."""
    HOLD = auto()
    """Wait for the gate or for an engine, then send it again."""
    RELAY = auto()
    """The engine's own answer belongs to the client."""
    FAIL = auto()
    """Give up with an error of the proxy."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of `decide`.

    Attributes:
        action: what to do.
        delay: seconds to wait first (AGAIN).
        forget_tried: all engines may be tried anew (AGAIN after a back-off).
    """

    action: Action
    delay: float = 0.0
    forget_tried: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """What the decision depends on.

    Attributes:
        generation: the request runs the model.
        repeatable: running it twice is safe: a generation, or a safe method.
        replayable: all bytes of the body that were sent are still there.
        attempts: attempts so far that an engine may have worked on, the failed one included: not those that met a
            pause, a stale connection or none at all.
        max_attempts: the limit.
        others_left: an eligible engine has not been tried yet.
        engine_dead: whether the engine turned out to be dead (FAILED, CUT).
        engine_paused: whether the engine turned out to be paused (CUT).
        has_answer: the engine gave an answer that could go to the client (BUSY, FAILED).
        resends: earlier re-sends of this request that were not free.
    """

    generation: bool
    repeatable: bool
    replayable: bool
    attempts: int
    max_attempts: int
    others_left: bool
    engine_dead: bool = False
    engine_paused: bool = False
    has_answer: bool = False
    resends: int = 0


class Budget:
    """Re-sends that may happen, over a sliding window of ten seconds.

    Args:
        ratio: re-sends for each request.
        floor: re-sends a second that are always allowed.
    """

    WINDOW = 10.0
    """Seconds; Finagle's and tower's default. Ten slots of one second slide over it."""

    def __init__(self, *, ratio: float, floor: float) -> None:
        self._ratio = ratio
        self._floor = floor
        self._slots = [0.0] * 10
        self._slot = 0

    def _slide(self, now: float) -> None:
        slot = int(now)
        passed = slot - self._slot
        if passed <= 0:
            return
        if passed >= len(self._slots):
            self._slots = [0.0] * len(self._slots)
        else:
            for index in range(self._slot + 1, slot + 1):
                self._slots[index % 10] = 0.0
        self._slot = slot

    def deposit(self, now: float) -> None:
        """A request came."""
        if int(now) != self._slot:
            self._slide(now)
        self._slots[self._slot % 10] += self._ratio

    def withdraw(self, now: float) -> bool:
        """Take one re-send; False if there is none left."""
        self._slide(now)
        # Shares are added up in binary: a hair below a whole re-send is a whole one.
        if sum(self._slots) + self._floor * self.WINDOW < 1 - 1e-6:
            return False
        self._slots[self._slot % 10] -= 1.0
        return True


class Backoff:
    """Exponential back-off with full jitter.

    Args:
        base: seconds of the first wait at most.
        longest: seconds of any wait at most.
    """

    def __init__(self, *, base: float, longest: float) -> None:
        self._wait = wait_random_exponential(multiplier=base, max=longest)

    def seconds(self, attempt: int) -> float:
        """The wait after attempt number ``attempt`` (from 1)."""
        state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
        state.attempt_number = attempt
        return self._wait(state)


def decide(
    failure: Failure, facts: Facts, *, budget: Budget, backoff: Backoff, now: float, max_wait: float
) -> Decision:
    """What to do about a failed attempt. No byte has gone to the client.

    Args:
        failure: how the attempt failed.
        facts: about the request.
        budget: shared by all requests.
        backoff: computes waits.
        now: seconds, monotonic.
        max_wait: seconds of an engine's Retry-After that are honoured.
    """
    kind = failure.kind
    if not facts.replayable:
        relay = facts.has_answer and kind in (Kind.BUSY, Kind.FAILED)
        return Decision(Action.RELAY if relay else Action.FAIL)
    if kind is Kind.PAUSED or (kind is Kind.CUT and facts.engine_paused):
        return Decision(Action.HOLD) if facts.generation else Decision(Action.RELAY)
    if kind is Kind.STALE:
        return Decision(Action.AGAIN)
    if kind is Kind.CONNECT:
        if facts.others_left:
            return Decision(Action.AGAIN)
        return Decision(Action.HOLD) if facts.generation else Decision(Action.FAIL)
    if kind is Kind.FAILED and not facts.engine_dead:
        return Decision(Action.RELAY)
    if kind is Kind.BUSY:
        return _after_refusal(failure, facts, budget=budget, backoff=backoff, now=now, max_wait=max_wait)
    # LOST, TIMEOUT, BROKEN, CUT, REMOVED, FAILED with a dead engine: it may have run, or did.
    give_up = Decision(Action.RELAY if facts.has_answer else Action.FAIL)
    if not facts.repeatable or facts.attempts >= facts.max_attempts:
        return give_up
    if facts.resends and not budget.withdraw(now):
        return give_up
    if facts.others_left:
        return Decision(Action.AGAIN)
    if facts.generation:
        return Decision(Action.AGAIN, backoff.seconds(facts.attempts), forget_tried=True)
    return give_up


def _after_refusal(
    failure: Failure, facts: Facts, *, budget: Budget, backoff: Backoff, now: float, max_wait: float
) -> Decision:
    if not facts.generation or facts.attempts >= facts.max_attempts:
        return Decision(Action.RELAY)
    affordable = budget.withdraw(now)
    if facts.others_left and affordable:
        return Decision(Action.AGAIN)
    asked = min(failure.retry_after or 0.0, max_wait)
    return Decision(Action.AGAIN, max(asked, backoff.seconds(facts.attempts)), forget_tried=True)
