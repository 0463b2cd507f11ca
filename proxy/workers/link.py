"""Messages between the director and a worker: one JSON object a line, over a socket pair.

Each side sends notes (no answer) and questions (one answer, matched by number). Messages of one side arrive in the
order in which they were sent, which the protocol relies on: what a worker learns after a closed gate was decided
after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable
from typing import Any

import orjson

from proxy.tasks import spawn

_log = logging.getLogger("fleetgate.workers")

LINE_LIMIT = 64 << 20
"""Bytes of one message; a list of every running request is the longest."""

Message = dict[str, Any]
Handler = Callable[[Message], Message | None]


class LinkLostError(Exception):
    """The other side is gone."""


class Link:
    """One end of the connection.

    Args:
        handler: takes each message of the other side; what it returns is the answer, if the message asks for one.
        on_lost: called once when the other side is gone.
    """

    def __init__(self, handler: Handler, on_lost: Callable[[], None]) -> None:
        self._handler = handler
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, sock: socket.socket) -> None:
        """Begin to talk over a connected socket."""
        reader, self._writer = await asyncio.open_unix_connection(sock=sock, limit=LINE_LIMIT)
        self._task = spawn(self._read(reader), name="link")

    def send(self, kind: str, **fields: Any) -> None:
        """A note."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(orjson.dumps({"t": kind, **fields}) + b"\n")

    async def ask(self, kind: str, *, timeout: float, **fields: Any) -> Message:
        """A question.

        Raises:
            LinkLostError: the other side is gone, or silent for ``timeout`` seconds.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self.send(kind, n=number, **fields)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise LinkLostError(f"no answer to {kind!r} within {timeout:g} s") from None
        finally:
            self._waiting.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError, ValueError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                self._take(orjson.loads(line))
        self._lost()

    def _take(self, message: Message) -> None:
        number = message.get("n")
        if message["t"] == "answer":
            waiting = self._waiting.get(message["n"])
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
            return
        try:
            answer = self._handler(message)
        except Exception:
            # A bug in one message must not end the link, and with it the worker.
            _log.exception("message %r could not be handled", message.get("t"))
            answer = {"failed": True}
        if number is not None:
            self.send("answer", **{**(answer or {}), "n": number})

    def _lost(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(LinkLostError("the other side is gone"))
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._on_lost()

    def close(self) -> None:
        """End the link from this side."""
        if self._task is not None:
            self._task.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
