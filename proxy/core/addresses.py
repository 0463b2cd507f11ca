"""What names an engine or a listener in a setting: base URLs, DNS names, hosts."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def parse_engine_url(url: str, whose: str = "engine", port: int = 8001) -> str:
    """The canonical form of a base URL.

    Args:
        url: an engine's, or that of something else.
        whose: how an error calls that.
        port: of the example that an error gives.

    Raises:
        ValueError: not ``http(s)://host[:port][/prefix]``.
    """
    parts = urlsplit(url if "://" in url else f"//{url}")
    example = f"give a base URL such as http://127.0.0.1:{port}"
    if parts.scheme not in {"http", "https"}:
        raise ValueError(f"{whose} {url!r} has no http:// or https:// scheme; {example}")
    try:
        own = parts.port
    except ValueError as error:
        raise ValueError(f"{whose} {url!r} has no valid port ({error}); {example}") from None
    if not parts.hostname or any(ch.isspace() for ch in url):
        raise ValueError(f"{whose} {url!r} has no valid host; {example}")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{whose} {url!r} must not carry a query, a fragment or credentials; {example}")
    own = own if own is not None else (443 if parts.scheme == "https" else 80)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError(f"{whose} {url!r} ends with /v1; give the server's root, {url[: url.rfind('/v1')]!r}")
    return f"{parts.scheme}://{host}:{own}{path}"


def parse_engines_dns(value: str) -> tuple[str, int | None]:
    """The name to look for and the port of its addresses, None for SRV records.

    Args:
        value: ``NAME:PORT`` (addresses), ``_SERVICE._PROTO.NAME`` (RFC 2782) or ``srv:NAME``.

    Raises:
        ValueError: it is none of them.
    """
    name = value.removeprefix("srv:")
    if name != value or value.startswith("_"):
        if not name or ":" in name or any(ch.isspace() for ch in name):
            raise ValueError(f"{value!r} must be an SRV name without a port, such as _http._tcp.engines.rl.svc")
        return name, None
    name, _, port = value.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError(f"{value!r} must be NAME:PORT, such as engines.rl.svc:8000, or an SRV name")
    return name, int(port)


def overlap(one: str, other: str) -> bool:
    """Whether two listeners on these hosts would want the same address, as far as their names tell."""
    if one == other or {one, other} & {"0.0.0.0", "::"}:
        return True
    return "localhost" in (one, other) and is_loopback(one) and is_loopback(other)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
