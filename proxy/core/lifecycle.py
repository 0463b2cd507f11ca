"""The life of one weight sync: who is at it, how far it is, and which call is legal next.

Two things are tracked apart, because trainers mix them freely (TRL's server mode never pauses, prime-rl never starts):

- the *lock*: one life-cycle call at a time in the whole fleet, with an owner that others can see. It is held while a
  call runs. Between two calls of a sync anybody may continue, because a trainer cannot be told apart by its connection
  (vLLM's client opens a new one for each call, TRL has several processes).
- the *round*: start, update (any number), finish. Its table is below.

            start              update ok            finish ok
    NONE ----------> OPEN ----------------> UPDATED ----------> NONE, and the weights are the fleet's
      |               |  any leg fails       |
      |               +-------> BROKEN <-----+   also: /resume, a new init, or an engine restarts
      | update, found half-way   |
      +--> OPEN (see below)      +--- start ---> OPEN

Where the proxy found its engines paused when it started, the start may have been before that: then an update enters the
round half-way, and finish ends it as usual. Any other update without a start is whole by itself and no round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from proxy.core.calls import Call, Kind
from proxy.errors import Conflict


class RoundState(StrEnum):
    """How far the update round is."""

    NONE = "none"
    OPEN = "open"
    UPDATED = "updated"
    BROKEN = "broken"


class Phase(StrEnum):
    """What the fleet is doing, for people and metrics."""

    OPEN = "open"
    PAUSING = "pausing"
    PAUSED = "paused"
    UPDATING = "updating"
    FINISHING = "finishing"
    RESUMING = "resuming"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the life-cycle lock.

    Attributes:
        call: path of the running call.
        client: address of the caller.
        request_id: its ``X-Request-Id``, or empty.
        since: Unix time (seconds), for people.
    """

    call: str
    client: str
    request_id: str
    since: float

    def describe(self, now: float) -> str:
        """In words, for the 409 that others get."""
        name = f" (X-Request-Id {self.request_id})" if self.request_id else ""
        return f"{self.call} by {self.client}{name}, running for {max(0.0, now - self.since):.1f} s"

    def as_json(self) -> dict[str, Any]:
        """For ``/fleet`` and the 409."""
        return {"call": self.call, "client": self.client, "request_id": self.request_id, "since": self.since}


@dataclass(slots=True)
class Round:
    """One update round.

    Attributes:
        state: how far it is.
        members: boot number of each engine that takes part, by id.
        why: what broke it.
        passed_by: a pause or init came after its start, so that a second start is a retry and no mistake.
        seen_start: a start was seen in this proxy's life: the trainer keeps to vLLM's order of calls.
    """

    state: RoundState = RoundState.NONE
    members: dict[str, int] = field(default_factory=dict)
    why: str = ""
    passed_by: bool = False
    seen_start: bool = False

    @property
    def live(self) -> bool:
        """Whether engines are in the middle of it."""
        return self.state in (RoundState.OPEN, RoundState.UPDATED)

    @property
    def brought(self) -> bool:
        """Whether a finish ends an update that brought weights, as far as was seen."""
        return self.state in (RoundState.UPDATED, RoundState.NONE)

    def check(self, call: Call) -> None:
        """Refuse what cannot be right, before any engine is touched.

        Raises:
            Conflict: with what would be right.
        """
        if call.kind is Kind.START and self.live and not self.passed_by:
            raise Conflict(
                f"{call.path}: an update round is open already; send /update_weights and /finish_weight_update, "
                "or begin anew with /init_weight_transfer_engine or after a /pause or /resume"
            )
        if self.state is RoundState.BROKEN and call.kind in (Kind.UPDATE, Kind.FINISH):
            raise Conflict(
                f"{call.path}: the update round is broken ({self.why}); begin anew with /start_weight_update "
                "(after /init_weight_transfer_engine if an engine was lost)"
            )
        if call.kind is Kind.FINISH and self.state is RoundState.NONE and self.seen_start:
            raise Conflict(f"{call.path}: no update round is open; send /start_weight_update first")

    def open(self, members: dict[str, int]) -> None:
        """A start is about to be sent."""
        self.clear()
        self.state, self.members = RoundState.OPEN, dict(members)

    def updated(self, members: dict[str, int]) -> None:
        """Every member took an update."""
        if self.state is RoundState.NONE:
            self.open(members)
        if self.state is RoundState.OPEN:
            self.state = RoundState.UPDATED

    def broken(self, why: str) -> bool:
        """It cannot end well any more; True if it was live."""
        live = self.live
        if live:
            self.state, self.why = RoundState.BROKEN, why
        return live

    def finished(self) -> bool:
        """Every member finished; True if an update was among what they finished."""
        updated = self.brought
        self.clear()
        return updated

    def clear(self) -> None:
        """Nothing is open."""
        self.state, self.members, self.why, self.passed_by = RoundState.NONE, {}, "", False


_RUNNING = {
    Kind.PAUSE: Phase.PAUSING,
    Kind.RESUME: Phase.RESUMING,
    Kind.FINISH: Phase.FINISHING,
    Kind.UPDATE: Phase.UPDATING,
    Kind.START: Phase.UPDATING,
    Kind.INIT: Phase.UPDATING,
}


def phase(running: Kind | None, *, gate_closed: bool, round_live: bool) -> Phase:
    """What the fleet is doing now."""
    if running in _RUNNING:
        return _RUNNING[running]
    if round_live:
        return Phase.UPDATING
    return Phase.PAUSED if gate_closed else Phase.OPEN
