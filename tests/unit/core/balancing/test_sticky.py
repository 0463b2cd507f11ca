from collections import Counter
from math import inf

from fleets import fleet, take
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proxy.core.balancing import Sticky


def policy(*, ttl=100.0, most=1000, margin=1.25, slack=2.0, live=10.0):
    return Sticky(ttl=ttl, max_sessions=most, margin=margin, slack=slack, live=live)


def test_every_turn_of_a_session_goes_to_one_engine():
    engines = fleet(0, 0, 0, 0)
    one = policy()
    first = one.select(engines, b"k", 0.0)
    others = [engine for engine in engines if engine is not first]
    for now in range(1, 20):
        others[now % 3].inflight = 0
        assert one.select(engines, b"k", float(now)) is first


def test_the_first_turn_goes_to_the_least_busy():
    assert take(policy(), fleet(5, 3, 4), 1, key=b"k") == [1]


def test_sessions_between_turns_count_as_load():
    engines = fleet(0, 0, 0, 0)
    one = policy()
    # No request keeps running, yet the sessions are shared out evenly.
    counts = Counter(one.select(engines, b"s%d" % n, 0.0).id for n in range(40))
    assert set(counts.values()) == {10}


def test_ties_of_first_turns_are_spread():
    counts = Counter(policy().select(fleet(0, 0, 0, 0), b"s%d" % n, 0.0).id for n in range(400))
    assert min(counts.values()) > 60


def test_two_idle_proxies_agree_about_an_unknown_session():
    for n in range(50):
        key = b"s%d" % n
        engines = fleet(*[0] * 6)
        assert policy().select(engines, key, 0.0).id == policy().select(engines[::-1], key, 0.0).id


def test_first_turns_follow_the_weights():
    engines = fleet(0, 0, weights=(1, 3))
    one = policy()
    counts = Counter(one.select(engines, b"s%d" % n, 0.0).id for n in range(400))
    assert counts[engines[1].id] == 300


def test_single_turn_sessions_stop_counting_when_they_are_no_longer_live():
    engines = fleet(0, 0)
    one = policy(live=10.0)
    for n in range(50):
        one.select(engines[:1], b"old%d" % n, 0.0)
    engines[1].inflight = 1
    assert one.select(engines, b"early", 9.0) is engines[1]
    assert one.select(engines, b"late", 10.0) is engines[0]


def test_a_session_that_was_idle_keeps_its_engine_and_counts_again():
    engines = fleet(0, 0)
    one = policy(live=10.0)
    home = one.select(engines, b"k", 0.0)
    other = engines[1 - engines.index(home)]
    one.select(engines, b"another", 0.0)
    assert one.select(engines, b"k", 50.0) is home
    assert one.select(engines, b"new", 51.0) is other


def test_a_session_leaves_an_engine_that_holds_too_much_and_stays_where_it_went():
    engines = fleet(0, 0, 0)
    one = policy(margin=1.25, slack=2.0)
    home = one.select(engines, b"k", 0.0)
    home.inflight = 4
    # 5 with the new one; the others hold none, so that only what is free is left to it.
    moved = one.select(engines, b"k", 1.0)
    assert moved is not home
    home.inflight = 0
    assert one.select(engines, b"k", 2.0) is moved


def test_within_the_limit_it_stays():
    engines = fleet(0, 0, 0)
    one = policy(margin=1.25, slack=2.0)
    home = one.select(engines, b"k", 0.0)
    home.inflight = 3
    assert one.select(engines, b"k", 1.0) is home


def test_without_a_margin_it_never_leaves():
    engines = fleet(0, 0, 0)
    one = policy(margin=inf)
    home = one.select(engines, b"k", 0.0)
    home.inflight = 100_000
    assert one.select(engines, b"k", 1.0) is home


def test_the_limit_of_a_bigger_engine_is_higher():
    engines = fleet(0, 0, weights=(1, 4))
    one = policy(margin=1.25, slack=2.0)
    home = one.select(engines, b"k", 0.0)
    assert home is engines[1]
    home.inflight = 15
    assert one.select(engines, b"k", 1.0) is home
    home.inflight = 1000
    assert one.select(engines, b"k", 2.0) is engines[0]


def test_a_session_whose_engine_is_gone_moves_and_stays():
    engines = fleet(0, 0, 0)
    one = policy()
    home = one.select(engines, b"k", 0.0)
    rest = [engine for engine in engines if engine is not home]
    moved = one.select(rest, b"k", 1.0)
    assert one.select(engines, b"k", 2.0) is moved


