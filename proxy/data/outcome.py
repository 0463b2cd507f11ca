"""What a failed attempt means for its request: the facts that the decision needs, and the error if it was the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core import routes
from proxy.core.failures import Failure, Kind
from proxy.core.retry import Decision, Facts, decide
from proxy.core.sse import EngineError
from proxy.errors import EngineBroken, EngineRemoved, EngineTimeout, EngineUnreachable, FleetgateError, Overloaded

if TYPE_CHECKING:
    from proxy.data.attempt import Attempt
    from proxy.data.exchange import Exchange
    from proxy.data.head import Head
    from proxy.data.plane import DataPlane

RETRY_AFTER = 5
"""Seconds for Retry-After where no engine can take a request."""


def failure_of(error: EngineError, head: Head) -> Failure:
    """An error that an engine answered, as a failure of the attempt."""
    assert error.kind is not None
    asked = head.get(b"retry-after")
    retry_after = float(asked) if asked is not None and asked.isdigit() else None
    return Failure(error.kind, error.message or f"status {head.status}", retry_after)


async def look_at(plane: DataPlane, attempt: Attempt, failure: Failure) -> tuple[bool, bool]:
    """Whether the engine is dead, and whether it is paused: a 500 or a cut answer may mean either, or neither.

    An engine that is well but was started again since the attempt began counts as dead: another process answered.
    """
    watch = plane.watch
    engine = attempt.engine
    if failure.kind is Kind.CUT and (plane.gate.closed or await watch.is_paused(engine)):
        return False, True
    dead = await watch.is_dead(engine)
    if dead:
        watch.suspect(engine, failure.detail)
    return dead or engine.boot != attempt.boot, False


def decision_for(exchange: Exchange, attempt: Attempt, failure: Failure, *, dead: bool, paused: bool) -> Decision:
    """What happens next after a failed attempt; see `facts_of` for the arguments."""
    plane = exchange.plane
    return decide(
        failure,
        facts_of(exchange, attempt, dead=dead, paused=paused),
        budget=plane.budget,
        backoff=plane.backoff,
        now=exchange.client.loop.time(),
        max_wait=plane.settings.max_retry_after,
    )


def facts_of(exchange: Exchange, attempt: Attempt, *, dead: bool, paused: bool) -> Facts:
    """What `proxy.core.retry.decide` has to know.

    Args:
        exchange: the request.
        attempt: the attempt that failed.
        dead: its engine turned out to be dead.
        paused: its engine turned out to be paused.
    """
    head = exchange.head
    plane = exchange.plane
    return Facts(
        generation=exchange.generation,
        repeatable=routes.is_repeatable(head.method, head.path),
        replayable=exchange.replayable or not exchange.sent,
        attempts=exchange.attempts - exchange.free,
        max_attempts=1 if head.no_retry else plane.settings.max_attempts,
        others_left=plane.others_left(exchange.tried, generation=exchange.generation),
        engine_dead=dead,
        engine_paused=paused,
        has_answer=attempt.has_answer,
        resends=exchange.resends,
    )


def error_for(failure: Failure) -> FleetgateError:
    """The error that a client sees when no attempt is left."""
    match failure.kind:
        case Kind.CONNECT:
            return EngineUnreachable(failure.detail)
        case Kind.TIMEOUT:
            return EngineTimeout(failure.detail)
        case Kind.BUSY | Kind.PAUSED:
            return Overloaded(failure.detail, retry_after=RETRY_AFTER)
        case Kind.REMOVED:
            return EngineRemoved(failure.detail, retry_after=RETRY_AFTER)
        case _:
            return EngineBroken(failure.detail)
