"""What a fleet of engines is made of, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from engine_launcher.errors import UsageError

Kind = Literal["vllm", "sim"]
Backend = Literal["local", "ray"]

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
"""More engines than this in one fleet is a slip of the finger."""

LOG_BYTES: Final = 64 * 2**20
"""Bytes after which a log is turned over: some days of vLLM's own lines, minutes of a traceback in a loop."""

LOG_KEEP: Final = 3
"""Older logs that are kept for each engine."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """When a log is turned over (bytes), and how many older ones are kept."""

    max_bytes: int = LOG_BYTES
    keep: int = LOG_KEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine, wherever it is started; plain data, so that it can be sent to another machine."""

    name: str
    """Unique in the fleet; part of the log's name."""
    kind: Kind = "vllm"
    model: Path | None = None
    """Directory of a Hugging Face model (``vllm``), or the name to serve under (``sim``)."""
    host: str = "127.0.0.1"
    port: int | None = None
    vllm: Path | None = None
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    gpus: int | None = None
    """GPUs of this engine; ``None`` is what its parallel sizes need."""
    restore_from: Path | None = None
    """Directory that a trainer leaves checkpoints in; the newest is loaded at each start."""
    share: int = 1
    """Engines that share the processors of a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """N engines of one kind, or a list of unequal ones. ``check()`` says what cannot work."""

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
    gpus_per_engine: int | None = None
    restore_from: Path | None = None
    engines: tuple[EngineSpec, ...] = ()
    """Unequal engines; where there are any, ``count`` is their number and what is said above of each is theirs."""
    backend: Backend = "local"
    ray_address: str | None = None
    """Address of a Ray cluster (``auto``: the one this machine is in); only for the backend ``ray``."""
    rotation: Rotation = Rotation()

    def check(self) -> None:
        """Raise ``UsageError`` for the first thing that cannot work."""
        if not 1 <= self.count <= MAX_ENGINES:
            raise UsageError(f"--count {self.count} is not between 1 and {MAX_ENGINES}: say how many engines to start")
        if self.ready_wait <= 0:
            raise UsageError(f"--ready-wait {self.ready_wait:g} must be above 0 seconds")
        if self.stop_grace < 0:
            raise UsageError(f"--stop-grace {self.stop_grace:g} must be 0 seconds or more")
        if self.gpus_per_engine is not None and self.gpus_per_engine < 1:
            raise UsageError(f"--gpus-per-engine {self.gpus_per_engine} must be 1 or more; leave it out for none")
        if self.rotation.max_bytes < 1 or self.rotation.keep < 0:
            raise UsageError("--log-bytes must be 1 or more, and --log-keep 0 or more")
        for each in self.plan():
            if each.restore_from is not None and not each.restore_from.is_dir() and self.backend == "local":
                raise UsageError(
                    f"--restore-from {each.restore_from} is not a directory here: make it first; "
                    "a trainer may fill it later"
                )
            # On Ray the model need not be on the machine that the launcher runs on.
            if each.kind == "vllm" and self.backend == "local":
                check_model(each.model)

    def plan(self) -> tuple[EngineSpec, ...]:
        """Each engine, in order."""
        if self.engines:
            return self.engines
        one = EngineSpec(
            name="0",
            kind=self.kind,
            model=self.model,
            host=self.host,
            vllm=self.vllm,
            extra=self.extra,
            environment=self.environment,
            seed=self.seed,
            gpus=self.gpus_per_engine,
            restore_from=self.restore_from,
            share=self.count,
        )
        first = self.port
        return tuple(
            replace(one, name=str(index), port=None if first is None else first + index) for index in range(self.count)
        )


def check_model(model: Path | None) -> None:
    """Raise ``UsageError`` where ``model`` is no directory that vLLM could load."""
    if model is None:
        raise UsageError("--model is missing: give the directory of a model, such as the one that `make model` makes")
    if not model.is_dir():
        raise UsageError(
            f"--model {model} is not a directory here: give the path of a downloaded model, or make the tiny "
            "one with `make model`"
        )
    if not (model / "config.json").is_file():
        raise UsageError(f"--model {model} holds no config.json, so it is not a Hugging Face model directory")


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


def flag_value(arguments: tuple[str, ...], *flags: str) -> str | None:
    """The value that ``arguments`` give one of ``flags`` (the last one counts), or ``None``."""
    wanted = {each.lstrip("-").replace("_", "-") for each in flags}
    found: str | None = None
    for index, each in enumerate(arguments):
        name, sign, value = each.partition("=")
        if not name.startswith("-") or name.lstrip("-").replace("_", "-") not in wanted:
            continue
        if sign:
            found = value
        elif index + 1 < len(arguments):
            found = arguments[index + 1]
    return found