def test_a_forgotten_engine_keeps_no_session_and_no_count():
    engines = fleet(0, 0)
    one = policy()
    for n in range(9):
        one.select(engines[:1], b"s%d" % n, 0.0)
    one.forget(engines[0].id)
    assert one.select(engines, b"a", 1.0) is engines[0]
    engines[0].inflight = 1
    assert one.select(engines, b"s0", 1.0) is engines[1]


def test_emptied_caches_move_no_session():
    engines = fleet(0, 0)
    one = policy()
    home = one.select(engines, b"k", 0.0)
    for engine in engines:
        one.emptied(engine.id)
    assert one.select(engines, b"k", 1.0) is home


def test_a_finished_session_is_unknown():
    engines = fleet(0, 0)
    one = policy()
    home = one.select(engines, b"k", 0.0)
    assert one.finish(b"k") is True
    assert one.finish(b"k") is False
    home.inflight = 1
    assert one.select(engines, b"k", 1.0) is not home


def test_a_finished_idle_session_is_unknown_too():
    one = policy(live=10.0)
    engines = fleet(0, 0)
    one.select(engines, b"k", 0.0)
    one.select(engines, b"other", 20.0)
    assert one.finish(b"k") is True


def test_unused_sessions_are_forgotten():
    one = policy(ttl=100.0)
    engines = fleet(0, 0)
    one.select(engines, b"k", 0.0)
    one.select(engines, b"other", 99.0)
    assert len(one) == 2
    one.select(engines, b"other", 100.0)
    assert len(one) == 1


def test_a_lifetime_shorter_than_the_live_time_bounds_both():
    one = policy(ttl=5.0, live=60.0)
    engines = fleet(0, 0)
    one.select(engines, b"k", 0.0)
    one.select(engines, b"other", 5.0)
    assert len(one) == 1


def test_of_too_many_sessions_the_longest_unused_goes():
    one = policy(most=3)
    engines = fleet(0, 0)
    for key in (b"a", b"b", b"c"):
        one.select(engines, key, 0.0)
    one.select(engines, b"a", 1.0)
    one.select(engines, b"d", 2.0)
    assert len(one) == 3
    assert one.finish(b"b") is False
    assert one.finish(b"a") is True


def test_requests_without_a_key_go_to_the_least_busy_and_are_not_remembered():
    one = policy()
    assert Counter(take(one, fleet(0, 0, 0, 0), 64)) == {0: 16, 1: 16, 2: 16, 3: 16}
    assert len(one) == 0


def test_a_session_that_another_worker_placed_is_kept_there_and_counts():
    engines = fleet(0, 0)
    one = policy()
    one.adopt(b"k", engines[1].id, 0.0)
    assert one.select(engines, b"new", 1.0) is engines[0]
    assert one.select(engines, b"k", 2.0) is engines[1]
    one.adopt(b"k", engines[0].id, 3.0)
    assert one.select(engines, b"k", 4.0) is engines[0]
    assert len(one) == 2


class Life(RuleBasedStateMachine):
    """The counts that first turns go by are those of the sessions that are live, whatever happens in whatever order."""

    def __init__(self):
        super().__init__()
        self.engines = fleet(0, 0, 0)
        self.policy = policy(ttl=20.0, most=6, live=5.0)
        self.now = 0.0

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"]), out=st.sampled_from([None, 0, 1, 2]))
    def turn(self, key, out):
        candidates = [engine for n, engine in enumerate(self.engines) if n != out]
        chosen = self.policy.select(candidates, key, self.now)
        assert chosen in candidates
        chosen.inflight += 1

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.now += seconds

    @rule(key=st.sampled_from([b"a", b"b", b"c"]))
    def finish(self, key):
        self.policy.finish(key)

    @rule(key=st.sampled_from([b"a", b"d", b"i"]), number=st.integers(0, 2))
    def adopt(self, key, number):
        self.policy.adopt(key, self.engines[number].id, self.now)

    @rule(number=st.integers(0, 2))
    def forget(self, number):
        self.policy.forget(self.engines[number].id)

    @precondition(lambda self: any(engine.inflight for engine in self.engines))
    @rule(number=st.integers(0, 2))
    def answer(self, number):
        self.engines[number].inflight = max(0, self.engines[number].inflight - 1)

    @invariant()
    def counts_are_true(self):
        one = self.policy
        live = [s for s in one._live.values() if s.life == one._lives.get(s.engine, 0)]
        assert one._count == dict(Counter(session.engine for session in live))
        assert len(one) <= 6
        assert not set(one._live) & set(one._idle)
        assert all(session.live for session in one._live.values())
        assert not any(session.live for session in one._idle.values())


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase
