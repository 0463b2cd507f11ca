"""What all requests of the data plane share: who may take one, what is counted, what runs now."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from proxy.config import Policy, Settings
from proxy.core.balancing import Balancer, ConsistentHash, LeastInflight, PowerOfTwo, Prefix, RoundRobin, Sticky
from proxy.core.balancing.caches import CacheWatch
from proxy.core.balancing.keys import prompt_of, session_of, session_pattern
from proxy.core.engine_state import State
from proxy.core.failures import Failure, Kind
from proxy.core.framing import Limits
from proxy.core.outliers import Outliers
from proxy.core.retry import Backoff, Budget
from proxy.data.flood import Flood
from proxy.data.gate import Gate
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.observe import access
from proxy.observe.stats import DataStats

if TYPE_CHECKING:
    from proxy.data.exchange import Exchange
    from proxy.observe.spans import Spans

_log = logging.getLogger("fleetgate.data")

HEAD_LINES = 8
"""A whole request head may be as long as this many of the longest header lines."""


class EngineWatch(Protocol):
    """Who looks after the engines' health and identity (`proxy.fleet.probes`)."""

    def suspect(self, engine: Engine, why: str) -> None:
        """Its process may be gone or replaced: nothing is sent there until it has been looked at."""

    def watch_paused(self, engine: Engine) -> None:
        """Somebody else paused it: keep it out until it says otherwise."""

    async def is_dead(self, engine: Engine) -> bool:
        """A quick look whether it still serves."""

    async def is_paused(self, engine: Engine) -> bool:
        """A quick look whether generation is paused there."""


def make_balancer(settings: Settings) -> Balancer:
    """The policy that the settings name."""
    match settings.policy:
        case Policy.LEAST_INFLIGHT:
            return LeastInflight()
        case Policy.ROUND_ROBIN:
            return RoundRobin()
        case Policy.POWER_OF_TWO:
            return PowerOfTwo(Random())
        case Policy.CONSISTENT_HASH:
            return ConsistentHash(margin=settings.affinity_margin, slack=settings.affinity_slack)
        case Policy.PREFIX:
            return Prefix(
                prompt_bytes=settings.prefix_bytes,
                max_blocks=settings.prefix_max_blocks,
                margin=settings.affinity_margin,
                slack=settings.affinity_slack,
                min_match=settings.prefix_min_match,
            )
        case _:
            return Sticky(
                ttl=settings.session_ttl,
                max_sessions=settings.max_sessions,
                margin=settings.affinity_margin,
                slack=settings.affinity_slack,
                live=settings.session_live,
            )


