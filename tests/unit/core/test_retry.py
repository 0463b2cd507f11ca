"""The re-send decision, row by row, and the budget behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.failures import Failure, Kind
from proxy.core.retry import Action, Backoff, Budget, Decision, Facts, decide

GENERATION = Facts(
    generation=True, repeatable=True, replayable=True, attempts=1, max_attempts=6, others_left=True, has_answer=False
)
MODELS = replace(GENERATION, generation=False)
UNKNOWN_POST = replace(GENERATION, generation=False, repeatable=False)


def ask(kind: Kind, facts: Facts, *, budget: Budget | None = None, retry_after: float | None = None) -> Decision:
    return decide(
        Failure(kind, "x", retry_after),
        facts,
        budget=budget or Budget(ratio=0.2, floor=10),
        backoff=Backoff(base=0.025, longest=2.0),
        now=100.0,
        max_wait=30.0,
    )


ROWS: list[tuple[Kind, Facts, Action]] = [
    # No connection: any method, elsewhere; a generation waits for an engine, nothing else does.
    (Kind.CONNECT, GENERATION, Action.AGAIN),
    (Kind.CONNECT, UNKNOWN_POST, Action.AGAIN),
    (Kind.CONNECT, replace(GENERATION, others_left=False), Action.HOLD),
    (Kind.CONNECT, replace(MODELS, others_left=False), Action.FAIL),
    (Kind.CONNECT, replace(GENERATION, attempts=99), Action.AGAIN),
    # A reused connection that died unanswered: again, any method, at any number of attempts.
    (Kind.STALE, GENERATION, Action.AGAIN),
    (Kind.STALE, UNKNOWN_POST, Action.AGAIN),
    (Kind.STALE, replace(GENERATION, others_left=False, attempts=99), Action.AGAIN),
    # A fresh one: only what may run twice.
    (Kind.LOST, GENERATION, Action.AGAIN),
    (Kind.LOST, MODELS, Action.AGAIN),
    (Kind.LOST, UNKNOWN_POST, Action.FAIL),
    (Kind.LOST, replace(GENERATION, attempts=6), Action.FAIL),
    (Kind.LOST, replace(MODELS, others_left=False), Action.FAIL),
    (Kind.TIMEOUT, GENERATION, Action.AGAIN),
    (Kind.REMOVED, GENERATION, Action.AGAIN),
    (Kind.REMOVED, UNKNOWN_POST, Action.FAIL),
    (Kind.BROKEN, GENERATION, Action.AGAIN),
    (Kind.CUT, GENERATION, Action.AGAIN),
    (Kind.CUT, replace(GENERATION, engine_paused=True), Action.HOLD),
    # Paused: waits, whatever the number of attempts.
    (Kind.PAUSED, GENERATION, Action.HOLD),
    (Kind.PAUSED, replace(GENERATION, attempts=99, others_left=False), Action.HOLD),
    (Kind.PAUSED, replace(MODELS, has_answer=True), Action.RELAY),
    # Overload.
    (Kind.BUSY, GENERATION, Action.AGAIN),
    (Kind.BUSY, replace(GENERATION, attempts=6), Action.RELAY),
    (Kind.BUSY, MODELS, Action.RELAY),
    # 500.
    (Kind.FAILED, replace(GENERATION, has_answer=True), Action.RELAY),
    (Kind.FAILED, replace(GENERATION, has_answer=True, engine_dead=True), Action.AGAIN),
    (Kind.FAILED, replace(GENERATION, has_answer=True, engine_dead=True, attempts=6), Action.RELAY),
    # What was not kept cannot be sent again.
    (Kind.LOST, replace(GENERATION, replayable=False), Action.FAIL),
    (Kind.STALE, replace(GENERATION, replayable=False), Action.FAIL),
    (Kind.PAUSED, replace(GENERATION, replayable=False, has_answer=True), Action.FAIL),
    (Kind.BUSY, replace(GENERATION, replayable=False, has_answer=True), Action.RELAY),
]


@pytest.mark.parametrize(("kind", "facts", "action"), ROWS)
def test_the_table(kind: Kind, facts: Facts, action: Action) -> None:
    assert ask(kind, facts).action is action


def test_elsewhere_is_at_once_and_the_same_engine_after_a_back_off() -> None:
    assert ask(Kind.BUSY, GENERATION).delay == 0
    nobody_left = ask(Kind.BUSY, replace(GENERATION, others_left=False))
    assert 0 <= nobody_left.delay <= 0.025
    assert nobody_left.forget_tried
    assert ask(Kind.LOST, replace(GENERATION, others_left=False)).forget_tried


@pytest.mark.parametrize(("asked", "least"), [(None, 0.0), (2.0, 2.0), (3600.0, 30.0)])
def test_retry_after_is_honoured_and_bounded(asked: float | None, least: float) -> None:
    decision = ask(Kind.BUSY, replace(GENERATION, others_left=False), retry_after=asked)
    assert least <= decision.delay <= max(least, 2.0)


def test_another_engine_need_not_wait_for_what_the_first_one_asked() -> None:
    assert ask(Kind.BUSY, GENERATION, retry_after=20.0).delay == 0


def test_the_first_re_send_is_free_and_later_ones_are_paid() -> None:
    empty = Budget(ratio=0.0, floor=0.0)
    assert ask(Kind.LOST, GENERATION, budget=empty).action is Action.AGAIN
    assert ask(Kind.LOST, replace(GENERATION, resends=1), budget=empty).action is Action.FAIL
    assert ask(Kind.STALE, replace(GENERATION, resends=1), budget=empty).action is Action.AGAIN
    # A refusal for load without budget waits instead of hammering the next engine.
    assert ask(Kind.BUSY, GENERATION, budget=empty).forget_tried


def test_the_budget_is_a_share_of_the_last_ten_seconds_and_a_floor() -> None:
    budget = Budget(ratio=0.2, floor=1.0)
    for _ in range(100):
        budget.deposit(5.0)
    assert sum(budget.withdraw(5.5) for _ in range(200)) == 30
    assert not budget.withdraw(9.0)
    # The deposits and the withdrawals slide out of the window; the floor is left.
    assert sum(budget.withdraw(16.0) for _ in range(200)) == 10


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=200))
def test_the_budget_never_goes_below_nothing(events: list[tuple[float, bool]]) -> None:
    budget = Budget(ratio=0.5, floor=0.0)
    now = 0.0
    deposits = withdrawn = 0
    for step, is_request in events:
        now += step / 100
        if is_request:
            budget.deposit(now)
            deposits += 1
        else:
            withdrawn += budget.withdraw(now)
    assert withdrawn <= deposits * 0.5 + 1e-3


@given(st.integers(1, 50))
def test_back_off_stays_within_its_bounds(attempt: int) -> None:
    assert 0 <= Backoff(base=0.025, longest=2.0).seconds(attempt) <= min(2.0, 0.025 * 2 ** (attempt - 1))


@given(
    st.sampled_from(list(Kind)),
    st.builds(
        Facts,
        generation=st.booleans(),
        repeatable=st.booleans(),
        replayable=st.booleans(),
        attempts=st.integers(1, 10),
        max_attempts=st.integers(1, 6),
        others_left=st.booleans(),
        engine_dead=st.booleans(),
        engine_paused=st.booleans(),
        has_answer=st.booleans(),
        resends=st.integers(0, 5),
    ),
)
def test_what_holds_for_every_case(kind: Kind, facts: Facts) -> None:
    decision = ask(kind, facts)
    if not facts.replayable:
        assert decision.action in (Action.FAIL, Action.RELAY)
    if decision.action is Action.HOLD:
        assert facts.generation
    if decision.action is Action.AGAIN and kind not in (Kind.CONNECT, Kind.STALE, Kind.BUSY):
        assert facts.repeatable
        assert facts.attempts < facts.max_attempts
    assert decision.delay <= 30.0
