"""Rollouts that are kept in flight: as one ends the next begins, and an aborted one is continued."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from examples.demo.client import KINDS, ClientError, Kind, Piece, ask, request_body
from examples.demo.settings import DemoFailed
from proxy.tasks import spawn

MAX_ERRORS: Final = 200
"""Errors after which the demo ends: the table is not made better by thousands of them."""

ERROR_PAUSE: Final = 0.1
"""Seconds between an error and the next rollout of the same worker, so that a dead fleet is not hammered."""


@dataclass(slots=True)
class Rollout:
    """One finished rollout."""

    number: int
    kind: Kind
    mode: str
    """How the engines were paused meanwhile."""
    pieces: list[Piece] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class VisibleError:
    """An error that a client saw."""

    mode: str
    kind: str
    rollout: int
    message: str


class RolloutPool:
    """Keeps ``in_flight`` rollouts going against one URL.

    Args:
        session: for the requests.
        base: the URL.
        model: name of the model that is served.
        in_flight: how many at once.
        lengths: shortest and longest rollout, in tokens.
    """

    def __init__(
        self, session: aiohttp.ClientSession, base: str, model: str, in_flight: int, lengths: tuple[int, int]
    ) -> None:
        self.mode = ""
        self.finished: list[Rollout] = []
        self.errors: list[VisibleError] = []
        self.running = 0
        self._session = session
        self._base = base
        self._model = model
        self._in_flight = in_flight
        self._lengths = lengths
        self._next = 0
        self._stopping = False
        self._changed = asyncio.Condition()
        self._workers: list[asyncio.Task[None]] = []

    def start(self, mode: str) -> None:
        """Begin the first rollouts of a mode."""
        self.mode = mode
        self._stopping = False
        self._workers = [spawn(self._work(), name=f"rollouts {index}") for index in range(self._in_flight)]

    async def finish(self) -> None:
        """Let the running rollouts end; no new ones begin."""
        self._stopping = True
        await asyncio.gather(*self._workers)

    async def cancel(self) -> None:
        """End at once."""
        for each in self._workers:
            each.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def more(self, count: int) -> None:
        """Wait until ``count`` more rollouts have finished; raises ``DemoFailed`` when they fail instead."""
        goal = len(self.finished) + count
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.finished) >= goal or len(self.errors) >= MAX_ERRORS)
        if len(self.errors) >= MAX_ERRORS:
            raise DemoFailed(f"{MAX_ERRORS} rollouts failed, the last with: {self.errors[-1].message}")

    async def _work(self) -> None:
        while not self._stopping:
            number, self._next = self._next, self._next + 1
            kind = KINDS[number % len(KINDS)]
            self.running += 1
            try:
                pieces = await self._rollout(number, kind)
                self.finished.append(Rollout(number, kind, self.mode, pieces))
            except ClientError as error:
                self.errors.append(VisibleError(self.mode, str(kind), number, str(error)))
                await asyncio.sleep(ERROR_PAUSE)
            finally:
                self.running -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _rollout(self, number: int, kind: Kind) -> list[Piece]:
        # The number comes first, so that no two prompts share a block of a prefix cache.
        text = f"{number:06d}: a rollout of the demo"
        left = random.Random(number).randint(*self._lengths)
        headers = {"X-Session-ID": f"rollout-{number}"}
        body = request_body(kind, self._model, text if kind.route == "chat" else list(text.encode()), left)
        pieces: list[Piece] = []
        while True:
            piece = await ask(self._session, self._base, kind, body, headers)
            pieces.append(piece)
            left -= len(piece.tokens)
            if piece.finish != "abort" or left <= 0:
                break
            if piece.tokens:
                # As RL clients do: the tokens so far become part of the prompt. Chat takes no token ids.
                kind = Kind("completions", kind.stream) if kind.route == "chat" else kind
                body = request_body(kind, self._model, piece.prompt + piece.tokens, left)
        if left:
            raise ClientError(f"finish_reason {pieces[-1].finish!r} with {left} tokens missing")
        return pieces
