"""What an engine's metric page says about its work right now, for the live page and the terminal."""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.observe.exposition import Page

TOKENS = b"vllm:generation_tokens_total"
RUNNING = b"vllm:num_requests_running"
WAITING = b"vllm:num_requests_waiting"
CACHE = b"vllm:kv_cache_usage_perc"

SMOOTH = 0.2
"""Seconds between two readings below which no rate is made of them: counters move in steps."""

_NUMBER = re.compile(rb"\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one engine.

    Attributes:
        tokens_per_second: generated, between the last two readings; None until there are two.
        running: sequences in its batches.
        waiting: sequences in its queue.
        cache: share of its KV cache in use, 0 to 1.
    """

    tokens_per_second: float | None = None
    running: float | None = None
    waiting: float | None = None
    cache: float | None = None

    def as_json(self) -> dict[str, float | None]:
        """For ``/fleet/load``."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "running": self.running,
            "waiting": self.waiting,
            "kv_cache": self.cache,
        }


class Meter:
    """Makes a `Load` of the pages that come in."""

    __slots__ = ("_at", "_tokens", "load")

    def __init__(self) -> None:
        self.load = Load()
        self._tokens: float | None = None
        self._at = 0.0

    def feed(self, page: Page, now: float) -> None:
        """One more page.

        Args:
            page: the engine's families.
            now: seconds, monotonic.
        """
        tokens = _values(page, TOKENS)
        rate = self.load.tokens_per_second
        if tokens and now - self._at >= SMOOTH:
            total = sum(tokens)
            if self._tokens is not None:
                # After a restart the counter begins at 0 again.
                grown = total - self._tokens if total >= self._tokens else total
                rate = grown / (now - self._at)
            self._tokens, self._at = total, now
        cache = _values(page, CACHE)
        self.load = Load(
            rate, _sum(_values(page, RUNNING)), _sum(_values(page, WAITING)), max(cache) if cache else None
        )


def _values(page: Page, name: bytes) -> list[float]:
    block = page.get(name)
    return [float(value) for value in _NUMBER.findall(block.samples)] if block is not None else []


def _sum(values: list[float]) -> float | None:
    return sum(values) if values else None
