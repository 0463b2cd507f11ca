"""Processes of a benchmark run: start them pinned to a core, ask what they cost, end them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BIN = HERE / "bin"
PROXY_CORE = 1
LOAD_CORE = 0
WANTED_FILES = 65_536
"""Open files that 10,000 open requests need, with room: two connections each in the proxy."""


class BenchError(Exception):
    """The benchmark cannot go on; the message says why."""


def raise_file_limit() -> int:
    """Raise the limit of open files as far as wanted and allowed; children inherit it. Returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in ((WANTED_FILES, max(hard, WANTED_FILES)), (hard, hard)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
            return wanted[0]
    return soft


def most_open() -> int:
    """Requests that a proxy can have open at once within the limit of open files: two connections each."""
    return (raise_file_limit() - 200) // 2


def free_port() -> int:
    """A port that is free now, for programs that cannot take port 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def pinned(core: int, command: Sequence[str]) -> list[str]:
    """The command, kept on one core where there is more than one."""
    return ["taskset", "-c", str(core), *command] if cores() > 1 else list(command)


def http(
    port: int, method: str, path: str, body: bytes | None = None, *, timeout: float = 60.0
) -> tuple[int, bytes, dict[str, str]]:
    """One request on a connection of its own.

    Raises:
        OSError: the port does not answer.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json"} if body else {}
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}
    except HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def _parents() -> dict[int, int]:
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = (entry / "stat").read_text(encoding="latin-1")
                table[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return table


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    table = _parents()
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in table.items() if its_parent == parent]
    return found


def rss_kb(pids: Sequence[int]) -> int:
    """Resident memory of processes, in KiB, counting what they share only once (proportional set size)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total


def cpu_ns(pids: Sequence[int]) -> int:
    """CPU time of processes with their threads, in nanoseconds."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total


@dataclass
class Process:
    """A program that was started for the benchmark."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pids(self) -> list[int]:
        """It and its descendants."""
        return tree(self.popen.pid)

    def stop(self) -> None:
        """End it and all it started."""
        pids = self.pids
        if self.popen.stdin is not None:
            with contextlib.suppress(OSError):
                self.popen.stdin.close()
        self.popen.terminate()
        try:
            self.popen.wait(5)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        for pid in pids[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def tail(self) -> str:
        """The end of what it wrote."""
        with contextlib.suppress(OSError):
            return self.log.read_text(encoding="utf-8", errors="replace")[-1500:]
        return ""


def start(
    command: Sequence[str], *, core: int, log: Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> Process:
    """Start a program on a core; its output goes to a file."""
    with log.open("wb") as out:
        popen = subprocess.Popen(
            pinned(core, command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )
    return Process(popen, log)


@dataclass
class Mock:
    """Mock engines in one process."""

    popen: subprocess.Popen[str]
    ports: list[int]
    urls: list[str] = field(default_factory=list)

    def ask(self, call: str) -> dict[str, Any]:
        """One of the harness's own calls (``stats``, ``reset``, ``release``, ``control_us=N``)."""
        result: dict[str, Any] = json.loads(http(self.ports[0], "GET", f"/bench/{call}")[1])
        return result

    def wait_for(self, name: str, value: int, seconds: float) -> bool:
        """Wait until a count of ``stats`` is reached."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.ask("stats")[name] >= value:
                return True
            time.sleep(0.02)
        return False


@contextlib.contextmanager
def mock(engines: int = 2, *, control_us: int = 0, delay_us: int = 0) -> Iterator[Mock]:
    """Run mock engines for a while."""
    command = [str(BIN / "mock"), "--engines", str(engines), "--control-us", str(control_us)]
    command += ["--delay-us", str(delay_us)]
    popen = subprocess.Popen(pinned(LOAD_CORE, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert popen.stdin is not None
    assert popen.stdout is not None
    try:
        ports = json.loads(popen.stdout.readline())["ports"]
        yield Mock(popen, ports, [f"http://127.0.0.1:{port}" for port in ports])
    finally:
        popen.stdin.close()
        try:
            popen.wait(5)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        popen.stdout.close()


def wish(*, events: int = 16, us: int = 0, size: int = 1024, delay_us: int = 0, hold: bool = False) -> str:
    """What the mock is to do with a request (``benchmarks/src/mock.h``)."""
    return f"bench n={events} us={us} size={size} delay={delay_us} hold={int(hold)}"


def load_command(port: int, **options: Any) -> list[str]:
    """The command line of the load generator: ``seconds=3`` is ``--seconds 3``, True is a bare flag."""
    command = [str(BIN / "load"), "--port", str(port)]
    for name, value in options.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command += [f"--{name}", str(value)]
    return pinned(LOAD_CORE, command)


def load(port: int, *, pids: Sequence[int] = (), timeout: float = 180.0, **options: Any) -> dict[str, Any]:
    """Run the load generator to its end.

    Args:
        port: where the requests go.
        pids: processes whose CPU time is taken over the counted window.
        timeout: seconds after which it is ended by force.
        options: its options.

    Raises:
        BenchError: it failed.
    """
    command = load_command(port, **options)
    if pids:
        command += ["--watch", ",".join(map(str, pids))]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode:
        raise BenchError(f"the load generator failed: {done.stderr.strip() or done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


class Held:
    """Requests that stay open until they are answered or dropped."""

    def __init__(self, port: int, count: int, what: str, body: int = 2048) -> None:
        command = load_command(port, mode="hold", connections=count, wish=what, body=body)
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._popen.stdout is not None
        self.sent = json.loads(self._popen.stdout.readline())["sent"]

    def result(self, seconds: float = 60.0) -> dict[str, Any]:
        """Wait until all are answered (or for so long), then drop the rest; what the load generator reports."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)
        out, _ = self._popen.communicate(timeout=30)
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        return result

    def drop(self) -> dict[str, Any]:
        """Close all connections now."""
        return self.result(0.01)
