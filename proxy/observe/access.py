"""One record a request: who, where, how long. Never bodies, headers or credentials."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.data.exchange import Exchange

_log = logging.getLogger("fleetgate.access")


def record(exchange: Exchange, status: int, seconds: float) -> None:
    """Log one finished request.

    Args:
        exchange: the request.
        status: what the client got; 499 if it went away.
        seconds: from its head to the last byte of its answer.
    """
    engine = exchange.last_engine
    _log.info(
        "%s %s %d",
        exchange.head.method.decode("latin-1"),
        exchange.route,
        status,
        extra={
            "request_id": exchange.request_id,
            "engine": engine.id if engine is not None else None,
            "weight_version": exchange.version.decode("latin-1"),
            "attempts": exchange.attempts,
            "seconds": round(seconds, 6),
            "bytes_in": exchange.body_size,
            "bytes_out": exchange.relay.bytes_out,
        },
    )
