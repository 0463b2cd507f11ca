"""The gate: order, limits, who goes when. No sockets, no sleep."""

from __future__ import annotations

import asyncio

import pytest

from proxy.data.gate import Gate
from proxy.errors import FleetgateError


class Held:
    """A request that can be held."""

    def __init__(
        self, order: int, size: int = 1, *, goes: bool = True, breaks: bool = False, limit: float = 600
    ) -> None:
        self.order = order
        self.held_bytes = size
        self.hold_timer: asyncio.TimerHandle | None = None
        self.hold_since = 0.0
        self.hold_limit = limit
        self.goes = goes
        self.breaks = breaks
        self.let_go = 0
        self.error: FleetgateError | None = None
        self.broke = False
        self.log: list[int] | None = None

    def admitted(self) -> bool:
        self.let_go += 1
        if self.log is not None:
            self.log.append(self.order)
        if self.breaks:
            raise RuntimeError
        return self.goes

    def refused(self, error: FleetgateError) -> None:
        self.error = error

    def crashed(self) -> None:
        self.broke = True


class Rig:
    """A gate whose fleet can be switched on and off."""

    def __init__(self, *, requests: int = 1000, size: int = 1000) -> None:
        self.able = True
        self.ends: list[str] = []
        self.gate = Gate(max_requests=requests, max_bytes=size, can_pass=lambda: self.able)
        self.gate.on_hold_end = lambda _, how: self.ends.append(how)


async def turns(count: int = 40) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_open_gate_with_an_engine_lets_pass() -> None:
    rig = Rig()
    assert not rig.gate.must_wait()
    rig.able = False
    assert rig.gate.must_wait()
    rig.able = True
    rig.gate.close("a")
    assert rig.gate.must_wait()


async def test_nobody_passes_those_who_wait() -> None:
    rig = Rig()
    rig.able = False
    rig.gate.hold(Held(1))
    rig.able = True
    assert rig.gate.must_wait()


async def test_order_is_kept_by_new_ones_and_by_those_that_come_back() -> None:
    rig = Rig()
    log: list[int] = []
    rig.gate.close("a")
    waiters = {order: Held(order) for order in range(300)}
    for waiter in waiters.values():
        waiter.log = log
    for order in range(100, 300):
        rig.gate.hold(waiters[order])
    for order in sorted(range(100), key=lambda n: (n * 37) % 100):
        rig.gate.hold(waiters[order], front=True)
    assert rig.gate.held == 300
    rig.gate.open()
    await turns()
    assert log == list(range(300))
    assert rig.gate.held == 0
    assert rig.gate.held_bytes == 0


async def test_closing_in_the_middle_of_a_release_stops_it() -> None:
    rig = Rig()
    rig.gate.close("a")
    waiters = [Held(order) for order in range(200)]
    for waiter in waiters:
        rig.gate.hold(waiter)
    rig.gate.open()
    await asyncio.sleep(0)
    rig.gate.close("b")
    await turns()
    gone = sum(waiter.let_go for waiter in waiters)
    assert 0 < gone < 200
    assert rig.gate.held == 200 - gone
    assert rig.gate.closed_by == "b"


async def test_one_that_cannot_go_stops_the_release_until_the_next_pump() -> None:
    rig = Rig()
    rig.gate.close("a")
    first, second = Held(1, goes=False), Held(2)
    rig.gate.hold(first)
    rig.gate.hold(second)
    rig.gate.open()
    await turns()
    assert (first.let_go, second.let_go) == (1, 0)
    rig.gate.pump()
    await turns()
    assert second.let_go == 1


async def test_one_that_breaks_does_not_keep_those_behind_it() -> None:
    rig = Rig()
    rig.gate.close("a")
    first, second = Held(1, breaks=True), Held(2)
    rig.gate.hold(first)
    rig.gate.hold(second)
    rig.gate.open()
    await turns()
    assert first.broke
    assert second.let_go == 1


async def test_a_request_that_comes_back_to_an_open_gate_does_not_sleep_through_it() -> None:
    rig = Rig()
    waiter = Held(1)
    rig.gate.hold(waiter, front=True)
    await turns()
    assert waiter.let_go == 1


