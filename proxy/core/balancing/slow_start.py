"""The share of an engine that has just come: it grows to the whole over some seconds.

An engine that comes into a busy fleet holds nothing, so every new prompt goes there until it holds as much as the
others: N times the prompts that an engine of N gets as a rule, each of them a whole prefill in an empty cache. With a
share, its weight is a part of what it will be, which every policy takes for a smaller engine: it is filled up to that
part of what the others hold, and the part grows.

Only an engine that is new to a fleet that has been at work for as long as the ramp is held back. Where all come at
once (the proxy starts, a cluster comes up) nobody else has the caches either.
"""

from __future__ import annotations

STEPS = 20
"""Times that a weight changes in a ramp: 5 % each, little enough to be no jump; every one makes policies look at the
fleet anew."""
LEAST = 0.1
"""The share that a ramp begins with: enough to warm up on, a tenth of what the others hold."""


class SlowStart:
    """Which engines are held back, and how far.

    Args:
        seconds: length of a ramp; 0: nobody is held back.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._warm: dict[str, float] = {}
        self._cold: dict[str, float] = {}

    @property
    def step(self) -> float:
        """Seconds until shares are to be looked at again."""
        return self._seconds / STEPS

    def __bool__(self) -> bool:
        """Whether anybody is held back."""
        return bool(self._cold)

    def came(self, engine_id: str, now: float) -> bool:
        """An engine takes requests for the first time in its life; True if it is held back.

        Args:
            engine_id: a process that was not known yet; one that comes back with its caches is not new.
            now: seconds, monotonic.
        """
        if engine_id in self._warm or engine_id in self._cold:
            return False
        if self._seconds and any(now - since >= self._seconds for since in self._warm.values()):
            self._cold[engine_id] = now
            return True
        self._warm[engine_id] = now
        return False

    def gone(self, engine_id: str) -> None:
        """It left, or its process ended: the next one under this name is new."""
        self._warm.pop(engine_id, None)
        self._cold.pop(engine_id, None)

    def share(self, engine_id: str, now: float) -> float:
        """Part of its whole weight, `LEAST` to 1."""
        since = self._cold.get(engine_id)
        return 1.0 if since is None else min(1.0, max(LEAST, (now - since) / self._seconds))

    def shares(self, now: float) -> dict[str, float]:
        """The share of everybody who is held back; who gets 1 is let go with that."""
        found = {engine_id: self.share(engine_id, now) for engine_id in self._cold}
        for engine_id, share in found.items():
            if share >= 1.0:
                self._warm[engine_id] = self._cold.pop(engine_id)
        return found
