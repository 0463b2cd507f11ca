"""``tiny_trainer`` as a child process of an asyncio program: the light environment has neither torch nor vLLM.

::

    async with TrainerProcess(python, Path(".models/tiny"), [url], log=Path("trainer.log")) as trainer:
        await trainer.ask("init")
        await trainer.ask("send", seed=1)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from engine_launcher.errors import LauncherError

START_LIMIT: Final = 180.0
"""Seconds to import torch and vLLM and to load the tiny model; 20 on two busy cores."""

LINE_LIMIT: Final = 64 * 2**20
"""Longest answer in bytes: token ids of a long rollout as JSON stay far below."""

STOP_LIMIT: Final = 10.0
"""Seconds that the trainer gets to end after its input has ended, before it is killed."""


class TrainerProcess:
    """One trainer; ``ask`` one thing at a time."""

    def __init__(self, python: Path, model: Path, urls: Sequence[str], *, log: Path) -> None:
        self._argv = [str(python), "-m", "engine_launcher.tiny_trainer", "--model", str(model)]
        for each in urls:
            self._argv += ["--url", each]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        try:
            await asyncio.wait_for(self._start(), START_LIMIT)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as sink:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=sink,
                limit=LINE_LIMIT,
                start_new_session=True,
            )
        await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            raise LauncherError(f"the trainer ended with exit code {code}; see {self._log}")
        found: dict[str, Any] = json.loads(line)
        return found

    async def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """Give one command and return its answer; raises ``LauncherError`` with what the trainer said went wrong."""
        assert self._process is not None
        assert self._process.stdin is not None
        async with self._turn:
            self._process.stdin.write(json.dumps({"do": command, **fields}).encode() + b"\n")
            await self._process.stdin.drain()
            answer = await self._answer()
        if not answer["ok"]:
            raise LauncherError(f"trainer, {command}: {answer['error']}")
        return answer

    async def stop(self) -> None:
        """End the trainer: its input ends, and it is killed if that does not do."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_LIMIT)
        except TimeoutError:
            process.kill()
            await process.wait()
