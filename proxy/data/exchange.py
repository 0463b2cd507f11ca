"""One request's way: client -> gate -> engine -> client, as a state machine that runs on events.

No task runs for a request unless something has to be waited for that the loop has no event for: a new connection, or
a look at an engine that failed. On the usual way (an idle connection is there, the engine answers) everything happens
inside the callbacks of the two transports.

    BODY -> HELD <-> CONNECTING -> WAITING -> PEEKING / COLLECTING -> JUDGING -> RELAYING -> DONE
                ^________________________________________________________|

Before RELAYING nothing has gone to the client, so every failure can be mended by another attempt. From RELAYING on a
failure can only be made visible: an error event in the route's own protocol, then the connection is cut.

A slot at an engine is taken in `_attempt` and given back in `_release`, which every way out passes.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any

from proxy.core import routes
from proxy.core.bodies import wants_stream
from proxy.core.failures import Failure, Kind
from proxy.core.framing import RequestHead
from proxy.core.retry import Action, Decision, Facts, decide
from proxy.core.sse import EngineError, FirstEvent, Verdict, read_error
from proxy.data import outbound
from proxy.data.relay import Relay
from proxy.data.upstream import ConnectFailedError, Connection, Head
from proxy.errors import (
    BodyTooLarge,
    EngineBroken,
    EngineTimeout,
    EngineUnreachable,
    FleetgateError,
    NoEngine,
    Overloaded,
    RequestAborted,
    SlowClient,
)
from proxy.tasks import spawn

if TYPE_CHECKING:
    from proxy.data.front import Front
    from proxy.data.plane import DataPlane
    from proxy.fleet.engine import Engine

_SAFE_METHODS = (b"GET", b"HEAD", b"OPTIONS")


class Phase(IntEnum):
    """Where a request is on its way."""

    BODY = auto()
    """Its body is still coming and all of it fits the replay buffer."""
    HELD = auto()
    WAITING_BACKOFF = auto()
    CONNECTING = auto()
    WAITING = auto()
    """Sent; no head of an answer yet."""
    PEEKING = auto()
    """A stream has begun; its first event is not whole yet."""
    COLLECTING = auto()
    """An error answer is being gathered."""
    JUDGING = auto()
    """The engine is being looked at to find out what its error means."""
    RELAYING = auto()
    TUNNEL = auto()
    DONE = auto()


class Exchange:
    """One request, from its head to the last byte of its answer.

    Args:
        plane: what all requests share.
        client: the connection it came on.
        head: its head.
    """

    __slots__ = (
        "_pending",
        "_stream",
        "attempts",
        "begun",
        "body",
        "body_done",
        "body_size",
        "broken",
        "client",
        "conn",
        "ended",
        "engine",
        "engine_head",
        "fresh",
        "generation",
        "head",
        "held_bytes",
        "hold_limit",
        "hold_since",
        "hold_timer",
        "id_bytes",
        "lines",
        "pauses",
        "peek",
        "phase",
        "plane",
        "relay",
        "replayable",
        "resends",
        "slot",
        "started",
        "task",
        "timer",
        "tried",
        "uploading",
        "version",
    )

    def __init__(self, plane: DataPlane, client: Front, head: RequestHead) -> None:
        self.plane = plane
        self.client = client
        self.head = head
        self.generation = routes.is_generation(head.method, head.path)
        self.id_bytes = head.request_id or plane.new_id()
        self.started = client.loop.time()
        self.phase = Phase.BODY
        self.begun = False
        self.body: list[bytes] = []
        self.body_size = 0
        self.body_done = not head.has_body
        self.replayable = True
        self.uploading = False
        self.attempts = 0
        self.pauses = 0
        self.resends = 0
        self.tried: list[Engine] = []
        self.fresh = False
        self.engine: Engine | None = None
        self.slot = False
        self.conn: Connection | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.engine_head: Head | None = None
        self.peek: FirstEvent | None = None
        self._pending: list[bytes] = []
        self.ended = False
        self.broken = False
        self._stream = False
        self.relay = Relay(self)
        self.version = b""
        self.lines = b""
        self.held_bytes = 0
        self.hold_timer: asyncio.TimerHandle | None = None
        self.hold_since = 0.0
        limit = plane.settings.hold_timeout
        self.hold_limit = limit if head.hold_timeout is None else min(limit, head.hold_timeout)

    def __repr__(self) -> str:
        where = self.engine.id if self.engine is not None else None
        return f"<Exchange {self.request_id} {self.route} {self.phase.name} engine={where} attempts={self.attempts}>"

    @property
    def request_id(self) -> str:
        """``X-Request-Id``, the client's or ours."""
        return self.id_bytes.decode("latin-1")

    @property
    def route(self) -> str:
        """The path."""
        return self.head.path.decode("latin-1")

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
        if self.phase is Phase.DONE:
            return
        self.body_size += len(data)
        limit = self.plane.limits.body
        if limit and self.body_size > limit:
            self._fail(BodyTooLarge(f"the body is over {limit} bytes"))
            return
        if self.uploading:
            self._upload(data)
            return
        self.body.append(data)
        if self.replayable and self.body_size > self.plane.settings.replay_limit:
            self.replayable = False
            if self.phase is Phase.BODY and self.begun:
                self._dispatch()
        if not self.replayable and not self.uploading:
            # Too big to keep: the rest stays in the socket until an engine takes it.
            self.client.pause_reading()

    def body_end(self) -> None:
        """The body is whole."""
        self.body_done = True
        if self.phase is Phase.BODY:
            if self.begun:
                self._dispatch()
        elif self.uploading and self.head.chunked and self.conn is not None:
            self.conn.write(b"0\r\n\r\n")

    def client_slow(self) -> None:
        """The body stopped coming."""
        seconds = self.plane.settings.body_timeout
        self._fail(SlowClient(f"no piece of the body came for {seconds:g} s"))

    def client_writable(self, writable: bool) -> None:
        """The client takes (no) more of its answer for now: only its own stream stops."""
        if self.conn is not None:
            if writable:
                self.conn.resume_reading()
            else:
                self.conn.pause_reading()

    def client_gone(self) -> None:
        """The client went away: whatever was done for it ends now."""
        if self.phase is Phase.DONE:
            return
        self.plane.stats.disconnects += 1
        self._over(499)

    def abort(self) -> None:
        """``/abort_requests`` names this request while no engine runs it."""
        if self.phase is not Phase.DONE:
            self._fail(RequestAborted("the request was aborted while it was held; no engine had it"))

    # The gate

    def _dispatch(self) -> None:
        if self.generation and self.plane.gate.must_wait():
            self._hold()
        else:
            self._attempt()

    def _hold(self, *, front: bool = False) -> None:
        self.phase = Phase.HELD
        self.held_bytes = self.body_size
        if not self.body_done:
            self.client.pause_reading()
        ping = self.plane.settings.hold_ping
        if ping and self.timer is None and (self.relay.pinging or wants_stream(self.body)):
            self.timer = self.client.loop.call_later(ping, self._ping)
        self.plane.gate.hold(self, front=front)

    def admitted(self) -> bool:
        """The gate lets it go."""
        self._cancel_timer()
        return self._attempt()

    def refused(self, error: FleetgateError) -> None:
        """The gate cannot hold it."""
        self._fail(error)

    def _ping(self) -> None:
        """Keep a held stream's connection busy with SSE comments, which clients skip."""
        self.timer = None
        if self.phase not in (Phase.HELD, Phase.WAITING_BACKOFF):
            return
        self.relay.ping()
        self.timer = self.client.loop.call_later(self.plane.settings.hold_ping, self._ping)

    # Attempts

    def _attempt(self) -> bool:
        now = self.client.loop.time()
        engine = self.plane.pick(self.tried, self.head.session, now, generation=self.generation)
        if engine is None:
            if self.generation:
                self._hold(front=True)
            else:
                self._fail(NoEngine("no engine answers; see /fleet", retry_after=5))
            return False
        self.engine = engine
        engine.inflight += 1
        self.slot = True
        self.attempts += 1
        connection = None if self.fresh else engine.upstream.take_idle(now)
        if connection is None:
            self.phase = Phase.CONNECTING
            self.task = spawn(self._connect(engine), name="connect")
        else:
            self._send(connection, engine)
        return True

    async def _connect(self, engine: Engine) -> None:
        try:
            connection = await engine.upstream.connect()
        except ConnectFailedError as error:
            self.task = None
            self.plane.watch.suspect(engine, error.failure.detail)
            self._failed(error.failure)
            return
        self.task = None
        if self.phase is not Phase.CONNECTING:
            connection.abort()
            return
        if self.generation and self.plane.gate.closed:
            # The gate closed while the connection was made; nothing was sent yet.
            engine.upstream.put_idle(connection)
            self._release()
            self.attempts -= 1
            self._hold(front=True)
            return
        self._send(connection, engine)

    def _send(self, connection: Connection, engine: Engine) -> None:
        self.phase = Phase.WAITING
        self.conn = connection
        self.engine_head = None
        self.ended = False
        self.broken = False
        self._pending = []
        self.version = self.plane.version_header()
        if not self.lines:
            self.lines = outbound.field_lines(self)
        head = outbound.request_head(self, engine.upstream)
        if self.body_done:
            data = head + b"".join(self.body)
            if not self.replayable:
                self.body = []
        else:
            self.uploading = True
            first = b"".join(self.body)
            self.body = []
            data = head + (outbound.chunk(first) if self.head.chunked and first else first)
        connection.send(self, data, bodyless_answer=self.head.method == b"HEAD")
        limit = self.plane.settings.first_byte_timeout
        if limit:
            self.timer = self.client.loop.call_later(limit, self._silent)
        if self.uploading:
            self.client.resume_reading()

    def _upload(self, data: bytes) -> None:
        if self.conn is not None:
            self.conn.write(outbound.chunk(data) if self.head.chunked else data)

    def _silent(self) -> None:
        self.timer = None
        if self.phase is Phase.WAITING and self.conn is not None:
            self.conn.detach()
            limit = self.plane.settings.first_byte_timeout
            self._failed(Failure(Kind.TIMEOUT, f"no answer byte within {limit:g} s"))

    # From the engine

    def on_head(self, head: Head) -> None:
        """The head of the engine's answer."""
        self.engine_head = head
        self._cancel_timer()
        engine = self.engine
        assert engine is not None
        engine.last_byte = self.client.loop.time()
        self.plane.stats.engine_answered(engine.id, head.status)
        if head.status == 101:
            self._switch(head)
            return
        self._stream = _is_stream(head)
        if self.generation:
            if head.status == 200 and self._stream:
                self.peek = FirstEvent(self.plane.settings.peek_limit)
                self.phase = Phase.PEEKING
                return
            if head.status in (500, 503, 529):
                self.phase = Phase.COLLECTING
                return
        self._relay_head(head)

    def on_data(self, data: bytes) -> None:
        """A piece of the engine's answer."""
        phase = self.phase
        if phase is Phase.RELAYING:
            engine = self.engine
            if engine is not None:
                engine.last_byte = self.client.loop.time()
            self.relay.data(data)
        elif phase is Phase.PEEKING:
            self._peek(data)
        elif phase is Phase.COLLECTING:
            self._pending.append(data)
            if sum(map(len, self._pending)) > self.plane.settings.peek_limit:
                self._relay_pending()
        elif phase is Phase.JUDGING:
            self._pending.append(data)

    def _peek(self, data: bytes) -> None:
        peek = self.peek
        assert peek is not None
        verdict = peek.feed(data)
        if verdict is Verdict.MORE:
            return
        self._pending = [peek.held]
        if verdict is Verdict.ERROR and peek.error is not None and peek.error.kind is not None:
            self._engine_error(peek.error)
        else:
            self._relay_pending()

    def on_end(self) -> None:
        """The engine's answer is whole."""
        self.ended = True
        self.conn = None
        phase = self.phase
        if phase is Phase.RELAYING:
            self._finish()
        elif phase is Phase.COLLECTING:
            assert self.engine_head is not None
            error = read_error(b"".join(self._pending), status=self.engine_head.status)
            if error is not None and error.kind is not None:
                self._engine_error(error)
            else:
                self._relay_pending()
        elif phase is Phase.PEEKING:
            assert self.peek is not None
            if self.peek.held:
                self._pending = [self.peek.held]
                self._relay_pending()
            else:
                self._failed(Failure(Kind.CUT, "the stream ended before its first event"))

    def on_failure(self, failure: Failure) -> None:
        """The engine's answer is not whole."""
        self.conn = None
        self.broken = True
        if self.phase in (Phase.RELAYING, Phase.TUNNEL):
            self._cut(failure)
        elif self.phase is not Phase.JUDGING:
            self._cancel_timer()
            self._failed(failure)

    def on_writable(self, writable: bool) -> None:
        """The engine takes (no) more of the request body for now."""
        if writable:
            self.client.resume_reading()
        else:
            self.client.pause_reading()

    # Failures before the first byte to the client

    def _engine_error(self, error: EngineError) -> None:
        assert error.kind is not None
        assert self.engine_head is not None
        asked = self.engine_head.get(b"retry-after")
        retry_after = float(asked) if asked is not None and asked.isdigit() else None
        self._failed(Failure(error.kind, error.message or f"status {self.engine_head.status}", retry_after))

    def _failed(self, failure: Failure) -> None:
        """An attempt failed: decide at once, or look at the engine first."""
        if self.phase is Phase.DONE:
            return
        if failure.kind in (Kind.FAILED, Kind.CUT) and self.generation:
            self.phase = Phase.JUDGING
            self.task = spawn(self._judge(failure), name="judge")
        else:
            self._decide(failure)

    async def _judge(self, failure: Failure) -> None:
        engine = self.engine
        assert engine is not None
        watch = self.plane.watch
        paused = dead = False
        if failure.kind is Kind.CUT:
            paused = self.plane.gate.closed or await watch.is_paused(engine)
        if not paused:
            dead = await watch.is_dead(engine)
            if dead:
                watch.suspect(engine, failure.detail)
        self.task = None
        if self.phase is Phase.JUDGING:
            self._decide(failure, dead=dead, paused=paused)

    def _decide(self, failure: Failure, *, dead: bool = False, paused: bool = False) -> None:
        engine = self.engine
        assert engine is not None
        plane = self.plane
        paused = paused or failure.kind is Kind.PAUSED
        if paused:
            self.pauses += 1
        elif failure.kind is not Kind.STALE and engine not in self.tried:
            self.tried.append(engine)
        head = self.head
        facts = Facts(
            generation=self.generation,
            repeatable=self.generation or head.method in _SAFE_METHODS,
            replayable=self.replayable and not self.uploading,
            attempts=self.attempts - self.pauses,
            max_attempts=1 if head.no_retry else plane.settings.max_attempts,
            others_left=plane.others_left(self.tried, generation=self.generation),
            engine_dead=dead,
            engine_paused=paused,
            has_answer=bool(self._pending) and self.engine_head is not None,
            resends=self.resends,
        )
        decision = decide(
            failure,
            facts,
            budget=plane.budget,
            backoff=plane.backoff,
            now=self.client.loop.time(),
            max_wait=plane.settings.max_retry_after,
        )
        if decision.action is Action.RELAY:
            self._relay_pending()
        elif decision.action is Action.FAIL:
            self._fail(_error_for(failure))
        else:
            self._again(failure, decision, engine)

    def _again(self, failure: Failure, decision: Decision, engine: Engine) -> None:
        plane = self.plane
        plane.stats.retried(str(failure.kind))
        self._drop_attempt()
        if failure.kind is Kind.PAUSED or decision.action is Action.HOLD:
            if failure.kind in (Kind.PAUSED, Kind.CUT) and not plane.gate.closed:
                plane.watch.watch_paused(engine)
            if failure.kind is Kind.CONNECT:
                self.tried = []
            self._hold(front=True)
            return
        self.fresh = failure.kind is Kind.STALE
        if failure.kind not in (Kind.STALE, Kind.CONNECT):
            self.resends += 1
        if decision.forget_tried:
            self.tried = []
        if decision.delay:
            self.phase = Phase.WAITING_BACKOFF
            self.timer = self.client.loop.call_later(decision.delay, self._resend)
        else:
            self._resend()

    def _resend(self) -> None:
        self.timer = None
        if self.generation and self.plane.gate.closed:
            self._hold(front=True)
        else:
            self._attempt()

    def _drop_attempt(self) -> None:
        if self.conn is not None:
            self.conn.detach()
            self.conn = None
        self._pending = []
        self.peek = None
        self.engine_head = None
        self._release()

    def _release(self) -> None:
        if self.slot:
            self.slot = False
            engine = self.engine
            assert engine is not None
            engine.inflight -= 1
            gate = self.plane.gate
            if self.plane.settings.max_inflight and gate.held:
                gate.pump()

    # To the client

    def _relay_pending(self) -> None:
        """What was looked at belongs to the client: pass it on, and the rest as it comes."""
        head = self.engine_head
        assert head is not None
        pending = self._pending
        self._pending = []
        self.peek = None
        self._relay_head(head)
        for data in pending:
            if self.phase is Phase.RELAYING:
                self.relay.data(data)
        if self.phase is not Phase.RELAYING:
            return
        if self.broken:
            self._cut(Failure(Kind.CUT, "the engine broke off its answer"))
        elif self.ended:
            self._finish()

    def _relay_head(self, head: Head) -> None:
        self.phase = Phase.RELAYING
        relay = self.relay
        if relay.pinging and not (self._stream and head.status == 200):
            # 200 went out with the first ping, so the engine's error can only be said as an event.
            message = f"engine answered status {head.status} after the request had been held"
            relay.cut(message, code="engine_error", status=502)
            self._over(head.status)
            return
        relay.stream = self._stream
        relay.begin(head)

    def _finish(self) -> None:
        head = self.engine_head
        assert head is not None
        if not self.relay.whole():
            self._cut(Failure(Kind.CUT, "the engine closed the connection inside its answer"))
            return
        self.relay.end()
        self._over(head.status)

    def _cut(self, failure: Failure) -> None:
        """The answer broke off after bytes went out: make it visible, never let it pass for a whole one."""
        if self.phase is Phase.TUNNEL:
            self.client.cut(hard=True)
        else:
            name = self.engine.id if self.engine is not None else "?"
            self.relay.cut(f"engine {name} broke off its answer: {failure.detail}", code="engine_broken", status=502)
        self._over(502)

    def _fail(self, error: FleetgateError) -> None:
        """Give the client an error of the proxy's own."""
        if self.phase in (Phase.RELAYING, Phase.TUNNEL):
            self.client.cut(hard=True)
        elif self.relay.pinging:
            self.relay.cut(error.message, code=error.code, status=error.status)
        else:
            self._release_connection()
            self.client.answer_begun()
            self.client.send_error(error, self)
        self._over(error.status)

    def _release_connection(self) -> None:
        if self.conn is not None:
            self.conn.detach()
            self.conn = None

    def _over(self, status: int) -> None:
        """Every way out ends here, once."""
        if self.phase is Phase.DONE:
            return
        self.plane.gate.leave(self)
        self.phase = Phase.DONE
        self._cancel_timer()
        if self.task is not None:
            self.task.cancel()
            self.task = None
        self._release_connection()
        self._release()
        self.body = []
        self._pending = []
        plane = self.plane
        plane.tracker.remove(self)
        seconds = self.client.loop.time() - self.started
        plane.stats.answered(routes.label(self.head.path), status)
        plane.stats.request_seconds.observe(seconds)
        if plane.settings.access_log:
            from proxy.observe.access import record  # noqa: PLC0415 - off by default

            record(self, status, seconds)
        self.client.request_done(self)

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    # WebSocket

    def _switch(self, head: Head) -> None:
        """101: bytes go both ways from here on. Only what the client asked for is tunnelled."""
        connection = self.conn
        upgrade = head.get(b"upgrade")
        if connection is None or not self.head.websocket or (upgrade or b"").lower() != b"websocket":
            self._fail(EngineBroken("the engine switched to a protocol that was not asked for"))
            return
        self.phase = Phase.TUNNEL
        self.relay.switch(head)
        connection.tunnel = self._from_engine
        self.client.open_tunnel(connection.write)

    def _from_engine(self, data: bytes) -> None:
        if data:
            self.client.write(data)
        else:
            self.conn = None
            self.client.close()
            self._over(101)


def _is_stream(head: Head) -> bool:
    kind = head.get(b"content-type")
    return kind is not None and kind[:17].lower() == b"text/event-stream"


def _error_for(failure: Failure) -> FleetgateError:
    """The error that a client sees when no attempt is left."""
    errors: dict[Kind, Any] = {
        Kind.CONNECT: EngineUnreachable,
        Kind.TIMEOUT: EngineTimeout,
        Kind.BUSY: Overloaded,
        Kind.PAUSED: Overloaded,
    }
    made: FleetgateError = errors.get(failure.kind, EngineBroken)(failure.detail)
    return made
