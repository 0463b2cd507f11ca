from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.observe.access import Sampler


def test_below_the_rate_every_event_passes():
    sampler = Sampler(10)
    assert all(sampler.passes(second + part / 10) for second in range(5) for part in range(10))
    assert sampler.take_skipped() == 0


def test_above_the_rate_the_sample_is_spread_over_the_second():
    sampler = Sampler(10)
    for part in range(1000):
        sampler.passes(5 + part / 1000)
    passed = [part for part in range(1000) if sampler.passes(6 + part / 1000)]
    assert passed == list(range(99, 1000, 100))


def test_a_record_tells_how_many_it_stands_for():
    sampler = Sampler(2)
    told = 0
    for second in range(3):
        for part in range(100):
            if sampler.passes(second + part / 100):
                told += 1 + sampler.take_skipped()
    assert told + sampler.skipped == 300


def test_after_a_quiet_time_everything_passes_again():
    sampler = Sampler(1)
    for part in range(100):
        sampler.passes(part / 100)
    assert sampler.passes(10.0)


@settings(deadline=None)
@given(st.lists(st.floats(0, 20), max_size=200), st.integers(1, 20))
def test_no_second_has_more_records_than_the_rate(times, rate):
    sampler = Sampler(rate)
    counts = {}
    for now in sorted(times):
        if sampler.passes(now):
            counts[int(now)] = counts.get(int(now), 0) + 1
    assert all(count <= rate for count in counts.values())
