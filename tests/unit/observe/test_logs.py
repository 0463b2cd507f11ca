from __future__ import annotations

import logging

import orjson
import pytest

from proxy.observe.logs import JsonFormatter, TextFormatter


def record(message="hello", **extra):
    made = logging.makeLogRecord({"name": "fleetgate.x", "levelno": logging.INFO, "levelname": "INFO", "msg": message})
    made.__dict__.update(extra)
    return made


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_record_is_one_line_whatever_is_in_it(formatter):
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    text = formatter.format(record("a\r\nb", engine="x\ny", exc_info=info))
    assert "\n" not in text
    assert "\r" not in text


def test_json_keeps_the_fields_apart():
    data = orjson.loads(JsonFormatter().format(record(engine="a:1", seconds=0.5, status=200)))
    assert (data["level"], data["logger"], data["message"]) == ("info", "fleetgate.x", "hello")
    assert (data["engine"], data["seconds"], data["status"]) == ("a:1", 0.5, 200)
    assert data["time"].endswith("Z")


def test_json_writes_what_json_does_not_know():
    assert orjson.loads(JsonFormatter().format(record(thing={1, 2})))["thing"] == "{1, 2}"


def test_text_has_the_fields_behind_the_message():
    assert TextFormatter().format(record(engine="a:1")).endswith("INFO fleetgate.x hello engine=a:1")
