from __future__ import annotations

import io

import pytest
from rich.console import Console

from proxy.status import plain, render_status, render_syncs, seconds


def shown(*parts, width=120):
    out = io.StringIO()
    console = Console(file=out, width=width)
    for part in parts:
        console.print(part)
    return out.getvalue()


def engine(name, **more):
    return {
        "id": name, "state": "ready", "reason": "same weights", "weight_version": "v1", "inflight": 3, "paused": False,
        "suspect": False, "plain": False, "updating": False, "asleep": [], "last_error": "", **more,
    }  # fmt: skip


def fleet(*engines, **more):
    return {
        "phase": "open", "weight_version": "v1", "ready": 1, "problem": None, "lifecycle": None,
        "gate": {"closed": False, "held_requests": 0, "seconds": 0.0, "by": None}, "engines": list(engines), **more,
    }  # fmt: skip


def test_an_open_fleet_at_a_glance():
    load = {"a:1": {"tokens_per_second": 1234.5, "running": 2.0, "waiting": 1.0, "kv_cache": 0.42}}
    text = shown(render_status(fleet(engine("a:1"), engine("b:2")), load))
    assert "open   weights v1   ready 1 of 2   held 0" in text
    (row,) = [line for line in text.splitlines() if line.startswith("a:1")]
    assert row.split() == ["a:1", "●", "ready", "v1", "3", "1,234", "2+1", "42", "%"]
    assert "gate closed" not in text


def test_a_paused_fleet_names_who_paused_it_and_who_holds_the_life_cycle():
    gate = {"closed": True, "held_requests": 7, "seconds": 61.0, "by": "/pause of 10.0.0.9"}
    holder = {"call": "/update_weights", "client": "10.0.0.9"}
    text = shown(render_status(fleet(engine("a:1", updating=True), phase="updating", gate=gate, lifecycle=holder), {}))
    assert "gate closed for 1 min 1 s by /pause of 10.0.0.9" in text
    assert "life-cycle held by /update_weights of 10.0.0.9" in text
    assert "held 7" in text
    assert "updating" in text


def test_a_fenced_engine_shows_its_reason_and_a_dead_one_its_error():
    text = shown(
        render_status(
            fleet(
                engine("a:1", state="fenced", reason="shows v0"),
                engine("b:2", state="down", reason="lost", last_error="connection refused", weight_version=None),
                problem="0 of 1 engines are ready",
            ),
            {},
        )
    )
    assert "▲ fenced" in text
    assert "shows v0" in text
    assert "lost; connection refused" in text
    assert "unknown" in text
    assert "0 of 1 engines are ready" in text


def test_what_comes_from_outside_cannot_speak_to_the_terminal():
    bad = "\x1b[31mred[bold]"
    text = shown(render_status(fleet(engine("a:1", weight_version=bad), weight_version=bad), {}))
    assert "\x1b" not in text
    assert "[31mred[bold]" in text
    assert plain("a\nb\x1b\u202ec") == "a\ufffdb\ufffd\ufffdc"


def call(name, spent, status=200, count=1, **legs):
    legs = legs or {"h:1": (spent, "answered"), "h:2": (spent / 2, "answered")}
    return {
        "call": name, "phase": name, "count": count, "ended": spent, "status": status, "started": 0.0, "seconds": spent, "overhead_seconds": 0.001,
        "legs": {engine: {"status": 200, "seconds": leg[0], "outcome": leg[1]} for engine, leg in legs.items()},
    }  # fmt: skip


def sync(*calls, **more):
    return {
        "number": 4, "outcome": "ok", "version": "v2", "started": 0.0, "ended": 1.0, "seconds": 1.5, "trouble": [],
        "running": None, "calls": list(calls), "dropped_calls": 0, **more,
    }  # fmt: skip


def test_a_report_has_a_line_for_each_call_and_a_column_for_each_engine():
    text = shown(*render_syncs([sync(call("pause", 0.02), call("update_weights", 2.0))]))
    assert text.startswith("sync 4 -> v2")
    lines = [line.split() for line in text.splitlines()]
    assert ["Call", "Status", "Whole", "Overhead", ":1", ":2"] in lines
    assert ["pause", "200", "20", "ms", "1", "ms", "20", "ms", "10", "ms"] in lines


def test_many_buckets_of_one_update_are_one_line():
    text = shown(*render_syncs([sync(call("update_weights", 20.0, count=40), dropped_calls=2)]))
    assert "update_weights x40" in text
    assert "20.0 s" in text
    assert "and 2 more calls" in text


def test_a_large_fleet_is_summed_up_and_its_slowest_engine_named():
    legs = {f"h:{number}": (float(number), "answered") for number in range(1, 20)}
    legs["h:3"] = (3.0, "died")
    text = shown(*render_syncs([sync(call("pause", 19.0, 424, **legs), outcome="failed", trouble=["pause: h:3 died"])]))
    assert "19.0 s h:19; h:3 died" in text
    assert "10.0 s" in text
    assert "pause: h:3 died" in text


def test_one_that_runs_names_its_call():
    assert "update_weights is running" in shown(
        *render_syncs([sync(outcome="running", running={"call": "update_weights"}, version=None)])
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0123, "12 ms"), (1.0, "1.0 s"), (59.94, "59.9 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")],
)
def test_durations_are_for_people(value, expected):
    assert seconds(value) == expected
