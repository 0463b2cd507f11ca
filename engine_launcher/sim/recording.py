"""What an engine remembers of the requests it got, for tests to look at."""

from __future__ import annotations

import base64
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

MAX_CONTROL_ENTRIES = 20_000
"""Control calls kept; a chaos run of an hour makes fewer."""
MAX_DATA_ENTRIES = 2_000
"""Data-plane requests kept: enough to look at a test's, without growing under a load test."""
MAX_BODY_BYTES = 1 << 20
"""Bytes kept of one body."""


@dataclass(slots=True)
class Entry:
    """One request.

    Attributes:
        control: a control call, not a data-plane request.
        seconds: wall-clock time at which it arrived.
        status: of the answer; None while it is being served, or when it never got one.

    """

    control: bool
    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    body: bytes
    seconds: float
    connection: int
    status: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the entry as JSON; the body both as text and exact in base64."""
        return {
            "control": self.control,
            "method": self.method,
            "path": self.path,
            "query": self.query,
            "headers": self.headers,
            "body": self.body.decode("utf-8", "replace"),
            "body_b64": base64.b64encode(self.body).decode(),
            "time": self.seconds,
            "connection": self.connection,
            "status": self.status,
        }


class RequestLog:
    """The most recent requests, control calls apart from the many others."""

    def __init__(self) -> None:
        self._control: deque[Entry] = deque(maxlen=MAX_CONTROL_ENTRIES)
        self._data: deque[Entry] = deque(maxlen=MAX_DATA_ENTRIES)

    def add(
        self,
        *,
        control: bool,
        method: str,
        path: str,
        query: str,
        headers: list[tuple[str, str]],
        body: bytes,
        connection: int,
    ) -> Entry:
        """Record a request that just arrived."""
        entry = Entry(control, method, path, query, headers, body[:MAX_BODY_BYTES], time.time(), connection)
        (self._control if control else self._data).append(entry)
        return entry

    def entries(self, *, all_paths: bool = False, path: str | None = None) -> list[dict[str, Any]]:
        """Return the recorded requests, oldest first."""
        found = list(self._control)
        if all_paths or path is not None:
            found = sorted([*found, *self._data], key=lambda entry: entry.seconds)
        return [entry.as_json() for entry in found if path is None or entry.path == path]

    def clear(self) -> None:
        """Forget everything."""
        self._control.clear()
        self._data.clear()
