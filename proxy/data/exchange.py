"""One request's way: client -> gate -> engine -> client, as a state machine that runs on events.

    BODY -> HELD <-> SENT <-> BACKOFF
                      |
                      v
                   ANSWERED -> DONE

An `proxy.data.attempt.Attempt` deals with one engine; this is what outlives it: the request, its body, what was tried.
Until ANSWERED nothing has gone to the client, so every failure can be mended by another attempt. From then on a failure
can only be made visible: an error event in the route's own protocol, then the connection is cut.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from proxy.core import routes
from proxy.core.abort_ids import count_prompts
from proxy.core.bodies import wants_stream
from proxy.core.failures import Failure, Kind
from proxy.core.framing import RequestHead
from proxy.core.retry import Action, Decision
from proxy.data.answering import Answering
from proxy.data.attempt import Attempt
from proxy.data.outcome import RETRY_AFTER, decision_for, error_for
from proxy.data.relay import Relay
from proxy.data.stages import Phase
from proxy.errors import (
    BodyTooLarge,
    FleetgateError,
    NoEngine,
    RequestAborted,
    SlowClient,
)

if TYPE_CHECKING:
    from proxy.data.front import Front
    from proxy.data.plane import DataPlane
    from proxy.fleet.engine import Engine

_log = logging.getLogger("fleetgate.exchange")


# CPython 3.11 takes 140 ns to look up an enum member, 7 for a module constant; these are compared per event.
_BODY = Phase.BODY
_HELD = Phase.HELD
_BACKOFF = Phase.BACKOFF
_SENT = Phase.SENT
_ANSWERED = Phase.ANSWERED
_DONE = Phase.DONE


class Exchange(Answering):
    """One request, from its head to the last byte of its answer.

    Args:
        plane: what all requests share.
        client: the connection it came on.
        head: its head.
    """

    __slots__ = (
        "_fresh",
        "attempts",
        "begun",
        "body_done",
        "body_size",
        "free",
        "generation",
        "held_bytes",
        "hold_limit",
        "hold_since",
        "hold_timer",
        "id_bytes",
        "lines",
        "order",
        "replayable",
        "resends",
        "sent",
        "started",
        "tried",
        "version",
    )

    def __init__(self, plane: DataPlane, client: Front, head: RequestHead) -> None:
        self.plane = plane
        self.client = client
        self.head = head
        self.generation = routes.is_generation(head.method, head.path)
        self.order = plane.next_order()
        self.id_bytes = head.request_id or plane.new_id(self.order)
        self.started = client.loop.time()
        self.phase = _BODY
        self.begun = False
        self.body: list[bytes] = []
        self.body_size = 0
        self.body_done = not head.has_body
        self.replayable = True
        self.sent = False
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.free = 0
        self.resends = 0
        self._fresh = False
        self.tried: list[Engine] = []
        self.last_engine: Engine | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.relay = Relay(self)
        self.version = b""
        self.lines = b""
        self.held_bytes = 0
        self.hold_timer: asyncio.TimerHandle | None = None
        self.hold_since = 0.0
        self.prompts_streamed = 0
        limit = plane.settings.hold_timeout
        self.hold_limit = limit if head.hold_timeout is None else min(limit, head.hold_timeout)

    def __repr__(self) -> str:
        return f"<Exchange {self.request_id} {self.route} {self.phase.name} {self.attempt} attempts={self.attempts}>"

    @property
    def request_id(self) -> str:
        """``X-Request-Id``, the client's or ours."""
        return self.id_bytes.decode("latin-1")

    @property
    def route(self) -> str:
        """The path."""
        return self.head.path.decode("latin-1")

    @property
    def prompts(self) -> int:
        """Prompts of a completion, each with a name of its own at the engine."""
        return self.prompts_streamed or count_prompts(b"".join(self.body))

    @property
    def engine(self) -> Engine | None:
        """The engine that has the request now; None while it is held or waits."""
        return self.attempt.engine if self.attempt is not None else None

    # From the client

    def begin(self) -> None:
        """It is this request's turn on its connection."""
        self.begun = True
        self.plane.tracker.add(self)
        self.plane.budget.deposit(self.started)
        if self.body_done or not self.replayable:
            self._dispatch()

    def body_data(self, data: bytes) -> None:
        """A piece of the body."""
        if self.phase is _DONE:
            return
        self.body_size += len(data)
        limit = self.plane.limits.body
        if limit and self.body_size > limit:
            self._fail(BodyTooLarge(f"the body is over {limit} bytes"))
            return
        if self.attempt is not None and self.attempt.uploading:
            self.attempt.upload(data)
            return
        self.body.append(data)
        if self.replayable and self.body_size > self.plane.settings.replay_limit:
            self.replayable = False
            if self.phase is _BODY and self.begun:
                self._dispatch()
        if not self.replayable and (self.attempt is None or not self.attempt.uploading):
            # Too big to keep: the rest stays in the socket until an engine takes it.
            self.client.pause_reading()

    def body_end(self) -> None:
        """The body is whole."""
        self.body_done = True
        if self.phase is _BODY:
            if self.begun:
                self._dispatch()
        elif self.attempt is not None and self.attempt.uploading:
            self.attempt.upload_end()

    def client_slow(self) -> None:
        """The body stopped coming."""
        seconds = self.plane.settings.body_timeout
        self._fail(SlowClient(f"no piece of the body came for {seconds:g} s"))

    def client_writable(self, writable: bool) -> None:
        """The client takes (no) more of its answer for now: only its own stream stops."""
        if self.attempt is not None and self.attempt.conn is not None:
            if writable:
                self.attempt.conn.resume_reading()
            else:
                self.attempt.conn.pause_reading()

    def client_gone(self) -> None:
        """The client went away: whatever was done for it ends now."""
        if self.phase is _DONE:
            return
        self.plane.stats.disconnects += 1
        self._over(499)

    def abort(self) -> None:
        """``/abort_requests`` names this request while no engine runs it."""
        if self.phase is not _DONE:
            self._fail(RequestAborted("the request was aborted while it was held; no engine had it"))

    # The gate

    def _dispatch(self) -> None:
        if self.generation and self.plane.gate.must_wait():
            self._hold()
        else:
            self._try_engine()

    def _hold(self, *, front: bool = False) -> None:
        self.phase = _HELD
        self.held_bytes = self.body_size
        if not self.body_done:
            self.client.pause_reading()
        ping = self.plane.settings.hold_ping
        if ping and (self.relay.pinging or wants_stream(self.body)):
            self._set_timer(ping, self._ping)
        self.plane.gate.hold(self, front=front)

    def admitted(self) -> bool:
        """The gate lets it go."""
        self._cancel_timer()
        return self._try_engine()

    def refused(self, error: FleetgateError) -> None:
        """The gate cannot hold it, or the connection refuses it."""
        self._fail(error)

    def stopped(self, error: FleetgateError) -> None:
        """The proxy ends."""
        self._fail(error)

    def _ping(self) -> None:
        """Keep a held stream's connection busy with SSE comments, which clients skip."""
        self.relay.ping()
        if self.phase is _HELD:
            self._set_timer(self.plane.settings.hold_ping, self._ping)

    # Attempts

    def _try_engine(self) -> bool:
        now = self.client.loop.time()
        engine = self.plane.pick(self.tried, self.head.session, now, generation=self.generation, body=self.body)
        if engine is None:
            if self.generation:
                self._hold(front=True)
            else:
                self._fail(NoEngine("no engine answers; see /fleet", retry_after=RETRY_AFTER))
            return False
        self.phase = _SENT
        self.last_engine = engine
        self.attempts += 1
        self.attempt = attempt = Attempt(self, engine)
        # A body that can be sent only once must not meet a connection that the engine has just closed.
        attempt.start(now, fresh=self._fresh or not self.replayable)
        return True

    def may_send_to(self, engine: Engine) -> bool:
        """Whether the request may still go to this engine: asked after the connection to it was made."""
        if not self.generation:
            return True
        return engine.eligible and engine.id in self.plane.fleet.engines and not self.plane.gate.closed

    def withdrawn(self) -> None:
        """The attempt ended before anything was sent, through nobody's fault."""
        self._drop_attempt()
        self.attempts -= 1
        self._hold(front=True)

    def slot_freed(self) -> None:
        """An attempt gave its slot back: somebody who is held may be waiting for it."""
        gate = self.plane.gate
        if self.plane.settings.max_inflight and gate.held:
            gate.pump()

    def failed(self, attempt: Attempt, failure: Failure, *, dead: bool = False, paused: bool = False) -> None:
        """An attempt failed and nothing went to the client: decide what happens next.

        Args:
            attempt: the attempt.
            failure: how it failed.
            dead: its engine turned out to be dead.
            paused: its engine turned out to be paused.
        """
        engine = attempt.engine
        plane = self.plane
        kind = failure.kind
        paused = paused or kind is Kind.PAUSED
        if paused or kind in (Kind.CONNECT, Kind.STALE):
            self.free += 1
        if not paused and kind is not Kind.STALE and engine not in self.tried:
            self.tried.append(engine)
        if not paused:
            plane.broke(engine, failure)
        decision = decision_for(self, attempt, failure, dead=dead, paused=paused)
        if decision.action is Action.RELAY:
            attempt.relay()
        elif decision.action is Action.FAIL:
            self._fail(error_for(failure))
        else:
            self._again(failure, decision, engine)

    def _again(self, failure: Failure, decision: Decision, engine: Engine) -> None:
        plane = self.plane
        kind = failure.kind
        plane.stats.retried(str(kind))
        self._drop_attempt()
        self._fresh = kind is Kind.STALE
        if decision.action is Action.HOLD:
            if kind is Kind.CONNECT:
                self.tried = []
            elif not plane.gate.closed:
                plane.watch.watch_paused(engine)
            self._hold(front=True)
            return
        if kind not in (Kind.STALE, Kind.CONNECT):
            self.resends += 1
        if decision.forget_tried:
            self.tried = []
        if decision.delay:
            self.phase = _BACKOFF
            self._set_timer(decision.delay, self._resend)
        else:
            self._resend()

    def _resend(self) -> None:
        if self.generation and self.plane.gate.closed:
            self._hold(front=True)
        else:
            self._try_engine()

    def _drop_attempt(self) -> None:
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.end()

    # To the client

    def _fail(self, error: FleetgateError) -> None:
        """Give the client an error of the proxy's own."""
        if self.phase is _DONE:
            return
        if self.relay.begun:
            self.relay.cut(error)
        else:
            self._drop_attempt()
            self.client.answer_begun()
            self.client.send_error(error, self)
        self._over(error.status)

    def crashed(self) -> None:
        """A bug in the proxy, called inside the handler: the client gets an error or a cut, never silence."""
        _log.exception("request %s failed inside the proxy", self.request_id)
        try:
            self._fail(FleetgateError("the proxy failed to handle the request; see its log"))
        except Exception:
            _log.exception("request %s could not be ended in order", self.request_id)
            self.client.abort()

    def _over(self, status: int) -> None:
        """Every way out ends here, once."""
        if self.phase is _DONE:
            return
        if self.phase is _HELD:
            self.plane.gate.leave(self)
        self.phase = _DONE
        self._cancel_timer()
        self._drop_attempt()
        self.body = []
        plane = self.plane
        plane.tracker.remove(self)
        seconds = self.client.loop.time() - self.started
        plane.stats.answered(routes.label(self.head.path), status)
        plane.stats.request_seconds.observe(seconds)
        for tell in plane.on_over:
            tell(self, status, seconds)
        self.client.request_done(self)
