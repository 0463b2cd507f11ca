"""The command ``fleetgate``.

Exit codes: 0 clean stop, 2 wrong usage or configuration, 1 anything else.
"""

from __future__ import annotations

import sys
import types
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from proxy.config import Settings
from proxy.sources import ConfigError, load

EXIT_FAILURE = 1
EXIT_USAGE = 2
COMPLETE_VARIABLE = "_FLEETGATE_COMPLETE"
"""By which the shell asks for completions; click derives it from the name of the command."""


def _plain_type(field: FieldInfo) -> Any:
    """The type of a setting without Optional and Annotated."""
    annotation = field.annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
    return annotation


def _is_list(field: FieldInfo) -> bool:
    return typing.get_origin(_plain_type(field)) is list


def _default_text(field: FieldInfo) -> str | None:
    default = field.get_default(call_default_factory=True)
    if default is None or default == [] or isinstance(default, (bool, SecretStr)):
        return None
    if isinstance(default, list):
        return ",".join(str(item) for item in default)
    return str(default)


def setting_options(command: click.Command) -> click.Command:
    """Add a flag for each setting. Values are judged by the settings model, so that all sources speak alike."""
    for name, field in Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        kind = _plain_type(field)
        if kind is bool:
            option = click.Option([f"{flag}/--no-{flag[2:]}", name], default=None, help=field.description)
        else:
            option = click.Option(
                [flag, name],
                multiple=_is_list(field),
                default=None,
                metavar=getattr(kind, "__name__", "TEXT").upper() if not _is_list(field) else "TEXT",
                help=field.description,
                show_default=_default_text(field) or False,
            )
        command.params.append(option)
    command.params.append(
        click.Option(
            ["--config", "config"], type=click.Path(path_type=Path), help="YAML file with any of these settings."
        )
    )
    return command


def read_settings(options: dict[str, Any]) -> Settings:
    """Settings from the options of a command; ends the process with code 2 if they are wrong."""
    config = options.pop("config", None)
    flags = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    flags = {key: value for key, value in flags.items() if value is not None and value != []}
    try:
        return load(flags, config)
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)


def fail(message: str, code: int) -> typing.NoReturn:
    """Say what is wrong and end with this exit code."""
    click.echo(f"fleetgate: {message}", err=True)
    sys.exit(code)


class LazyGroup(click.Group):
    """Commands of the launcher are imported when asked for: the sidecar does without them."""

    LAZY = {
        "engines": "engine_launcher.cli:engines",
        "up": "engine_launcher.up:up",
        "status": "proxy.status:status",
        "sync-report": "proxy.status:sync_report",
        "doctor": "proxy.doctor:doctor",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in order of use."""
        return ["proxy", *self.LAZY, *(name for name in super().list_commands(ctx) if name != "proxy")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by name, importing it if need be."""
        target = self.LAZY.get(cmd_name)
        if target is None:
            return super().get_command(ctx, cmd_name)
        from importlib import import_module  # noqa: PLC0415

        module, _, name = target.partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("fleetgate"), prog_name="fleetgate")
def main() -> None:
    """One URL in front of N independent vLLM servers, made for asynchronous reinforcement learning.

    \b
    Try it, no GPU needed:    fleetgate up --kind sim --count 2
    Engines that run already: fleetgate doctor URL URL
                              fleetgate proxy --engine URL --engine URL
    Then, beside it:          fleetgate status --watch

    Rollout clients talk to http://127.0.0.1:8000/v1, the trainer to http://127.0.0.1:8000; people look at /fleet/ui.
    """  # noqa: D301 - click wants the character


@main.command("proxy")
def proxy_command(**options: Any) -> None:
    """Run the proxy in front of engines that run already.

    Example: fleetgate proxy --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002

    Each setting is also an environment variable (FLEETGATE_PORT=8000) and a key of the YAML file given by --config
    (port: 8000). A flag beats the environment, which beats the file.
    """
    from proxy.app import run  # noqa: PLC0415 - --help must not pay for the server

    sys.exit(run(read_settings(options)))


@main.command("check-config")
def check_config(**options: Any) -> None:
    """Check settings without starting anything, and show what is in force."""
    settings = read_settings(options)
    for name in Settings.model_fields:
        value = getattr(settings, name)
        mark = "*" if name in settings.model_fields_set else " "
        click.echo(f"{mark} {name.replace('_', '-')}: {value}")


@main.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a SHELL complete commands and flags.

    Example: source <(fleetgate completion bash)
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(main, {}, "fleetgate", COMPLETE_VARIABLE).source())


setting_options(proxy_command)
setting_options(check_config)