async def test_without_an_engine_an_open_gate_holds_until_pumped() -> None:
    rig = Rig()
    rig.able = False
    waiter = Held(1)
    rig.gate.hold(waiter)
    await turns()
    assert waiter.let_go == 0
    rig.able = True
    rig.gate.pump()
    await turns()
    assert waiter.let_go == 1


async def test_limits_by_number_and_bytes_count_only_against_new_ones() -> None:
    rig = Rig(requests=2, size=10)
    rig.gate.close("a trainer")
    rig.gate.hold(Held(1, 6))
    too_big = Held(2, 5)
    rig.gate.hold(too_big)
    assert too_big.error is not None
    assert too_big.error.code == "hold_queue_full"
    assert "a trainer" in too_big.error.message
    rig.gate.hold(Held(3, 4))
    too_many = Held(4, 0)
    rig.gate.hold(too_many)
    assert too_many.error is not None
    assert too_many.error.retry_after
    returned = Held(0, 100)
    rig.gate.hold(returned, front=True)
    assert returned.error is None
    assert rig.gate.held == 3
    assert rig.gate.held_bytes == 110


@pytest.mark.parametrize(
    ("held", "size", "says", "not_"),
    [
        ([], 11, "its body of 11 bytes is over the 10 that may be held", "already"),
        ([6], 5, "6 of 10 bytes of requests are held already", "over"),
        ([1, 1, 1], 1, "3 requests are held already", "bytes"),
    ],
)
async def test_a_refusal_says_what_is_true(held: list[int], size: int, says: str, not_: str) -> None:
    rig = Rig(requests=3, size=10)
    rig.gate.close("a trainer")
    for order, bytes_held in enumerate(held):
        rig.gate.hold(Held(order, bytes_held))
    refused = Held(9, size)
    rig.gate.hold(refused)
    assert refused.error is not None
    assert (refused.error.code, refused.error.retry_after) == ("hold_queue_full", 5)
    assert says in refused.error.message
    assert not_ not in refused.error.message


@pytest.mark.parametrize("front", [False, True])
async def test_leaving_frees_the_place_once(front: bool) -> None:
    rig = Rig()
    rig.gate.close("a")
    waiters = [Held(order, 5) for order in range(3)]
    for waiter in waiters:
        rig.gate.hold(waiter, front=front)
    assert rig.gate.leave(waiters[1])
    assert not rig.gate.leave(waiters[1])
    assert waiters[1].hold_timer is None
    assert rig.gate.held_bytes == 10
    rig.gate.open()
    await turns()
    assert [waiter.let_go for waiter in waiters] == [1, 0, 1]
    assert rig.ends == ["gone", "sent", "sent"]


async def test_the_time_limit_counts_over_all_holds() -> None:
    rig = Rig()
    rig.gate.close("a")
    waiter = Held(1, limit=0.0)
    waiter.hold_since = asyncio.get_running_loop().time() - 1
    rig.gate.hold(waiter)
    assert waiter.error is not None
    assert waiter.error.code == "hold_timeout"
    assert rig.gate.held == 0


async def test_a_limit_that_strikes_while_held() -> None:
    rig = Rig()
    rig.gate.close("a")
    waiter = Held(1, limit=600)
    rig.gate.hold(waiter)
    rig.gate._expire(waiter)
    assert waiter.error is not None
    assert waiter.error.status == 503
    assert rig.gate.held == 0
    assert rig.ends == ["hold_timeout"]


async def test_closing_twice_keeps_the_first_time_and_tells_once() -> None:
    rig = Rig()
    told: list[bool] = []
    rig.gate.on_change = told.append
    rig.gate.close("a")
    since = rig.gate.closed_since
    rig.gate.close("b")
    assert rig.gate.closed_since == since
    rig.gate.open()
    opened = rig.gate.opened_at
    assert opened >= since
    rig.gate.open()
    assert rig.gate.opened_at == opened
    assert told == [True, False]
