"""Which of an engine's answer fields go to the client (RFC 9110 section 7.6.1)."""

from __future__ import annotations

from proxy.core.framing import HOP_BY_HOP

OURS: frozenset[bytes] = frozenset(
    {
        b"x-fleetgate-engine",
        b"x-fleetgate-weight-version",
        b"x-fleetgate-attempts",
        b"x-fleetgate-error",
        # TRL takes this field for the address of the server that answered.
        b"x-forwarded-for",
    }
)
_DROPPED = HOP_BY_HOP | OURS | {b"content-length"}
_MAX_KNOWN = 4096
_lower: dict[bytes, bytes] = {}


def end_to_end(headers: list[tuple[bytes, bytes]]) -> tuple[list[tuple[bytes, bytes]], bool]:
    """End-to-end fields in order and case, without Content-Length, and whether ``X-Request-Id`` is among them."""
    kept: list[tuple[bytes, bytes]] = []
    named: set[bytes] | None = None
    has_id = False
    for pair in headers:
        name = pair[0]
        known = _lower.get(name)
        if known is None:
            known = name.lower()
            if len(_lower) < _MAX_KNOWN:
                _lower[name] = known
        if known in _DROPPED:
            if known == b"connection":
                for token in pair[1].lower().split(b","):
                    option = token.strip()
                    if option not in (b"close", b"keep-alive", b"upgrade", b""):
                        named = {option} if named is None else named | {option}
            continue
        if known == b"x-request-id":
            has_id = True
        kept.append(pair)
    if named is not None:
        kept = [pair for pair in kept if pair[0].lower() not in named]
        has_id = has_id and b"x-request-id" not in named
    return kept, has_id
