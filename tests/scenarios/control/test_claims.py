"""What engines claim, and what others do to them: nobody's word is taken for more than it says."""

from __future__ import annotations

import gzip

import pytest

from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import proxy_for, rig


async def settle(fleet, looks: int = 4) -> None:
    """Until every engine was looked at so many times more."""
    before = {engine: engine.successes for engine in fleet.plane.fleet}
    await fleet.until(lambda: all(engine.successes >= before[engine] + looks for engine in before))


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update", "/update_weight_version"])
@pytest.mark.parametrize("count", [1, 2])
async def test_weights_that_no_engine_took_are_not_the_fleets(path: str, count: int) -> None:
    """``{"success": false}`` from all of them is as little of an update as from one of them."""
    async with rig(count) as fleet:
        await fleet.sync("w1", "v1")
        for engine in fleet.engines:
            engine.fail(path, "false")
        if path == "/update_weight_version":
            await fleet.call(path, json={"new_version": "v2"}, status=424)
        else:
            await fleet.call("/start_weight_update")
            update = {"update_info": {"names": ["w2"]}}
            await fleet.call("/update_weights", json=update, status=424 if path == "/update_weights" else 200)
            await fleet.call("/finish_weight_update", json={"weight_version": "v2"}, status=None)
            assert not any(engine.eligible for engine in fleet.plane.fleet)
        assert fleet.plane.fleet.version == "v1"
        for engine in fleet.engines:
            engine.heal()
        await fleet.sync("w3", "v3")
        assert (fleet.plane.fleet.version, fleet.states()) == ("v3", ["ready"] * count)


async def test_a_group_and_an_adapter_that_no_engine_has_are_not_remembered() -> None:
    async with rig(2) as fleet:
        for engine in fleet.engines:
            engine.fail("/init_weight_transfer_engine", "false", times=1)
            engine.fail("/v1/load_lora_adapter", "false", times=1)
        init = {"init_info": {"rank_offset": 1, "world_size": 3}}
        await fleet.call("/init_weight_transfer_engine", json=init, status=424)
        group = fleet.plane.conductor.groups.group
        assert group is None or group.lost
        await fleet.call("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"}, status=None)
        assert not fleet.plane.fleet.adapters


async def test_a_cache_that_no_engine_could_reset_is_their_own_answer() -> None:
    async with rig(2) as fleet:
        for engine in fleet.engines:
            engine.fail("/reset_prefix_cache", "false", times=1)
        assert await fleet.call("/reset_prefix_cache") == {"success": False}
        assert fleet.states() == ["ready"] * 2


async def test_a_pause_of_somebody_else_is_never_ended_by_the_proxy() -> None:
    """Found at the start at one of them, or at one that joins: who paused it may be in the middle of an update."""
    paused, joiner = MockEngine(paused=True), MockEngine(paused=True)
    await joiner.start()
    async with rig(engines=[paused, MockEngine()]) as fleet:
        await fleet.call("/fleet/engines", json={"url": joiner.url}, status=201)
        await fleet.until(lambda: fleet.plane.fleet.engines[joiner.id].paused)
        await settle(fleet)
        assert not paused.calls("/resume")
        assert not joiner.calls("/resume")
        assert [engine.id for engine in fleet.plane.fleet.eligible] == [fleet.engines[1].id]
        paused.paused = False
        await fleet.until(lambda: fleet.engine(0).eligible)
        await fleet.call("/resume")
        await fleet.until(lambda: fleet.plane.fleet.engines[joiner.id].eligible)
    await joiner.kill()


async def test_engines_that_could_not_be_asked_at_the_start_stay_paused() -> None:
    """Their cores were busy with an update when the proxy looked first; the trainer holds the pause."""
    engines = [MockEngine(paused=True, version="v1"), MockEngine(paused=True, version="v1")]
    for engine in engines:
        await engine.start()
        for path in ("/weight_info", "/is_paused"):
            engine.fail(path, "status", times=3)
    async with proxy_for(engines) as fleet:
        await fleet.until(lambda: all(engine.reported_paused for engine in fleet.plane.fleet))
        await settle(fleet)
        assert fleet.seen("/resume") == [0, 0]
        assert fleet.plane.gate.closed
        assert await fleet.get("/is_paused") == {"is_paused": True}
        await fleet.call("/resume")
        await fleet.until(lambda: len(fleet.plane.fleet.eligible) == 2)
    for engine in engines:
        await engine.kill()


