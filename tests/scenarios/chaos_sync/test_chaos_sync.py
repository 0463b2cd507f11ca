"""A small run of ``make chaos-sync``: a few syncs with a fault in almost each, the proxy killed among them."""

import pytest

from tests.scenarios.chaos_sync.run import Options, chaos


@pytest.mark.skip(reason="open: seed 5 sometimes sees one /resume answered 400, which a trainer must never get")
async def test_syncs_under_faults_never_mislabel_an_answer():
    options = Options(seed=5, syncs=8, engines=3, clients=8, every=6.0, proxy_every=0.0)
    assert await chaos(options) == 0
