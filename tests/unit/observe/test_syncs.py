from __future__ import annotations

import pytest

from proxy.observe import syncs
from proxy.observe.syncs import SyncLog


class Trainer:
    """Plays events against a log on a clock of its own."""

    def __init__(self):
        self.now = 1000.0
        self.log = SyncLog(lambda: self.now)

    def call(self, name, *, seconds=0.1, status=200, legs=None):
        self.now += seconds
        legs = legs or {"a": (200, seconds, "answered"), "b": (200, seconds, "answered")}
        self.log.on_event(
            "control_call",
            {"call": name, "status": status, "seconds": seconds, "overhead_seconds": 0.001, "legs": legs},
        )

    def emit(self, kind, **details):
        self.log.on_event(kind, details)

    def pause(self):
        self.emit("gate_closed", by="t")
        self.call("pause")

    def resume(self, *, gate_first=True):
        if gate_first:
            self.emit("gate_opened", by="t", seconds=1.0)
            self.call("resume")
        else:
            self.call("resume")
            self.emit("gate_opened", by="t", seconds=1.0)

    def update(self, version="v1"):
        self.call("start_weight_update")
        self.call("update_weights", seconds=2.0)
        self.emit("weight_version", version=version, before=None, epoch=1, by="trainer")
        self.call("finish_weight_update")

    def syncs(self):
        return self.log.as_json()["syncs"]


def phases(sync):
    return [call["phase"] for call in sync["calls"]]


@pytest.mark.parametrize("gate_first", [True, False])
def test_a_sync_is_everything_from_the_pause_to_the_resume(gate_first):
    trainer = Trainer()
    trainer.pause()
    trainer.update()
    trainer.resume(gate_first=gate_first)
    (sync,) = trainer.syncs()
    assert phases(sync) == ["pause", "start", "update", "finish", "resume"]
    assert sync["outcome"] == "ok"
    assert sync["version"] == "v1"
    assert sync["seconds"] == pytest.approx(2.4)
    assert sync["calls"][2]["legs"]["a"] == {"status": 200, "seconds": 2.0, "outcome": "answered"}


def test_without_a_pause_it_is_everything_from_the_start_to_the_finish():
    trainer = Trainer()
    trainer.call("init_weight_transfer_engine")
    trainer.update("v1")
    trainer.update("v2")
    second, first, init = trainer.syncs()
    assert phases(init) == ["init"]
    assert (phases(first), first["version"]) == (["start", "update", "finish"], "v1")
    assert (phases(second), second["version"]) == (["start", "update", "finish"], "v2")
    assert [sync["number"] for sync in (init, first, second)] == [1, 2, 3]


def test_one_that_runs_says_so_and_grows():
    trainer = Trainer()
    trainer.pause()
    trainer.call("update_weights")
    trainer.now += 5
    (sync,) = trainer.syncs()
    assert (sync["outcome"], sync["ended"]) == ("running", None)
    assert sync["seconds"] == pytest.approx(5.2)


def test_a_failed_leg_is_named_and_the_sync_has_failed():
    trainer = Trainer()
    trainer.pause()
    legs = {"a": (200, 1.0, "answered"), "b": (None, 1.0, "died")}
    trainer.call("update_weights", status=424, legs=legs)
    trainer.emit("round_broken", why="b died", engines=["b"])
    trainer.resume()
    (sync,) = trainer.syncs()
    assert sync["outcome"] == "failed"
    assert sync["trouble"] == ["update_weights answered 424 (b)", "b died"]
    assert sync["ended"] is not None


def test_reads_and_aborts_are_no_part_of_it_and_lone_cache_resets_are_no_sync():
    trainer = Trainer()
    trainer.call("is_paused")
    trainer.call("abort_requests")
    trainer.call("reset_prefix_cache")
    assert trainer.syncs() == []
    trainer.pause()
    trainer.call("is_paused")
    trainer.call("reset_prefix_cache")
    trainer.resume()
    assert phases(trainer.syncs()[0]) == ["pause", "other", "resume"]


