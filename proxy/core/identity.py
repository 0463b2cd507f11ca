"""Is the process behind an engine's URL still the one it was?

vLLM says so in two ways: ``process_start_time_seconds`` on its ``/metrics``, and its weight label, which is ``default``
again after any restart. A server that shows neither is judged by its connections: one that refused them and came back
is taken for another process, because answers from base weights cost more than a needless weight sync.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.core.admission import DEFAULT

START_TIME_SLACK = 0.02
"""Seconds by which two readings of one process's start time may differ: two ticks of the kernel's clock, in which it is
counted. prometheus_client reads it once per process; a small engine may be replaced twice within half a second."""

_START_TIME = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.eE+-]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at an engine showed; None where it did not say.

    Attributes:
        version: weight label.
        plain: whether it has no RL routes.
        paused: whether generation is paused.
        start_time: of its process, Unix seconds.
        world_size: workers of this server.
    """

    version: str | None = None
    plain: bool | None = None
    paused: bool | None = None
    start_time: float | None = None
    world_size: int | None = None


def start_time(metrics: bytes) -> float | None:
    """The process's start time from a Prometheus page, or None."""
    match = _START_TIME.search(metrics)
    if match is None:
        return None
    try:
        return float(match[1])
    except ValueError:
        return None


def restarted(before: Look, now: Look, *, refused: bool, broken: bool) -> str | None:
    """Why the process must be taken for another one, or None.

    Args:
        before: what was known.
        now: what is known after a whole look.
        refused: connections were refused in between.
        broken: a connection broke in between.
    """
    if before.start_time is not None and now.start_time is not None:
        if abs(before.start_time - now.start_time) > START_TIME_SLACK:
            return "its process start time changed"
        return None
    if before.version not in (None, DEFAULT) and now.version == DEFAULT:
        return f"its weight version went from {before.version!r} back to {DEFAULT!r}"
    if before.plain is False and now.plain:
        return "it lost its RL routes"
    if refused:
        return "it refused connections and shows no process start time"
    if broken and now.version == DEFAULT:
        return "its connections broke, it shows no process start time and its weight version is the default"
    return None
