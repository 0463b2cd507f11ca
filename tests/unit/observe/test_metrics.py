from __future__ import annotations

import asyncio

import pytest
from prometheus_client.exposition import generate_latest as generate_text
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from proxy.config import Settings
from proxy.core.engine_state import State
from proxy.data.plane import DataPlane
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.observe.control_stats import MAX_CALLS, ControlStats
from proxy.observe.exposition import Format
from proxy.observe.metrics import SAMPLES_A_PIECE, OwnPage
from proxy.observe.scrape import Scraper

CONTRACT = {
    "fleetgate_requests_total": {"route", "code"},
    "fleetgate_engine_requests_total": {"engine", "code"},
    "fleetgate_request_seconds": set(),
    "fleetgate_first_byte_seconds": set(),
    "fleetgate_inflight_requests": {"engine"},
    "fleetgate_held_requests": set(),
    "fleetgate_hold_seconds": set(),
    "fleetgate_retries_total": {"reason"},
    "fleetgate_engine_state": {"engine", "state"},
    "fleetgate_engine_weight_version_info": {"engine", "version"},
    "fleetgate_weight_versions_in_service": set(),
    "fleetgate_paused": set(),
    "fleetgate_pause_seconds": set(),
    "fleetgate_fanout_seconds": {"call"},
    "fleetgate_fanout_overhead_seconds": {"call"},
    "fleetgate_fanout_failures_total": {"call", "engine"},
    "fleetgate_client_disconnects_total": set(),
    "fleetgate_continued_requests_total": set(),
}


class Proxy:
    def __init__(self, *engines):
        self.fleet = Fleet(asyncio.get_running_loop().time)
        self.plane = DataPlane(Settings(), self.fleet)
        self.control = ControlStats()
        self.fleet.listeners.append(self.control.on_event)
        for name, state, version in engines:
            engine = Engine(name, f"http://{name}", None)
            engine.state, engine.version = state, version
            self.fleet.add(engine)
        self.own = OwnPage(self.plane, self.control, Scraper(self.fleet))

    def text(self):
        return b"".join(self.own.render(Format.TEXT)).decode()

    def value(self, name, **labels):
        for family in parse_text(self.text()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return None


async def test_every_family_of_the_contract_is_there_from_the_first_scrape():
    proxy = Proxy(("a:1", State.READY, "v1"))
    proxy.plane.stats.answered("/v1/completions", 200)
    text = proxy.text()
    samples = [sample for family in parse_text(text) for sample in family.samples]
    for name, labels in CONTRACT.items():
        assert f"# TYPE {name} " in text
        matching = [sample for sample in samples if sample.name in (name, f"{name}_count")]
        assert matching, name
        assert set(matching[0].labels) == labels, name


async def test_the_families_are_declared_even_without_engines_and_requests():
    text = Proxy().text()
    assert [name for name in CONTRACT if f"# TYPE {name} " not in text] == []
    assert "_created" not in text


async def test_openmetrics_parses_and_leaves_the_end_to_the_caller():
    proxy = Proxy(("a:1", State.FENCED, None), ("b:2", State.READY, 'v"1\\'))
    page = b"".join(proxy.own.render(Format.OPENMETRICS)).decode()
    assert "# EOF" not in page
    families = {family.name: family for family in parse_open(page + "# EOF\n")}
    assert families["fleetgate_requests"].type == "counter"
    assert families["fleetgate_engine_weight_version"].samples[0].labels == {"engine": "b:2", "version": 'v"1\\'}


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([], 0),
        ([("a", State.READY, "v1"), ("b", State.READY, "v1")], 1),
        ([("a", State.READY, "v1"), ("b", State.FENCED, "v0")], 2),
        ([("a", State.READY, "v1"), ("b", State.DOWN, "v0")], 1),
        ([("a", State.READY, "v1"), ("b", State.DRAINING, "v0")], 2),
    ],
)
async def test_versions_in_service_are_those_of_living_engines(engines, expected):
    assert Proxy(*engines).value("fleetgate_weight_versions_in_service") == expected


