"""Flags and file together: which of them counts."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from engine_launcher.errors import UsageError
from engine_launcher.options import Plan, fleet_options, plan


def planned(*arguments: str, environment: dict[str, str] | None = None) -> Plan:
    found: list[Plan] = []

    @click.command()
    @fleet_options
    @click.pass_context
    def command(context: click.Context, /, **options: object) -> None:
        found.append(plan(context, options, host="127.0.0.1", extra=("--late",), environment={"OWN": "1"}))

    result = CliRunner().invoke(command, arguments, env=environment or {}, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert found, result.output
    return found[0]


def file(tmp_path: Path, text: str) -> tuple[str, str]:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return "-c", str(path)


def test_the_defaults() -> None:
    found = planned("--kind", "sim")
    assert (found.fleet.count, found.care.restarts, found.fleet.ready_wait) == (1, 5, 1800.0)
    assert found.fleet.extra == ("--late",)
    assert found.fleet.environment == {"OWN": "1"}


def test_a_flag_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    given = file(
        tmp_path, "kind: sim\ncount: 3\nrestarts: 7\ndrain: 9\nhost: 127.0.0.2\nlog_bytes: 100\nargs: [--early]"
    )
    found = planned(*given, "--restarts", "8")
    assert (found.fleet.count, found.care.restarts, found.care.drain) == (3, 8, 9.0)
    assert found.fleet.host == "127.0.0.2"
    assert found.fleet.rotation.max_bytes == 100
    assert found.fleet.extra == ("--early", "--late")


def test_variables_come_from_flags_and_the_file(tmp_path: Path) -> None:
    found = planned(*file(tmp_path, "kind: sim\nenv: {A: 1, B: 1}"), "--env", "B=2", "--env", "C=a=b")
    assert found.fleet.environment == {"OWN": "1", "A": "1", "B": "2", "C": "a=b"}
    with pytest.raises(UsageError, match="--env X must be NAME=VALUE"):
        planned("--kind", "sim", "--env", "X")


def test_a_list_of_engines_is_the_count(tmp_path: Path) -> None:
    given = file(tmp_path, "kind: sim\nengines: [{count: 2}, {name: x}]\nproxy: {port: 8001}")
    found = planned(*given)
    assert [each.name for each in found.fleet.plan()] == ["0", "1", "x"]
    assert found.fleet.count == 3
    assert found.proxy == {"port": 8001}
    with pytest.raises(UsageError, match="lists the engines, so there is no count"):
        planned(*given, "--count", "2")


def test_values_are_checked_whatever_they_come_from(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--drain -1"):
        planned(*file(tmp_path, "kind: sim\ndrain: -1"))
    with pytest.raises(UsageError, match=r"--restore-from .*absent is not a directory"):
        planned("--kind", "sim", "--restore-from", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="--gpus-per-engine 0"):
        planned("--kind", "sim", "--gpus-per-engine", "0")
    with pytest.raises(UsageError, match="--log-bytes"):
        planned("--kind", "sim", "--log-bytes", "0")
    with pytest.raises(UsageError, match="--model is missing"):
        planned(*file(tmp_path, "engines: [{kind: sim}, {}]"))
