"""Who may answer clients after restarts, other labels, ties and operators."""

import asyncio
import json

from proxy.fleet.members import Members
from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import proxy_for, rig


async def settle(fleet, seconds=0.4):
    """Long enough for several probes and a catch-up, so that an engine that stays fenced really does."""
    await asyncio.sleep(seconds)


async def test_a_restarted_engine_is_as_good_as_before_while_nothing_was_ever_updated():
    async with rig(2) as fleet:
        await fleet.restart(1)
        await fleet.until_state(1, "ready")


async def test_a_restarted_engine_gets_nothing_until_a_whole_sync():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.restart(1)
        await settle(fleet)
        assert fleet.states() == ["ready", "fenced"]
        await fleet.sync("w2", "v2")
        assert fleet.states() == ["ready", "ready"]


async def test_a_restart_shows_at_once_and_not_at_the_next_probe():
    async with rig(2, probe_interval=60) as fleet:
        await fleet.sync("w1", "v1")
        await asyncio.sleep(0.2)
        await fleet.engines[1].kill()
        await fleet.until(lambda: not fleet.engine(1).eligible, limit=1)


async def test_a_restart_under_the_fleets_own_label_is_told_by_the_start_time():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.restart(1, version="v1")
        await settle(fleet)
        assert fleet.states() == ["ready", "fenced"]
        assert fleet.engine(1).version == "v1"


async def test_without_start_times_a_refused_connection_counts_as_a_restart():
    mocks = [MockEngine(metrics=False), MockEngine(metrics=False)]
    async with rig(engines=mocks) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.restart(1, version="v1")
        await settle(fleet)
        assert fleet.states() == ["ready", "fenced"]


async def test_an_engine_that_was_only_silent_comes_back_as_the_one_it_was():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].health = 500
        await fleet.until_state(1, "down")
        fleet.engines[1].health = 200
        await fleet.until_state(1, "ready")
        assert fleet.engine(1).boot == 0


async def test_an_engine_with_another_label_is_fenced_and_comes_back_with_the_fleets():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].version, weights = "v0", fleet.engines[1].weights
        fleet.engines[1].weights = "w0"
        await fleet.until_state(1, "fenced")
        await settle(fleet)
        assert fleet.engine(1).state == "fenced"
        fleet.engines[1].version, fleet.engines[1].weights = "v1", weights
        await fleet.until_state(1, "ready")


async def test_equal_checksums_let_a_restarted_engine_in_under_the_fleets_label():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/weight_checker", json={"action": "checksum"})
        await fleet.restart(1, weights=fleet.engines[0].weights)
        await fleet.until_state(1, "ready")
        assert fleet.engines[1].version == "v1"
        assert fleet.seen("/weight_checker") == [1, 2]


async def test_a_check_that_shows_equal_checksums_lets_an_engine_in():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.restart(1, weights=fleet.engines[0].weights)
        await settle(fleet)
        assert fleet.engine(1).state == "fenced"
        assert fleet.seen("/weight_checker") == [0, 0]
        await fleet.call("/weight_checker", json={"action": "checksum"})
        await fleet.until_state(1, "ready")
        assert fleet.engines[1].version == "v1"


async def test_other_checksums_do_not_and_are_asked_once():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/weight_checker", json={"action": "checksum"})
        await fleet.restart(1)
        await settle(fleet, 0.6)
        assert fleet.engine(1).state == "fenced"
        assert fleet.seen("/weight_checker") == [1, 2]


async def test_at_start_the_majority_wins_and_default_never_does():
    mocks = [MockEngine(version="v1"), MockEngine(), MockEngine()]
    async with rig(engines=mocks) as fleet:
        assert fleet.plane.fleet.version == "v1"
        assert fleet.states() == ["ready", "fenced", "fenced"]
    mocks = [MockEngine(version="v1"), MockEngine(version="v2"), MockEngine(version="v2")]
    async with rig(engines=mocks) as fleet:
        assert fleet.plane.fleet.version == "v2"
        assert fleet.states() == ["fenced", "ready", "ready"]


async def test_a_tie_fences_all_until_a_sync_or_an_admission():
    async with rig(engines=[MockEngine(version="v1"), MockEngine(version="v2")]) as fleet:
        assert fleet.states() == ["fenced", "fenced"]
        data = await fleet.get("/fleet")
        assert data["tied"] == ["v1", "v2"]
        assert data["weight_version"] is None
        ready = await fleet.get("/ready", status=503)
        assert "v1" in ready["problem"]
        await fleet.call(f"/fleet/engines/{fleet.engines[0].id}/admit")
        assert fleet.plane.fleet.version == "v1"
        assert fleet.states() == ["ready", "fenced"]
    async with rig(engines=[MockEngine(version="v1"), MockEngine(version="v2")]) as fleet:
        await fleet.sync("w", "v3")
        assert fleet.states() == ["ready", "ready"]


async def test_an_engine_seen_late_may_still_decide_the_vote_of_the_start():
    mocks = [MockEngine(), MockEngine(version="v1", weights="w1")]
    await mocks[0].start()
    await mocks[1].start()
    await mocks[1].kill()
    async with proxy_for(mocks) as fleet:
        assert fleet.states()[0] == "ready"
        await mocks[1].start()
        await fleet.until_state(1, "ready")
        assert fleet.states() == ["fenced", "ready"]
    for mock in mocks:
        await mock.kill()


async def test_all_paused_at_start_closes_the_gate_until_they_go_on():
    mocks = [MockEngine(paused=True), MockEngine(paused=True)]
    async with rig(engines=mocks) as fleet:
        assert fleet.data.gate.closed
        for mock in mocks:
            mock.paused = False
        await fleet.until(lambda: not fleet.data.gate.closed)
        assert len(fleet.plane.fleet.eligible) == 2


async def test_some_paused_at_start_keeps_those_out_until_they_go_on():
    mocks = [MockEngine(paused=True), MockEngine()]
    async with rig(engines=mocks) as fleet:
        assert not fleet.data.gate.closed
        assert [engine.id for engine in fleet.plane.fleet.eligible] == [mocks[1].id]
        mocks[0].paused = False
        await fleet.until(lambda: len(fleet.plane.fleet.eligible) == 2)


async def test_an_engine_that_missed_a_pause_catches_up_and_one_that_missed_a_resume_too():
    async with rig(2) as fleet:
        fleet.engines[1].health = 500
        await fleet.until_state(1, "down")
        await fleet.call("/pause?mode=keep")
        await fleet.call("/resume")
        assert fleet.seen("/resume") == [1, 0]
        fleet.engines[1].paused = True
        fleet.engines[1].health = 200
        await fleet.until_state(1, "ready")
        assert not fleet.engines[1].paused


async def test_fence_by_hand_holds_until_admit_by_hand():
    async with rig(2) as fleet:
        name = fleet.engines[1].id
        await fleet.call(f"/fleet/engines/{name}/fence")
        await settle(fleet)
        assert fleet.states() == ["ready", "fenced"]
        await fleet.call(f"/fleet/engines/{name}/admit")
        assert fleet.states() == ["ready", "ready"]


async def test_admit_by_hand_takes_the_engines_word_and_stays():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.engines[1].restart(version="theirs")
        await fleet.until(lambda: fleet.engine(1).boot == 1 and not fleet.engine(1).suspect)
        await fleet.call(f"/fleet/engines/{fleet.engines[1].id}/admit")
        await settle(fleet)
        assert fleet.states() == ["ready", "ready"]
        fleet.engines[1].version = "other"
        await fleet.until_state(1, "fenced")


async def test_drain_and_back_and_remove():
    async with rig(2) as fleet:
        name = fleet.engines[1].id
        await fleet.call(f"/fleet/engines/{name}/drain")
        assert fleet.states() == ["ready", "draining"]
        await fleet.call(f"/fleet/engines/{name}/admit")
        assert fleet.states() == ["ready", "ready"]
        data = await fleet.call(f"/fleet/engines/{name}?drain=1", method="DELETE")
        assert data == {"removed": name, "idle": True}
        assert len(fleet.plane.fleet) == 1
        await fleet.call("/fleet/engines", json={"url": fleet.engines[1].url}, status=201)
        await fleet.until_state(1, "ready")
        await fleet.call("/fleet/engines", json={"url": fleet.engines[1].url}, status=409)
        await fleet.call("/fleet/engines", json={"url": "http://10.0.0.1:8000"}, status=403)
        await fleet.call("/fleet/engines", json={"url": "nonsense"}, status=400)
        await fleet.call("/fleet/engines", data=b"{", status=400)
        await fleet.call("/fleet/engines/nobody/drain", status=404)
        await fleet.call("/fleet/engines/nobody/sing", status=404)


