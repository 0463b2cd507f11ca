"""Errors of the proxy's own, as bytes."""

from __future__ import annotations

import json

import pytest

from proxy import errors
from proxy.data.replies import REASONS, error_answer


def leaves(kind: type[errors.FleetgateError]) -> list[type[errors.FleetgateError]]:
    below = [leaf for child in kind.__subclasses__() for leaf in leaves(child)]
    return [kind, *below]


@pytest.mark.parametrize("kind", leaves(errors.FleetgateError))
def test_every_error_has_a_reason_phrase(kind: type[errors.FleetgateError]) -> None:
    assert kind.status in REASONS


def test_the_shape() -> None:
    error = errors.HoldTimeout('waited "long"\r\n', retry_after=5)
    head, _, body = error_answer(error, close=True, extra=[("X-Request-Id", "a\xe9\u2603")]).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"X-Fleetgate-Error: hold_timeout" in head
    assert b"Retry-After: 5" in head
    assert b"Connection: close" in head
    assert b"X-Request-Id: a\xe9?" in head
    assert b"Content-Length: %d" % len(body) in head
    assert json.loads(body)["error"] == {
        "message": 'waited "long"\r\n',
        "type": "ServiceUnavailableError",
        "param": None,
        "code": "hold_timeout",
    }


def test_an_answer_to_head_has_the_length_but_not_the_body() -> None:
    answer = error_answer(errors.NoEngine("x"), close=False, bodyless=True)
    assert answer.endswith(b"\r\n\r\n")
    assert b"Content-Length: 0" not in answer
    assert b"Connection: close" not in answer
