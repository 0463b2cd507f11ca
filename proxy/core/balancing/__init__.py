"""Who gets the next rollout: one small class a policy, no clock and no I/O of its own.

Which is the default and why: docs/balancing.md.
"""

from __future__ import annotations

from proxy.core.balancing.base import Balancer, Candidate
from proxy.core.balancing.consistent_hash import ConsistentHash
from proxy.core.balancing.prefix import Prefix
from proxy.core.balancing.spread import LeastInflight, PowerOfTwo, RoundRobin
from proxy.core.balancing.sticky import Sticky

__all__ = [
    "Balancer",
    "Candidate",
    "ConsistentHash",
    "LeastInflight",
    "PowerOfTwo",
    "Prefix",
    "RoundRobin",
    "Sticky",
]