async def test_checksums_that_serving_engines_dispute_are_nobodys() -> None:
    async with rig(3) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[0].weights = "other"
        data = await fleet.call("/weight_checker", json={"action": "checksum"})
        assert data["match"] is False
        await fleet.engines[2].restart(weights="other")
        await fleet.until_state(2, "fenced")
        await fleet.call("/weight_checker", json={"action": "checksum"})
        await settle(fleet)
        assert fleet.states()[2] == "fenced"
        assert fleet.engines[2].version == "default"


async def test_whoever_comes_late_cannot_outvote_what_is_served() -> None:
    serving = MockEngine(version="v2")
    late = [MockEngine(version="v1"), MockEngine(version="v1")]
    for engine in (serving, *late):
        await engine.start()
    for engine in late:
        await engine.kill()
    async with proxy_for([serving, *late]) as fleet:
        await fleet.until_state(0, "ready")
        for engine in late:
            await engine.start()
        await fleet.until(lambda: fleet.states()[1:] == ["fenced", "fenced"])
        await settle(fleet)
        assert (fleet.plane.fleet.version, fleet.states()) == ("v2", ["ready", "fenced", "fenced"])
    for engine in (serving, *late):
        await engine.kill()


async def test_a_tie_that_an_operator_breaks_lets_in_all_with_that_label() -> None:
    engines = [MockEngine(version=label) for label in ("v1", "v1", "v2", "v2")]
    async with rig(engines=engines) as fleet:
        assert fleet.states() == ["fenced"] * 4
        await fleet.call(f"/fleet/engines/{fleet.engines[0].id}/admit")
        await fleet.until(lambda: fleet.states() == ["ready", "ready", "fenced", "fenced"])


async def test_a_call_that_was_refused_before_any_engine_was_called_hides_no_replay() -> None:
    async with rig(2) as fleet:
        await fleet.call("/start_weight_update")
        update = {"update_info": {"names": ["w2"]}}
        await fleet.call("/update_weights", json=update)
        await fleet.call("/start_draft_weight_update", status=409)
        await fleet.call("/update_weights", json=update)
        assert fleet.seen("/update_weights") == [1, 1]


async def test_a_coded_body_reaches_the_engines_as_it_came() -> None:
    body = gzip.compress(b'{"level": 1}')
    async with rig(1) as fleet:
        await fleet.call("/reset_mm_cache", data=body, headers={"Content-Encoding": "gzip"}, status=None)
        (seen,) = fleet.engines[0].calls("/reset_mm_cache")
        assert dict(seen.headers)["Content-Encoding"] == "gzip"
        assert int(dict(seen.headers)["Content-Length"]) == len(body)


async def test_each_pause_has_a_lease_of_its_own_but_the_alarm_counts_from_the_first() -> None:
    async with rig(1, max_pause=60) as fleet:
        pauses = fleet.plane.conductor.pauses
        await fleet.call("/pause?mode=keep")
        lease, alarm = pauses._lease, pauses._alarm
        assert lease is not None
        assert alarm is not None
        await fleet.call("/pause?mode=keep")
        assert lease.cancelled()
        assert pauses._lease is not None
        assert not pauses._lease.cancelled()
        assert pauses._alarm is alarm
        assert not alarm.cancelled()


async def test_a_label_that_failed_on_one_is_reported_with_all() -> None:
    async with rig(3) as fleet:
        fleet.engines[1].fail("/update_weight_version", "status")
        await fleet.call("/start_weight_update")
        await fleet.call("/update_weights", json={"update_info": {"names": ["w2"]}})
        data = await fleet.call("/finish_weight_update", status=424)
        assert len(data["engines"]) == 3
        assert "on 1 of 3 engines" in data["message"]