async def test_an_engine_added_after_an_update_waits_for_the_next_one():
    mocks = [await MockEngine().start() for _ in range(2)]
    late = await MockEngine().start()
    async with proxy_for(mocks) as fleet:
        await fleet.call("/init_weight_transfer_engine", json={"init_info": {"rank_offset": 1, "world_size": 3}})
        await fleet.sync("w1", "v1")
        await fleet.call("/fleet/engines", json={"url": late.url}, status=201)
        engine = fleet.plane.fleet.engines[late.id]
        await fleet.until(lambda: engine.state == "fenced")
        await fleet.sync("w2", "v2")
        assert not late.calls("/start_weight_update")
        assert engine.state == "fenced"
        await fleet.call("/init_weight_transfer_engine", json={"init_info": {"rank_offset": 1, "world_size": 4}})
        await fleet.sync("w3", "v3")
        assert engine.state == "ready"
    for mock in [*mocks, late]:
        await mock.kill()


async def test_servers_that_close_each_connection_raise_no_suspicion():
    async with rig(engines=[MockEngine(close_each=True)]) as fleet:
        await settle(fleet)
        assert fleet.states() == ["ready"]
        assert not any(kind == "engine_suspect" for kind, _ in fleet.events)


async def test_a_word_from_the_data_plane_makes_an_engine_ineligible_until_it_is_checked():
    async with rig(2, probe_interval=60) as fleet:
        fleet.plane.prober.suspect(fleet.engine(0), "a stream broke")
        assert not fleet.engine(0).eligible
        await fleet.until(lambda: fleet.engine(0).eligible)
        assert await fleet.plane.prober.is_dead(fleet.engine(0)) is False
        fleet.engines[0].health = 503
        assert await fleet.plane.prober.is_dead(fleet.engine(0)) is True


async def test_an_engine_paused_by_others_is_watched():
    async with rig(2) as fleet:
        fleet.engines[0].paused = True
        fleet.plane.prober.watch_paused(fleet.engine(0))
        assert not fleet.engine(0).eligible
        await settle(fleet, 0.2)
        assert not fleet.engine(0).eligible
        fleet.engines[0].paused = False
        await fleet.until(lambda: fleet.engine(0).eligible)


async def test_fleet_and_its_events():
    async with rig(2) as fleet:
        async with fleet.http.get(fleet.base + "/fleet/events") as stream:
            assert stream.headers["Content-Type"].startswith("text/event-stream")
            first = await stream.content.readuntil(b"\n\n")
            assert first.startswith(b"event: snapshot\n")
            snapshot = json.loads(first.split(b"data: ", 1)[1])
            assert [engine["state"] for engine in snapshot["engines"]] == ["ready", "ready"]
            await fleet.call("/pause")
            kinds = []
            while "control_call" not in kinds:
                kinds.append((await stream.content.readuntil(b"\n\n")).split(b"\n")[0][7:].decode())
            assert "gate_closed" in kinds
        data = await fleet.get("/fleet")
        assert data["paused"] is True
        assert data["gate"]["by"].startswith("/pause of 127.0.0.1")
        await fleet.get("/health")
        assert (await fleet.get("/ready", status=503))["problem"].startswith("paused by /pause")


def test_patterns_of_engines_that_may_be_added():
    from proxy.fleet.members import _allowed

    assert _allowed("127.0.0.1:8001", "127.0.0.1:*")
    assert _allowed("[::1]:8001", "[::1]:*")
    assert not _allowed("10.0.0.1:8001", "127.0.0.1:*")
    assert _allowed("gpu-7.rl.svc:80", "*.rl.svc:80")
    assert Members.__doc__


async def test_an_engine_taken_out_and_added_again_is_known_by_its_label():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        name, url = fleet.engines[1].id, fleet.engines[1].url
        await fleet.call(f"/fleet/engines/{name}", method="DELETE")
        await fleet.call("/fleet/engines", json={"url": url}, status=201)
        await fleet.until_state(1, "ready")
        await fleet.call(f"/fleet/engines/{name}", method="DELETE")
        await fleet.engines[1].restart()
        await fleet.call("/fleet/engines", json={"url": url}, status=201)
        await fleet.until_state(1, "fenced")
        await settle(fleet)
        assert fleet.engine(1).state == "fenced"


async def test_an_engine_that_freezes_in_a_call_is_not_waited_for_once_its_probes_say_so():
    async with rig(2, probe_timeout=0.3) as fleet:
        fleet.engines[1].fail("/pause", "hang")
        fleet.engines[1].fail("/health", "hang")
        data = await fleet.call("/pause?mode=wait", status=424)
        assert fleet.engines[1].id in data["message"]
        assert "went down" in data["message"]
