"""OpenTelemetry spans: one a request, one a control call with a child for each engine's leg.

The client's ``traceparent`` (W3C Trace Context) is the parent; an engine gets that of its request's or its leg's span
in its stead. Spans carry what log records carry: never bodies, queries, header values or credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy.core import routes
from proxy.errors import PartialFailure

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from proxy.control.asked import Asked, Reply
    from proxy.control.fanout import Runner, Shot
    from proxy.core.merge import Leg
    from proxy.data.exchange import Exchange
    from proxy.fleet.engine import Engine

FLUSH_SECONDS = 3.0
"""Seconds that a stop waits for spans to be sent; a collector that hangs must not keep the proxy from ending."""
TRACE_FIELDS = frozenset({b"traceparent", b"tracestate"})
"""Fields of W3C Trace Context, in lower case. Both are replaced: a state belongs to the parent that it came with."""

Fields = Iterable[tuple[bytes, bytes]]

_context = TraceContextTextMapPropagator()


def exporting() -> TracerProvider:
    """A provider that sends spans by OTLP over HTTP, as the ``OTEL_*`` variables say."""
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    about = {"service.version": version("fleetgate")} | ({} if named else {"service.name": "fleetgate"})
    # Its own hook at the end of the process may wait half a minute for a collector.
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _parent(fields: Fields) -> Context:
    """The context that a client sent along; empty if it sent none that is valid."""
    carrier = {
        name.lower().decode("latin-1"): value.decode("latin-1")
        for name, value in fields
        if name.lower() in TRACE_FIELDS
    }
    return _context.extract(carrier)


def _with(fields: Fields, span: Span) -> list[tuple[bytes, bytes]]:
    """These fields with this span as the parent."""
    carrier: dict[str, str] = {}
    _context.inject(carrier, set_span_in_context(span))
    mine = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in carrier.items()]
    return [field for field in fields if field[0].lower() not in TRACE_FIELDS] + mine


class Spans:
    """Makes the spans of this process.

    Args:
        provider: where they go.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("fleetgate", version("fleetgate"))
        self._open: dict[Exchange, Span] = {}

    # Requests

    def _begin(self, exchange: Exchange) -> Span:
        """The span of a request, from the moment in which its head was read."""
        head = exchange.head
        route = routes.label(head.path)
        method = head.method.decode("latin-1")
        age = exchange.client.loop.time() - exchange.started
        return self._tracer.start_span(
            method if route == "other" else f"{method} {route}",
            context=_parent(head.fields),
            kind=SpanKind.SERVER,
            start_time=time.time_ns() - int(age * 1e9),
            attributes={
                "http.request.method": method,
                "url.path": exchange.route,
                "client.address": exchange.client.peer.decode("latin-1"),
                "fleetgate.request_id": exchange.request_id,
            }
            | ({} if route == "other" else {"http.route": route}),
        )

    def fields(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        """A request goes to its first engine: its fields, with its span for the parent of what engines do."""
        span = self._open.get(exchange)
        if span is None:
            span = self._open[exchange] = self._begin(exchange)
        # From the beginning of the span to here it waited: for its body, at the gate, for an engine.
        span.add_event("sent to an engine")
        return _with(exchange.head.fields, span)

    def request_over(self, exchange: Exchange, status: int, seconds: float) -> None:  # noqa: ARG002 - as access.record
        """One request is finished.

        Args:
            exchange: the request.
            status: what the client got; 499 if it went away.
            seconds: from its head to the last byte of its answer.
        """
        span = self._open.pop(exchange, None) or self._begin(exchange)
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("fleetgate.attempts", exchange.attempts)
        if exchange.last_engine is not None:
            span.set_attribute("fleetgate.engine", exchange.last_engine.id)
            span.set_attribute("fleetgate.weight_version", exchange.version.decode("latin-1"))
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    # Control calls

    @contextmanager
    def call(self, asked: Asked) -> Iterator[CallSpan]:
        """The span of a control call, current while it runs so that its legs find it."""
        with self._tracer.start_as_current_span(
            f"{asked.method} {asked.call.path}",
            context=_parent(asked.headers),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": asked.method,
                "http.route": asked.call.path,
                "client.address": asked.client,
                "fleetgate.call": asked.call.name,
                "fleetgate.request_id": asked.request_id,
            },
        ) as span:
            yield CallSpan(span)

    def legs(self, runner: Runner) -> Runner:
        """The same runner with a span around each leg."""

        async def run(engine: Engine, shot: Shot) -> Leg:
            with self._tracer.start_as_current_span(
                f"{shot.method} {shot.call.path} {engine.id}",
                kind=SpanKind.CLIENT,
                attributes={
                    "http.request.method": shot.method,
                    "url.full": engine.url + shot.call.path,
                    "fleetgate.call": shot.call.name,
                    "fleetgate.engine": engine.id,
                },
            ) as span:
                leg = await runner(engine, replace(shot, headers=tuple(_with(shot.headers, span))))
                span.set_attribute("fleetgate.outcome", str(leg.outcome))
                if leg.status is not None:
                    span.set_attribute("http.response.status_code", leg.status)
                if not leg.ok:
                    span.set_status(Status(StatusCode.ERROR, leg.detail or str(leg.outcome)))
                return leg

        return run

    async def stop(self) -> None:
        """Send what is left, for at most `FLUSH_SECONDS`."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def flush() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop may have ended without us
                loop.call_soon_threadsafe(done.set)

        # A daemon, not the loop's executor: that one is waited for without a limit when the loop ends.
        threading.Thread(target=flush, name="send spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await done.wait()


class CallSpan:
    """The span of one control call."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def answered(self, reply: Reply) -> None:
        """The trainer gets this."""
        span = self._span
        span.set_attribute("http.response.status_code", reply.status)
        span.set_attribute("fleetgate.engines", len(reply.legs))
        if reply.status >= 500 or reply.status == PartialFailure.status:
            failed = ", ".join(leg.engine for leg in reply.legs if not leg.ok)
            span.set_status(Status(StatusCode.ERROR, f"failed at {failed}" if failed else None))
