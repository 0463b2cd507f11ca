"""``python -m tests.scenarios.chaos_sync [--seed N] [--syncs N]``: weight syncs while everything breaks."""

from __future__ import annotations

import argparse
import sys
import time

import uvloop

from tests.scenarios.chaos_sync.run import Options, chaos


def main() -> int:
    """Read the arguments and run; 1 if anything was violated."""
    defaults = Options()
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.chaos_sync", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--syncs", type=int, default=defaults.syncs)
    parser.add_argument("--engines", type=int, default=defaults.engines)
    parser.add_argument("--clients", type=int, default=defaults.clients)
    parser.add_argument("--every", type=float, default=defaults.every, help="trainer calls between two faults")
    parser.add_argument(
        "--proxy-every",
        type=float,
        default=defaults.proxy_every,
        help="trainer calls between deaths of the proxy; 0: never",
    )
    parser.add_argument("--only", default="", help="kinds of faults, comma-separated")
    parser.add_argument("--trace", default="", help="file for the trace of what happened")
    parser.add_argument("--careless", action="store_true", help="resume after a death of the proxy, whatever was sent")
    parser.add_argument("--stop-at-first", action="store_true", help="end at the first violation")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    options = Options(**vars(given))
    return uvloop.run(chaos(options))


if __name__ == "__main__":
    sys.exit(main())
