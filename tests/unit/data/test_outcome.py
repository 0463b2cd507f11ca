"""Which error a client sees when no attempt is left."""

from __future__ import annotations

import pytest

from proxy.core.failures import Failure, Kind
from proxy.data.outcome import error_for

STATUS = {Kind.CONNECT: 502, Kind.TIMEOUT: 504, Kind.BUSY: 503, Kind.PAUSED: 503, Kind.REMOVED: 503}


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_one(kind: Kind) -> None:
    error = error_for(Failure(kind, "what happened"))
    assert error.status == STATUS.get(kind, 502)
    assert error.message == "what happened"
    assert (error.retry_after is not None) is (error.status == 503)
