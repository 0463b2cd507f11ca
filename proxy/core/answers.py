"""Which of an engine's answer fields go to the client (RFC 9110 section 7.6.1)."""

from __future__ import annotations

from dataclasses import dataclass

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


_LENGTH, _CODING, _CONNECTION, _ID, _TYPE, _DROP, _KEEP = range(7)
_BY_NAME = dict.fromkeys(_DROPPED, _DROP) | {
    b"content-length": _LENGTH,
    b"transfer-encoding": _CODING,
    b"connection": _CONNECTION,
    b"x-request-id": _ID,
    b"content-type": _TYPE,
}
_actions: dict[bytes, int] = {}
_COLON = b": "
_END = b"\r\n"


@dataclass(slots=True)
class Fields:
    """What the fields of an answer say, from one pass over them.

    Attributes:
        lines: the end-to-end fields as pieces of header lines, in order and case, without Content-Length.
        length: Content-Length, or None.
        coding: Transfer-Encoding, or None.
        stream: the answer is an event stream.
        has_id: ``X-Request-Id`` is among them.
    """

    lines: list[bytes]
    length: int | None
    coding: bytes | None
    stream: bool
    has_id: bool


def read_fields(headers: list[tuple[bytes, bytes]]) -> Fields:
    """One pass over an answer's fields."""
    lines: list[bytes] = []
    length: int | None = None
    coding: bytes | None = None
    stream = has_id = False
    named: set[bytes] | None = None
    for name, value in headers:
        action = _actions.get(name)
        if action is None:
            action = _BY_NAME.get(name.lower(), _KEEP)
            if len(_actions) < _MAX_KNOWN:
                _actions[name] = action
        if action >= _ID:
            if action == _DROP:
                continue
            if action == _TYPE:
                stream = stream or value[:17].lower() == b"text/event-stream"
            elif action == _ID:
                has_id = True
            lines += (name, _COLON, value, _END)
        elif action == _LENGTH:
            length = int(value)
        elif action == _CODING:
            coding = value if coding is None else coding + b", " + value
        else:
            for token in value.lower().split(b","):
                option = token.strip()
                if option not in (b"close", b"keep-alive", b"upgrade", b""):
                    named = {option} if named is None else named | {option}
    if named is not None:
        kept: list[bytes] = []
        for i in range(0, len(lines), 4):
            if lines[i].lower() not in named:
                kept += lines[i : i + 4]
        lines = kept
        has_id = has_id and b"x-request-id" not in named
    return Fields(lines, length, coding, stream, has_id)
