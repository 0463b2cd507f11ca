"""What the proxy knows of one engine: a cache of what the engine itself said."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.core.admission import UNKNOWN_EPOCH
from proxy.core.engine_state import State
from proxy.core.history import History

if TYPE_CHECKING:
    from proxy.control.fanout import Shot
    from proxy.data.upstream import Upstream

_UNSAFE = re.compile(r"[^A-Za-z0-9.:_~-]+")


def engine_id(url: str) -> str:
    """The name of an engine: ``host:port``, plus its path prefix if it has one. Safe in a URL path and a label."""
    parts = urlsplit(url)
    return _UNSAFE.sub("-", parts.netloc + parts.path).strip("-")


@dataclass(eq=False, slots=True)
class Engine:
    """One vLLM server.

    Attributes:
        id: unique in the fleet; the value of ``X-Fleetgate-Engine`` and of the label ``engine``.
        url: canonical base URL.
        upstream: connections to it.
        state: changed only through `proxy.fleet.registry.Fleet.apply`.
        reason: why it is in this state, for people.
        since: loop time of the last move (seconds).
        inflight: requests that hold a slot.
        paused: generation is paused there although the gate of the proxy is open.
        reported_paused: what ``/is_paused`` said when its identity was last checked, or None.
        suspect: its process may have been replaced; nothing is sent until its identity is checked.
        plain: has no RL routes (dev mode off, or another server); no version checks.
        version: label as last read from ``/weight_info``; None before the first look or if plain.
        start_time: ``process_start_time_seconds`` of its ``/metrics`` (Unix seconds), if it has one.
        boot: counts the restarts that the proxy noticed.
        world_size: workers of this server (``GET /get_world_size``).
        weight: share of the load relative to others; the world size unless it is unknown, a part of it while the
            engine starts slowly.
        tainted: an update began and did not end well, or its weights were wiped (`Fleet.taint`).
        marked: its own label says that its weights are nobody's; `version` is the one before.
        late_mark: likewise, but it took a whole update since: the mark is to be taken back.
        session: whether an update session is open there, which its counts say too; None if it may be, because the
            answer to a step was lost.
        updating: it is inside an update round, so its weights are nobody's.
        asleep: what ``/sleep`` took away and ``/wake_up`` has not brought back: ``weights``, ``kv_cache``.
        epoch: number of the last update that it is known to hold (`Fleet.epoch`); -1 after a restart.
        met: its label was looked at for the first time, and `epoch` set from that.
        was_rl: it had the RL routes at some time.
        by_hand: an operator admitted (True) or fenced (False) it; None: the rules decide. An admission speaks for the
            weights of that moment: a restart, another label or another update ends it.
        drained: an operator wants this process to get no new requests, whatever its weights are worth.
        leaving: likewise, because it is being removed.
        failed_call: the control call that it failed or missed, so that it is looked at again before it is admitted.
        owed: idempotent control calls that it failed or missed, by path (an unload: and by
            adapter); sent again before it is admitted.
        busy: control calls that are running there; its engine core may answer nothing else meanwhile.
        calls: control calls that were ever sent to it: what was read before one is not news after it.
        probed_at: loop time of the last good probe.
        compared: fleet version against which the checksums of this boot were compared, or None.
        checksums_equal: the result of that.
        history: counts of updates from before this proxy's first look, until they were judged or a round ended well.
        counted: its page has the counts that tell whether a session is open.
        failures: failed probes in a row.
        successes: good probes in a row.
        last_error: last probe or passive error, for people.
    """

    id: str
    url: str
    upstream: Upstream
    state: State = State.STARTING
    reason: str = "not probed yet"
    since: float = 0.0
    inflight: int = 0
    paused: bool = False
    reported_paused: bool | None = None
    suspect: bool = True
    plain: bool = False
    version: str | None = None
    start_time: float | None = None
    boot: int = 0
    world_size: int | None = None
    weight: float = 1.0
    tainted: bool = False
    marked: bool = False
    late_mark: bool = False
    session: bool | None = False
    updating: bool = False
    asleep: frozenset[str] = frozenset()
    epoch: int = 0
    met: bool = False
    was_rl: bool = False
    by_hand: bool | None = None
    drained: bool = False
    leaving: bool = False
    failed_call: str = ""
    owed: dict[str, Shot] = field(default_factory=dict)
    busy: int = 0
    calls: int = 0
    probed_at: float = 0.0
    compared: str | None = None
    checksums_equal: bool | None = None
    history: History | None = None
    counted: bool = False
    failures: int = 0
    successes: int = 0
    last_error: str = ""
    last_byte: float = 0.0
    adapters: dict[str, bytes] = field(default_factory=dict)

    @property
    def eligible(self) -> bool:
        """Whether a generation request may be sent to it now."""
        return (
            self.state is State.READY and not self.paused and not self.suspect and not self.updating and not self.asleep
        )

    @property
    def alive(self) -> bool:
        """Whether it answered lately: a control call goes to it."""
        return self.state in (State.READY, State.DRAINING, State.FENCED)

    @property
    def whole_weight(self) -> float:
        """Its share of the load by size: the workers that it has, one where that is not known."""
        return float(self.world_size or 1)

    def forget_process(self) -> None:
        """Another process answers: nothing that was known of its weights and its pauses holds."""
        self.boot += 1
        self.epoch = UNKNOWN_EPOCH
        self.tainted = self.marked = self.late_mark = self.session = self.updating = self.paused = self.drained = False
        self.asleep = frozenset()
        self.by_hand = None if self.by_hand else self.by_hand
        self.owed.clear()
        self.adapters.clear()
        self.failed_call = ""
        self.world_size = self.start_time = self.compared = self.checksums_equal = self.history = None

    def __repr__(self) -> str:
        return f"<Engine {self.id} {self.state} version={self.version!r} inflight={self.inflight}>"
