"""What the GPU run is made of: servers, the load's client processes, counters, and control calls. Every wait is bounded
and ends when the process that it waits for has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent

ENGINE_WAIT: Final = 240.0
"""Seconds until an engine must answer; 55 were seen."""
PROXY_WAIT: Final = 30.0
TRAINER_WAIT: Final = 180.0
"""Seconds for a trainer to load its weights."""
CALL_LIMIT: Final = 150.0
"""Seconds for one control call or one command of the trainer."""
STOP_LIMIT: Final = 60.0
"""Seconds for the client processes to hand in what they saw."""

_TOKENS: Final = re.compile(rb"^vllm:generation_tokens_total\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)
_RUNNING: Final = re.compile(rb"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)


class RunFailed(Exception):
    """Something of the run did not do what it must; the phase is given up."""


def say(text: str) -> None:
    """A line for whoever watches, with the time since the start of the machine."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Server:
    """A process in a session of its own, with a log."""

    def __init__(
        self, name: str, argv: Sequence[str], env: dict[str, str], log_dir: Path, *, pipes: bool = False
    ) -> None:
        self.name, self.argv, self.env = name, list(argv), env
        self.log = log_dir / f"{name}.log"
        self.pipes = pipes
        self.process: asyncio.subprocess.Process | None = None
        self.url = ""
        self.ending = False
        """Whether its end is wanted."""

    async def start(self) -> None:
        """Start it, or start it again."""
        self.ending = False
        with self.log.open("ab") as sink:
            pipe = asyncio.subprocess.PIPE if self.pipes else None
            self.process = await asyncio.create_subprocess_exec(
                *self.argv,
                stdin=pipe or asyncio.subprocess.DEVNULL,
                stdout=pipe or sink,
                stderr=sink,
                env=self.env,
                cwd=ROOT,
                start_new_session=True,
                limit=2**24,
            )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.returncode is None

    def check(self) -> None:
        """Raise when it has ended."""
        if not self.alive:
            raise RunFailed(f"{self.name} has ended ({self.process and self.process.returncode}):\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL to it and all that it started."""
        self.ending = True
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def healthy(self, session: aiohttp.ClientSession, limit: float) -> float:
        """Wait for ``/health``; returns the seconds it took."""
        started = time.monotonic()
        while time.monotonic() - started < limit:
            self.check()
            try:
                async with session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=2)) as answer:
                    if answer.status == 200:
                        return time.monotonic() - started
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(0.1)
        raise RunFailed(f"{self.name} did not answer /health in {limit:g} s:\n{self.tail()}")


class Trainer(Server):
    """The trainer's process: one JSON line in, one out."""

    is_ready = False

    async def ready(self) -> None:
        """Wait until its weights are loaded; at once after the first time."""
        if not self.is_ready:
            await self._line(TRAINER_WAIT)
            self.is_ready = True

    async def ask(self, do: str, limit: float = CALL_LIMIT, **fields: Any) -> dict[str, Any]:
        """One command; raises with the trainer's error."""
        self.check()
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        answer = await self._line(limit)
        if not answer["ok"]:
            raise RunFailed(f"{self.name}: {do}: {answer['error']}\n{self.tail(8)}")
        return answer

    async def _line(self, limit: float) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), limit)
        except TimeoutError:
            raise RunFailed(f"{self.name} did not answer in {limit:g} s:\n{self.tail()}") from None
        if not line:
            raise RunFailed(f"{self.name} has ended:\n{self.tail()}")
        found: dict[str, Any] = json.loads(line)
        return found


@dataclass
class Load:
    """The client processes of one load."""

    processes: list[asyncio.subprocess.Process] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    async def start(self, urls: list[str], concurrency: int, processes: int, seed: int, **plan: Any) -> None:
        """Spread the rollouts over processes and wait until all are on their way."""
        share, rest = divmod(concurrency, processes)
        for index in range(processes):
            count = share + (index < rest)
            fields = {"urls": urls, "concurrency": count, "seed": seed * 1000 + index, **plan}
            self.processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    str(HERE / "load.py"),
                    json.dumps(fields),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,
                    limit=2**28,
                )
            )
        for each in self.processes:
            assert each.stdout is not None
            line = await asyncio.wait_for(each.stdout.readline(), STOP_LIMIT)
            if line.strip() != b"started":
                raise RunFailed(f"a client process ended at once: {line!r}")

    async def stop(self) -> list[dict[str, Any]]:
        """End it; every rollout that its clients saw."""
        for each in self.processes:
            assert each.stdin is not None
            each.stdin.close()
        rows: list[dict[str, Any]] = []
        for each in self.processes:
            assert each.stdout is not None
            text = await asyncio.wait_for(each.stdout.read(), STOP_LIMIT)
            found = json.loads(text)
            if found["broken"]:
                raise RunFailed(f"a client process broke: {found['broken'][0]}")
            rows += found["rollouts"]
            await asyncio.wait_for(each.wait(), STOP_LIMIT)
        self.processes.clear()
        return rows

    def kill(self) -> None:
        """End it without asking."""
        for each in self.processes:
            with contextlib.suppress(ProcessLookupError):
                each.kill()
        self.processes.clear()


