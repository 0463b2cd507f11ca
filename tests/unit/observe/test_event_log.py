from __future__ import annotations

import logging
import re
from pathlib import Path

import orjson
import pytest

from proxy.observe import event_log
from proxy.observe.events import KINDS
from proxy.observe.logs import JsonFormatter, TextFormatter

PROXY = Path(__file__).parents[3] / "proxy"


@pytest.fixture
def records():
    """Filled while the test runs."""
    made = []

    class Keep(logging.Handler):
        def emit(self, record):
            made.append(record)

    logger = logging.getLogger("fleetgate.events")
    handler = Keep()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield made
    logger.removeHandler(handler)
    logger.setLevel(before)


def call(name="pause", status=200, **legs):
    return {
        "call": name, "status": status, "seconds": 0.25, "overhead_seconds": 0.05, "legs": legs,
        "client": "127.0.0.1", "request_id": "step-1",
    }  # fmt: skip


def test_a_control_call_is_one_record_with_its_times(records):
    event_log.on_event("control_call", call(a=(200, 0.1, "answered"), b=(200, 0.2, "answered")))
    (record,) = records
    data = orjson.loads(JsonFormatter().format(record))
    assert data["message"] == "control call"
    assert {key: data[key] for key in ("call", "status", "seconds", "overhead_seconds", "engines", "slowest", "client", "request_id")} == {
        "call": "pause", "status": 200, "seconds": 0.25, "overhead_seconds": 0.05, "engines": 2, "slowest": "b",
        "client": "127.0.0.1", "request_id": "step-1",
    }  # fmt: skip


def test_a_failed_call_names_its_engines_but_not_hundreds(records):
    legs = {f"e{number}": (None, 0.1, "died") for number in range(300)}
    event_log.on_event("control_call", call(status=424, **legs))
    (record,) = records
    assert record.levelno == logging.WARNING
    assert record.failed_count == 300
    assert len(record.failed) == event_log.MAX_NAMED
    assert record.failed["e0"] == "died (None)"


def test_polls_of_a_trainer_are_not_logged(records):
    event_log.on_event("control_call", call("is_paused", a=(200, 0.1, "answered")))
    assert records == []


def test_every_kind_of_event_can_be_logged(records):
    for kind in KINDS - {"control_call"}:
        event_log.on_event(kind, {"engine": "a", "name": "n", "message": "m", "args": (1,)})
    assert {record.msg for record in records} == {text for _, text in event_log._TOLD.values()}
    for record in records:
        assert "event_name=n" in TextFormatter().format(record)


def test_the_kinds_that_are_told_exist():
    assert set(event_log._TOLD) <= KINDS


def test_every_kind_that_is_emitted_is_listed_and_told_apart_on_the_live_page():
    sources = [path.read_text() for path in PROXY.rglob("*.py")]
    emitted = {kind for source in sources for kind in re.findall(r'emit\(\s*"(\w+)"', source)}
    assert emitted == KINDS
    shown = set(re.findall(r"^  (\w+): \(e\) =>", (PROXY / "observe" / "ui.js").read_text(), re.MULTILINE))
    assert shown <= KINDS
    # What the page shows elsewhere, or what would drown the rest.
    assert KINDS - shown == {"engine_checked", "probe", "sync_phase", "lifecycle"}
