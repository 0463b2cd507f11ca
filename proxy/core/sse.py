"""A look at the first event of a stream, incremental and byte-exact (WHATWG HTML, server-sent events, section 9.2).

vLLM hides every refusal of a stream inside a 200: the first event is the error. The proxy must see it before a byte
goes to the client, yet must not delay a normal first token. So a first event that came whole, as engines write it, and
that nowhere says ``"error"`` is let go after one search; only what may be an error, or came in pieces, is looked into.
An event that is not whole is of no use to a client either, so waiting for its end delays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import orjson

from proxy.core.failures import Kind


class Verdict(Enum):
    """What the bytes so far are."""

    MORE = auto()
    NORMAL = auto()
    ERROR = auto()


@dataclass(frozen=True, slots=True)
class EngineError:
    """An error object of vLLM, whatever its protocol.

    Attributes:
        kind: what it means, or None for an error about the request itself, which belongs to the client.
        message: the engine's own text.
    """

    kind: Kind | None
    message: str


_ERROR = b'"error"'
"""Every error object holds this: as a key, or as the value of ``object`` or ``type``."""
_WHITE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
PREAMBLE = frozenset({b"response.created", b"response.queued", b"response.in_progress"})
"""Events that ``/v1/responses`` sends on acceptance, before the engine has looked at the request: a refusal (the cut
stream of a paused engine) comes after them, so they are looked past."""
_MAY_BE_ERROR = frozenset({b"", b"message", b"error", b"response.failed"})
"""Names of events that may carry an error; ``message`` is what an event without a name is called."""
PREFIX = 64
"""Bytes of an event's data that tell whether it is an object; longer white space before it settles nothing, and the
whole event is waited for."""


class FirstEvent:
    """Reads a stream until its first event is known to be an error or not, in time linear in the bytes fed.

    Args:
        limit: bytes kept at most; an event that is longer is no error.

    Attributes:
        error: the error, after `Verdict.ERROR`.
    """

    __slots__ = ("_buffer", "_data", "_limit", "_name", "_pos", "_scan", "_settled", "_whole", "error")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._whole = b""
        self._pos = 0  # where the unfinished line begins
        self._scan = 0  # no line end lies before this
        self._name = b""
        self._data: list[bytes] | None = None
        self._settled = False  # the data is an object; only the whole event can tell
        self.error: EngineError | None = None

    @property
    def held(self) -> bytes:
        """All bytes fed so far, to be passed on unchanged."""
        return self._whole or bytes(self._buffer)

    def feed(self, data: bytes) -> Verdict:
        """Take more bytes."""
        if not self._buffer and data[:7] == b"data: {":
            # A search for one byte is a hundred times as fast as one for two.
            end = data.find(b"\n")
            if data[end : end + 2] == b"\n\n" and data.find(_ERROR, 0, end) < 0:
                # The usual way of a usual stream: no copy, no parse.
                self._whole = data
                return Verdict.NORMAL
        buffer = self._buffer
        buffer += data
        if self._pos == 0 and buffer[:3] == _BOM[: len(buffer)]:
            if len(buffer) < len(_BOM):
                return Verdict.MORE
            self._pos = self._scan = len(_BOM)
        while True:
            end, after = _line_end(buffer, self._scan)
            if end < 0:
                # A CR at the end may still become a CRLF, so it is looked at again.
                self._scan = len(buffer) - (1 if buffer.endswith(b"\r") else 0)
                return self._unfinished()
            line = bytes(buffer[self._pos : end])
            self._pos = self._scan = after
            verdict = self._line(line)
            if verdict is not Verdict.MORE:
                return verdict

    def finish(self) -> Verdict:
        """The stream ended: `Verdict.MORE` if no event of its own ever came.

        An event without its closing empty line counts here: it is all there will ever be.
        """
        rest = bytes(self._buffer[self._pos :]).rstrip(b"\r")
        if rest:
            verdict = self._line(rest)
            if verdict is not Verdict.MORE:
                return verdict
        return self._line(b"") if self._data is not None else Verdict.MORE

    def _unfinished(self) -> Verdict:
        if len(self._buffer) > self._limit:
            return Verdict.NORMAL
        start = self._pos
        if not self._settled and self._name not in PREAMBLE and self._buffer[start : start + 5] == b"data:":
            return self._judge(bytes(self._buffer[start + 5 : start + 5 + PREFIX]))
        return Verdict.MORE

    def _judge(self, line: bytes) -> Verdict:
        """Look at the beginning of a line of data while all data before it is white."""
        begun = line.lstrip(_WHITE)
        if begun and begun[:1] != b"{":
            return Verdict.NORMAL
        self._settled = bool(begun) or len(line) >= PREFIX
        return Verdict.MORE

    def _line(self, line: bytes) -> Verdict:
        if not line:
            return self._event()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event" and self._data is None:
            self._name = value
            if value not in _MAY_BE_ERROR and value not in PREAMBLE:
                return Verdict.NORMAL
        elif name == b"data" and self._name not in PREAMBLE:
            if not self._settled and self._judge(value[:PREFIX]) is Verdict.NORMAL:
                return Verdict.NORMAL
            if self._data is None:
                self._data = []
            self._data.append(value)
        return Verdict.MORE

    def _event(self) -> Verdict:
        """An event is whole. One without data is none."""
        if not self._data or self._data == [b""] or self._name in PREAMBLE:
            self._name = b""
            self._data = None
            self._settled = False
            return Verdict.MORE
        named = self._name == b"error"
        data = b"\n".join(self._data)
        if named or _ERROR in data:
            self.error = read_error(data, named_error=named)
        return Verdict.ERROR if self.error is not None else Verdict.NORMAL


def _line_end(data: bytearray, start: int) -> tuple[int, int]:
    """End of the first line end at or after ``start`` and start of the next line; (-1, -1) if more bytes are needed.

    A line ends with LF, CR or CRLF; a CR at the very end may still become a CRLF.
    """
    lf = data.find(b"\n", start)
    cr = data.find(b"\r", start, lf if lf >= 0 else len(data))
    if cr >= 0:
        if cr + 1 == len(data):
            return -1, -1
        return cr, cr + 2 if data[cr + 1] == 0x0A else cr + 1
    if lf >= 0:
        return lf, lf + 1
    return -1, -1


def read_error(body: bytes, *, status: int | None = None, named_error: bool = False) -> EngineError | None:
    """What an error object of vLLM means; None if the body is none.

    Args:
        body: JSON of an error answer, or the data of an event.
        status: HTTP status of the answer, where it has one of its own.
        named_error: the event was called ``error``.
    """
    try:
        parsed: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None if status is None else EngineError(_by_code(status, "", ""), "")
    if not isinstance(parsed, dict):
        return None if status is None else EngineError(_by_code(status, "", ""), "")
    # A /v1/responses stream that failed, and one of /cohere/v2/chat, which tells it in its last event.
    wrapped = {"response.failed": "response", "message-end": "delta"}.get(str(parsed.get("type")))
    if wrapped is not None and isinstance(parsed.get(wrapped), dict):
        parsed = parsed[wrapped]
    error: Any = parsed.get("error")
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        if status is None and not named_error and parsed.get("object") != "error" and parsed.get("type") != "error":
            return None
        error = parsed
    message = error.get("message")
    message = message if isinstance(message, str) else str(error.get("detail") or "")
    kind = error.get("type")
    code = error.get("code")
    if code is None:
        code = error.get("status")
    number = code if isinstance(code, int) else int(code) if isinstance(code, str) and code.isdigit() else status
    if code == "engine_paused":
        return EngineError(Kind.PAUSED, message)
    if kind is None and code == "server_error":
        kind = code
    return EngineError(_by_code(number, kind if isinstance(kind, str) else "", message), message)


def _by_code(code: int | None, kind: str, message: str) -> Kind | None:
    # The text is looked at first: a paused chat stream says InternalServerError, and every 503 looks alike.
    # Not in an error about the request, which may quote the request.
    text = message.lower() if code in (None, 500, 503) else ""
    if "generation is paused" in text or "engine is paused" in text or "scheduler is paused" in text:
        return Kind.PAUSED
    if (
        code == 503
        or kind in ("overloaded_error", "ServiceUnavailableError", "Service Unavailable")
        or (code is None and "engine is currently busy" in text)
    ):
        return Kind.BUSY
    if code == 500 or (code is None and kind in ("InternalServerError", "api_error", "internal_error", "server_error")):
        return Kind.FAILED
    return None


def ends_event(tail: bytes) -> bool:
    """Whether the last bytes of a stream end an event, so that another may follow."""
    return not tail or tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))


_LAST_EVENTS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")


def looks_whole(tail: bytes, *, stream: bool) -> bool:
    """Whether an answer that is delimited only by the end of its connection looks complete.

    Args:
        tail: its last bytes, at least 512 if it has as many.
        stream: it is an event stream rather than JSON.
    """
    if stream:
        return ends_event(tail) and any(mark in tail for mark in _LAST_EVENTS)
    return tail.rstrip(_WHITE).endswith((b"}", b"]"))
