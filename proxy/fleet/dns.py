"""Engines by DNS: the addresses of a name and one port, or SRV records, which carry both.

A headless service of Kubernetes has both. Of SRV records the target's *name* becomes the engine's, so that a pod that
comes back under another address is the engine that it was, with its place in the order of ranks; of addresses nothing
else is known.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from proxy.core.addresses import parse_engines_dns

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

LIFETIME = 5.0
"""Seconds for one answer, all name servers and the search list included: the resolver's own default."""


class DnsSource(Protocol):
    """Something that names engines."""

    async def look(self) -> list[str]:
        """The engines' URLs of now.

        Raises:
            OSError: nobody answered, or with an error.
        """


def dns_source(value: str) -> DnsSource:
    """What looks for the engines that the setting ``engines_dns`` names.

    Raises:
        ValueError: see `proxy.core.addresses.parse_engines_dns`.
    """
    name, port = parse_engines_dns(value)
    return SrvList(name) if port is None else AddressList(name, port)


class AddressList:
    """One engine for each address of a name, all on one port; sorted, so that ranks are stable."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port

    async def look(self) -> list[str]:
        """One URL an address; none if there is no such name."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno == socket.EAI_NONAME:
                return []
            raise
        addresses = sorted({str(item[4][0]) for item in found})
        return [f"http://[{item}]:{self._port}" if ":" in item else f"http://{item}:{self._port}" for item in addresses]


def system_resolver() -> Resolver:
    """A resolver by the system's configuration of now."""
    # Nobody else needs the library, which takes some 30 ms to import.
    from dns.asyncresolver import Resolver  # noqa: PLC0415

    return Resolver()


class SrvList:
    """One engine for each SRV record.

    Priority and weight are not looked at: a sync has to reach all engines, and which gets how many requests is for the
    balancing policy to say.

    Args:
        name: of the records; ``_https._tcp...`` makes https URLs.
        resolver: makes the resolver, for each look a new one, since ``resolv.conf`` may change; default: the system's.
    """

    def __init__(self, name: str, resolver: Callable[[], Resolver] | None = None) -> None:
        self._name = name
        self._scheme = "https" if name.lower().startswith("_https.") else "http"
        self._resolver = resolver or system_resolver

    async def look(self) -> list[str]:
        """One URL a record, sorted; none if there is no such name, or none that offers the service."""
        from dns.exception import DNSException  # noqa: PLC0415 - as above
        from dns.resolver import NXDOMAIN, NoAnswer  # noqa: PLC0415

        try:
            answer = await self._resolver().resolve(self._name, "SRV", lifetime=LIFETIME, search=True)
        except (NXDOMAIN, NoAnswer):
            return []
        except DNSException as error:
            raise OSError(f"no SRV records of {self._name}: {error}") from error
        records = sorted({(record.target.to_text(omit_final_dot=True), record.port) for record in answer})
        # A target of "." says that the service is decidedly not there (RFC 2782).
        return [f"{self._scheme}://{target}:{port}" for target, port in records if target not in ("", ".", "@")]
