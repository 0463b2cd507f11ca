"""``fleetgate engines`` from outside: output, exit codes, signals."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "engine_launcher"]


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=60, cwd=cwd, check=False)


@contextmanager
def started(*args: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--count", "0", "--kind", "sim"], "--count 0"),
        (["--count", "many"], "'many' is not a valid integer"),
        (["--no-such-flag"], "No such option"),
        (["--kind", "other"], "'other' is not one of"),
        (["--model", "absent"], "--model absent is not a directory here"),
        ([], "--model is missing"),
        (["--kind", "sim", "--port", "70000"], "--port 70000"),
        (["--kind", "sim", "--host", "no such host"], "cannot be resolved"),
    ],
)
def test_bad_usage_is_exit_code_2_and_says_what_is_wrong(args: list[str], message: str, tmp_path: Path) -> None:
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_exit_code_1_and_names_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("--kind", "sim", "--port", port, cwd=tmp_path)
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 cannot be used" in done.stderr


def test_an_engine_that_dies_at_start_is_exit_code_1_with_the_end_of_its_log(tmp_path: Path) -> None:
    done = run("--kind", "sim", "--", "--no-such-flag", cwd=tmp_path)
    assert done.returncode == 1
    assert "ended with exit code 2; the end of .run/engines/engine-0.log" in done.stderr
    assert "unrecognized arguments: --no-such-flag" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_urls_are_printed_when_ready_and_a_signal_is_a_clean_stop(signum: signal.Signals, tmp_path: Path) -> None:
    with started("--kind", "sim", "--count", "2", "--engines-file", "urls", cwd=tmp_path) as process:
        assert process.stdout is not None
        urls = [process.stdout.readline().strip() for _ in range(2)]
        assert (tmp_path / "urls").read_text().splitlines() == urls
        for url in urls:
            with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
                assert answer.status == 200
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out == ""
    for url in urls:
        port = int(url.rpartition(":")[2])
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_signal_while_starting_is_a_clean_stop_too(tmp_path: Path) -> None:
    with started("--kind", "sim", "--ready-wait", "60", cwd=tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("0 of 1 engines ready")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


def test_when_no_engine_is_left_the_command_ends_with_exit_code_1(tmp_path: Path) -> None:
    with started("--kind", "sim", "--restarts", "0", cwd=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        engine = Path(f"/proc/{children[0]}/task/{children[0]}/children").read_text().split()[0]
        signal_process(int(engine))
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "ended with exit code 137" in err
        assert "is given up after 0 restarts in a row" in err
        assert "no engine is left" in err


def signal_process(pid: int) -> None:
    import os

    os.kill(pid, signal.SIGKILL)


def test_help_names_the_exit_codes(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "Exit codes: 0 clean stop" in done.stdout
