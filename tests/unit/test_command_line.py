"""The command line: what it teaches, what it completes, how it refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from proxy.cli import COMPLETE_VARIABLE, main
from proxy.config import Settings


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch):
    for name in os.environ:
        if name.startswith("FLEETGATE_"):
            monkeypatch.delenv(name)


def run(*arguments):
    return CliRunner().invoke(main, arguments, prog_name="fleetgate")


def test_help_shows_how_to_begin():
    text = run("--help").output
    for line in ("fleetgate up --kind sim --count 2", "fleetgate proxy --engine URL", "fleetgate status --watch"):
        assert line in text


@pytest.mark.parametrize(
    "command", ["proxy", "engines", "up", "status", "sync-report", "doctor", "check-config", "completion"]
)
def test_every_command_explains_itself(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    said = result.output.partition("Options:")[0].splitlines()[1:]
    assert any(line.strip() for line in said), "what it does stands before its flags"
    for option in main.get_command(click.Context(main), command).params:
        if isinstance(option, click.Option):
            assert option.help, option.name


def test_every_setting_is_a_flag_of_the_proxy():
    text = run("proxy", "--help").output
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in text


def test_a_wrong_flag_names_the_right_one():
    result = run("proxy", "--engin", "http://h:1")
    assert result.exit_code == 2
    assert "--engine" in result.output


def test_a_wrong_value_is_told_and_ends_with_2():
    result = run("check-config", "--port", "many")
    assert result.exit_code == 2
    assert "port: Input should be a valid integer" in result.output


def test_check_config_marks_what_was_given_and_hides_secrets():
    result = run("check-config", "--engine", "http://h:1", "--control-token", "canary-51c2")
    assert result.exit_code == 0
    assert "* engine: ['http://h:1']" in result.output
    assert "* control-token: *" in result.output
    assert "  port: 8000" in result.output
    assert "canary" not in result.output


@pytest.mark.parametrize("command", [("status",), ("status", "--json"), ("status", "--watch"), ("sync-report",)])
@pytest.mark.parametrize("url", ["foo", "localhost:9", "http://", "http://h:many", "ftp://h", ""])
def test_what_is_no_url_of_a_proxy_is_wrong_usage(command, url):
    result = run(*command, "--url", url)
    assert result.exit_code == 2
    assert "give a base URL such as http://127.0.0.1:8000" in result.output


@pytest.mark.parametrize("command", ["status", "sync-report"])
def test_a_proxy_that_is_not_there_is_a_failure(command):
    result = run(command, "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "no proxy at http://127.0.0.1:1" in result.output


@pytest.mark.parametrize("option", ["--register", "--proxy"])
def test_the_launcher_says_what_is_no_url_of_a_proxy_before_it_starts_engines(option, tmp_path):
    result = run("engines", "--model", str(tmp_path), "--count", "1", option, "foo")
    assert result.exit_code == 2
    assert "give a base URL such as http://127.0.0.1:8000" in result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_the_variable_by_which_it_is_asked(shell):
    assert COMPLETE_VARIABLE in run("completion", shell).output


@pytest.mark.parametrize(
    ("words", "at", "found"),
    [("fleetgate pro", 1, "proxy"), ("fleetgate do", 1, "doctor"), ("fleetgate proxy --hold-t", 2, "--hold-timeout")],
)
def test_a_shell_that_asks_is_told(words, at, found):
    asked = {COMPLETE_VARIABLE: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(at)}
    program = "import sys; sys.argv[0] = 'fleetgate'; from proxy.cli import main; main()"
    answer = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert f"plain,{found}" in answer.stdout.splitlines()
