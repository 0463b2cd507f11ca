from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.admission import DEFAULT, UNKNOWN_EPOCH, Decision, Facts, judge, next_label, vote

GOOD = Facts(version="v1", fleet_version="v1", pristine=False, epoch=3, fleet_epoch=3, recorded=True)

TABLE = [
    ("holds the fleet's weights", GOOD, Decision.ADMIT),
    ("plain", Facts(plain=True), Decision.ADMIT),
    ("plain in a fleet with versions", Facts(plain=True, pristine=False, fleet_version="v1"), Decision.ADMIT),
    ("lost its RL routes", Facts(plain=True, was_rl=True, pristine=False), Decision.FENCE),
    ("lost its RL routes before any update", Facts(plain=True, was_rl=True), Decision.ADMIT),
    ("has not said its version", Facts(), Decision.FENCE),
    ("pristine", Facts(version=DEFAULT, fleet_version=DEFAULT), Decision.ADMIT),
    ("restarted, pristine", Facts(version=DEFAULT, fleet_version=DEFAULT, epoch=UNKNOWN_EPOCH), Decision.ADMIT),
    ("restarted", replace(GOOD, epoch=UNKNOWN_EPOCH), Decision.COMPARE),
    ("restarted to the default", replace(GOOD, version=DEFAULT, epoch=UNKNOWN_EPOCH), Decision.COMPARE),
    ("restarted, labels off", replace(GOOD, version=DEFAULT, fleet_version=DEFAULT, epoch=-1), Decision.COMPARE),
    ("restarted, compared, other", replace(GOOD, epoch=-1, checked=True, checksums_equal=False), Decision.FENCE),
    ("restarted, compared, no answer", replace(GOOD, epoch=-1, checked=True), Decision.FENCE),
    ("restarted, compared, equal", replace(GOOD, epoch=-1, checked=True, checksums_equal=True), Decision.ADMIT),
    ("restarted, nothing recorded", replace(GOOD, epoch=UNKNOWN_EPOCH, recorded=False), Decision.FENCE),
    ("tainted, nothing recorded", replace(GOOD, tainted=True, recorded=False), Decision.FENCE),
    ("another version", replace(GOOD, version="v0"), Decision.COMPARE),
    ("missed an update under the same label", replace(GOOD, epoch=2), Decision.COMPARE),
    ("tied", replace(GOOD, tie=True), Decision.FENCE),
    ("nobody knows", replace(GOOD, fleet_version=None), Decision.FENCE),
    ("tainted", replace(GOOD, tainted=True), Decision.COMPARE),
    ("tainted, compared", replace(GOOD, tainted=True, checked=True, checksums_equal=False), Decision.FENCE),
    ("tainted in a tie", replace(GOOD, tainted=True, tie=True), Decision.FENCE),
    ("in a round", replace(GOOD, in_round=True), Decision.FENCE),
    ("fenced by hand", replace(GOOD, by_hand=False), Decision.FENCE),
    ("admitted by hand", replace(GOOD, version="v0", epoch=-1, by_hand=True), Decision.ADMIT),
    ("admitted by hand, then tainted", replace(GOOD, by_hand=True, tainted=True), Decision.COMPARE),
]  # fmt: skip


@pytest.mark.parametrize(("name", "facts", "want"), TABLE, ids=[row[0] for row in TABLE])
def test_verdicts(name, facts, want):
    verdict = judge(facts)
    assert verdict.decision is want
    assert verdict.reason


def test_no_combination_admits_unknown_weights():
    """Whatever else holds: an engine with versions serves only for one of the contract's reasons."""
    for version, fleet, tie, pristine, tainted, in_round, epoch, checked, equal in product(
        [None, DEFAULT, "v1", "v2"], [None, DEFAULT, "v1"], [False, True], [False, True], [False, True],
        [False, True], [-1, 1, 2], [False, True], [None, False, True],
    ):  # fmt: skip
        facts = Facts(
            version=version, fleet_version=fleet, tie=tie, pristine=pristine, tainted=tainted, in_round=in_round,
            epoch=epoch, fleet_epoch=2, checked=checked, checksums_equal=equal,
        )  # fmt: skip
        if judge(facts).decision is not Decision.ADMIT:
            continue
        assert not tainted
        assert not in_round
        untouched = pristine and version == DEFAULT
        same = version == fleet and epoch == 2 and not tie and fleet is not None
        assert untouched or same or (equal is True and not tie and fleet is not None)


@pytest.mark.parametrize(
    ("labels", "version", "tied"),
    [
        ([], None, ()),
        ([None], None, ()),
        (["default"] * 3, "default", ()),
        (["v1", "default", "default"], "v1", ()),
        (["v1", "v2", "v2", "default"], "v2", ()),
        (["v1", "v2"], None, ("v1", "v2")),
        (["v2", "v1", None, "default"], None, ("v1", "v2")),
    ],
)
def test_votes(labels, version, tied):
    result = vote(labels)
    assert (result.version, result.tied) == (version, tied)


@given(st.lists(st.none() | st.from_regex(r"\A(u[0-9]{1,4}|v1|default|u|ux1)\Z")))
def test_a_label_is_never_used_twice(seen):
    assert next_label(seen) not in seen


def test_labels_count_on():
    assert next_label([]) == "u1"
    assert next_label(["u2", "u10", "default", None]) == "u11"
    assert next_label(["u2"], beyond=10) == "u11"
    assert next_label(["u12"], beyond=10) == "u13"
