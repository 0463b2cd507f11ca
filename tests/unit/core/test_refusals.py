"""An engine's error answer, told inside a stream that had begun before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.refusals import LONGEST, refusal_event
from proxy.core.routes import Dialect

TEXT = "max_tokens must be at least 1, got 0."
OPENAI = {"error": {"message": TEXT, "type": "BadRequestError", "param": "max_tokens", "code": 400}}


def told(kind: Dialect, status: int, body: bytes) -> dict[str, Any]:
    event = refusal_event(kind, status, body)
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
    return json.loads(event.partition(b"data: ")[2])


def test_the_error_object_of_an_openai_route_comes_as_it_was() -> None:
    assert told(Dialect.OPENAI, 400, json.dumps(OPENAI).encode()) == OPENAI
    more = {"error": OPENAI["error"] | {"hint": [1, 2]}}
    assert told(Dialect.OPENAI, 400, json.dumps(more, indent=2).encode()) == more


def test_other_protocols_get_it_in_their_own_shape() -> None:
    body = json.dumps(OPENAI).encode()
    responses = told(Dialect.RESPONSES, 400, body)
    assert responses == {"type": "error", "code": "400", "message": TEXT, "param": "max_tokens", "sequence_number": 0}
    assert told(Dialect.COHERE, 400, body)["delta"] == {"error": TEXT, "finish_reason": "ERROR"}
    anthropic = {"type": "error", "error": {"type": "invalid_request_error", "message": TEXT}}
    assert told(Dialect.ANTHROPIC, 400, json.dumps(anthropic).encode()) == anthropic
    assert refusal_event(Dialect.ANTHROPIC, 400, body).startswith(b"event: error\ndata: ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":"no such thing"}', "no such thing"),
        (b'{"object":"error","message":"no such thing"}', "no such thing"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"msg":"missing"}]}', '{"detail":[{"msg":"missing"}]}'),
        (b"Bad Gateway\n", "Bad Gateway"),
        (b"[1]", "[1]"),
        (b'{"error":{"message":"cut of', '{"error":{"message":"cut of'),
        (b"x" * 2 * LONGEST, "x" * LONGEST),
        (b"", "the engine answered status 418"),
        (b'{"error":{"message":null}}', '{"error":{"message":null}}'),
    ],
)
def test_any_other_body_is_told_as_far_as_it_says_something(body: bytes, message: str) -> None:
    error = told(Dialect.OPENAI, 418, body)["error"]
    assert error["message"] == message
    assert (error["code"], error["type"], error["param"]) == (418, "BadRequestError", None)


@pytest.mark.parametrize(
    ("kind", "status", "name"),
    [
        (Dialect.OPENAI, 422, "BadRequestError"),
        (Dialect.OPENAI, 500, "InternalServerError"),
        (Dialect.ANTHROPIC, 422, "invalid_request_error"),
        (Dialect.ANTHROPIC, 500, "api_error"),
    ],
)
def test_whose_fault_it_is_can_be_told(kind: Dialect, status: int, name: str) -> None:
    assert told(kind, status, b"no")["error"]["type"] == name
