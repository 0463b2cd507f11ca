"""Which routes run the model, which may run twice, and how each says an error inside a stream."""

from __future__ import annotations

import json

import pytest

from proxy.core.routes import GENERATION, Dialect, dialect, error_event, is_generation, is_repeatable, label


@pytest.mark.parametrize("path", GENERATION)
def test_generation_is_a_post_with_or_without_a_trailing_slash(path: bytes) -> None:
    assert is_generation(b"POST", path)
    assert is_generation(b"POST", path + b"/")
    assert not is_generation(b"GET", path)
    assert is_repeatable(b"POST", path)


@pytest.mark.parametrize("path", [b"/v1/models", b"/tokenize", b"/health", b"/v1/completions/x", b"/", b"/v1/realtime"])
def test_the_rest_is_not(path: bytes) -> None:
    assert not is_generation(b"POST", path)


@pytest.mark.parametrize(
    ("method", "path", "twice"),
    [
        (b"GET", b"/anything", True),
        (b"HEAD", b"/anything", True),
        (b"OPTIONS", b"*", True),
        (b"POST", b"/tokenize", True),
        (b"POST", b"/v1/messages/count_tokens/", True),
        (b"POST", b"/v1/files", False),
        (b"PUT", b"/v1/completions", False),
        (b"DELETE", b"/v1/models", False),
    ],
)
def test_what_may_run_twice(method: bytes, path: bytes, twice: bool) -> None:
    assert is_repeatable(method, path) is twice


def test_labels_cannot_be_grown_by_clients() -> None:
    assert label(b"/v1/completions/") == "/v1/completions"
    assert label(b"/v1/models") == "/v1/models"
    assert label(b"/v1/models/anything") == "other"


def test_error_events() -> None:
    def event(kind: Dialect) -> bytes:
        return error_event(kind, message='a "b"\n', error_type="T", code="c", status=502)

    openai = event(dialect(b"/v1/chat/completions"))
    assert openai.startswith(b"data: ")
    assert json.loads(openai[6:])["error"] == {"message": 'a "b"\n', "type": "T", "param": "c", "code": 502}
    anthropic = event(dialect(b"/v1/messages/"))
    assert anthropic.startswith(b"event: error\ndata: ")
    assert json.loads(anthropic[19:]) == {"type": "error", "error": {"type": "api_error", "message": 'a "b"\n'}}
    responses = event(dialect(b"/v1/responses"))
    assert json.loads(responses[19:])["type"] == "error"
    for one in (openai, anthropic, responses):
        assert one.endswith(b"\n\n")
        assert one.count(b"\n\n") == 1
