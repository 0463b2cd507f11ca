from __future__ import annotations

import asyncio

import pytest

from proxy.observe import turns
from proxy.observe.pages import PIECE, _pieces
from proxy.observe.turns import finish, paced


class Clock:
    """Each look at it takes this many seconds."""

    def __init__(self, step):
        self.now = 0.0
        self.step = step

    def __call__(self):
        self.now += self.step
        return self.now


async def turns_of_the_loop(work):
    """How often others came to their turn while this ran."""
    count = 0

    async def other():
        nonlocal count
        while True:
            await asyncio.sleep(0)
            count += 1

    task = asyncio.ensure_future(other())
    await asyncio.sleep(0)
    before = count
    await work
    task.cancel()
    return count - before


@pytest.mark.parametrize(("seconds_a_step", "expected"), [(1e-3, 10), (1e-6, 0), (0.2e-3, 3)])
async def test_the_loop_has_a_turn_when_the_work_took_too_long(monkeypatch, seconds_a_step, expected):
    monkeypatch.setattr(turns, "perf_counter", Clock(seconds_a_step))
    got = []

    async def work():
        got.extend([step async for step in paced(range(10))])

    assert await turns_of_the_loop(work()) == expected
    assert got == list(range(10))


async def test_what_a_generator_returns_comes_out():
    def steps():
        yield
        yield
        return "page"

    assert await finish(steps()) == "page"


async def test_an_error_inside_comes_out():
    def steps():
        yield
        raise KeyError("x")

    with pytest.raises(KeyError):
        await finish(steps())


def test_small_parts_are_joined_and_nothing_is_lost():
    parts = [b"a" * 1000] * 100 + [b"b" * (3 * PIECE)] + [b"c"]
    pieces = list(_pieces(parts))
    assert b"".join(pieces) == b"".join(parts)
    assert [len(piece) >= PIECE for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert len(pieces) < 6
