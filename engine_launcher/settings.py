"""What a fleet of engines is made of, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from engine_launcher.errors import UsageError

Kind = Literal["vllm", "sim"]

READY_WAIT: Final = 1800.0
"""Longest wait, in seconds, until every engine answers: a large model over a network disk takes many minutes."""

STOP_GRACE: Final = 20.0
"""Seconds that an engine gets to end by itself after SIGTERM; vLLM's own worker shutdown takes up to 5."""

HEALTH_INTERVAL: Final = 0.25
"""Seconds between two looks at ``/health`` of an engine that is starting."""

HEALTH_TIMEOUT: Final = 5.0
"""Seconds for one answer of ``/health``; a starting vLLM accepts no connection at all."""

TAIL_LINES: Final = 40
"""Lines of an engine's log that an error shows: a Python traceback with the lines that led to it."""

MAX_ENGINES: Final = 4096
"""More engines than this on one machine is a slip of the finger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """N engines of one kind. ``check()`` says what cannot work."""

    count: int
    kind: Kind = "vllm"
    model: Path | None = None
    """Directory of a Hugging Face model (``vllm``), or the name to serve under (``sim``)."""
    host: str = "127.0.0.1"
    port: int | None = None
    """Port of the first engine, the others follow; ``None`` takes free ones."""
    log_dir: Path = Path(".run/engines")
    vllm: Path | None = None
    """Python executable or virtual environment that has vLLM; ``None`` looks for the one of ``make engine``."""
    extra: tuple[str, ...] = ()
    """Arguments handed to every engine as they are, after the launcher's own; the same flag there replaces ours."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set for every engine on top of the launcher's environment."""
    seed: int = 0
    """Seed of the simulated engine's weights; all engines of a fleet share it, as they share a model."""
    ready_wait: float = READY_WAIT
    stop_grace: float = STOP_GRACE

    def check(self) -> None:
        """Raise ``UsageError`` for the first thing that cannot work."""
        if not 1 <= self.count <= MAX_ENGINES:
            raise UsageError(f"--count {self.count} is not between 1 and {MAX_ENGINES}: say how many engines to start")
        if self.ready_wait <= 0:
            raise UsageError(f"--ready-wait {self.ready_wait:g} must be above 0 seconds")
        if self.stop_grace < 0:
            raise UsageError(f"--stop-grace {self.stop_grace:g} must be 0 seconds or more")
        if self.kind == "vllm":
            self._check_model()

    def _check_model(self) -> None:
        if self.model is None:
            raise UsageError(
                "--model is missing: give the directory of a model, such as the one that `make model` makes"
            )
        if not self.model.is_dir():
            raise UsageError(
                f"--model {self.model} is not a directory here: give the path of a downloaded model, or make the tiny "
                "one with `make model`"
            )
        if not (self.model / "config.json").is_file():
            raise UsageError(f"--model {self.model} holds no config.json, so it is not a Hugging Face model directory")


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to run for one engine."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """The whole environment of the process, not only what is added to it."""


def has_flag(arguments: tuple[str, ...], flag: str) -> bool:
    """Whether ``--flag``, ``--flag=value``, ``--no-flag`` or the same with underscores is among ``arguments``."""
    bare = flag.removeprefix("--").replace("_", "-")
    for each in arguments:
        if each.startswith("--"):
            name = each[2:].partition("=")[0].replace("_", "-")
            if name in (bare, f"no-{bare}"):
                return True
    return False
