"""A small run of ``make chaos-sync``: a few syncs with a fault in almost each."""

from tests.scenarios.chaos_sync.run import Options, chaos


async def test_syncs_under_faults_never_mislabel_an_answer():
    options = Options(seed=5, syncs=8, engines=3, clients=8, every=6.0, proxy_every=0.0)
    assert await chaos(options) == 0
