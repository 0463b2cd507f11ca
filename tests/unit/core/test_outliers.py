import pytest

from proxy.core.failures import Kind
from proxy.core.outliers import COUNTED, LONGEST, Outliers


def fail(outliers, engine, times, now=0.0, kind=Kind.LOST, engines=4):
    return [outliers.failed(engine, kind, now, engines=engines) for _ in range(times)]


def test_so_many_failures_in_a_row_leave_an_engine_out_for_a_while():
    outliers = Outliers(limit=3, seconds=30)
    assert fail(outliers, "a", 3) == [0, 0, 30]
    assert outliers.out("a", 29.9)
    assert not outliers.out("a", 30.0)


def test_one_whole_answer_forgives():
    outliers = Outliers(limit=3, seconds=30)
    fail(outliers, "a", 2)
    outliers.succeeded("a", 0.0)
    assert not outliers
    assert fail(outliers, "a", 2) == [0, 0]


def test_a_late_answer_brings_nobody_back():
    outliers = Outliers(limit=1, seconds=30)
    fail(outliers, "a", 1)
    outliers.succeeded("a", 10.0)
    assert outliers.out("a", 10.0)


def test_each_ejection_is_twice_as_long_up_to_a_cap():
    outliers = Outliers(limit=1, seconds=100)
    now, lengths = 0.0, []
    for _ in range(4):
        lengths += fail(outliers, "a", 1, now=now)
        now += 1000.0
    assert lengths == [100, 200, LONGEST, LONGEST]


@pytest.mark.parametrize(("engines", "out"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_never_more_than_half_and_never_the_last(engines, out):
    outliers = Outliers(limit=1, seconds=30)
    for index in range(engines):
        fail(outliers, str(index), 1, engines=engines)
    assert sum(outliers.out(str(index), 1.0) for index in range(engines)) == out


@pytest.mark.parametrize("kind", sorted(set(Kind) - COUNTED))
def test_what_says_nothing_against_the_engine_is_not_counted(kind):
    outliers = Outliers(limit=1, seconds=30)
    assert fail(outliers, "a", 5, kind=kind) == [0] * 5
    assert not outliers


def test_zero_switches_it_off():
    assert fail(Outliers(limit=0, seconds=30), "a", 9) == [0] * 9
