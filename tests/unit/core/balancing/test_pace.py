from random import Random

import pytest
from fleets import fleet

from proxy.core.balancing import Sticky
from proxy.core.balancing.pace import MIN_SECONDS, MIN_TURNS, MOST, RECKON_EVERY, Pace


def feed(pace, seconds, turns=RECKON_EVERY, names=None, random=None):
    names = names or [str(n) for n in range(len(seconds))]
    for _ in range(turns):
        for name, value in zip(names, seconds, strict=True):
            pace.saw(name, value * (random.lognormvariate(0, 1) if random else 1))


def test_an_engine_far_slower_than_the_median_counts_for_as_many():
    pace = Pace()
    feed(pace, [1.0, 1.0, 5.0, 1.2])
    assert [pace.times(str(n)) for n in range(4)] == [1.0, 1.0, pytest.approx(5.0, rel=0.2), 1.0]


def test_of_two_engines_the_slower_one_is_seen():
    pace = Pace()
    feed(pace, [5.0, 1.0])
    assert (pace.times("0"), pace.times("1")) == (pytest.approx(5.0), 1.0)


def test_chance_is_ignored():
    pace = Pace()
    feed(pace, [1.0] * 16, turns=600, random=Random(1))
    assert {pace.times(str(n)) for n in range(16)} == {1.0}


def test_a_slow_engine_is_seen_through_chance():
    pace = Pace()
    feed(pace, [1.0] * 7 + [5.0], turns=200, random=Random(1))
    assert pace.times("7") == pytest.approx(5.0, rel=0.5)
    assert {pace.times(str(n)) for n in range(7)} == {1.0}


def test_it_is_forgiven_when_it_is_fast_again():
    pace = Pace()
    feed(pace, [1.0, 1.0, 5.0])
    assert pace.times("2") > 1
    feed(pace, [1.0, 1.0, 1.0], turns=100)
    assert pace.times("2") == 1.0


def test_nothing_is_said_after_a_few_turns_or_of_one_engine():
    pace = Pace()
    feed(pace, [1.0, 9.0], turns=MIN_TURNS - 1)
    feed(pace, [1.0], turns=RECKON_EVERY)
    assert pace.times("1") == 1.0
    alone = Pace()
    feed(alone, [9.0], turns=3 * RECKON_EVERY)
    assert alone.times("0") == 1.0


def test_requests_side_by_side_say_nothing():
    pace = Pace()
    feed(pace, [1.0, 1.0, MIN_SECONDS / 2])
    feed(pace, [1.0, 1.0, 0.0])
    assert pace._mean.keys() == {"0", "1"}


def test_the_factor_is_bounded_whatever_was_seen():
    pace = Pace()
    feed(pace, [0.1, 0.1, 1e300])
    assert pace.times("2") == MOST


def test_one_that_left_is_forgotten():
    pace = Pace()
    feed(pace, [1.0, 1.0, 5.0])
    pace.forget("2")
    pace.forget("nobody")
    assert pace.times("2") == 1.0


def test_sessions_leave_a_slow_engine_before_they_pile_up_and_new_ones_keep_away():
    engines = fleet(0, 0, 0)
    one = Sticky(ttl=1e9, max_sessions=1000, margin=1.25, slack=2.0, live=0.0)
    now = 0.0
    # Three sessions, one on each engine; the one on the first takes five times as long for a turn.
    homes = {one.select(engines, key, now): key for key in (b"a", b"b", b"c", b"d", b"e", b"f")}
    assert len(homes) == 3
    due = {key: (5.0 if home is engines[0] else 1.0) for home, key in homes.items()}
    for _ in range(400):
        key = min(due, key=due.get)
        now = due[key]
        home = one.select(engines, key, now)
        due[key] = now + (5.0 if home is engines[0] else 1.0)
    for engine in engines:
        engine.inflight = 3
    at_slow = next(key for home, key in homes.items() if home is engines[0])
    assert one.select(engines, at_slow, now) is not engines[0]
    assert all(one.select(engines, b"new%d" % n, now) is not engines[0] for n in range(5))
