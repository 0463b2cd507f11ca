"""The test process's end of `worker`: real clients run in an environment of their own."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
CLIENTS_PYTHON = ROOT / ".clients/bin/python"
END_SECONDS = 10.0
"""For the worker to end after its input has."""


class ClientError(Exception):
    """A client raised; the attributes are those of its exception."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['type']}: {error['message']}")
        self.type: str = error["type"]
        self.message: str = error["message"]
        self.status: int | None = error["status"]
        self.body: Any = error["body"]
        self.cause: str | None = error["cause"]


class Clients:
    """One worker process; ``await clients("using_openai.chat", url=...)`` runs a function there."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w")
        environment = {
            **os.environ,
            # The clients under test talk to this machine only, and need no credentials of the person who runs this.
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_API_KEY": "none",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_NO_USAGE_STATS": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        self._process = subprocess.Popen(
            [CLIENTS_PYTHON, "-m", "tests.contract.clients.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._waiting: dict[int, Future[Any]] = {}
        self._ids = itertools.count()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            future = self._waiting.pop(answer["id"])
            if "error" in answer:
                future.set_exception(ClientError(answer["error"]))
            else:
                future.set_result(answer["result"])
        for future in self._waiting.values():
            future.set_exception(RuntimeError(f"the worker ended; see {self._log.name}"))

    def start(self, call: str, **kwargs: Any) -> asyncio.Future[Any]:
        """Begin a call."""
        assert self._process.stdin is not None
        future: Future[Any] = Future()
        number = next(self._ids)
        self._waiting[number] = future
        self._process.stdin.write(json.dumps({"id": number, "call": call, "kwargs": kwargs}) + "\n")
        self._process.stdin.flush()
        return asyncio.wrap_future(future)

    async def __call__(self, call: str, **kwargs: Any) -> Any:
        """The result of a call.

        Raises:
            ClientError: what the client raised.
        """
        return await self.start(call, **kwargs)

    def stop(self) -> None:
        """End the worker."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        self._log.close()


def has_engine() -> bool:
    """Whether ``.clients`` finds torch and vLLM, that is whether ``make engine`` ran with the same Python."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return (ROOT / ".engine/lib" / version / "site-packages/vllm").is_dir()
