"""The label of an engine whose weights are nobody's, so that the next proxy knows it too.

The proxy keeps nothing that the engines do not know. That an update was left half done would be forgotten with the
process, and the engine would show the label of weights that it has no more. So the label itself says it, and what it
was before: ``fleetgate-unfinished:u7``. A whole update replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.admission import DEFAULT

UNFINISHED = "fleetgate-unfinished:"
"""What the label begins with; what follows is the label of the last whole weights."""


@dataclass(frozen=True, slots=True)
class Label:
    """What an engine's label says.

    Attributes:
        version: of its last whole weights.
        unfinished: it may hold others since.
    """

    version: str
    unfinished: bool = False

    @property
    def text(self) -> str:
        """As the engine shows it."""
        return UNFINISHED + self.version if self.unfinished else self.version


def read_label(text: str) -> Label:
    """What a label says; any that does not begin with the mark is its own version."""
    if text.startswith(UNFINISHED):
        return Label(text[len(UNFINISHED) :] or DEFAULT, unfinished=True)
    return Label(text)