async def test_an_engine_is_in_one_state():
    proxy = Proxy(("a", State.FENCED, None))
    states = {state: proxy.value("fleetgate_engine_state", engine="a", state=str(state)) for state in State}
    assert states == {state: float(state is State.FENCED) for state in State}


async def test_a_control_call_is_counted_with_its_failed_legs():
    proxy = Proxy(("a", State.READY, "v1"), ("b", State.READY, "v1"))
    legs = {"a": (200, 0.2, "answered"), "b": (None, 0.1, "timed_out")}
    proxy.fleet.emit("control_call", call="pause", status=424, seconds=0.25, overhead_seconds=0.05, legs=legs)
    assert proxy.value("fleetgate_fanout_seconds_sum", call="pause") == 0.25
    assert proxy.value("fleetgate_fanout_overhead_seconds_bucket", call="pause", le="0.05") == 1
    assert proxy.value("fleetgate_fanout_failures_total", call="pause", engine="b") == 1
    assert proxy.value("fleetgate_fanout_failures_total", call="pause", engine="a") == 0
    assert proxy.value("fleetgate_fanout_seconds_count", call="resume") == 0


async def test_a_pause_is_timed_and_known_to_be_overdue_while_it_lasts():
    proxy = Proxy()
    proxy.plane.gate.close("t")
    proxy.fleet.emit("gate_closed", by="t")
    assert (proxy.value("fleetgate_paused"), proxy.value("fleetgate_pause_overdue")) == (1, 0)
    proxy.fleet.emit("pause_overdue", by="t", seconds=300.0)
    assert proxy.value("fleetgate_pause_overdue") == 1
    assert proxy.value("fleetgate_paused_for_seconds") >= 0
    proxy.plane.gate.open()
    proxy.fleet.emit("gate_opened", by="t", seconds=301.0)
    assert (proxy.value("fleetgate_paused"), proxy.value("fleetgate_pause_overdue")) == (0, 0)
    assert proxy.value("fleetgate_pause_seconds_sum") == 301.0


async def test_clients_cannot_grow_the_label_call_without_bound():
    proxy = Proxy()
    for number in range(3 * MAX_CALLS):
        proxy.fleet.emit("control_call", call=f"areal_{number}", status=200, seconds=0.1, overhead_seconds=0.0, legs={})
    assert len(proxy.control.fanout_seconds) <= MAX_CALLS + 1
    assert proxy.value("fleetgate_fanout_seconds_count", call="other") > MAX_CALLS


async def test_the_series_of_an_engine_that_left_go_with_it():
    proxy = Proxy(("a", State.READY, "v1"))
    proxy.plane.stats.engine_answered("a", 200)
    legs = {"a": (500, 0.1, "refused")}
    proxy.fleet.emit("control_call", call="pause", status=424, seconds=0.1, overhead_seconds=0.0, legs=legs)
    proxy.fleet.emit("engine_restarted", engine="a", boot=1, why="w")
    assert 'engine="a"' in proxy.text()
    proxy.fleet.remove(proxy.fleet.engines["a"])
    proxy.plane.stats.forget("a")
    assert 'engine="a"' not in proxy.text()


async def test_refused_calls_are_counted():
    proxy = Proxy()
    proxy.fleet.emit("control_refused", call="pause", status=409, code="conflict", holder=None)
    assert proxy.value("fleetgate_control_refused_total", call="pause", code="conflict") == 1


@pytest.mark.parametrize(("fmt", "generate"), [(Format.TEXT, generate_text), (Format.OPENMETRICS, generate_open)])
async def test_a_large_family_comes_in_pieces_that_are_one(fmt, generate):
    proxy = Proxy(*((f"e{number}:1", State.READY, "v1") for number in range(64)))
    pieces = list(proxy.own.render(fmt))
    for piece in pieces:
        samples = [line for line in piece.splitlines() if not line.startswith(b"#")]
        assert len(samples) <= SAMPLES_A_PIECE
    collector = proxy.own._collectors[0]
    whole = generate(collector).removesuffix(b"# EOF\n")
    assert b"".join(pieces).startswith(whole)
    assert whole.count(b"fleetgate_fanout_failures_total{") == 64 * 7
