"""A command of this project as a child process, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[3]
MARK = "FG_TEST_RUN"
"""Environment variable by which a run's processes are told from all others; children inherit it."""


class Command:
    """``python -m MODULE ARGS``, killed at the end of the block if it still runs."""

    def __init__(self, module: str, *args: str, **environment: str) -> None:
        self._argv = [sys.executable, "-m", module, *args]
        self._mark = uuid.uuid4().hex
        self._environment = os.environ | environment | {MARK: self._mark}
        self.lines: list[str] = []
        self.process: asyncio.subprocess.Process

    async def __aenter__(self) -> Command:
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
