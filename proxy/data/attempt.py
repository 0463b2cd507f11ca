"""One attempt of a request at one engine: connect, send, look at the answer before any of it goes to the client.

    CONNECTING -> WAITING -> PEEKING / COLLECTING -> JUDGING -> RELAYING / TUNNEL -> OVER

An attempt either comes to relay the engine's answer, or it reports one `Failure` to its exchange, which decides what
happens next. It takes a slot at the engine when it is made and gives it back in `end`, which every way out passes.

No task runs for an attempt unless something has to be waited for that the loop has no event for: a new connection, or
a look at an engine that failed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.core.failures import Failure, Kind
from proxy.core.sse import EngineError, FirstEvent, Verdict, read_error
from proxy.data import outbound
from proxy.data.outcome import failure_of, look_at
from proxy.data.stages import Stage
from proxy.data.upstream import ConnectFailedError, Connection, Head
from proxy.tasks import spawn

if TYPE_CHECKING:
    from proxy.data.exchange import Exchange
    from proxy.fleet.engine import Engine


# CPython 3.11 takes 140 ns to look up an enum member, 7 for a module constant; these are compared per event.
_MORE = Verdict.MORE
_CONNECTING = Stage.CONNECTING
_WAITING = Stage.WAITING
_PEEKING = Stage.PEEKING
_COLLECTING = Stage.COLLECTING
_JUDGING = Stage.JUDGING
_RELAYING = Stage.RELAYING
_TUNNEL = Stage.TUNNEL
_OVER = Stage.OVER
_TELLING = (500, 503, 529)  # Their bodies have to tell what they mean.


class Attempt:
    """One try at one engine. The interface towards the connection is `proxy.data.connection.Receiver`.

    Args:
        exchange: the request.
        engine: where it goes; a slot is taken there at once.
    """

    __slots__ = (
        "_broken",
        "_ended",
        "_gathered_size",
        "_stream",
        "_task",
        "_timer",
        "boot",
        "conn",
        "engine",
        "exchange",
        "gathered",
        "head",
        "heard",
        "peek",
        "stage",
        "uploading",
    )

    def __init__(self, exchange: Exchange, engine: Engine) -> None:
        self.exchange = exchange
        self.engine = engine
        self.stage = _CONNECTING
        self.conn: Connection | None = None
        self.head: Head | None = None
        self.peek: FirstEvent | None = None
        self.uploading = False
        self.heard = 0.0
        self._stream = False
        self.gathered: list[bytes] = []
        self._gathered_size = 0
        self._ended = False
        self._broken: Failure | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.boot = engine.boot
        engine.inflight += 1

    def __repr__(self) -> str:
        return f"<Attempt {self.engine.id} {self.stage.name}>"

    @property
    def has_answer(self) -> bool:
        """Whether the engine gave an answer that could go to the client."""
        return self.head is not None and bool(self.gathered)

    # Towards the engine

    def start(self, now: float, *, fresh: bool) -> None:
        """Send on an idle connection, or open one.

        Args:
            now: loop time.
            fresh: never take an idle connection: the last one was stale, or the body can be sent only once.
        """
        connection = None if fresh else self.engine.upstream.take_idle(now)
        if connection is None:
            self._task = spawn(self._connect(), name="connect")
        else:
            self._send(connection)

    async def _connect(self) -> None:
        engine = self.engine
        exchange = self.exchange
        try:
            connection = await engine.upstream.connect()
            self._task = None
            if self.stage is not _CONNECTING:
                connection.abort()
            elif exchange.may_send_to(engine):
                self._send(connection)
            else:
                # The gate closed or the engine left while the connection was made; nothing was sent yet.
                engine.upstream.put_idle(connection)
                exchange.withdrawn()
        except ConnectFailedError as error:
            self._task = None
            exchange.plane.watch.suspect(engine, error.failure.detail)
            self._failed(error.failure)
        except Exception:
            exchange.crashed()

    def _send(self, connection: Connection) -> None:
        exchange = self.exchange
        self.stage = _WAITING
        self.conn = connection
        if not exchange.lines:
            exchange.lines = outbound.field_lines(exchange)
        exchange.version = exchange.plane.version_header()
        data = outbound.request_head(exchange, self.engine.upstream)
        if exchange.body_done:
            data += b"".join(exchange.body)
        else:
            self.uploading = True
            first = b"".join(exchange.body)
            if first:
                data += outbound.chunk(first) if exchange.head.chunked else first
        if not exchange.replayable:
            exchange.body = []
            exchange.sent = True
        connection.send(self, data, bodyless_answer=exchange.head.method == b"HEAD", open_body=self.uploading)
        settings = exchange.plane.settings
        if settings.first_byte_timeout:
            loop = exchange.client.loop
            self._timer = loop.call_later(settings.first_byte_timeout, self._silent, loop.time())
        if self.uploading:
            exchange.client.resume_reading()

    def upload(self, data: bytes) -> None:
        """A further piece of a body that is too big to be kept."""
        if self.conn is not None:
            self.conn.write(outbound.chunk(data) if self.exchange.head.chunked else data)

    def upload_end(self) -> None:
        """The body is whole."""
        if self.conn is not None:
            if self.exchange.head.chunked:
                self.conn.write(b"0\r\n\r\n")
            self.conn.request_open = False

    def _silent(self, since: float) -> None:
        """A limit on the engine's silence struck, to its first byte or between two; none before ``since`` counts."""
        self._timer = None
        client, plane = self.exchange.client, self.exchange.plane
        waiting = self.stage is _WAITING
        limit = plane.settings.first_byte_timeout if waiting else plane.settings.read_timeout
        now = client.loop.time()
        left = max(since, self.heard, plane.gate.opened_at) + limit - now
        if plane.gate.closed or self.engine.paused or self.conn is None or not client.taking:
            # Frozen by a pause, or held back by its own client: not the engine's silence, and that may last until then.
            left, since = limit, now + limit
        if left > 0:
            self._timer = client.loop.call_later(left, self._silent, since)
        else:
            what = "answer byte" if waiting else "further answer byte"
            self.give_up(Failure(Kind.TIMEOUT if waiting else Kind.CUT, f"no {what} within {limit:g} s"))

    def give_up(self, failure: Failure) -> None:
        """The engine will not go on with this, though its connection does not say so."""
        if self.stage in (_CONNECTING, _OVER):
            return
        self._release_connection()
        try:
            self.on_failure(failure)
        except Exception:
            self.exchange.crashed()

    # From the engine

    def on_head(self, head: Head) -> None:
        """The head of the engine's answer."""
        self.head = head
        exchange = self.exchange
        plane = exchange.plane
        engine = self.engine
        self._cancel_timer()
        self.heard = engine.last_byte = exchange.client.loop.time()
        plane.stats.engine_answered(engine.id, head.status)
        if head.status == 101:
            self._switch(head)
            return
        self._stream = head.fields().stream
        if plane.settings.read_timeout:
            self._timer = exchange.client.loop.call_later(plane.settings.read_timeout, self._silent, self.heard)
        if exchange.generation:
            if head.status == 200 and self._stream:
                self.peek = FirstEvent(plane.settings.peek_limit)
                self.stage = _PEEKING
                return
            if head.status in _TELLING or (head.status >= 400 and exchange.relay.pinging):
                self.stage = _COLLECTING
                return
        conn = self.conn
        self._relay_head(head, more=conn is not None and conn.has_more)

    def on_data(self, data: bytes, more: bool) -> None:
        """A piece of the engine's answer."""
        exchange = self.exchange
        self.heard = self.engine.last_byte = now = exchange.client.loop.time()
        stage = self.stage
        if stage is _RELAYING:
            exchange.relay.data(data, now, more)
        elif stage is _PEEKING:
            peek = self.peek
            assert peek is not None
            verdict = peek.feed(data)
            if verdict is not _MORE:
                self._peeked(peek, verdict)
        elif stage in (_COLLECTING, _JUDGING):
            self.gathered.append(data)
            self._gathered_size += len(data)
            if stage is _COLLECTING and self._gathered_size > exchange.plane.settings.peek_limit:
                self.relay()

    def _peeked(self, peek: FirstEvent, verdict: Verdict) -> None:
        self.gathered = [peek.held]
        if verdict is Verdict.ERROR and peek.error is not None and peek.error.kind is not None:
            self._engine_error(peek.error)
        else:
            self.relay()

    def on_end(self) -> None:
        """The engine's answer is whole."""
        self._ended = True
        self.conn = None
        stage = self.stage
        if stage is _RELAYING:
            self.exchange.finished()
        elif stage is _COLLECTING:
            assert self.head is not None
            status = self.head.status
            error = read_error(b"".join(self.gathered), status=status) if status in _TELLING else None
            if error is not None and error.kind is not None:
                self._engine_error(error)
            else:
                self.relay()
        elif stage is _PEEKING:
            peek = self.peek
            assert peek is not None
            verdict = peek.finish()
            if verdict is Verdict.MORE:
                self._failed(Failure(Kind.CUT, "the stream ended before its first event"))
            else:
                self._peeked(peek, verdict)

    def on_failure(self, failure: Failure) -> None:
        """The engine's answer is not whole."""
        self.conn = None
        self._broken = failure
        if self.stage in (_RELAYING, _TUNNEL):
            self.exchange.broke_off(failure)
        elif self.stage not in (_JUDGING, _OVER):
            self._cancel_timer()
            self._failed(failure)

    def on_writable(self, writable: bool) -> None:
        """The engine takes (no) more of the request body for now."""
        if writable:
            self.exchange.client.resume_reading()
        else:
            self.exchange.client.pause_reading()

    def on_crash(self) -> None:
        """An event could not be handled."""
        self.exchange.crashed()

    # Failures before the first byte to the client

    def _engine_error(self, error: EngineError) -> None:
        assert self.head is not None
        self._failed(failure_of(error, self.head))

    def _failed(self, failure: Failure) -> None:
        """Report at once, or look at the engine first."""
        if failure.kind in (Kind.FAILED, Kind.CUT) and self.exchange.generation:
            self.stage = _JUDGING
            if self.conn is not None:
                # What follows an error event is not gathered without bound.
                self.conn.pause_reading()
            self._task = spawn(self._judge(failure), name="judge")
        else:
            self.exchange.failed(self, failure)

    async def _judge(self, failure: Failure) -> None:
        exchange = self.exchange
        try:
            dead, paused = await look_at(exchange.plane, self, failure)
            self._task = None
            if self.stage is _JUDGING:
                exchange.failed(self, failure, dead=dead, paused=paused)
        except Exception:
            exchange.crashed()

    # To the client

    def relay(self) -> None:
        """What was looked at belongs to the client: pass it on, and the rest as it comes."""
        head = self.head
        assert head is not None
        pending = self.gathered
        self.peek = None
        whole = self._ended or self._broken is not None or (self.conn is not None and self.conn.has_more)
        self._relay_head(head, more=whole or bool(pending))
        if self.stage is not _RELAYING:
            return
        self.gathered = []
        if pending:
            self.exchange.relay.data(b"".join(pending), self.heard, whole)
        if self._broken is not None:
            self.exchange.broke_off(self._broken)
        elif self._ended:
            self.exchange.finished()
        elif self.conn is not None and self.exchange.client.taking:
            self.conn.resume_reading()

    def _relay_head(self, head: Head, *, more: bool) -> None:
        self.stage = _RELAYING
        self.exchange.relay_begins(head, stream=self._stream, more=more)

    def _switch(self, head: Head) -> None:
        """101: bytes go both ways from here on. Only what the client asked for is tunnelled."""
        connection = self.conn
        upgrade = head.get(b"upgrade")
        if connection is None or not self.exchange.head.websocket or (upgrade or b"").lower() != b"websocket":
            self._failed(Failure(Kind.BROKEN, "the engine switched to a protocol that was not asked for"))
            return
        self.stage = _TUNNEL
        self.exchange.relay.switch(head)
        connection.tunnel = self._from_engine
        self.exchange.client.open_tunnel(connection.write)

    def _from_engine(self, data: bytes) -> None:
        if self.stage is not _TUNNEL:
            return
        if data:
            self.exchange.client.write(data)
        else:
            self.conn = None
            self.exchange.tunnel_closed()

    # The end

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release_connection(self) -> None:
        connection, self.conn = self.conn, None
        if connection is None:
            return
        if self.stage is _TUNNEL:
            # What the client said last, a close frame maybe, still goes out.
            connection.close()
        else:
            connection.detach()

    def end(self) -> None:
        """Every way out ends here: connection, task, timer and slot are given back, once."""
        if self.stage is _OVER:
            return
        self._release_connection()
        self.stage = _OVER
        self._cancel_timer()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.gathered = []
        self.engine.inflight -= 1
        self.exchange.slot_freed()
