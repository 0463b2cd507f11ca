"""Sessions stay where their prefix is cached, until that engine is too busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from proxy.core.balancing.base import C, Shares
from proxy.core.balancing.limit import Limit
from proxy.core.balancing.pace import Pace
from proxy.core.balancing.ring import Ring
from proxy.core.balancing.spread import LeastInflight


class _Session:
    """Where a session lives.

    Attributes:
        engine: id of its engine.
        life: how often that engine had been forgotten when the session came; forgetting it again ends the tie.
        used: when its last turn began.
        live: it counts as load of its engine.
    """

    __slots__ = ("engine", "life", "live", "used")

    def __init__(self, engine: str, life: int, used: float) -> None:
        self.engine = engine
        self.life = life
        self.used = used
        self.live = True


class Sticky:
    """A session stays on one engine; requests without a session go to the least busy.

    The first turn goes to the engine with the least load, live sessions counted as well as requests: a session between
    two turns will come back. Equal loads are settled by the session's place on a ring, so that ties go round and two
    idle proxies agree. A session moves when its engine holds over ``margin`` times what the others hold plus
    ``slack``; it then lives where it went, since the newest prefix is there.

    A request to an engine whose sessions come round many times slower than elsewhere counts as that many requests (see
    `proxy.core.balancing.pace`), so that sessions leave a slow engine before they pile up there.

    A session is live while its last turn began less than ``live`` seconds ago. Were sessions counted for as long as
    they are remembered, single-turn rollouts with an id each would count for hours after they ended, and the first
    turns would go round evenly, to a slow engine as often as to a fast one.

    Args:
        ttl: seconds after which an unused session is forgotten.
        max_sessions: sessions remembered; the one unused for longest goes first.
        margin: times the load of the others above which an engine loses sessions; infinity: never.
        slack: requests per unit of weight on top of that, so that small numbers do not make sessions flap.
        live: seconds that a session counts as load after a turn began.
    """

    prompt_bytes = 0

    def __init__(self, *, ttl: float, max_sessions: int, margin: float, slack: float, live: float) -> None:
        self._ttl = ttl
        self._max = max_sessions
        self._limit = Limit(margin=margin, slack=slack)
        self._live_for = min(live, ttl)
        self._spread = LeastInflight()
        self._shares = Shares()
        self._ring = Ring()
        self._pace = Pace()
        self._by_id: dict[str, Any] = {}
        # A session is in one of the two, each in the order of last use.
        self._live: OrderedDict[bytes, _Session] = OrderedDict()
        self._idle: OrderedDict[bytes, _Session] = OrderedDict()
        self._count: dict[str, int] = {}
        self._lives: dict[str, int] = {}

    def __len__(self) -> int:
        """Sessions remembered."""
        return len(self._live) + len(self._idle)

    def select(self, candidates: Sequence[C], key: bytes | None, now: float, prompt: bytes = b"") -> C:  # noqa: ARG002
        """The session's engine, unless that is gone, was forgotten or holds too much."""
        if key is None:
            return self._spread.select(candidates, key, now)
        self._expire(now)
        if self._shares.look(candidates):
            self._by_id = {candidate.id: candidate for candidate in candidates}
        session = self._live.get(key) or self._idle.get(key)
        if session is not None:
            self._pace.saw(session.engine, now - session.used)
            chosen: C | None = self._by_id.get(session.engine)
            if (
                chosen is not None
                and session.life == self._lives.get(session.engine, 0)
                and not self._limit.over(chosen, candidates, self._pace.times(session.engine))
            ):
                self._touch(key, session, now)
                return chosen
            self.finish(key)
        chosen = self._least(candidates, key)
        self._live[key] = _Session(chosen.id, self._lives.get(chosen.id, 0), now)
        self._count[chosen.id] = self._count.get(chosen.id, 0) + 1
        if len(self) > self._max:
            self.finish(next(iter(self._idle or self._live)))
        return chosen

    def adopt(self, key: bytes, engine_id: str, now: float) -> None:
        """Another worker of the same proxy gave this session an engine."""
        self.finish(key)
        self._live[key] = _Session(engine_id, self._lives.get(engine_id, 0), now)
        self._count[engine_id] = self._count.get(engine_id, 0) + 1
        if len(self) > self._max:
            self.finish(next(iter(self._idle or self._live)))

    def _least(self, candidates: Sequence[C], key: bytes) -> C:
        count = self._count
        times = self._pace.times
        loads = [(one.inflight + count.get(one.id, 0) + 1) * times(one.id) / one.weight for one in candidates]
        low = min(loads)
        if loads.count(low) == 1:
            return candidates[loads.index(low)]
        tied = {one.id: one for one, at in zip(candidates, loads, strict=True) if at == low}
        self._ring.cover(candidates)
        for engine_id in self._ring.walk(key):
            if engine_id in tied:
                return tied[engine_id]
        return candidates[loads.index(low)]

    def _touch(self, key: bytes, session: _Session, now: float) -> None:
        session.used = now
        if session.live:
            self._live.move_to_end(key)
        else:
            del self._idle[key]
            self._live[key] = session
            session.live = True
            self._count[session.engine] = self._count.get(session.engine, 0) + 1

    def _expire(self, now: float) -> None:
        """Two looks at the oldest; the work is that of sessions that changed, each once."""
        while self._live:
            key, session = next(iter(self._live.items()))
            if now - session.used < self._live_for:
                break
            del self._live[key]
            self._idle[key] = session
            self._discount(session)
        while self._idle:
            key, session = next(iter(self._idle.items()))
            if now - session.used < self._ttl:
                break
            del self._idle[key]

    def _discount(self, session: _Session) -> None:
        session.live = False
        # An engine that was forgotten began to count anew.
        if session.life != self._lives.get(session.engine, 0):
            return
        left = self._count[session.engine] - 1
        if left:
            self._count[session.engine] = left
        else:
            del self._count[session.engine]

    def finish(self, key: bytes) -> bool:
        """A session is over."""
        session = self._live.pop(key, None)
        if session is not None:
            self._discount(session)
            return True
        return self._idle.pop(key, None) is not None

    def forget(self, engine_id: str) -> None:
        """Its sessions find an engine anew at their next turn, which costs them nothing any more."""
        self._lives[engine_id] = self._lives.get(engine_id, 0) + 1
        self._count.pop(engine_id, None)
        self._ring.remove(engine_id)
        self._pace.forget(engine_id)

    def emptied(self, engine_id: str, running: int = 0) -> None:
        """Sessions stay: the turns that run there fill its cache again, and no other engine has more of the rest."""
