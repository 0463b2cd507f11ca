"""The head of a request that repeats the one before it on the same connection.

Clients send the same fields with every request but for the length of the body. Judging a block of fields again that was
judged already takes a tenth of what a small request costs; comparing it takes next to nothing. What differs in anything
but the digits of Content-Length is judged anew (`proxy.core.framing.inspect`).
"""

from __future__ import annotations

from proxy.core.framing import Limits, RequestHead, lower_name

Fields = list[tuple[bytes, bytes]]

_UNKNOWN = -2
_NONE = -1


class Repeats:
    """The last head of one connection.

    Args:
        limits: sizes that are taken.
    """

    __slots__ = ("_fields", "_head", "_length_at", "_limits", "_method", "_target", "_version")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._head: RequestHead | None = None
        self._fields: Fields = []
        self._length_at = _UNKNOWN
        self._method = self._target = b""
        self._version = ""

    def keep(self, method: bytes, target: bytes, version: str, fields: Fields, head: RequestHead) -> None:
        """Remember a head that was judged good.

        An upgrade is not remembered: what becomes of its connection is written into its head.
        """
        self._head = None if head.upgrade else head
        self._fields, self._length_at = fields, _UNKNOWN
        self._method, self._target, self._version = method, target, version

    def find(self, method: bytes, target: bytes, version: str, fields: Fields) -> RequestHead | None:
        """The head, if all but the digits of its length is as before; equal heads are one object, not to be changed.

        Args:
            method: request method.
            target: request target as sent.
            version: ``1.0`` or ``1.1``.
            fields: in order, as llhttp split them.
        """
        head = self._head
        if head is None or target != self._target or method != self._method or version != self._version:
            return None
        kept = self._fields
        if fields == kept:
            return head
        if self._length_at == _UNKNOWN:
            self._length_at = _place_of_length(kept)
        at = self._length_at
        if at == _NONE or len(fields) != len(kept):
            return None
        name, value = fields[at]
        # Not longer, or the block might be over a limit that it was not over before.
        if name != kept[at][0] or not value.isdigit() or len(value) > len(kept[at][1]):
            return None
        length = int(value)
        if self._limits.body and length > self._limits.body:
            return None
        if fields[:at] != kept[:at] or fields[at + 1 :] != kept[at + 1 :]:
            return None
        return head.with_length(length)


def _place_of_length(fields: Fields) -> int:
    for place, (name, value) in enumerate(fields):
        if lower_name(name) == b"content-length":
            # With white space around it (RFC 9112 section 5) it is judged anew each time.
            return place if value.isdigit() else _NONE
    return _NONE
