"""Long work on the event loop in short turns, because the same loop relays the streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

TURN = 0.0005
"""Seconds that work may go on until the loop has its turn: what a page may add to the time of a token on its way."""


async def paced(steps: Iterable[T]) -> AsyncIterator[T]:
    """The same items; the loop has a turn after each step that ends later than `TURN` after the last one."""
    began = perf_counter()
    for step in steps:
        yield step
        if perf_counter() - began > TURN:
            await asyncio.sleep(0)
            began = perf_counter()


async def finish(steps: Generator[None, None, T]) -> T:
    """What a generator returns, run in turns."""
    result: list[T] = []

    def run() -> Generator[None, None, None]:
        result.append((yield from steps))

    async for _ in paced(run()):
        pass
    return result[0]
