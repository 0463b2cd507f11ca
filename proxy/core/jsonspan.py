"""Where a value stands in a JSON text, so that it can be replaced without touching any other byte.

Bodies go on as they came. Where one number has to differ per engine, the text around it stays as the trainer wrote it:
its spacing, its number formats, its order of keys. The text must be valid JSON (the caller parsed it).
"""

from __future__ import annotations

_SPACE = b" \t\n\r"
_ENDS = b",]} \t\n\r"


def _skip(text: bytes, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _string_end(text: bytes, at: int) -> int:
    """The index after the closing quote of the string that opens at ``at``."""
    at += 1
    while True:
        quote = text.index(b'"', at)
        back = quote
        while text[back - 1] == 0x5C:
            back -= 1
        if (quote - back) % 2 == 0:
            return quote + 1
        at = quote + 1


def value_end(text: bytes, at: int) -> int:
    """The index after the value that begins at ``at``."""
    first = text[at]
    if first == 0x22:
        return _string_end(text, at)
    if first not in b"{[":
        while at < len(text) and text[at] not in _ENDS:
            at += 1
        return at
    depth = 0
    while True:
        byte = text[at]
        if byte == 0x22:
            at = _string_end(text, at)
            continue
        if byte in b"{[":
            depth += 1
        elif byte in b"}]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1


def members(text: bytes, at: int) -> list[tuple[bytes, int, int]]:
    """The members of the object that begins at ``at``: raw key without quotes, start and end of the value."""
    out: list[tuple[bytes, int, int]] = []
    at = _skip(text, at + 1)
    while text[at] != 0x7D:
        end = _string_end(text, at)
        key = text[at + 1 : end - 1]
        at = _skip(text, end)
        at = _skip(text, at + 1)
        stop = value_end(text, at)
        out.append((key, at, stop))
        at = _skip(text, stop)
        if text[at] == 0x2C:
            at = _skip(text, at + 1)
    return out


def elements(text: bytes, at: int) -> list[tuple[int, int]]:
    """Start and end of each element of the array that begins at ``at``."""
    out: list[tuple[int, int]] = []
    at = _skip(text, at + 1)
    while text[at] != 0x5D:
        stop = value_end(text, at)
        out.append((at, stop))
        at = _skip(text, stop)
        if text[at] == 0x2C:
            at = _skip(text, at + 1)
    return out


def find(text: bytes, dotted: str) -> tuple[int, int] | None:
    """Start and end of the value at a dotted path of object keys, or None. Of repeated keys the last one counts."""
    start = _skip(text, 0)
    stop = value_end(text, start) if start < len(text) else start
    for part in dotted.split("."):
        if start >= len(text) or text[start] != 0x7B:
            return None
        name = part.encode()
        hits = [(begin, end) for key, begin, end in members(text, start) if key == name]
        if not hits:
            return None
        start, stop = hits[-1]
    return start, stop


def replace(text: bytes, dotted: str, value: bytes) -> bytes:
    """The text with the value at a path replaced; a last key that is missing is added to its object.

    Raises:
        KeyError: the object that should hold the key does not exist.
    """
    span = find(text, dotted)
    if span is not None:
        return text[: span[0]] + value + text[span[1] :]
    parent, _, key = dotted.rpartition(".")
    holder = find(text, parent) if parent else (_skip(text, 0), len(text))
    if holder is None or text[holder[0]] != 0x7B:
        raise KeyError(dotted)
    at = _skip(text, holder[0] + 1)
    comma = b"" if text[at] == 0x7D else b", "
    return text[: holder[0] + 1] + b'"' + key.encode() + b'": ' + value + comma + text[holder[0] + 1 :]
