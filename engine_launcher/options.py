"""Flags that ``fleetgate engines`` and ``fleetgate up`` share, and what they and a fleet file make together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from engine_launcher.errors import UsageError
from engine_launcher.fleet_file import FleetFile, read, unequal
from engine_launcher.restart import Care
from engine_launcher.settings import LOG_BYTES, LOG_KEEP, READY_WAIT, STOP_GRACE, FleetSpec, Rotation
from engine_launcher.vllm_engine import VLLM_VARIABLE

_PATH = click.Path(path_type=Path)
_CARE = Care()
_F = TypeVar("_F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("-c", "--fleet", "fleet_file", type=_PATH, help="YAML file with any of these and a list of engines."),
    click.option("--model", type=_PATH, help="Directory of the model; for sim, the name to serve."),
    click.option("--count", type=int, default=1, help="How many engines to start."),
    click.option(
        "--kind", type=click.Choice(["vllm", "sim"]), default="vllm", help="Real vLLM, or the simulated engine."
    ),
    click.option("--log-dir", type=_PATH, default=Path(".run/engines"), help="Directory of the engines' logs."),
    click.option("--log-bytes", type=int, default=LOG_BYTES, help="Bytes after which a log is turned over."),
    click.option("--log-keep", type=int, default=LOG_KEEP, help="Older logs that are kept for each engine."),
    click.option(
        "--vllm",
        "--python",
        "vllm",
        type=_PATH,
        envvar=VLLM_VARIABLE,
        help="Python executable or virtual environment that has vLLM; else what `make engine` built.",
    ),
    click.option("--gpus-per-engine", type=int, help="GPUs of each engine; else what its parallel sizes need."),
    click.option("--env", multiple=True, metavar="NAME=VALUE", help="Set for each engine; may be given several times."),
    click.option("--restore-from", type=_PATH, help="Load the newest whole checkpoint there at each start."),
    click.option("--ready-wait", type=float, default=READY_WAIT, help="Seconds until all must answer."),
    click.option("--stop-grace", type=float, default=STOP_GRACE, help="Seconds from SIGTERM to SIGKILL at the end."),
    click.option("--seed", type=int, default=0, help="Seed of the simulated engine's weights."),
    click.option("--restarts", type=int, default=_CARE.restarts, help="Restarts in a row until one is given up."),
    click.option(
        "--restart-backoff", type=float, default=_CARE.restart_backoff, help="Seconds before the first; doubles."
    ),
    click.option(
        "--restart-backoff-max", type=float, default=_CARE.restart_backoff_max, help="Seconds that the wait grows to."
    ),
    click.option(
        "--restart-reset", type=float, default=_CARE.restart_reset, help="Seconds of service that clear the count."
    ),
    click.option(
        "--health-interval", type=float, default=_CARE.health_interval, help="Seconds between two looks at /health."
    ),
    click.option("--health-timeout", type=float, default=_CARE.health_timeout, help="Seconds for one answer."),
    click.option(
        "--health-failures", type=int, default=_CARE.health_failures, help="Failures in a row that end an engine."
    ),
    click.option("--drain", type=float, default=_CARE.drain, help="Seconds that running requests get at the end."),
    click.option(
        "--roll-wait",
        type=float,
        default=_CARE.roll_wait,
        help="Seconds for each engine of a rolling restart.",
    ),
    click.option(
        "--backend", type=click.Choice(["local", "ray"]), default="local", help="This machine, or a Ray cluster."
    ),
    click.option("--ray-address", help="Address of the Ray cluster; else that of this machine (auto)."),
)


def fleet_options(command: _F) -> _F:
    """Add the flags."""
    for each in reversed(_OPTIONS):
        command = each(command)
    return command


NAMES = frozenset(
    {"fleet_file", "model", "count", "kind", "log_dir", "log_bytes", "log_keep", "vllm", "gpus_per_engine", "env"}
    | {"restore_from", "ready_wait", "stop_grace", "seed", "backend", "ray_address"}
    | {each.name for each in fields(Care)}
)
"""Field names of the flags above."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command is to run.

    Attributes:
        fleet: the engines.
        care: how they are looked after.
        proxy: settings of the proxy that the file holds.
    """

    fleet: FleetSpec
    care: Care
    proxy: Mapping[str, Any]


def plan(context: click.Context, options: dict[str, Any], **more: Any) -> Plan:
    """Flags and file together.

    Args:
        context: of the command; says which flags were really given.
        options: all of its options; those of this module are taken out.
        more: further fields of ``FleetSpec``, such as ``host``, ``port``, ``extra`` and ``environment``.

    Raises:
        UsageError: the file, or a value, is wrong.
    """
    own = {name: options.pop(name) for name in NAMES}
    path = own.pop("fleet_file")
    file = FleetFile.model_validate({}) if path is None else read(path)
    for name, value in file.flags().items():
        # What was given on the command line or in the environment beats the file.
        if context.get_parameter_source(name) in (None, ParameterSource.DEFAULT):
            (more if name == "host" else own)[name] = value
    care = Care(**{each.name: own.pop(each.name) for each in fields(Care)})
    care.check()
    rotation = Rotation(own.pop("log_bytes"), own.pop("log_keep"))
    environment = {**more.pop("environment", {}), **file.env, **_variables(own.pop("env"))}
    extra = (*file.args, *more.pop("extra", ()))
    fleet = FleetSpec(**own, **more, extra=extra, environment=environment, rotation=rotation)
    if file.engines:
        if context.get_parameter_source("count") is ParameterSource.COMMANDLINE or file.count is not None:
            raise UsageError(f"{path} lists the engines, so there is no count to give: use 'count' in its entries")
        engines = unequal(file.engines, fleet)
        fleet = replace(fleet, engines=engines, count=len(engines))
    fleet.check()
    return Plan(fleet, care, file.proxy)


def _variables(given: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for each in given:
        name, sign, value = each.partition("=")
        if not sign or not name:
            raise UsageError(f"--env {each} must be NAME=VALUE")
        found[name] = value
    return found
