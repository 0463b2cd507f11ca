"""What a failed attempt means for its request: the facts that the decision needs, and the error if it was the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core import routes
from proxy.core.failures import Failure, Kind
from proxy.core.retry import Facts
from proxy.errors import EngineBroken, EngineTimeout, EngineUnreachable, FleetgateError, Overloaded

if TYPE_CHECKING:
    from proxy.data.attempt import Attempt
    from proxy.data.exchange import Exchange

RETRY_AFTER = 5
"""Seconds for Retry-After where no engine can take a request."""


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
        case _:
            return EngineBroken(failure.detail)
