"""The many spellings of one path, and the form that they have in common.

Servers differ in what they read into a path: percent-encoding once or many times over, dot segments, empty segments,
backslashes, path parameters, control characters. What a path may mean is judged by the most lenient reading.
"""

from __future__ import annotations

import re

MAX_DECODE = 8
"""Rounds of percent-decoding before a path that still changes is refused; no honest client encodes even twice."""

_HEX = {bytes([byte]): int(bytes([byte]), 16) for byte in b"0123456789abcdefABCDEF"}
_DROPPED = bytes(range(0x21)) + b"\x7f"
_ODD = re.compile(rb"[%;\\?#\x00-\x20\x7f]|/[./]|/\Z")


def percent_decode(path: bytes) -> bytes:
    """One round of percent-decoding; malformed triplets stay as they are (RFC 3986 section 2.1)."""
    if b"%" not in path:
        return path
    head, *parts = path.split(b"%")
    out = [head]
    for part in parts:
        high, low = _HEX.get(part[0:1]), _HEX.get(part[1:2])
        out += [b"%", part] if high is None or low is None else [bytes([high * 16 + low]), part[2:]]
    return b"".join(out)


def normal_form(path: bytes) -> bytes | None:
    """The most lenient reading of a path; None if it never settles."""
    for _ in range(MAX_DECODE):
        # Dropped in each round, or a byte that somebody drops would keep a triplet from being one: ``%<tab>70ause``.
        decoded = percent_decode(path).translate(None, _DROPPED)
        if decoded == path:
            break
        path = decoded
    else:
        return None
    for mark in (b"?", b"#"):
        path = path.partition(mark)[0]
    path = path.replace(b"\\", b"/")
    segments: list[bytes] = []
    for raw in path.split(b"/"):
        segment = raw.partition(b";")[0]
        if segment in (b"", b"."):
            continue
        if segment == b"..":
            if segments:
                segments.pop()
            continue
        segments.append(segment)
    return b"/" + b"/".join(segments)


def plain(path: bytes) -> bytes:
    """The plain spelling of a path: its normal form where it has one that differs, else the path as it is."""
    return (normal_form(path) or path) if _ODD.search(path) else path
