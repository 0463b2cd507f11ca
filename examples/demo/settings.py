"""What the demo does, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

Engine = Literal["sim", "vllm"]
Mode = Literal["keep", "wait", "abort"]

MODES: Final[tuple[Mode, ...]] = ("keep", "wait", "abort")

SIM_TOKENS_PER_SECOND: Final = 150
"""Speed of one simulated sequence: about that of the tiny model on a CPU, so that both demos look alike."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long rollouts are, and how long the demo may take."""

    shortest: int
    """Tokens of the shortest rollout."""
    longest: int
    """Tokens of the longest one: long enough to straddle a sync, since a sync comes each time half of them finished."""
    limit: float
    """Seconds after which the demo gives up, once everything has started."""


PACES: Final[dict[Engine, Pace]] = {"sim": Pace(40, 140, 120.0), "vllm": Pace(64, 192, 600.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSpec:
    """One run of the demo."""

    engine: Engine = "sim"
    engines: int = 2
    in_flight: int = 32
    syncs: int = 10
    """Weight syncs in each mode."""
    modes: tuple[Mode, ...] = MODES
    model: Path = Path(".models/tiny")
    """Directory of the tiny model; only for real engines."""
    vllm: Path | None = None
    """Environment that has vLLM; ``None`` looks for the one of ``make engine``."""
    run_dir: Path = field(default=Path(".run/demo"))
    """Where the logs go."""

    @property
    def sync_every(self) -> int:
        """Finished rollouts between two syncs: half of those in flight, so that most of them straddle a sync."""
        return max(1, self.in_flight // 2)

    @property
    def pace(self) -> Pace:
        """Lengths and limits for this kind of engine."""
        return PACES[self.engine]


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""
