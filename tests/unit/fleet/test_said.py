import pytest

from proxy.data.upstream import Answer, Head
from proxy.fleet.said import paused_of, version_of, world_size_of


def answer(body, status=200):
    return Answer(Head(status, b"OK", [], len(body), False, True), body)


@pytest.mark.parametrize(
    ("body", "status", "want"),
    [
        (b'{"weight_version":"v1"}', 200, "v1"),
        (b'{"weight_version":7}', 200, "7"),
        (b'{"weight_version":null}', 200, None),
        (b'{"weight_version":"v1"}', 500, None),
        (b"<html>", 200, None),
        (b"[]", 200, None),
    ],
)
def test_versions(body, status, want):
    assert version_of(answer(body, status)) == want


@pytest.mark.parametrize(
    ("body", "want"), [(b'{"is_paused":true}', True), (b'{"is_paused":false}', False), (b'{"is_paused":1}', None)]
)
def test_pauses(body, want):
    assert paused_of(answer(body)) is want


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (b'{"world_size":4}', 4),
        (b'{"world_size":0}', None),
        (b'{"world_size":true}', None),
        (b'{"world_size":"4"}', None),
    ],
)
def test_sizes(body, want):
    assert world_size_of(answer(body)) == want


def test_no_answer_says_nothing():
    assert version_of(None) is paused_of(None) is world_size_of(None) is None
