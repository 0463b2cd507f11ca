"""Bounded looks into a request body, for features that a setting switches on. Never a JSON parse."""

from __future__ import annotations

import re
from collections.abc import Iterable

_STREAM = re.compile(rb'"stream"\s*:\s*true')


def wants_stream(body: Iterable[bytes]) -> bool:
    """Whether a JSON body asks for a stream. A text that contains the same words is a harmless false yes."""
    return _STREAM.search(b"".join(body)) is not None
