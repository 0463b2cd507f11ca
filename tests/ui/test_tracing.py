"""Spans of requests and control calls, as an exporter gets them and as engines see their parent."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from proxy import app as proxy_app
from proxy import extras
from proxy.config import Settings
from proxy.observe import spans as spans_module
from proxy.observe import tracing
from proxy.observe.spans import Spans
from proxy.sources import ConfigError, check_safety
from tests.scenarios.control.mock import MockEngine
from tests.tools.process import proxy_process

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "X-Request-Id": "rollout-7"}
BODY = {"model": "m", "prompt": "canary-prompt"}


class Traced:
    def __init__(self, engines, app, session, exporter):
        self.engines = engines
        self.app = app
        self.session = session
        self.exporter = exporter

    async def post(self, path, headers=None, **what):
        async with self.session.post(self.app.url + path, headers=headers, **what) as answer:
            return answer.status, await answer.text()

    def spans(self, name):
        return [span for span in self.exporter.get_finished_spans() if span.name.startswith(name)]

    async def span(self, name):
        """The one of this name; the last byte may reach the client a moment before the span ends."""
        async with asyncio.timeout(10):
            while not self.spans(name):
                await asyncio.sleep(0.01)
        (span,) = self.spans(name)
        return span

    def heard(self, path):
        """The trace fields that each engine got with its last request for this path."""
        return [
            {name.lower(): value for name, value in engine.calls(path)[-1].headers if name.lower().startswith("trace")}
            for engine in self.engines
            if engine.calls(path)
        ]


@pytest.fixture
async def traced():
    engines = [await MockEngine().start() for _ in range(2)]
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = Settings(engine=[engine.url for engine in engines], port=0, drain_timeout=0.0, max_attempts=2)
    app = await proxy_app.start(settings, Spans(provider))
    async with aiohttp.ClientSession() as session:
        yield Traced(engines, app, session, exporter)
    await app.stop()
    for engine in engines:
        await engine.kill()


def hexes(span):
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


async def test_a_request_is_a_span_between_the_clients_and_the_engines(traced):
    status, _ = await traced.post("/v1/completions?secret=canary-query", HEADERS, json=BODY)
    assert status == 200
    span = await traced.span("POST /v1/completions")
    trace, own = hexes(span)
    assert (trace, f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.kind is SpanKind.SERVER
    (heard,) = traced.heard("/v1/completions")
    assert heard == {"traceparent": f"00-{TRACE}-{own}-01", "tracestate": "vendor=1"}
    attributes = dict(span.attributes)
    assert attributes["http.response.status_code"] == 200
    assert attributes["fleetgate.engine"] in {engine.id for engine in traced.engines}
    assert attributes["fleetgate.weight_version"] == "default"
    assert attributes["fleetgate.attempts"] == 1
    assert attributes["fleetgate.request_id"] == "rollout-7"
    assert [event.name for event in span.events] == ["sent to an engine"]
    assert "canary" not in span.to_json()


async def test_without_a_parent_a_trace_begins_here(traced):
    await traced.post("/v1/completions", {"tracestate": "orphan=1", "traceparent": "nonsense"}, json=BODY)
    span = await traced.span("POST /v1/completions")
    trace, own = hexes(span)
    assert span.parent is None
    (heard,) = traced.heard("/v1/completions")
    assert heard == {"traceparent": f"00-{trace}-{own}-{span.context.trace_flags:02x}"}


async def test_a_parent_that_is_not_sampled_makes_no_span_and_is_passed_on_as_such(traced):
    await traced.post("/v1/completions", {"traceparent": f"00-{TRACE}-{PARENT}-00"}, json=BODY)
    await traced.post("/v1/completions", HEADERS, json=BODY)
    await traced.span("POST /v1/completions")
    flags = [seen.headers for engine in traced.engines for seen in engine.calls("/v1/completions")]
    told = [value for headers in flags for name, value in headers if name.lower() == "traceparent"]
    assert sorted(value[-2:] for value in told) == ["00", "01"]
    assert {value.split("-")[1] for value in told} == {TRACE}


async def test_a_request_that_failed_everywhere_is_one_span_with_its_attempts(traced):
    for engine in traced.engines:
        engine.fail("/v1/completions", "drop")
    status, _ = await traced.post("/v1/completions", HEADERS, json=BODY)
    assert status >= 500
    span = await traced.span("POST /v1/completions")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["fleetgate.attempts"] == 2


async def test_a_request_that_no_engine_ever_got_has_a_span(traced):
    traced.app.plane.gate.close("a test")
    with pytest.raises(TimeoutError):
        await traced.post("/v1/completions", HEADERS, json=BODY, timeout=aiohttp.ClientTimeout(0.2))
    span = await traced.span("POST /v1/completions")
    assert span.attributes["http.response.status_code"] == 499
    assert (span.events, "fleetgate.engine" in span.attributes) == ((), False)
    traced.app.plane.gate.open()


async def test_an_unknown_path_does_not_become_a_name(traced):
    await traced.post("/someone/made/this/up", HEADERS)
    span = await traced.span("POST")
    assert (span.name, span.attributes["url.path"]) == ("POST", "/someone/made/this/up")


async def test_a_control_call_is_a_span_with_a_child_for_each_leg(traced):
    status, _ = await traced.post("/pause?mode=keep", HEADERS)
    assert status == 200
    legs = {span.attributes["fleetgate.engine"]: span for span in traced.spans("POST /pause 127")}
    (call,) = (span for span in traced.spans("POST /pause") if span.name == "POST /pause")
    assert f"{call.parent.span_id:016x}" == PARENT
    assert set(legs) == {engine.id for engine in traced.engines}
    assert {leg.parent.span_id for leg in legs.values()} == {call.context.span_id}
    assert {leg.kind for leg in legs.values()} == {SpanKind.CLIENT}
    assert call.attributes["fleetgate.engines"] == 2
    assert traced.heard("/pause") == [
        {"traceparent": f"00-{TRACE}-{hexes(legs[engine.id])[1]}-01", "tracestate": "vendor=1"}
        for engine in traced.engines
    ]
    assert [dict(traced.engines[0].calls("/pause")[-1].headers)["X-Request-Id"]] == ["rollout-7"]


async def test_a_leg_that_failed_is_marked_and_so_is_its_call(traced):
    traced.engines[1].fail("/pause", "status", status=500)
    status, _ = await traced.post("/pause?mode=keep", HEADERS)
    assert status == 424
    (call,) = (span for span in traced.spans("POST /pause") if span.name == "POST /pause")
    assert call.status.status_code is StatusCode.ERROR
    assert traced.engines[1].id in call.status.description
    told = {span.attributes["fleetgate.engine"]: span.status.status_code for span in traced.spans("POST /pause 127")}
    assert told == {traced.engines[0].id: StatusCode.UNSET, traced.engines[1].id: StatusCode.ERROR}


async def test_while_it_is_off_the_clients_trace_goes_on_untouched():
    engine = await MockEngine().start()
    app = await proxy_app.start(Settings(engine=[engine.url], port=0, drain_timeout=0.0))
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{app.url}/v1/completions", headers=HEADERS, json=BODY) as answer,
        ):
            assert answer.status == 200
        headers = dict(engine.calls("/v1/completions")[-1].headers)
        assert {name: headers[name] for name in HEADERS} == HEADERS
        assert app.plane.on_over == []
    finally:
        await app.stop()
        await engine.kill()


@pytest.mark.parametrize(
    ("setting", "environ", "on"),
    [
        (None, {}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        (False, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, False),
        (True, {}, True),
    ],
)
def test_who_turns_it_on(setting, environ, on):
    assert tracing.wanted(Settings(otel=setting), environ) is on


def test_without_the_extra_the_flag_is_an_error_and_the_variable_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(extras, "otel_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'fleetgate\[otel\]'"):
        check_safety(Settings(otel=True))
    monkeypatch.setattr(tracing, "wanted", lambda settings: True)
    assert tracing.start(Settings()) is None
    assert "fleetgate[otel]" in caplog.text


async def test_a_collector_that_hangs_does_not_keep_the_proxy_from_stopping(monkeypatch):
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    release = asyncio.Event()

    async def hang(reader, writer):
        asked.set()
        await release.wait()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(spans_module, "FLUSH_SECONDS", 0.05)
    spans = tracing.start(Settings())
    assert spans is not None
    spans._tracer.start_span("one").end()
    before = loop.time()
    await spans.stop()
    assert loop.time() - before < 30
    await asyncio.wait_for(asked.wait(), 10)
    release.set()
    server.close()


class Refusing(SpanExporter):
    def export(self, spans):
        return SpanExportResult.FAILURE


async def test_spans_that_cannot_be_sent_harm_no_request():
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Refusing()))
    engine = await MockEngine().start()
    app = await proxy_app.start(Settings(engine=[engine.url], port=0, drain_timeout=0.0), Spans(provider))
    try:
        async with aiohttp.ClientSession() as session, session.post(f"{app.url}/v1/completions", json=BODY) as answer:
            assert answer.status == 200
    finally:
        await app.stop()
        await engine.kill()


@pytest.fixture
async def collector(monkeypatch):
    """What an OTLP collector was sent: (service, span) each."""
    got = []

    async def take(request):
        for resource in ExportTraceServiceRequest.FromString(await request.read()).resource_spans:
            (service,) = (
                item.value.string_value for item in resource.resource.attributes if item.key == "service.name"
            )
            got.extend((service, span) for scope in resource.scope_spans for span in scope.spans)
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{runner.addresses[0][1]}")
    yield got
    await runner.cleanup()


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_collector_gets_everything_when_the_proxy_stops(collector, workers):
    engine = await MockEngine().start()
    async with aiohttp.ClientSession() as session, proxy_process(engine.url, workers=workers) as proxy:
        for path in ("/v1/completions", "/pause", "/resume"):
            async with session.post(proxy.url + path, headers=HEADERS, json=BODY) as answer:
                assert answer.status == 200
    await engine.kill()
    assert {service for service, _ in collector} == {"fleetgate"}
    assert sorted(span.name for _, span in collector) == [
        "POST /pause", f"POST /pause {engine.id}", "POST /resume", f"POST /resume {engine.id}", "POST /v1/completions",
    ]  # fmt: skip
    assert {span.trace_id.hex() for _, span in collector} == {TRACE}
