import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.balancing.keys import MAX_KEY_BYTES, SCAN_BYTES, prompt_of, session_of, session_pattern

PATTERN = session_pattern(["session_id", "user"])


def pieces(data, seed):
    random = Random(seed)
    out = []
    while data:
        size = random.randrange(1, max(2, len(data)))
        out.append(data[:size])
        data = data[size:]
    return out


def test_no_fields_no_pattern():
    assert session_pattern([]) is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("order", [1, -1])
def test_the_field_is_found_before_and_after_a_long_prompt_in_any_pieces(seed, order):
    members = [("session_id", "rollout-7"), ("model", "m"), ("prompt", "x" * 50_000)][::order]
    body = json.dumps(dict(members)).encode()
    assert session_of(pieces(body, seed), PATTERN) == b"rollout-7"


@pytest.mark.parametrize("body", [b'{"user" : "u"}', b'{"user":\n"u","n":1}', b'{"n":1,"user":"u"}'])
def test_any_spacing(body):
    assert session_of([body], PATTERN) == b"u"


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"",
        b'{"user": 7}',
        b'{"user": null}',
        b'{"user": ""}',
        b'{"users": "u"}',
        b'{"User": "u"}',
        b'{"other": "user"}',
        json.dumps({"user": "u" * (MAX_KEY_BYTES + 1)}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode(),
    ],
)
def test_what_is_no_key(body):
    assert session_of([body], PATTERN) is None


@given(st.text(max_size=40))
def test_a_prompt_cannot_pass_for_the_field(tail):
    body = json.dumps({"prompt": f'"session_id": "forged", "user":"forged"{tail}'}).encode()
    assert session_of([body], PATTERN) is None


def test_the_middle_of_a_body_is_not_searched():
    filler = "x" * SCAN_BYTES
    body = json.dumps({"a": filler, "user": "u", "b": filler}).encode()
    assert session_of([body], PATTERN) is None


def test_a_name_is_taken_to_the_letter():
    assert session_of([b'{"a.b": "u"}'], session_pattern(["a.b"])) == b"u"
    assert session_of([b'{"axb": "u"}'], session_pattern(["a.b"])) is None


@pytest.mark.parametrize("field", ["prompt", "messages", "input", "token_ids", "prompt_token_ids"])
@pytest.mark.parametrize("seed", range(5))
def test_what_stands_before_the_prompt_does_not_matter(field, seed):
    value = [1, 2, 3] * 500
    plain = json.dumps({field: value}).encode()
    other = json.dumps({"seed": seed, "request_id": f"r{seed}", "temperature": 0.7, field: value, "n": seed}).encode()
    assert prompt_of(pieces(plain, seed), 1000) == prompt_of(pieces(other, seed + 1), 1000)
    assert len(prompt_of([plain], 1000)) == 1000


def test_a_field_named_inside_a_text_is_not_the_prompt():
    body = json.dumps({"system": 'say "prompt": now', "prompt": "real"}).encode()
    assert prompt_of([body], 100).strip().startswith(b'"real"')


def test_without_a_prompt_field_near_the_beginning_the_body_itself_is_it():
    body = json.dumps({"tools": "x" * 10_000, "messages": []}).encode()
    assert prompt_of([body], 64) == body[:64]


def test_what_has_come_so_far_is_enough():
    assert prompt_of([b'{"prompt": "abc'], 100) == b' "abc'
    assert prompt_of([], 100) == b""
