"""Back-off, cap, and forgetting."""

from __future__ import annotations

import pytest

from engine_launcher.errors import UsageError
from engine_launcher.restart import Care, Restarts


def test_the_wait_doubles_up_to_its_limit_and_then_it_is_given_up() -> None:
    restarts = Restarts(Care(restarts=6, restart_backoff=2.0, restart_backoff_max=20.0))
    assert [restarts.next(0.0) for _ in range(8)] == [2.0, 4.0, 8.0, 16.0, 20.0, 20.0, None, None]


def test_long_service_is_forgiven() -> None:
    restarts = Restarts(Care(restarts=1, restart_backoff=2.0, restart_reset=100.0))
    assert [restarts.next(served) for served in (5.0, 100.0, 250.0, 99.9)] == [2.0, 2.0, 2.0, None]


def test_none_are_wanted() -> None:
    assert Restarts(Care(restarts=0)).next(1e9) is None


def test_thousands_of_restarts_do_not_overflow() -> None:
    restarts = Restarts(Care(restarts=5000, restart_backoff=1.0, restart_backoff_max=60.0))
    assert [restarts.next(0.0) for _ in range(5000)][-1] == 60.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"restarts": -1}, "--restarts -1"),
        ({"restart_backoff": -0.5}, r"--restart-backoff -0\.5"),
        ({"restart_backoff": 9.0, "restart_backoff_max": 3.0}, "--restart-backoff-max 3 must not be below"),
        ({"health_interval": 0.0}, "--health-interval 0 must be above 0"),
        ({"health_failures": 0}, "--health-failures 0"),
        ({"drain": -1.0}, "--drain -1"),
        ({"roll_wait": 0.0}, "--roll-wait 0"),
    ],
)
def test_values_that_cannot_work_are_named(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Care(**change).check()
