"""A TCP relay between the proxy and an engine (or a client and the proxy) whose wire can be broken while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from typing import Self


class TcpFaultProxy:
    """Relays bytes to ``host:port`` until told otherwise.

    Attributes:
        refuse: close each new connection at once.
        black_hole: accept and relay nothing, in neither direction.
        delay: seconds before each piece is passed on.
        cut_after: bytes towards the client after which a connection is cut; None never.
        rst: cut with a reset instead of an end.
        piece: bytes passed on at once at most, for splitting.
    """

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        self._target = (host, port)
        self._random = random.Random(seed)
        self.port = 0
        self.refuse = False
        self.black_hole = False
        self.delay = 0.0
        self.cut_after: int | None = None
        self.rst = False
        self.piece = 65536
        self.accepted = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """Connections that are relayed now."""
        return len(self._open) // 2

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.drop_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop_all(self, *, share: float = 1.0) -> int:
        """Reset every open connection (or a random share of them); returns how many."""
        doomed = [writer for writer in self._open if self._random.random() < share]
        for writer in doomed:
            _reset(writer)
        return len(doomed)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        ends = [writer]
        try:
            if self.refuse:
                return
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            ends.append(far_writer)
            self._open |= set(ends)
            await asyncio.gather(self._pump(reader, far_writer, None), self._pump(far_reader, writer, self.cut_after))
        except (OSError, asyncio.CancelledError):
            # The streams module logs whatever this ends with; a broken wire is what this tool is for.
            pass
        finally:
            self._tasks.discard(task)
            for end in ends:
                self._open.discard(end)
                _reset(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None) -> None:
        passed = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(self.piece):
                while self.black_hole:
                    await asyncio.sleep(0.01)
                if self.delay:
                    await asyncio.sleep(self.delay)
                if limit is not None and passed + len(data) >= limit:
                    writer.write(data[: limit - passed])
                    await writer.drain()
                    if self.rst:
                        _reset(writer)
                    break
                passed += len(data)
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError, ValueError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
