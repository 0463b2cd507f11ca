from proxy.config import FanoutPath, Settings
from proxy.core.engine_state import State
from proxy.data.upstream import Upstream
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.observe.stats import DataStats
from proxy.workers.state import (
    apply_engine,
    dump_settings,
    fleet_snapshot,
    merge_stats,
    retired,
    stats_snapshot,
    worker_settings,
)


def engine(name="a:1"):
    return Engine(name, f"http://{name}", Upstream(f"http://{name}"), state=State.READY, suspect=False)


def told(source, ack=0):
    fleet = Fleet(lambda: 0.0)
    fleet.add(source)
    return fleet_snapshot(fleet, {source.id: ack})["engines"][0]


def test_a_worker_takes_over_what_bears_on_routing():
    ours, theirs = engine(), engine()
    ours.state, ours.version, ours.weight, ours.asleep = State.FENCED, "v7", 4.0, frozenset({"weights"})
    ours.updating = True
    apply_engine(theirs, told(ours), claim=0)
    fields = ("state", "version", "weight", "asleep", "updating", "eligible")
    assert [getattr(theirs, name) for name in fields] == [getattr(ours, name) for name in fields]


def test_a_claim_outlives_every_snapshot_made_before_it_was_heard():
    ours, theirs = engine(), engine()
    theirs.suspect = theirs.paused = True
    apply_engine(theirs, told(ours, ack=1), claim=2)
    assert theirs.suspect
    assert theirs.paused
    apply_engine(theirs, told(ours, ack=2), claim=2)
    assert theirs.eligible


def counted(requests=1):
    stats = DataStats()
    for _ in range(requests):
        stats.answered("/v1/completions", 200)
        stats.engine_answered("a:1", 200)
        stats.retried("busy")
        stats.request_seconds.observe(0.5)
    stats.connections = 3
    return stats


def test_counts_of_workers_add_up_and_those_of_the_dead_stay():
    one = stats_snapshot(counted(2), [engine()], held=5, held_bytes=50, now=1.0)
    two = stats_snapshot(counted(3), [engine()], held=1, held_bytes=10, now=1.0)
    total = DataStats()
    merge_stats(total, [one, two])
    assert total.requests == {("/v1/completions", 200): 5}
    assert total.engine_requests == {("a:1", 200): 5}
    assert (total.retries, total.connections) == ({"busy": 5}, 6)
    assert (total.request_seconds.count, total.request_seconds.total) == (5, 2.5)
    merge_stats(total, [retired(one), two])
    assert total.requests == {("/v1/completions", 200): 5}
    assert total.connections == 3
    assert retired(one)["held"] == 0


def test_limits_of_the_fleet_are_shared_out_and_never_rounded_to_none():
    shared = worker_settings(Settings(max_held_requests=5, max_inflight=1, max_connections=7), 2)
    assert (shared.max_held_requests, shared.max_inflight, shared.max_connections) == (3, 1, 4)
    assert worker_settings(Settings(), 2).max_inflight == 0


def test_settings_survive_the_way_to_a_worker(monkeypatch):
    monkeypatch.setenv("FLEETGATE_PORT", "9")
    before = Settings(
        engine=["http://a:1"], control_token="secret", port=7, hold_timeout=1.5,
        fanout_paths=[FanoutPath(path="/x", rank_field="r")], engines_file="list", policy="prefix",
    )  # fmt: skip
    assert Settings(**dump_settings(before)) == before
