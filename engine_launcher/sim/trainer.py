"""The sending side of a simulated weight transfer: a rendezvous that blocks where a collective would.

Every rank joins at init, every rank takes part in each update; one that is missing blocks all others, as with NCCL.
The "tensors" are one label of weights, see `engine_launcher.sim.model`.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Self

import orjson

from engine_launcher.sim.transfer import RENDEZVOUS_KEY


class SimTrainer:
    """Rank 0 of a transfer group of simulated engines.

    Use: ``start()``, POST ``init_info(...)`` to ``/init_weight_transfer_engine`` of every engine (or of the proxy in
    front of them), then for each round POST ``/update_weights`` concurrently with ``broadcast(weights)``.

    Attributes:
        world_size: ranks of the group, the trainer's own included.
        port: where it listens, once started.

    """

    def __init__(self, world_size: int, host: str = "127.0.0.1") -> None:
        self.world_size = world_size
        self.host = host
        self.port = 0
        self._server: asyncio.Server | None = None
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._ready: set[int] = set()
        self._changed = asyncio.Condition()
        self._joined = False

    async def __aenter__(self) -> Self:
        """Start listening."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, self.host, 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close every connection; members that wait in an update fail."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._connections):
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        self._members.clear()
        self._ready.clear()

    def init_info(self, rank_offset: int = 1, **more: Any) -> dict[str, Any]:
        """Return the ``init_info`` of the init call; ``more`` is added to it."""
        return {
            "master_address": self.host,
            "master_port": self.port,
            "rank_offset": rank_offset,
            "world_size": self.world_size,
            RENDEZVOUS_KEY: True,
            **more,
        }

    @property
    def ranks(self) -> list[int]:
        """Ranks that joined so far, the trainer's own not counted."""
        return sorted(self._members)

    async def wait_joined(self) -> None:
        """Return when every rank has joined."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._joined)

    async def broadcast(self, weights: str) -> None:
        """Send ``weights`` to every rank, once every rank has called ``/update_weights``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._joined and set(self._members) <= self._ready)
            self._ready.clear()
        self._tell({"weights": weights})

    def _tell(self, message: dict[str, Any]) -> None:
        line = orjson.dumps(message) + b"\n"
        for writer in set(self._members.values()):
            if not writer.is_closing():
                writer.write(line)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ranks: list[int] = []
        self._connections.add(writer)
        try:
            while line := await reader.readline():
                message = orjson.loads(line)
                async with self._changed:
                    if "join" in message:
                        ranks = [int(rank) for rank in message["join"]]
                        self._join(ranks, int(message["world_size"]), writer)
                    else:
                        self._ready.update(ranks)
                    self._changed.notify_all()
        except ConnectionError:
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    def _join(self, ranks: list[int], world_size: int, writer: asyncio.StreamWriter) -> None:
        if self._joined:
            # A new init begins a new group: its members all join again.
            self._joined = False
            self._members.clear()
            self._ready.clear()
        if world_size != self.world_size or any(rank in self._members or not 0 < rank < world_size for rank in ranks):
            # A duplicate or foreign rank leaves the group incomplete: everybody waits, as in a real rendezvous.
            return
        for rank in ranks:
            self._members[rank] = writer
        if len(self._members) == self.world_size - 1:
            self._joined = True
            self._tell({"joined": True})