class Counters:
    """Tokens that the engines say they made, looked at regularly: the same measure for every route and form."""

    def __init__(self, urls: Sequence[str], session: aiohttp.ClientSession, every: float = 0.5) -> None:
        self._urls, self._session, self._every = list(urls), session, every
        self.samples: dict[str, list[tuple[float, float]]] = {each: [] for each in urls}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Counters:
        self._tasks = [asyncio.ensure_future(self._look(each)) for each in self._urls]
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self._tasks:
            each.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look(self, url: str) -> None:
        while True:
            before = time.time()
            try:
                async with self._session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                    page = await answer.read()
                total = sum(float(each) for each in _TOKENS.findall(page))
                self.samples[url].append(((before + time.time()) / 2, total))
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(max(0.0, self._every - (time.time() - before)))

    def rate(self, start: float, end: float) -> float:
        """Tokens a second of all engines between two times: the slope of a line through the samples."""
        return sum(slope([each for each in rows if start <= each[0] <= end]) for rows in self.samples.values())

    def between(self, start: float, end: float) -> float:
        """Tokens of all engines between two times, interpolated."""
        return sum(at(rows, end) - at(rows, start) for rows in self.samples.values())


def slope(rows: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line; 0 for fewer than two samples."""
    if len(rows) < 2:
        return 0.0
    return statistics.linear_regression([x for x, _ in rows], [y for _, y in rows]).slope


def at(rows: Sequence[tuple[float, float]], when: float) -> float:
    """The counter at a time, on the line between its neighbours."""
    before = [each for each in rows if each[0] <= when]
    after = [each for each in rows if each[0] > when]
    if not before or not after:
        return (before[-1] if before else after[0])[1] if rows else 0.0
    (x0, y0), (x1, y1) = before[-1], after[0]
    return y0 + (y1 - y0) * (when - x0) / (x1 - x0)


async def idle(urls: Sequence[str], session: aiohttp.ClientSession, limit: float = 20.0) -> bool:
    """Wait until no engine has a request; whether that came to pass."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        busy = 0.0
        for each in urls:
            async with session.get(f"{each}/metrics", timeout=aiohttp.ClientTimeout(total=10)) as answer:
                busy += sum(float(one) for one in _RUNNING.findall(await answer.read()))
        if not busy:
            return True
        await asyncio.sleep(0.25)
    return False


def cpu_seconds(pid: int, *, children: bool = True) -> float:
    """Processor time of a process, and of those below it."""
    total, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    stack = [pid]
    while stack:
        each = stack.pop()
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
            if children:
                for thread in Path(f"/proc/{each}/task").iterdir():
                    stack += [int(one) for one in (thread / "children").read_text().split()]
        except OSError:
            continue
    return total


class Control:
    """Calls to one URL, engine or proxy."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def post(self, path: str, body: Any = None) -> Any:
        """POST; raises unless the answer is 200."""
        try:
            async with self.session.post(
                self.url + path, json=body, timeout=aiohttp.ClientTimeout(total=CALL_LIMIT)
            ) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RunFailed(f"POST {path}: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            raise RunFailed(f"POST {path} answered {answer.status}: {text[:600]}")
        return json.loads(text)

    async def get(self, path: str) -> Any:
        """GET JSON."""
        async with self.session.get(self.url + path, timeout=aiohttp.ClientTimeout(total=CALL_LIMIT)) as answer:
            return json.loads(await answer.text())


def quantile(values: Sequence[float], share: float) -> float | None:
    """Of a list, by rank; nothing of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def version_of(package: str, python: str, env: dict[str, str]) -> str:
    """Installed version of a package."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or "?"
