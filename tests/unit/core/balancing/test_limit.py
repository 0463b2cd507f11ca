from math import inf

from fleets import fleet
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.balancing.limit import FREE, Limit


@given(st.lists(st.integers(0, 500), min_size=1, max_size=15), st.floats(1, 4), st.floats(1, 10))
def test_the_least_busy_is_never_over(inflight, margin, slack):
    engines = fleet(*inflight)
    assert not Limit(margin=margin, slack=slack).over(min(engines, key=lambda engine: engine.inflight), engines)


@given(st.lists(st.integers(0, 500), min_size=2, max_size=15))
def test_without_slack_the_mean_of_the_others_is_the_limit(inflight):
    engines = fleet(*inflight)
    limit = Limit(margin=1.0, slack=0.0)
    for engine in engines:
        mean = (sum(inflight) - engine.inflight) / (len(inflight) - 1)
        assert limit.over(engine, engines) is (engine.inflight + 1 > max(mean, FREE))


def test_the_new_request_counts_and_the_limit_itself_is_allowed():
    engines = fleet(5, 2, 2, 2)
    # The limit is 2 * 2 + 2.
    assert not Limit(margin=2.0, slack=2.0).over(engines[0], engines)
    engines[0].inflight = 6
    assert Limit(margin=2.0, slack=2.0).over(engines[0], engines)


def test_of_two_engines_the_bad_one_is_seen():
    engines = fleet(30, 10)
    assert Limit(margin=2.0, slack=2.0).over(engines[0], engines)
    engines = fleet(400, 10, weights=(8, 1))
    assert Limit(margin=2.0, slack=2.0).over(engines[0], engines)


def test_slack_is_per_worker():
    engines = fleet(23, 0, weights=(4, 4))
    assert not Limit(margin=1.0, slack=6.0).over(engines[0], engines)
    engines = fleet(23, 0, weights=(1, 1))
    assert Limit(margin=1.0, slack=6.0).over(engines[0], engines)


def test_a_few_requests_are_always_free():
    engines = fleet(FREE - 1, 0, 0)
    limit = Limit(margin=1.0, slack=0.0)
    assert not limit.over(engines[0], engines)
    engines[0].inflight = FREE
    assert limit.over(engines[0], engines)


def test_one_engine_alone_is_never_over():
    engines = fleet(10_000)
    assert not Limit(margin=1.0, slack=0.0).over(engines[0], engines)


def test_no_margin_is_no_limit():
    engines = fleet(10_000, 0)
    assert not Limit(margin=inf, slack=0.0).over(engines[0], engines)


def test_in_a_large_fleet_the_sum_is_taken_anew_after_a_few_questions():
    engines = fleet(*[10] * 64)
    limit = Limit(margin=1.0, slack=0.0)
    engines[0].inflight = 20
    assert limit.over(engines[0], engines)
    for engine in engines[1:]:
        engine.inflight = 100
    assert not all(limit.over(engines[0], engines) for _ in range(5))
