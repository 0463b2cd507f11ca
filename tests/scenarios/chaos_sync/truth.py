"""Which weights each label stands for, and what was seen to go wrong.

Weights are opaque strings of the simulated model: sync 17 sends ``w17`` (its earlier chunks ``w17.part0``...), and
labels are the trainer's ``v17`` or the proxy's own ``u1, u2...``. An engine starts with ``base-0`` as ``default``.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from engine_launcher.sim.model import base_weights
from proxy.core.admission import is_automatic
from proxy.core.marks import read_label

BASE = base_weights(0)
DEFAULT = "default"


@dataclass
class Truth:
    """What the labels mean, and the verdicts.

    Attributes:
        weights: the weights that a label stands for.
        target: what the sync that runs now is sending.
        published: labels that were the fleet's at some time, oldest first.
        free_again: automatic labels that may be given again, because all engines and the proxy were lost at once and nobody
            is left who knows them.
        half_given: labels of calls that only some engines took: true of their weights, but never the fleet's.
        violations: by kind.
    """

    started: float = field(default_factory=time.monotonic)
    weights: dict[str, str] = field(default_factory=lambda: {DEFAULT: BASE})
    target: str = BASE
    published: list[str] = field(default_factory=lambda: [DEFAULT])
    free_again: set[str] = field(default_factory=set)
    half_given: set[str] = field(default_factory=set)
    violations: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    verbose: bool = False

    def note(self, text: str) -> None:
        """One line of what happened, for the reader of a violation."""
        line = f"{time.monotonic() - self.started:8.3f} {text}"
        self.trace.append(line)
        if self.verbose:
            print(line, flush=True)

    def violation(self, kind: str, detail: str) -> None:
        """Something that must never happen."""
        self.violations[kind] += 1
        self.note(f"VIOLATION {kind}: {detail}")
        if len(self.details) < 200:
            self.details.append(f"{kind}: {detail}")
        if self.report_limit(kind):
            print(f"  VIOLATION {time.monotonic() - self.started:.3f} {kind}: {detail}", flush=True)

    def labelled(self, engine: str, label: str, weights: str) -> None:
        """An engine was given a label while it held these weights; one that says "unfinished" claims nothing."""
        if read_label(label).unfinished:
            return
        if label not in self.weights or label in self.free_again:
            # The proxy's own: it names what the sync that runs was sending.
            self.free_again.discard(label)
            self.weights[label] = self.target
        if self.weights[label] != weights:
            self.note(f"{engine} holds {weights} and was labelled {label!r}")

    def publish(self, label: str | None) -> None:
        """The proxy says that this is the fleet's version."""
        if label == DEFAULT:
            self.free_again.update(name for name in self.weights if is_automatic(name))
        if label is not None and label != self.published[-1]:
            if label in self.published and label != DEFAULT:
                self.note(f"the fleet's version went back to {label}")
            self.published.append(label)

    def report_limit(self, kind: str) -> bool:
        """Whether one more violation of a kind is worth a line."""
        return self.violations[kind] <= 5

    def rank(self, label: str) -> int:
        """How new a label is; -1 if it never was the fleet's."""
        for index in range(len(self.published) - 1, -1, -1):
            if self.published[index] == label:
                return index
        return -1
