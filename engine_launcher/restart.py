"""When an engine is started again, and when that is given up. No clock and no I/O in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine_launcher.errors import UsageError

RESTARTS: Final = 5
"""Restarts in a row: a crash now and then is lived with; one that comes back five times has a cause to be looked at."""

BACKOFF: Final = 2.0
"""Seconds before the first restart, so that an engine that dies at once does not spin."""

BACKOFF_MAX: Final = 120.0
"""Seconds that the wait grows to: below the minutes that a large model takes to load, so it costs little more."""

RESET_AFTER: Final = 600.0
"""Seconds of service after which earlier crashes are forgotten."""

PROBE_INTERVAL: Final = 10.0
"""Seconds between two looks at ``/health`` of an engine that serves."""

PROBE_TIMEOUT: Final = 10.0
"""Seconds for one answer: vLLM's server is one event loop, which thousands of streams keep busy for seconds."""

PROBE_FAILURES: Final = 6
"""Failures in a row after which it is started again: a minute and more, since a restart costs all that runs there."""

DRAIN: Final = 60.0
"""Seconds that running requests get before engines are ended."""

ROLL_WAIT: Final = 3600.0
"""Seconds that a rolling restart waits for one engine to run empty, and then to be admitted: rollouts are long, and
after a weight update it takes the next one, or equal checksums, to be let in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """How a fleet is looked after. All times are seconds."""

    restarts: int = RESTARTS
    restart_backoff: float = BACKOFF
    restart_backoff_max: float = BACKOFF_MAX
    restart_reset: float = RESET_AFTER
    health_interval: float = PROBE_INTERVAL
    health_timeout: float = PROBE_TIMEOUT
    health_failures: int = PROBE_FAILURES
    drain: float = DRAIN
    roll_wait: float = ROLL_WAIT

    def check(self) -> None:
        """Raise ``UsageError`` for the first value that cannot work."""
        for name in ("restarts", "restart_backoff", "restart_reset", "drain"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name):g} must be 0 or more")
        for name in ("health_interval", "health_timeout", "health_failures", "roll_wait"):
            if getattr(self, name) <= 0:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name):g} must be above 0")
        if self.restart_backoff_max < self.restart_backoff:
            raise UsageError(
                f"--restart-backoff-max {self.restart_backoff_max:g} must not be below --restart-backoff "
                f"{self.restart_backoff:g}"
            )


class Restarts:
    """Counts the restarts of one engine.

    The wait doubles from ``restart_backoff`` up to ``restart_backoff_max``. An engine that served for
    ``restart_reset`` seconds starts again from the beginning, so that one crash a day never uses up the cap.
    """

    def __init__(self, care: Care) -> None:
        self._care = care
        self.done = 0
        """Restarts in a row so far."""

    def __repr__(self) -> str:
        return f"<Restarts {self.done} of {self._care.restarts}>"

    def next(self, served: float) -> float | None:
        """Seconds to wait before the next start, or ``None`` when the cap is reached.

        Args:
            served: seconds for which it answered before it failed; 0 if it never did.
        """
        if served >= self._care.restart_reset:
            self.done = 0
        if self.done >= self._care.restarts:
            return None
        # The exponent is bounded, as a float is: 2.0 ** 2000 raises.
        wait = self._care.restart_backoff * 2.0 ** min(self.done, 64)
        self.done += 1
        return min(wait, self._care.restart_backoff_max)
