"""One engine as a process: started under the guard, logged to a file, ended with everything below it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_launcher import guard
from engine_launcher.errors import LauncherError
from engine_launcher.settings import TAIL_LINES, EngineCommand, Rotation

GUARD_EXTRA: Final = 10.0
"""Seconds beyond the grace time after which the guard itself is taken to be stuck and is killed."""

GUARD: Final = str(Path(guard.__file__).resolve())
"""The guard is run by path, so that it starts without this package or anything else being imported."""

TAIL_BYTES: Final = 64 * 1024
"""How much of the end of a log is read for its last lines; a single line can be long."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One process of an engine's tree."""

    pid: int
    name: str
    """As the process calls itself: ``VLLM::EngineCore`` for vLLM's engine process."""


class EngineProcess:
    """A child that may be started, ended and started again; not for use from two tasks at once."""

    def __init__(
        self, name: str, command: EngineCommand, log: Path, grace: float, rotation: Rotation | None = None
    ) -> None:
        self.name = name
        self.command = command
        self.log = log
        self._grace = grace
        self._rotation = rotation or Rotation()
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self._log_inode = 0

    def __repr__(self) -> str:
        state = "not started" if self._process is None else "running" if self.alive else f"ended ({self.returncode})"
        return f"<EngineProcess {self.name} {state}>"

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def returncode(self) -> int | None:
        """Exit code of the engine, 128 + N when signal N ended it, or ``None`` while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Run the command; raises ``LauncherError`` when it runs already or its log cannot be written."""
        if self.alive:
            raise LauncherError(f"{self.name} is running already")
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            sink = self.log.open("ab")
        except OSError as error:
            raise LauncherError(
                f"the log {self.log} cannot be written: {error.strerror}; choose another --log-dir"
            ) from None
        with sink:
            self._log_start, self._log_inode = sink.tell(), os.fstat(sink.fileno()).st_ino
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                GUARD,
                str(self._grace),
                str(self.log.absolute()),
                str(self._rotation.max_bytes),
                str(self._rotation.keep),
                *self.command.argv,
                # Held open for as long as this process lives: its end tells the guard that the launcher is gone.
                stdin=asyncio.subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                env=dict(self.command.environment),
                # Ctrl-C in a terminal reaches the launcher alone, which then ends the engines in order.
                start_new_session=True,
            )

    async def wait(self) -> int:
        """Wait until it ends, and return its exit code."""
        if self._process is None:
            raise LauncherError(f"{self.name} was never started")
        return await self._process.wait()

    async def stop(self) -> None:
        """End it in order: SIGTERM, then SIGKILL for whatever is left after the grace time. Fine when it has ended."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """End the whole tree at once with SIGKILL, as a crash would."""
        await self._end(signal.SIGUSR1)

    async def _end(self, signum: signal.Signals) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signum)
        try:
            await asyncio.wait_for(process.wait(), self._grace + GUARD_EXTRA)
        except TimeoutError:
            # Once the guard is gone nobody adopts its orphans, so they are listed first.
            left = guard.descendants(process.pid)
            process.kill()
            guard.send(left, signal.SIGKILL)
            await process.wait()

    def processes(self) -> list[ProcessInfo]:
        """The engine's processes, the server first; without the guards. Empty when it does not run."""
        if self._process is None or not self.alive:
            return []
        found = []
        for pid in guard.descendants(self._process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if GUARD.encode() in words[:4]:
                    continue
                found.append(ProcessInfo(pid, words[0].decode(errors="replace").strip()))
        return found

    def signal_all(self, signum: signal.Signals) -> None:
        """Send a signal to each of the engine's processes, such as SIGSTOP to freeze it and SIGCONT to thaw it."""
        guard.send([each.pid for each in self.processes()], signum)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines that this run wrote to its log."""
        try:
            with self.log.open("rb") as source:
                size = source.seek(0, os.SEEK_END)
                # After it was turned over, all of the file is of this run.
                start = self._log_start if os.fstat(source.fileno()).st_ino == self._log_inode else 0
                source.seek(max(start, size - TAIL_BYTES))
                text = source.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-lines:])
