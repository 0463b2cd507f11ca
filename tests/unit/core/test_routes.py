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


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/%63ompletions",
        b"/v1%2fcompletions",
        b"/%76%31/completions",
        b"//v1/completions",
        b"/v1//completions/",
        b"/v1/./completions",
        b"/x/../v1/completions",
        b"/v1/completions%0a",
        b"/v1/completions;a=b",
        b"/v1\\completions",
        b"/v1/%2563ompletions",
    ],
)
def test_an_odd_spelling_that_an_engine_may_decode_is_the_same_route(path: bytes) -> None:
    assert is_generation(b"POST", path)
    assert is_repeatable(b"POST", path)
    assert not is_generation(b"GET", path)
    assert label(path) == "/v1/completions"
    assert dialect(path.replace(b"ompletions", b"ompletions/../messages")) is Dialect.ANTHROPIC


def test_a_usual_path_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.core.spelling.normal_form", None)
    assert is_generation(b"POST", b"/v1/completions")
    assert not is_generation(b"POST", b"/tokenize")
    assert not is_generation(b"GET", b"/v1/%63ompletions")
    assert label(b"/v1/models") == "/v1/models"


@pytest.mark.parametrize("path", [b"/v1/responses/resp_1", b"/v1/responses/resp_1/cancel", b"/v1/responses/r%31/"])
def test_a_stored_response_is_no_generation_but_speaks_its_protocol(path: bytes) -> None:
    for method in (b"GET", b"POST", b"DELETE"):
        assert not is_generation(method, path)
    assert dialect(path) is Dialect.RESPONSES


@pytest.mark.parametrize(
    "path",
    [b"/v1/models", b"/tokenize", b"/health", b"/v1/completions/x", b"/v1/completions%2fx", b"/", b"/v1/realtime"],
)
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
        (b"POST", b"/v1/chat/completions/derender", True),
        (b"POST", b"/cohere/v2/chat/render", True),
        (b"POST", b"/v1/responses/r/cancel", False),
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
    cohere = event(dialect(b"/cohere/v2/chat"))
    assert json.loads(cohere[6:]) == {
        "type": "message-end",
        "delta": {"error": 'a "b"\n', "finish_reason": "ERROR"},
    }
    for one in (openai, anthropic, responses, cohere):
        assert one.endswith(b"\n\n")
        assert one.count(b"\n\n") == 1
