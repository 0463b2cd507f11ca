from collections import Counter
from random import Random

import pytest
from fleets import fleet, take
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.balancing import LeastInflight, PowerOfTwo, RoundRobin
from proxy.core.balancing.spread import WINDOW

loads = st.lists(st.integers(0, 1000), min_size=1, max_size=WINDOW)


@given(loads, st.integers(0, 40))
def test_the_least_busy_is_taken_whatever_came_before(inflight, before):
    policy = LeastInflight()
    other = fleet(*range(7))
    for _ in range(before):
        policy.select(other, None, 0.0)
    engines = fleet(*inflight)
    assert policy.select(engines, None, 0.0).inflight == min(inflight)


def test_idle_engines_share_evenly_and_in_turn():
    engines = fleet(0, 0, 0, 0)
    assert take(LeastInflight(), engines, 8) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_ties_go_round_even_if_every_request_ends_at_once():
    policy = LeastInflight()
    engines = fleet(0, 0, 0)
    assert [policy.select(engines, None, 0.0).id[-6] for _ in range(6)] == list("012012")


def test_samples_of_one_prompt_without_a_key_are_spread():
    engines = fleet(*[0] * 4)
    assert Counter(take(LeastInflight(), engines, 64, prompt=b"the same")) == {0: 16, 1: 16, 2: 16, 3: 16}


def test_load_follows_the_weights():
    engines = fleet(0, 0, 0, weights=(1, 2, 4))
    take(LeastInflight(), engines, 70)
    assert [engine.inflight for engine in engines] == [10, 20, 40]


def test_the_first_request_goes_to_the_biggest():
    engines = fleet(0, 0, 0, weights=(1, 1, 4))
    assert take(LeastInflight(), engines, 1) == [2]


def test_a_weight_that_changes_counts_from_the_next_list_on():
    policy = LeastInflight()
    engines = fleet(0, 0)
    take(policy, engines, 2)
    engines[1].weight = 4.0
    engines = list(engines)
    assert take(policy, engines, 3) == [1, 1, 1]


def test_an_idle_engine_of_a_large_fleet_is_found_within_a_round_of_the_window():
    policy = LeastInflight()
    engines = fleet(*[50] * 64)
    take(policy, engines, 5)
    engines[40].inflight = 0
    assert 40 in take(policy, engines, 64 // WINDOW)


def test_a_large_fleet_stays_level():
    engines = fleet(*[0] * 64)
    policy = LeastInflight()
    random = Random(3)
    for _ in range(6400):
        take(policy, engines, 1)
        random.choice([engine for engine in engines if engine.inflight] or engines).inflight -= 1
    for _ in range(640):
        take(policy, engines, 1)
    counts = [engine.inflight for engine in engines]
    assert max(counts) - min(counts) <= 2


def test_round_robin_takes_each_in_turn_whatever_its_load():
    assert sorted(take(RoundRobin(), fleet(9, 0, 5), 6)) == [0, 0, 1, 1, 2, 2]


def test_round_robin_follows_the_weights():
    engines = fleet(0, 0, 0, weights=(1, 2, 4))
    assert Counter(take(RoundRobin(), engines, 70)) == {0: 10, 1: 20, 2: 40}


def test_an_engine_that_joins_a_weighted_round_gets_no_more_than_its_part():
    policy = RoundRobin()
    engines = fleet(0, 0, weights=(1, 2))
    take(policy, engines, 300)
    engines = [*engines, *fleet(0, weights=(3,))]
    engines[2].id = "joined"
    assert Counter(take(policy, engines, 60)) == pytest.approx({0: 10, 1: 20, 2: 30}, abs=1)


def test_one_that_left_a_weighted_round_comes_back_without_arrears():
    policy = RoundRobin()
    engines = fleet(0, 0, weights=(1, 2))
    take(policy, engines, 3)
    policy.forget(engines[0].id)
    take(policy, [engines[1], *fleet(0, weights=(4,))[:0]], 300)
    assert Counter(take(policy, engines, 30)) == pytest.approx({0: 10, 1: 20}, abs=1)


def test_power_of_two_never_takes_the_busier_of_its_pair():
    policy = PowerOfTwo(Random(1))
    engines = fleet(0, 1000)
    # Of two engines each pair is both.
    assert set(take(policy, engines, 100)) == {0}


def test_power_of_two_reaches_every_engine_and_stays_level():
    engines = fleet(*[0] * 16)
    take(PowerOfTwo(Random(1)), engines, 1600)
    counts = [engine.inflight for engine in engines]
    assert max(counts) - min(counts) <= 8


def test_power_of_two_follows_the_weights():
    engines = fleet(0, 0, 0, weights=(1, 1, 6))
    take(PowerOfTwo(Random(1)), engines, 800)
    assert engines[2].inflight == pytest.approx(600, rel=0.05)


@pytest.mark.parametrize("policy", [LeastInflight(), RoundRobin(), PowerOfTwo(Random(1))])
def test_one_engine_takes_all_and_no_session_is_known(policy):
    assert take(policy, fleet(3), 3) == [0, 0, 0]
    assert policy.finish(b"key") is False
    policy.forget("nobody")
    policy.emptied("nobody")
