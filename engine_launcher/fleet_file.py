"""``fleet.yaml``: a whole fleet in one file, engines that are not alike among it.

::

    model: /models/policy
    restarts: 10
    args: [--max-model-len, 8192]          # for every engine
    engines:
      - {count: 4, gpus: 1}
      - {name: big, gpus: 4, args: [--gpu-memory-utilization, 0.85], env: {NCCL_DEBUG: WARN}}
    proxy:                                 # settings of `fleetgate proxy`, for `fleetgate up`
      port: 8000
      min_engines: 5

A flag beats the file. What is unknown is an error that names the nearest right key.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from engine_launcher.errors import UsageError
from engine_launcher.settings import Backend, EngineSpec, FleetSpec, Kind
from proxy.config import Settings
from proxy.sources import nearest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _words(value: object) -> object:
    """Arguments as a list, or as one line in the words of a shell."""
    if isinstance(value, str):
        return shlex.split(value)
    if isinstance(value, list):
        return [str(each) if isinstance(each, (int, float)) and not isinstance(each, bool) else each for each in value]
    return value


def _texts(value: object) -> object:
    """YAML reads 1 and true as what they are; in an environment they are texts."""
    if isinstance(value, dict):
        return {
            str(name): str(each).lower() if isinstance(each, bool) else str(each) if each is not None else ""
            for name, each in value.items()
        }
    return value


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Variables = Annotated[dict[str, str], BeforeValidator(_texts)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineEntry(_Strict):
    """One entry of ``engines``; what it leaves out is as at the top of the file."""

    name: str | None = None
    count: int = Field(default=1, ge=1)
    kind: Kind | None = None
    model: Path | None = None
    host: str | None = None
    port: int | None = Field(default=None, ge=1, le=65535)
    vllm: Path | None = None
    gpus: int | None = Field(default=None, ge=1)
    args: Words = ()
    env: Variables = {}
    seed: int | None = None
    restore_from: Path | None = None

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        if value is not None and not _NAME.fullmatch(value):
            raise ValueError(f"{value!r} becomes part of a file name: use letters, digits, '.', '_' and '-'")
        return value


class FleetFile(_Strict):
    """The whole file. Its keys are the flags of ``fleetgate engines``, with ``_`` for ``-``."""

    kind: Kind | None = None
    model: Path | None = None
    count: int | None = Field(default=None, ge=1)
    host: str | None = None
    vllm: Path | None = None
    args: Words = ()
    env: Variables = {}
    seed: int | None = None
    gpus_per_engine: int | None = Field(default=None, ge=1)
    restore_from: Path | None = None
    log_dir: Path | None = None
    log_bytes: int | None = None
    log_keep: int | None = None
    ready_wait: float | None = None
    stop_grace: float | None = None
    restarts: int | None = None
    restart_backoff: float | None = None
    restart_backoff_max: float | None = None
    restart_reset: float | None = None
    health_interval: float | None = None
    health_timeout: float | None = None
    health_failures: int | None = None
    drain: float | None = None
    roll_wait: float | None = None
    backend: Backend | None = None
    ray_address: str | None = None
    engines: tuple[EngineEntry, ...] = ()
    proxy: dict[str, Any] = {}

    @field_validator("proxy")
    @classmethod
    def _settings(cls, value: dict[str, Any]) -> dict[str, Any]:
        found = {str(name).replace("-", "_"): each for name, each in value.items()}
        for name in found:
            if name not in Settings.model_fields:
                raise ValueError(f"unknown key {name!r}{nearest(name, list(Settings.model_fields))}")
        return found

    def flags(self) -> dict[str, Any]:
        """What the file says that is a flag too, by the flag's field name."""
        return {
            name: value
            for name in type(self).model_fields
            if name not in ("args", "env", "engines", "proxy") and (value := getattr(self, name)) is not None
        }


def read(path: Path) -> FleetFile:
    """The file, checked; raises ``UsageError`` that says what is wrong and what would be right."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} must be a mapping, such as 'model: /models/policy' and a list of 'engines'")
    try:
        return FleetFile.model_validate({_key(name): value for name, value in data.items()})
    except ValidationError as error:
        raise UsageError("; ".join(f"{path}: {_explain(each)}" for each in error.errors())) from None


def _key(name: object) -> str:
    return str(name).replace("-", "_")


def _explain(item: Any) -> str:
    where, inside = "", item["loc"]
    for each in inside:
        where += f"[{each}]" if isinstance(each, int) else f".{each}" if where else str(each)
    if item["type"] == "extra_forbidden":
        known: type[BaseModel] = EngineEntry if len(inside) > 1 else FleetFile
        above = where.rpartition(".")[0]
        text = f"unknown key {inside[-1]!r}{nearest(str(inside[-1]), list(known.model_fields))}"
        return f"{above}: {text}" if above else text
    return f"{where}: {str(item['msg']).removeprefix('Value error, ')}"


def unequal(entries: tuple[EngineEntry, ...], fleet: FleetSpec) -> tuple[EngineSpec, ...]:
    """The engines that the entries describe, with what they leave out taken from ``fleet``.

    Raises ``UsageError`` for names or ports that are given twice.
    """
    total = sum(each.count for each in entries)
    found: list[EngineSpec] = []
    for entry in entries:
        for index in range(entry.count):
            name = str(len(found)) if entry.name is None else entry.name
            if entry.name is not None and entry.count > 1:
                name = f"{entry.name}-{index}"
            found.append(
                EngineSpec(
                    name=name,
                    kind=entry.kind or fleet.kind,
                    model=entry.model or fleet.model,
                    host=entry.host or fleet.host,
                    port=None if entry.port is None else entry.port + index,
                    vllm=entry.vllm or fleet.vllm,
                    extra=(*fleet.extra, *entry.args),
                    environment={**fleet.environment, **entry.env},
                    seed=fleet.seed if entry.seed is None else entry.seed,
                    gpus=entry.gpus or fleet.gpus_per_engine,
                    restore_from=entry.restore_from or fleet.restore_from,
                    share=total,
                )
            )
    names = [each.name for each in found]
    ports = [(each.host, each.port) for each in found if each.port is not None]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two engines are called {name!r}; give each entry a name of its own")
    for host, port in ports:
        if ports.count((host, port)) > 1:
            raise UsageError(f"two engines are to listen on {host}:{port}; leave ports out for free ones")
    return tuple(found)
