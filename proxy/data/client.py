"""The socket side of a client connection: writing, closing, cutting, and telling a client that went away.

What is spoken on it is `proxy.data.front`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import sys
import termios
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from proxy.server import Server

_log = logging.getLogger("fleetgate.client")

FLUSH = 5.0
"""Seconds that the last bytes of a connection get to leave before it is aborted."""
LINGER = 2.0
"""Seconds for which what a refused client still sends is read and dropped. Closing with unread bytes would send a
reset, and that can take the answer with it before the client has read it (RFC 9112 section 9.6)."""
_RESET = struct.pack("ii", 1, 0)
_COUNT = struct.Struct("i")
_OPEN_STATES = frozenset({1, 2, 3})
"""TCP_ESTABLISHED, TCP_SYN_SENT, TCP_SYN_RECV of the kernel's ``tcp_states.h``."""


def unread(transport: asyncio.Transport) -> int:
    """Bytes written that the client's side has not taken yet: the transport's, and the kernel's where that tells.

    The kernel takes more from the transport only once much of its own buffer is free, which a slow reader of a big one
    needs minutes for.
    """
    left = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is not None:
        # ValueError: uvloop closed the descriptor and has not told us yet.
        with contextlib.suppress(OSError, ValueError):
            left += _COUNT.unpack(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, _COUNT.pack(0)))[0]
    return left


class ClientConnection(asyncio.Protocol):
    """One client connection, without a protocol.

    Attributes:
        transport: None once the connection is lost.
        peer: the client's address.
        trusted: its forwarding fields are kept.
        closing: nothing more is read as a request, the connection ends.
        taking: the client reads what is written; False while the buffer is over its limit.
        reading_paused: its bytes are left in the socket.
    """

    __slots__ = (
        "_end_timer",
        "_server",
        "_stall_timer",
        "closing",
        "loop",
        "peer",
        "reading_paused",
        "taking",
        "transport",
        "trusted",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self.loop = server.loop
        self.transport: asyncio.Transport | None = None
        self.peer = b"unknown"
        self.trusted = False
        self.closing = False
        self.taking = True
        self.reading_paused = False
        self._stall_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    def opened(self, transport: asyncio.BaseTransport) -> None:
        """The connection was made."""
        # uvloop's transports have the interface of asyncio.Transport without being one.
        self.transport = made = cast("asyncio.Transport", transport)
        address = transport.get_extra_info("peername")
        host = address[0] if isinstance(address, tuple) else "unix"
        self.peer = host.encode("ascii", "replace")
        self.trusted = self._server.plane.trusts(host)
        made.set_write_buffer_limits(high=self._server.plane.settings.stream_buffer)

    def lost(self) -> None:
        """The connection is gone."""
        self.transport = None
        self.closing = True
        for timer in (self._stall_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        self._stall_timer = self._end_timer = None

    # Writing

    def write(self, data: bytes) -> None:
        """Write unless the connection is closing (uvloop raises there)."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def stalls(self) -> None:
        """The client reads slower than is written: it may do so for a while only."""
        self.taking = False
        if self._stall_timer is None and self.transport is not None:
            limit = self._server.plane.settings.stalled_client_timeout
            self._stall_timer = self.loop.call_later(limit, self._stalled, unread(self.transport))

    def caught_up(self) -> None:
        """The client read enough."""
        self.taking = True
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stalled(self, before: int) -> None:
        self._stall_timer = None
        if self.transport is not None:
            self._stall_timer = self._again_if_less(before, self._stalled)

    def _again_if_less(self, before: int, look: Callable[[int], None]) -> asyncio.TimerHandle | None:
        """Look once more after the limit if the client read something since ``before`` bytes were left; else cut it."""
        assert self.transport is not None
        left = unread(self.transport)
        limit = self._server.plane.settings.stalled_client_timeout
        if left < before:
            return self.loop.call_later(limit, look, left)
        _log.warning("client %s read nothing for %g s; its connection is cut", self.peer.decode("latin-1"), limit)
        self.reset()
        return None

    # The end

    def close(self) -> None:
        """Close after what is buffered has left."""
        self.closing = True
        if self.transport is not None:
            self.transport.close()
            self._end_within(FLUSH)

    def linger(self) -> None:
        """Close for writing after what is buffered has left; drop what still comes for a moment."""
        self.closing = True
        transport = self.transport
        if transport is None:
            return
        if transport.is_closing() or not transport.can_write_eof():
            self.close()
            return
        transport.write_eof()
        self.resume_reading()
        self._end_within(LINGER)

    def reset(self) -> None:
        """End the connection at once with a reset, so that nothing can take its end for the answer's end."""
        self.closing = True
        transport = self.transport
        if transport is None:
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            # ValueError: uvloop closed the descriptor and has not told us yet.
            with contextlib.suppress(OSError, ValueError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.abort()

    def abort(self) -> None:
        """Drop the connection."""
        if self.transport is not None:
            self.transport.abort()

    def _end_within(self, seconds: float) -> None:
        if self._end_timer is None:
            self._end_timer = self.loop.call_later(seconds, self._end)

    def _end(self, before: int = sys.maxsize) -> None:
        """A slow reader gets longer as long as it reads."""
        self._end_timer = None
        transport = self.transport
        if transport is None:
            return
        if transport.get_write_buffer_size():
            self._end_timer = self._again_if_less(before, self._end)
        else:
            transport.abort()

    # Reading

    def pause_reading(self) -> None:
        """Leave the client's bytes in the socket."""
        if not self.reading_paused and self.transport is not None:
            self.reading_paused = True
            with contextlib.suppress(RuntimeError):
                self.transport.pause_reading()
            self._server.reading_paused(self)

    def resume_reading(self) -> None:
        """Go on reading."""
        if self.reading_paused and self.transport is not None:
            self.reading_paused = False
            with contextlib.suppress(RuntimeError):
                self.transport.resume_reading()
            self._server.reading_resumed(self)

    def peer_closed(self) -> bool:
        """Whether the client closed its side, asked of the kernel: while reading is paused the loop does not say."""
        transport = self.transport
        sock = transport.get_extra_info("socket") if transport is not None else None
        if sock is None:
            return False
        try:
            state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except (OSError, ValueError):
            return False
        return state not in _OPEN_STATES
