"""What a balancing policy may look at in a request body: bounded, by pattern, never a JSON parse.

A text inside the prompt that contains the same words cannot pass for the field: in JSON its quotes are escaped, and the
patterns refuse a quote after a backslash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

SCAN_BYTES = 4096
"""Bytes at the beginning and at the end of a body in which a session field is looked for: clients write such fields
before or after the prompt, and the prompt itself is not searched."""
PROMPT_SEEK_BYTES = 4096
"""Bytes at the beginning of a body in which the prompt's own field is looked for."""
MAX_KEY_BYTES = 256
"""A longer value is no session key; nothing of it is remembered."""

_PROMPT = re.compile(rb'(?<!\\)"(?:messages|prompt|prompt_token_ids|token_ids|input_ids|input|text)"\s*:')


def session_pattern(fields: Iterable[str]) -> re.Pattern[bytes] | None:
    """A pattern for the body fields that carry a session key, the string in group 1; None if there are none."""
    names = b"|".join(re.escape(name).encode() for name in fields)
    if not names:
        return None
    return re.compile(rb'(?<!\\)"(?:' + names + rb')"\s*:\s*"((?:[^"\\]|\\.){1,%d})"' % MAX_KEY_BYTES)


def _head(body: Sequence[bytes], size: int) -> bytes:
    if len(body) == 1:
        return body[0][:size]
    out: list[bytes] = []
    for piece in body:
        out.append(piece[:size])
        size -= len(piece)
        if size <= 0:
            break
    return b"".join(out)


def _tail(body: Sequence[bytes], size: int) -> bytes:
    out: list[bytes] = []
    for piece in reversed(body):
        out.append(piece[-size:])
        size -= len(piece)
        if size <= 0:
            break
    return b"".join(reversed(out))


def session_of(body: Sequence[bytes], pattern: re.Pattern[bytes]) -> bytes | None:
    """The session key that a JSON body carries.

    Args:
        body: the body, or what has come of it, in pieces.
        pattern: from `session_pattern`.
    """
    found = pattern.search(_head(body, SCAN_BYTES))
    if found is None:
        found = pattern.search(_tail(body, SCAN_BYTES))
    return found[1] if found is not None else None


def prompt_of(body: Sequence[bytes], size: int) -> bytes:
    """The first bytes of the prompt as it stands in a JSON body; of the body if no prompt field is near its beginning.

    Args:
        body: the body, or what has come of it, in pieces.
        size: bytes wanted at most.
    """
    head = _head(body, size + PROMPT_SEEK_BYTES)
    found = _PROMPT.search(head, 0, PROMPT_SEEK_BYTES)
    start = found.end() if found is not None else 0
    return head[start : start + size]
