"""A name server on this machine that says what a test wants: SRV records over UDP, and over TCP where they do not fit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
from dns.asyncresolver import Resolver

UDP_BYTES = 1232
"""A longer answer is cut short over UDP (RFC 9715's limit), so that the resolver asks again over TCP."""


class NameServer(asyncio.DatagramProtocol):
    """Answers from `records`: SRV data (``priority weight port target``) by name; an unknown name is NXDOMAIN."""

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}
        self.failure: int | None = None
        self.asked: list[tuple[str, str]] = []
        self.port = 0
        self._transport: Any = None

    def resolver(self) -> Resolver:
        """A resolver that asks nobody else."""
        made = Resolver(configure=False)
        made.nameservers = ["127.0.0.1"]
        made.port = self.port
        return made

    def _answer(self, wire: bytes, transport: str) -> bytes:
        query = dns.message.from_wire(wire)
        name = query.question[0].name.to_text(omit_final_dot=True)
        self.asked.append((name, transport))
        reply = dns.message.make_response(query)
        if self.failure is not None:
            reply.set_rcode(self.failure)
        elif name not in self.records:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        elif self.records[name]:
            reply.answer.append(dns.rrset.from_text(f"{name}.", 5, "IN", "SRV", *self.records[name]))
        out = reply.to_wire()
        if transport == "udp" and len(out) > UDP_BYTES:
            reply.answer.clear()
            reply.flags |= dns.flags.TC
            out = reply.to_wire()
        return out

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._transport.sendto(self._answer(data, "udp"), addr)

    async def stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2), "big")
        out = self._answer(await reader.readexactly(size), "tcp")
        writer.write(len(out).to_bytes(2, "big") + out)
        await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    """A name server on a free port of 127.0.0.1."""
    server = NameServer()
    tcp = await asyncio.start_server(server.stream, "127.0.0.1", 0)
    server.port = tcp.sockets[0].getsockname()[1]
    udp, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: server, local_addr=("127.0.0.1", server.port)
    )
    try:
        yield server
    finally:
        udp.close()
        tcp.close()
        await tcp.wait_closed()