class Tracker:
    """Requests that are held or running, by ``X-Request-Id``. The same id may run several times at once."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Exchange | list[Exchange]] = {}

    def __len__(self) -> int:
        return sum(len(item) if isinstance(item, list) else 1 for item in self._by_id.values())

    def add(self, exchange: Exchange) -> None:
        """A request begins."""
        known = self._by_id.get(exchange.id_bytes)
        if known is None:
            self._by_id[exchange.id_bytes] = exchange
        elif isinstance(known, list):
            known.append(exchange)
        else:
            self._by_id[exchange.id_bytes] = [known, exchange]

    def remove(self, exchange: Exchange) -> None:
        """A request is over."""
        known = self._by_id.get(exchange.id_bytes)
        if isinstance(known, list):
            if exchange in known:
                known.remove(exchange)
            if len(known) == 1:
                self._by_id[exchange.id_bytes] = known[0]
        elif known is exchange:
            del self._by_id[exchange.id_bytes]

    async def refresh(self) -> None:
        """Make `find` and `all` true; they always are where requests run in this process."""

    def find(self, request_id: str) -> list[Exchange]:
        """Requests that carry this id."""
        known = self._by_id.get(request_id.encode("latin-1", "replace"))
        if known is None:
            return []
        return list(known) if isinstance(known, list) else [known]

    def all(self) -> list[Exchange]:
        """Every request that is held or running."""
        return [exchange for item in self._by_id.values() for exchange in (item if isinstance(item, list) else (item,))]


class DataPlane:
    """Shared state of the data plane.

    Args:
        settings: the proxy's settings.
        fleet: the engines.
        watch: who looks after their health; set before the first request.
    """

    def __init__(self, settings: Settings, fleet: Fleet, watch: EngineWatch | None = None) -> None:
        self.settings = settings
        self.fleet = fleet
        self.stats = DataStats()
        self.tracker = Tracker()
        self.gate = Gate(
            max_requests=settings.max_held_requests, max_bytes=settings.max_held_bytes, can_pass=self.can_pass
        )
        self.gate.on_hold_end = self._hold_ended
        self.balancer = make_balancer(settings)
        self._caches = CacheWatch()
        self.budget = Budget(ratio=settings.retry_ratio, floor=settings.retry_floor)
        self.flood = Flood(settings.flood_window)
        self.backoff = Backoff(base=settings.backoff_base, longest=settings.backoff_max)
        self.limits = Limits(
            request_line=settings.max_request_line,
            header_line=settings.max_header_line,
            headers=settings.max_headers,
            body=settings.max_body,
            head=settings.max_request_line + HEAD_LINES * settings.max_header_line,
        )
        self.session_headers = tuple(name.lower().encode("ascii") for name in settings.session_headers)
        self._session_fields = session_pattern(settings.session_body_fields)
        self.outliers = Outliers(limit=settings.outlier_failures, seconds=settings.outlier_seconds)
        self.draining = False
        self.on_over: list[Callable[[Exchange, int, float], None]] = [access.record] if settings.access_log else []
        """Called with each finished request, the status its client got, and the seconds it took."""
        self.spans: Spans | None = None
        self.on_session: Callable[[bytes, str], None] | None = None
        """Called with a session's key and the engine it was sent to; other workers have to know."""
        key = settings.engine_api_key
        self.engine_authorization = (
            b"Authorization: Bearer " + key.get_secret_value().encode("latin-1") + b"\r\n" if key else b""
        )
        token = settings.control_token
        self.control_token = token.get_secret_value().encode() if token is not None else None
        self.scheme = b"https" if settings.tls_cert else b"http"
        # A pseudonym of this very process (RFC 9110 section 7.6.3) tells a loop from a chain of proxies.
        self.name = b"fleetgate-" + os.urandom(4).hex().encode("ascii")
        self._id_prefix = b"fg-" + os.urandom(5).hex().encode("ascii") + b"-"
        self._order = 0
        self._version: str | None = None
        self._version_field = b"unknown"
        self._watch = watch
        self._trusted = [ipaddress.ip_network(item) for item in settings.trusted_proxies]
        self._trust: dict[str, bool] = {}
        fleet.on_eligible.append(self.gate.pump)
        fleet.listeners.append(self._on_event)

    @property
    def watch(self) -> EngineWatch:
        """Who looks after the engines' health."""
        assert self._watch is not None
        return self._watch

    @watch.setter
    def watch(self, watch: EngineWatch) -> None:
        self._watch = watch

    def trace(self, spans: Spans) -> None:
        """Make a span of each request from now on."""
        self.spans = spans
        self.on_over.append(spans.request_over)

    def next_order(self) -> int:
        """The place of a new request among all requests."""
        self._order += 1
        return self._order

    def new_id(self, order: int) -> bytes:
        """A request id that no other process makes."""
        return self._id_prefix + b"%x" % order

    def can_pass(self) -> bool:
        """Whether an engine could take a generation request now."""
        limit = self.settings.max_inflight
        if not limit:
            return bool(self.fleet.eligible)
        return any(engine.inflight < limit for engine in self.fleet.eligible)

    def pick(
        self,
        tried: Iterable[Engine],
        key: bytes | None,
        now: float,
        *,
        generation: bool,
        body: Sequence[bytes] = (),
    ) -> Engine | None:
        """An engine for a request, none of those tried while another is left.

        A request that does not run the model may go to any engine that lives, if none is eligible.

        Args:
            tried: engines that failed it.
            key: its session, as a header named it.
            now: loop time.
            generation: it runs the model.
            body: what has come of its body, in pieces; looked at only where a setting asks for it.
        """
        candidates = self.fleet.eligible
        limit = self.settings.max_inflight
        # The list itself is kept while no engine is full: policies remember what they found in it.
        if limit and generation and any([engine.inflight >= limit for engine in candidates]):  # noqa: C419 - a list is faster
            candidates = [engine for engine in candidates if engine.inflight < limit]
        if not candidates and not generation:
            candidates = [engine for engine in self.fleet if engine.alive]
        if tried:
            candidates = [engine for engine in candidates if engine not in tried] or candidates
        if self.outliers:
            candidates = [engine for engine in candidates if not self.outliers.out(engine.id, now)] or candidates
        if not candidates:
            return None
        prompt = b""
        if body and generation:
            if key is None and self._session_fields is not None:
                key = session_of(body, self._session_fields)
            wanted = self.balancer.prompt_bytes
            if wanted:
                prompt = prompt_of(body, wanted)
        if len(candidates) == 1 and key is None and not prompt:
            return candidates[0]
        chosen = self.balancer.select(candidates, key, now, prompt)
        if key is not None and self.on_session is not None:
            self.on_session(key, chosen.id)
        return chosen

    def _on_event(self, kind: str, details: dict[str, Any]) -> None:
        """Tell the policy whose caches are gone."""
        if kind == "engine_state":
            if details["state"] == State.DOWN and self.settings.down_timeout and len(self.tracker):
                loop = asyncio.get_running_loop()
                loop.call_later(self.settings.down_timeout, self._give_up, self.fleet.engines[details["engine"]])
        elif kind == "engine_restarted":
            self.outliers.forget(details["engine"])
            self.balancer.forget(details["engine"])
        elif kind == "engine_removed":
            self._removed(details["engine"])
            self.outliers.forget(details["engine"])
        elif kind == "control_call" and self._caches.empties(details["call"], details.get("query", "")):
            for name in details["legs"]:
                engine = self.fleet.engines.get(name)
                self.balancer.emptied(name, engine.inflight if engine is not None else 0)

    def _give_up(self, engine: Engine) -> None:
        """An engine has been down for long: what it still has is lost, although its connections may never say so.

        A process that is stopped, or a machine behind a broken network, keeps its connections open and silent.
        """
        limit = self.settings.down_timeout
        if engine.state is State.DOWN and self.fleet.clock() - engine.since >= limit * 0.99:
            for exchange in self.tracker.all():
                attempt = exchange.attempt
                if attempt is not None and attempt.engine is engine:
                    attempt.give_up(Failure(Kind.LOST, f"the engine has been down for {limit:g} s"))

    def _removed(self, name: str) -> None:
        """An engine left the fleet: what it still has ends here, before its connections end as if by themselves."""
        failure = Failure(Kind.REMOVED, f"engine {name} was removed from the fleet before its answer was whole")
        left = [
            exchange.attempt
            for exchange in self.tracker.all()
            if exchange.attempt is not None and exchange.attempt.engine.id == name
        ]
        if left:
            _log.warning("engine %s was removed; %d requests that it had are cut or sent elsewhere", name, len(left))
        for attempt in left:
            attempt.give_up(failure)

    def broke(self, engine: Engine, failure: Failure) -> None:
        """A request broke at an engine: after several in a row it is left out for a while."""
        # Not the eligible ones: this very engine is suspect for the moment, because a connection to it died.
        ready = sum(1 for other in self.fleet if other.state is State.READY)
        seconds = self.outliers.failed(engine.id, failure.kind, self.fleet.clock(), engines=ready)
        if seconds:
            _log.warning(
                "engine %s keeps breaking requests (%s); it is left out for %g s", engine.id, failure.detail, seconds
            )
            self.fleet.emit("engine_left_out", engine=engine.id, seconds=seconds, why=failure.detail)

    def others_left(self, tried: Iterable[Engine], *, generation: bool) -> bool:
        """Whether an engine could take the request that has not been tried yet."""
        if any(engine not in tried for engine in self.fleet.eligible):
            return True
        return not generation and any(engine.alive and engine not in tried for engine in self.fleet)

    def version_header(self) -> bytes:
        """The fleet version as a field value; ``unknown`` while there is none."""
        version = self.fleet.version
        if version is not self._version:
            self._version = version
            # A label is any text that a trainer chose; a field value is not.
            plain = "unknown" if version is None else "".join(c if c.isprintable() else "?" for c in version)
            self._version_field = plain.encode("latin-1", "replace")
        return self._version_field

    def trusts(self, address: str) -> bool:
        """Whether the forwarding fields of this peer are kept."""
        known = self._trust.get(address)
        if known is None:
            try:
                ip = ipaddress.ip_address(address)
                known = any(ip in network for network in self._trusted)
            except ValueError:
                known = False
            if len(self._trust) < 4096:
                self._trust[address] = known
        return known

    def _hold_ended(self, seconds: float, how: str) -> None:  # noqa: ARG002 - the signature of an event
        self.stats.hold_seconds.observe(seconds)

    async def drain(self, seconds: float, controlled: Callable[[], bool]) -> None:
        """Wait until no request runs, at most so long.

        Args:
            seconds: the limit.
            controlled: whether a control call is under way: the one that lets the last request end is to be answered.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (len(self.tracker) or controlled()) and loop.time() < deadline:  # noqa: ASYNC110 - only at a stop
            await asyncio.sleep(0.05)
