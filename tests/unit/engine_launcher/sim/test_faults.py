"""Fault rules."""

from __future__ import annotations

import pytest

from engine_launcher.sim.faults import Fault, Faults, parse_fault


def test_a_rule_is_found_by_path_and_method() -> None:
    faults = Faults()
    faults.replace([Fault(path="/v1/*", action="cut", method="post")])
    assert faults.strike("GET", "/v1/models") is None
    assert faults.strike("POST", "/pause") is None
    assert faults.strike("POST", "/v1/completions") is not None


def test_a_rule_wears_out() -> None:
    faults = Faults()
    faults.replace([Fault(path="*", action="cut", times=2)])
    assert [faults.strike("GET", "/x") is not None for _ in range(3)] == [True, True, False]


def test_the_first_rule_wins() -> None:
    faults = Faults()
    faults.replace([Fault(path="/a", action="cut"), Fault(path="*", action="reset")])
    struck = [faults.strike("GET", path) for path in ("/a", "/b")]
    assert [rule.action for rule in struck if rule is not None] == ["cut", "reset"]


def test_probability_is_a_share_and_repeatable() -> None:
    def struck() -> list[bool]:
        faults = Faults(seed=1)
        faults.replace([Fault(path="*", action="cut", probability=0.3)])
        return [faults.strike("GET", "/x") is not None for _ in range(1000)]

    assert struck() == struck()
    assert 200 < sum(struck()) < 400


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"action": "explode"}, "unknown fault action 'explode'"),
        ({"action": "cut", "pth": "/x"}, "unknown fault fields"),
        ({"action": "cut", "when": "later"}, "'before' or 'after'"),
    ],
)
def test_a_wrong_rule_is_explained(raw: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_fault(raw)


def test_a_rule_is_an_object() -> None:
    with pytest.raises(TypeError, match="JSON object"):
        parse_fault("cut")


def test_path_defaults_to_all() -> None:
    assert parse_fault({"action": "cut"}).path == "*"
