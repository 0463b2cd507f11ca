"""The policies of a run: the proxy's own classes with the proxy's own defaults, and some variants for comparison."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

from benchmarks.simulate.world import TOKENS_PER_BYTE
from proxy.config import Settings
from proxy.core.balancing import Balancer, ConsistentHash, LeastInflight, PowerOfTwo, Prefix, RoundRobin, Sticky

BYTES_PER_TOKEN = 4
"""Of real text, about; what the settings of `prefix` are made for."""

DEFAULTS = {name: field.default for name, field in Settings.model_fields.items()}


def sticky(margin: float | None = None, slack: float | None = None, live: float | None = None) -> Sticky:
    return Sticky(
        ttl=DEFAULTS["session_ttl"],
        max_sessions=DEFAULTS["max_sessions"],
        margin=DEFAULTS["affinity_margin"] if margin is None else margin,
        slack=DEFAULTS["affinity_slack"] if slack is None else slack,
        live=DEFAULTS["session_live"] if live is None else live,
    )


def prefix(margin: float | None = None, slack: float | None = None, min_match: float | None = None) -> Prefix:
    scale = BYTES_PER_TOKEN * TOKENS_PER_BYTE
    return Prefix(
        prompt_bytes=DEFAULTS["prefix_bytes"] // scale,
        max_blocks=DEFAULTS["prefix_max_blocks"],
        margin=DEFAULTS["affinity_margin"] if margin is None else margin,
        slack=DEFAULTS["affinity_slack"] if slack is None else slack,
        min_match=DEFAULTS["prefix_min_match"] if min_match is None else min_match,
        block_bytes=256 // scale,
    )


def consistent_hash(margin: float | None = None, slack: float | None = None) -> ConsistentHash:
    return ConsistentHash(
        margin=DEFAULTS["affinity_margin"] if margin is None else margin,
        slack=DEFAULTS["affinity_slack"] if slack is None else slack,
    )


POLICIES: dict[str, Callable[[], Balancer]] = {
    "sticky": sticky,
    "sticky, no escape": lambda: sticky(margin=inf),
    "prefix": prefix,
    "consistent_hash": consistent_hash,
    "hash, no bound": lambda: consistent_hash(margin=inf),
    "least_inflight": LeastInflight,
    "power_of_two": lambda: PowerOfTwo(Random(1)),
    "round_robin": RoundRobin,
}
