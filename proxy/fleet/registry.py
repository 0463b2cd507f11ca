"""The fleet: its engines, their moves, and who wants to know.

All changes of an engine's state go through `Fleet.apply`, so that the list of eligible engines, the held requests,
metrics and the event stream can never disagree with the states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from proxy.core.engine_state import Event, State, move
from proxy.core.marks import read_label
from proxy.fleet.engine import Engine

_log = logging.getLogger("fleetgate.fleet")

Listener = Callable[[str, dict[str, Any]], None]

DRAINED = "drained by an operator; POST /fleet/engines/ID/admit ends that"
"""Why an engine with the fleet's weights is not ready."""


@dataclass(slots=True)
class Fleet:
    """The engines, in the order in which they were added (the order of ranks and of concatenated results).

    Attributes:
        version: the fleet version: the label of the last update that all engines took; None while unknown.
        epoch: updates that the whole fleet took since the proxy started; an engine whose epoch is older missed one.
        pristine: no weight update has ever been seen and all labels are ``default``.
        tied: the labels that were tied when the fleet's version was looked for at start; empty otherwise.
        coming: the automatic label that engines in a round have got for weights that are not theirs before its finish.
        labels_seen: every label that an engine ever showed, so that an automatic one is never used twice.
        checksums: the checksums recorded for `version`, by the engines' world size.
        adapters: LoRA adapters that every engine has: the path and body of the load call, by name.
        clock: seconds, monotonic.
    """

    clock: Callable[[], float]
    version: str | None = None
    epoch: int = 0
    pristine: bool = True
    tied: tuple[str, ...] = ()
    coming: str = ""
    labels_seen: set[str] = field(default_factory=set)
    checksums: dict[int | None, Any] = field(default_factory=dict)
    adapters: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    eligible: list[Engine] = field(default_factory=list)
    """Engines that may get a generation request now; rebuilt on each change, never edited in place."""
    on_eligible: list[Callable[[], None]] = field(default_factory=list)
    """Called after `eligible` gained an engine."""
    on_change: list[Callable[[], None]] = field(default_factory=list)
    """Called after anything that bears on `eligible` may have changed."""
    listeners: list[Listener] = field(default_factory=list)
    """Called with the kind and the details of each event, for logs, metrics and ``/fleet/events``."""

    def __iter__(self) -> Iterator[Engine]:
        return iter(self.engines.values())

    def __len__(self) -> int:
        return len(self.engines)

    def add(self, engine: Engine) -> None:
        """Take an engine in; it starts as ``starting`` and gets nothing until it is admitted.

        Raises:
            ValueError: an engine of this id is there already.
        """
        if engine.id in self.engines:
            raise ValueError(f"engine {engine.id} is already in the fleet")
        engine.since = self.clock()
        self.engines[engine.id] = engine
        self.emit("engine_added", engine=engine.id, url=engine.url)

    def remove(self, engine: Engine) -> None:
        """Forget an engine. The caller drained it and closes its connections."""
        self.engines.pop(engine.id, None)
        self.refresh()
        self.emit("engine_removed", engine=engine.id)

    def apply(self, engine: Engine, event: Event, reason: str) -> bool:
        """Move an engine by the table of `proxy.core.engine_state`; True if its state changed.

        Raises:
            IllegalMoveError: the event makes no sense in the engine's state.
        """
        if event is Event.ADMIT and (engine.leaving or engine.drained):
            # Admission speaks for its weights only. Whoever wants it out of rotation has to say that this is over.
            event, reason = Event.DRAIN, "being removed" if engine.leaving else DRAINED
        before = engine.state
        after = move(before, event)
        if after is before:
            return False
        engine.state = after
        engine.reason = reason
        engine.since = self.clock()
        if event is Event.LOST:
            engine.suspect = True
        self.emit("engine_state", engine=engine.id, before=str(before), state=str(after), reason=reason)
        level = (
            logging.WARNING if after in (State.FENCED, State.DOWN) and before is not State.STARTING else logging.INFO
        )
        _log.log(level, "engine %s: %s -> %s (%s)", engine.id, before, after, reason)
        self.refresh()
        return True

    def refresh(self) -> None:
        """Rebuild `eligible` after any change that bears on it (state, paused, suspect)."""
        before = self.eligible
        self.eligible = [engine for engine in self.engines.values() if engine.eligible]
        if any(engine not in before for engine in self.eligible):
            for callback in self.on_eligible:
                callback()
        for callback in self.on_change:
            callback()

    def emit(self, kind: str, **details: Any) -> None:
        """Tell the listeners. A listener must not raise and must not wait."""
        for listener in self.listeners:
            listener(kind, details)

    def taint(self, engine: Engine) -> None:
        """Its weights may be anything now; earlier comparisons of checksums are void."""
        news, engine.tainted = not engine.tainted, True
        engine.by_hand = None if engine.by_hand else engine.by_hand
        engine.compared = engine.checksums_equal = None
        if news:
            self.emit("engine_tainted", engine=engine.id)

    def set_version(self, engine: Engine, text: str) -> None:
        """Remember the label an engine showed or took; a mark on it taints it (`proxy.core.marks`)."""
        label = read_label(text)
        self.labels_seen.add(label.version)
        if self.coming and label.version == self.coming:
            return
        news = label.unfinished and not (engine.marked or engine.updating)
        if news and not engine.tainted and engine.epoch == self.epoch > 0:
            # No news of its weights: it took a whole update since the mark was sent.
            engine.late_mark = True
            return
        engine.marked, engine.late_mark = label.unfinished, False
        if label.version != engine.version:
            before, engine.version = engine.version, label.version
            engine.by_hand = None if engine.by_hand else engine.by_hand
            self.emit("engine_version", engine=engine.id, version=label.version, before=before)
        if news:
            self.pristine = False
            self.taint(engine)

    def versions(self) -> dict[str, str | None]:
        """The label of each living engine that has labels, by id."""
        return {engine.id: engine.version for engine in self if engine.alive and not engine.plain}
