import pytest

from proxy.core.balancing import LeastInflight
from proxy.core.balancing.slow_start import LEAST, STEPS, SlowStart


def busy(seconds=10.0, engines=("a", "b")):
    """A fleet that has been at work since 0, looked at after a minute."""
    rule = SlowStart(seconds)
    for name in engines:
        assert not rule.came(name, 0.0)
    return rule


def test_who_comes_into_a_busy_fleet_is_held_back_and_let_go():
    rule = busy()
    assert rule.came("c", 60.0)
    assert rule
    assert rule.share("c", 60.0) == LEAST
    assert rule.share("c", 65.0) == 0.5
    assert rule.share("c", 75.0) == 1.0
    assert rule.shares(65.0) == {"c": 0.5}
    assert rule.shares(70.0) == {"c": 1.0}
    assert not rule
    assert rule.shares(71.0) == {}


def test_shares_only_grow():
    rule = busy(seconds=20.0)
    rule.came("c", 60.0)
    seen = [rule.share("c", 60.0 + 20.0 * n / STEPS) for n in range(STEPS + 1)]
    assert seen == sorted(seen)
    assert seen[0] == LEAST
    assert seen[-1] == 1.0
    assert rule.step == 1.0


def test_where_all_come_at_once_nobody_is_held_back():
    rule = SlowStart(10.0)
    assert [rule.came(name, now) for name, now in (("a", 0.0), ("b", 3.0), ("c", 9.9))] == [False] * 3
    assert rule.came("d", 10.0)


def test_a_process_is_new_only_once():
    rule = busy()
    rule.came("c", 60.0)
    rule.shares(70.0)
    assert not rule.came("c", 90.0)
    assert not rule.came("a", 90.0)


def test_another_process_under_the_same_name_is_new():
    rule = busy()
    rule.gone("a")
    assert rule.came("a", 60.0)
    rule.gone("a")
    assert not rule
    assert rule.share("a", 60.0) == 1.0


def test_who_comes_again_in_the_middle_of_its_ramp_goes_on_with_it():
    rule = busy()
    rule.came("c", 60.0)
    assert not rule.came("c", 65.0)
    assert rule.share("c", 65.0) == 0.5


def test_nobody_is_held_back_without_seconds():
    rule = busy(seconds=0.0)
    assert not rule.came("c", 60.0)
    assert rule.share("c", 60.0) == 1.0


@pytest.mark.parametrize(("share", "most"), [(0.1, 3), (0.5, 11), (1.0, 21)])
def test_an_idle_engine_is_filled_up_to_its_share_of_what_the_others_hold(share, most):
    from fleets import fleet

    engines = fleet(20, 20, 0)
    engines[2].weight = share
    policy = LeastInflight()
    for _ in range(most):
        policy.select(engines, None, 0.0).inflight += 1
    assert engines[2].inflight in (most, most - 1)
    for _ in range(4):
        policy.select(engines, None, 0.0).inflight += 1
    assert engines[2].inflight <= most + 2