def test_a_pause_that_ended_by_itself_ends_the_sync():
    trainer = Trainer()
    trainer.pause()
    trainer.emit("pause_lease_ended", by="t", seconds=30.0)
    trainer.emit("gate_opened", by="lease", seconds=30.0)
    opened = trainer.now
    trainer.now += 60
    (sync,) = trainer.syncs()
    assert sync["ended"] == opened
    assert sync["trouble"] == ["the pause lease ran out after 30 s"]


def test_the_next_sync_is_not_mixed_up_with_one_that_ended_by_itself():
    trainer = Trainer()
    trainer.pause()
    trainer.emit("gate_opened", by="lease", seconds=30.0)
    trainer.pause()
    trainer.resume()
    second, first = trainer.syncs()
    assert phases(first) == ["pause"]
    assert phases(second) == ["pause", "resume"]


def test_it_remembers_a_bounded_number_of_syncs_and_calls(monkeypatch):
    monkeypatch.setattr(syncs, "MAX_CALLS", 3)
    trainer = Trainer()
    for number in range(syncs.MAX_SYNCS + 5):
        trainer.update(f"v{number}")
    assert len(trainer.syncs()) == syncs.MAX_SYNCS
    assert trainer.syncs()[0]["version"] == f"v{syncs.MAX_SYNCS + 4}"
    trainer.pause()
    for _ in range(5):
        trainer.call("update_weights")
        trainer.call("reset_prefix_cache")
    sync = trainer.syncs()[0]
    assert (len(sync["calls"]), sync["dropped_calls"]) == (3, 8)
    assert len(trainer.log.as_json(last=2)["syncs"]) == 2


def test_the_buckets_of_a_large_model_are_one_record():
    trainer = Trainer()
    trainer.pause()
    for number in range(300):
        legs = {"a": (200, 0.1, "answered"), "b": (500, 0.1, "refused")} if number == 7 else None
        trainer.call("update_weights", status=424 if legs else 200, legs=legs)
    _, update = trainer.syncs()[0]["calls"]
    assert (update["count"], update["status"]) == (300, 424)
    assert update["seconds"] == pytest.approx(30.0)
    assert update["ended"] - update["started"] == pytest.approx(30.0)
    assert update["legs"]["a"]["outcome"] == "answered"
    assert update["legs"]["b"]["outcome"] == "refused"
    assert update["legs"]["b"]["seconds"] == pytest.approx(30.0)


def holder(call):
    return {"call": call, "client": "t", "request_id": "", "since": 0.0}


def test_the_call_that_runs_is_told_before_it_ends():
    trainer = Trainer()
    trainer.emit("lifecycle", holder=holder("/update_weights"))
    trainer.now += 600
    (sync,) = trainer.syncs()
    assert sync["running"] == {"call": "update_weights", "phase": "update", "started": 1000.0}
    assert (sync["outcome"], sync["seconds"]) == ("running", 600.0)
    trainer.call("update_weights", seconds=0.0)
    trainer.emit("lifecycle", holder=None)
    assert trainer.syncs()[0]["running"] is None


def test_a_call_that_was_refused_before_any_engine_was_called_is_no_sync():
    trainer = Trainer()
    trainer.emit("lifecycle", holder=holder("/start_weight_update"))
    trainer.emit("control_refused", call="start_weight_update", status=409, code="conflict", holder=None)
    trainer.emit("lifecycle", holder=None)
    assert trainer.syncs() == []


def test_a_pause_without_engines_is_a_sync_all_the_same():
    trainer = Trainer()
    trainer.emit("lifecycle", holder=holder("/pause"))
    trainer.emit("gate_closed", by="t")
    trainer.emit("lifecycle", holder=None)
    assert [sync["outcome"] for sync in trainer.syncs()] == ["running"]
