"""Which engines are slow, as far as their sessions tell.

An engine that takes five times as long for the same requests (a throttled GPU, a noisy neighbour) is not seen by
counting requests until many pile up on it. The time between two turns of a session shows it: the answer of the last
turn and the client's tools. Its logarithm is averaged per engine, so that one very long answer does not count for
hundreds, and compared with the median engine. Differences that chance can make are ignored.
"""

from __future__ import annotations

from math import exp, log

SMOOTHING = 0.03
"""Part of the newest turn in the average: about the last 60 turns count. Turn times that spread by a factor of e then
leave an error of 12 %, far below `DEADBAND`."""
MIN_TURNS = 20
"""Turns after which an engine is judged."""
MIN_SECONDS = 0.1
"""Shorter than a turn can be: such requests of one session run side by side and say nothing of the engine."""
DEADBAND = 2.0
"""An engine counts as slow from this many times the median on; less may be the sessions it happens to have."""
MOST = 8.0
"""Slower than this makes no more difference, so that such an engine still gets a turn now and then."""
RECKON_EVERY = 32
"""Turns between two comparisons of all engines, which cost some 20 us for 64."""


class Pace:
    """How many times slower than the median engine each engine is."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        self._slow: dict[str, float] = {}
        self._until = RECKON_EVERY

    def saw(self, engine_id: str, seconds: float) -> None:
        """A turn of a session on this engine began so long after the one before it."""
        if seconds < MIN_SECONDS:
            return
        turns = self._turns.get(engine_id, 0) + 1
        self._turns[engine_id] = turns
        mean = self._mean.get(engine_id, 0.0)
        self._mean[engine_id] = mean + (log(seconds) - mean) * max(SMOOTHING, 1 / turns)
        self._until -= 1
        if not self._until:
            self._reckon()

    def times(self, engine_id: str) -> float:
        """How many times slower than the median engine it is; 1 if that may be chance."""
        return self._slow.get(engine_id, 1.0)

    def forget(self, engine_id: str) -> None:
        """It left or restarted."""
        self._mean.pop(engine_id, None)
        self._turns.pop(engine_id, None)
        self._slow.pop(engine_id, None)

    def _reckon(self) -> None:
        self._until = RECKON_EVERY
        known = {name: mean for name, mean in self._mean.items() if self._turns[name] >= MIN_TURNS}
        if len(known) < 2:
            self._slow = {}
            return
        # The lower median: of two engines the faster one is the measure.
        median = sorted(known.values())[(len(known) - 1) // 2]
        ratios = {name: exp(min(10.0, mean - median)) for name, mean in known.items()}
        self._slow = {name: min(MOST, ratio) for name, ratio in ratios.items() if ratio > DEADBAND}
