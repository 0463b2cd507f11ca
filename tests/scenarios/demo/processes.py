"""A command of this project as a child process, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[3]
MARK = "FG_TEST_RUN"
"""Environment variable by which a run's processes are told from all others; children inherit it."""


DEMO = (sys.executable, "-m", "examples.demo")
UP = (str(Path(sys.executable).with_name("fleetgate")), "up")


class Command:
    """A command line, killed at the end of the block if it still runs."""

    def __init__(self, *argv: str, **environment: str) -> None:
        self._argv = argv
        self._mark = uuid.uuid4().hex
        self._environment = os.environ | environment | {MARK: self._mark}
        self.lines: list[str] = []
        self.process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        self.process = await asyncio.create_subprocess_exec(
            *self._argv,
            cwd=ROOT,
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()

    async def until(self, text: str) -> str:
        """The first line from here on that holds ``text``."""
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"ended without {text!r}:\n{''.join(self.lines)}")

    async def end(self) -> int:
        """Read to the end; returns the exit code."""
        assert self.process.stdout is not None
        self.lines += (await self.process.stdout.read()).decode().splitlines(keepends=True)
        return await self.process.wait()

    async def gone(self) -> None:
        """Wait until none of its processes is left."""
        while self.left():
            await asyncio.sleep(0.05)

    def running(self, word: str) -> list[int]:
        """Process ids with this word on their command line, without their guards, which have it after ``-I``."""
        lines = {pid: command_line(pid) for pid in self.left()}
        return [pid for pid, words in lines.items() if word in words and "-I" not in words]

    def left(self) -> list[int]:
        """Process ids of this run that are there now."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if wanted in words:
                    found.append(int(entry.name))
        return found


def command_line(pid: int) -> list[str]:
    """The words that a process was started with; none when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
