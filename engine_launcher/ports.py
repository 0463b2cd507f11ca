"""Ports for engines: free ones found by asking the system, or a range that the user named."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from engine_launcher.errors import LauncherError, PortTakenError, UsageError

FIRST_PORT = 15_000
"""Start of the range that free ports are taken from: above the ports of common services."""

DEFAULT_EPHEMERAL_START = 32_768
"""Linux's default start of the ports that outgoing connections use."""

HIGHEST_PORT = 65_535

TRIES_PER_PORT = 200
"""Random picks per port before giving up; with a range of thousands, running out means that something is wrong."""

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def ephemeral_start() -> int:
    """Lowest port that the system gives to outgoing connections."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    return DEFAULT_EPHEMERAL_START


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As the servers do: a port that is only in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    except BaseException:
        probe.close()
        raise
    return probe


def free_ports(host: str, count: int) -> list[int]:
    """``count`` different ports that nobody listens on at ``host``.

    An engine binds its port seconds after it was chosen here, and binds it again when it is restarted. So the ports
    come from below the ephemeral range: there no outgoing connection can take one in between.

    Raises ``LauncherError`` when none can be found, ``UsageError`` when ``host`` is not an address of this machine.
    """
    high = ephemeral_start()
    low = FIRST_PORT if high > FIRST_PORT + count else 1024
    held: list[socket.socket] = []
    try:
        for _ in range(TRIES_PER_PORT * count):
            if len(held) == count:
                break
            try:
                held.append(_bind(host, random.randrange(low, max(high, low + count + 1))))
            except socket.gaierror as error:
                raise UsageError(f"--host {host} cannot be resolved: {error}; use an address of this machine") from None
            except OSError:
                continue
        if len(held) < count:
            raise LauncherError(f"found only {len(held)} of {count} free ports between {low} and {high} on {host}")
        return [int(each.getsockname()[1]) for each in held]
    finally:
        for each in held:
            each.close()


def named_ports(host: str, base: int, count: int) -> list[int]:
    """The ports ``base`` to ``base + count - 1``, each checked to be free.

    Raises ``UsageError`` for numbers that are no ports and ``PortTakenError`` for one that is in use.
    """
    if not 1 <= base <= HIGHEST_PORT - count + 1:
        raise UsageError(f"--port {base} with {count} engines leaves the range 1 to {HIGHEST_PORT}; use a lower one")
    ports = list(range(base, base + count))
    for port in ports:
        try:
            _bind(host, port).close()
        except socket.gaierror as error:
            raise UsageError(f"--host {host} cannot be resolved: {error}; use an address of this machine") from None
        except OSError as error:
            raise PortTakenError(
                f"port {port} on {host} cannot be used ({error.strerror}); engines need the ports {ports[0]} to "
                f"{ports[-1]}: choose another --port, or leave it out for free ones"
            ) from None
    return ports
