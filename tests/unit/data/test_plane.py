"""Who may take a request, and who runs what."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.config import Settings
from proxy.core.engine_state import Event, State
from proxy.data.plane import DataPlane, Tracker
from proxy.data.upstream import Upstream
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet


class Request:
    """What the tracker sees of a request."""

    def __init__(self, id_bytes: bytes) -> None:
        self.id_bytes = id_bytes


def plane(count: int = 3, **settings: Any) -> DataPlane:
    fleet = Fleet(lambda: 0.0)
    made = DataPlane(Settings(policy=settings.pop("policy", "least_inflight"), **settings), fleet)
    for number in range(count):
        url = f"http://127.0.0.1:{number + 1}"
        engine = Engine(f"e{number}", url, Upstream(url), suspect=False)
        fleet.add(engine)
        fleet.apply(engine, Event.CAME, "x")
        fleet.apply(engine, Event.ADMIT, "x")
    return made


def test_tried_engines_are_left_out_while_others_are_left() -> None:
    made = plane()
    engines = list(made.fleet)
    for _ in range(10):
        assert made.pick(engines[:2], None, 0.0, generation=True) is engines[2]
    assert made.pick(engines, None, 0.0, generation=True) in engines
    assert made.others_left(engines[:2], generation=True)
    assert not made.others_left(engines, generation=True)


@pytest.mark.parametrize("key", [None, b"session"])
def test_tried_engines_are_left_out_whatever_the_session(key: bytes | None) -> None:
    made = plane(policy="sticky")
    first = made.pick([], key, 0.0, generation=True)
    assert first is not None
    for _ in range(10):
        assert made.pick([first], key, 0.0, generation=True) is not first


def test_a_full_engine_gets_no_generation_but_other_requests() -> None:
    made = plane(1, max_inflight=2)
    engine = next(iter(made.fleet))
    engine.inflight = 2
    assert made.pick([], None, 0.0, generation=True) is None
    assert not made.can_pass()
    assert made.pick([], None, 0.0, generation=False) is engine


def test_what_does_not_generate_may_go_to_a_fenced_engine_if_nobody_else_lives() -> None:
    made = plane(2)
    first, second = made.fleet
    made.fleet.apply(first, Event.FENCE, "x")
    made.fleet.apply(second, Event.LOST, "x")
    assert made.pick([], None, 0.0, generation=True) is None
    assert made.pick([], None, 0.0, generation=False) is first
    made.fleet.apply(first, Event.LOST, "x")
    assert first.state is State.DOWN
    assert made.pick([], None, 0.0, generation=False) is None


def test_the_tracker_knows_equal_ids_apart_and_forgets_all() -> None:
    tracker = Tracker()
    requests: list[Any] = [Request(name) for name in (b"a", b"a", b"a", b"b")]
    for request in requests:
        tracker.add(request)
    assert len(tracker) == 4
    assert tracker.find("a") == requests[:3]
    tracker.remove(requests[1])
    tracker.remove(requests[1])
    assert tracker.find("a") == [requests[0], requests[2]]
    stranger: Any = Request(b"b")
    tracker.remove(stranger)
    assert tracker.all() == [requests[0], requests[2], requests[3]]
    for request in requests:
        tracker.remove(request)
    assert len(tracker) == 0
    assert tracker.find("a") == []
    assert tracker.find("\u2603") == []


def test_trusted_peers() -> None:
    made = plane(1, trusted_proxies=["10.0.0.0/8", "::1/128"])
    assert made.trusts("10.1.2.3")
    assert made.trusts("::1")
    assert not made.trusts("127.0.0.1")
    assert not made.trusts("unix")


def test_ids_are_unique() -> None:
    made = plane(1)
    assert len({made.new_id(made.next_order()) for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("version", "field"),
    [
        (None, b"unknown"),
        ("step-7", b"step-7"),
        ("a\r\nX-Evil: 1", b"a??X-Evil: 1"),
        ("\u2603 \xe9", b"? \xe9"),
        ("", b""),
    ],
)
def test_a_label_becomes_a_field_value(version: str | None, field: bytes) -> None:
    made = plane(1)
    made.fleet.version = version
    assert made.version_header() == field
    made.fleet.version = None
    assert made.version_header() == b"unknown"
