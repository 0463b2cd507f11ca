"""States of an engine and the table of legal moves.

Two rules hold everywhere:

1. Every move of an engine is an event looked up here. An event that the table does not list for a state is either
   ignored (it is in `IGNORED`: late news that changes nothing) or a bug that raises.
2. There is no way from ``down`` or ``fenced`` to ``ready`` but an ``ADMIT`` event, and those are made in one place
   (`proxy.core.admission`), for the reasons that the contract lists.

          CAME                ADMIT
starting ------> fenced --------------> ready <--> draining
    ^              ^  ^ |                |             ^ |
    |              |  +-|---- FENCE -----+-------------|-+
    |    CAME      |    +--------------- DRAIN --------+
   down -----------+      LOST: from every state to down

An engine that somebody drained or is removing takes the ``DRAIN`` from the fence instead of the ``ADMIT``
(`proxy.fleet.registry.Fleet.apply`): its weights are fine, and it gets nothing all the same.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """What the proxy may do with an engine. Only ``ready`` engines get generation requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FENCED = "fenced"
    DOWN = "down"


class Event(StrEnum):
    """What happened to an engine."""

    CAME = "came"
    """It answers; nothing is known yet about its weights."""
    ADMIT = "admit"
    """Its weights are known to be the fleet's (or an operator says so)."""
    FENCE = "fence"
    """Its weights are not known to be the fleet's."""
    DRAIN = "drain"
    """An operator wants it out of rotation, or it is being removed; running requests go on."""
    LOST = "lost"
    """It does not answer."""


MOVES: dict[tuple[State, Event], State] = {
    (State.STARTING, Event.CAME): State.FENCED,
    (State.STARTING, Event.FENCE): State.FENCED,
    (State.STARTING, Event.LOST): State.DOWN,
    (State.FENCED, Event.ADMIT): State.READY,
    (State.FENCED, Event.DRAIN): State.DRAINING,
    (State.FENCED, Event.LOST): State.DOWN,
    (State.READY, Event.FENCE): State.FENCED,
    (State.READY, Event.DRAIN): State.DRAINING,
    (State.READY, Event.LOST): State.DOWN,
    (State.DRAINING, Event.ADMIT): State.READY,
    (State.DRAINING, Event.FENCE): State.FENCED,
    (State.DRAINING, Event.LOST): State.DOWN,
    (State.DOWN, Event.CAME): State.FENCED,
}

IGNORED: frozenset[tuple[State, Event]] = frozenset(
    {
        (State.READY, Event.CAME),
        (State.READY, Event.ADMIT),
        (State.FENCED, Event.CAME),
        (State.FENCED, Event.FENCE),
        (State.DRAINING, Event.CAME),
        (State.DRAINING, Event.DRAIN),
        (State.DOWN, Event.LOST),
        # A control call that an engine missed because it is down changes nothing yet: it will come back fenced.
        (State.DOWN, Event.FENCE),
    }
)


class IllegalMoveError(Exception):
    """An event that makes no sense in a state: a bug in the proxy, or a refused operator request."""


def move(state: State, event: Event) -> State:
    """The state after ``event``.

    Raises:
        IllegalMoveError: neither a move nor an event that may be ignored in this state.
    """
    after = MOVES.get((state, event))
    if after is not None:
        return after
    if (state, event) in IGNORED:
        return state
    raise IllegalMoveError(f"an engine that is {state} cannot take the event {event}")
