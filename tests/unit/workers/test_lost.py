"""A connection that died at a worker: the director, who watches the engine, says whether that means anything."""

from types import SimpleNamespace

import pytest

from proxy.config import Settings
from proxy.core.failures import Kind
from proxy.fleet.members import make_engine
from proxy.fleet.registry import Fleet
from proxy.observe.stats import DataStats
from proxy.workers.director import Worker, Workers
from proxy.workers.worker import RemoteWatch


def fleet_of_one(settings):
    fleet = Fleet(lambda: 0.0)
    engine = make_engine("http://127.0.0.1:1", settings)
    fleet.add(engine)
    return fleet, engine


@pytest.mark.parametrize("kind", [Kind.STALE, Kind.LOST])
async def test_a_worker_believes_the_worst_until_the_director_has_judged(kind):
    settings = Settings()
    fleet, engine = fleet_of_one(settings)
    engine.suspect = False
    told = []
    link = SimpleNamespace(send=lambda what, **fields: told.append({"t": what, **fields}))
    RemoteWatch(link, fleet, settings).lost(engine, kind)
    assert engine.suspect

    there, known = fleet_of_one(settings)
    heard = []
    workers = Workers(settings, there, DataStats())
    workers.prober = SimpleNamespace(lost=lambda *what: heard.append(what))
    worker = Worker(0, workers)
    workers.heard(worker, told[0])
    assert heard == [(known, kind)]
    assert worker.acks == {engine.id: 1}
