"""Background tasks that are referenced, named, and whose errors are never lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_log = logging.getLogger("fleetgate.tasks")
_T = TypeVar("_T")
_running: set[asyncio.Task[Any]] = set()


def spawn(coro: Coroutine[Any, Any, _T], *, name: str) -> asyncio.Task[_T]:
    """Start ``coro`` as a task that stays referenced until it ends.

    The event loop keeps only weak references to tasks, so a task that nobody holds can vanish half-way. An exception
    that the task ends with is logged under its name unless somebody awaits the task and takes it.
    """
    task = asyncio.get_running_loop().create_task(coro, name=name)
    _running.add(task)
    task.add_done_callback(_finished)
    return task


def _finished(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        _log.error("task %s failed: %s: %s", task.get_name(), type(error).__name__, error, exc_info=error)


def running() -> frozenset[asyncio.Task[Any]]:
    """Tasks that have not ended: a leak check for tests and for a clean stop."""
    return frozenset(_running)
