"""What a source of engines (a file, DNS) says, and what has to change for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from proxy.core.addresses import parse_engine_url


@dataclass(frozen=True, slots=True)
class Change:
    """What makes the fleet what a source says.

    Attributes:
        add: URLs to take in, in the source's order.
        remove: URLs to drain and remove.
    """

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


def read_list(text: str) -> list[str]:
    """Canonical engine URLs of a file: one a line; blank lines and ``#`` comments are skipped, doubles counted once.

    Raises:
        ValueError: a line is no engine URL; nothing of the file may be used then, because half a list would remove
            the engines of the other half.
    """
    urls: dict[str, None] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        try:
            urls[parse_engine_url(line)] = None
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return list(urls)


def difference(known: Iterable[str], wanted: Iterable[str]) -> Change:
    """What to add and remove so that the engines of one source are those that it names."""
    before, after = dict.fromkeys(known), dict.fromkeys(wanted)
    return Change(
        add=tuple(url for url in after if url not in before), remove=tuple(url for url in before if url not in after)
    )
