"""Labels that the proxy writes before the step that makes them true, and marks where no session tells."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import Rig, proxy_for, rig

UPDATE = {"update_info": {"names": ["w2"]}}
RELOAD = {"weight_dir": "/step_2"}
MARKED = "fleetgate-unfinished:v1"


def labels(fleet: Rig) -> list[str]:
    """What the engines themselves say."""
    return [mock.version for mock in fleet.engines]


@asynccontextmanager
async def a_proxy_that_dies_in(
    path: str, kind: str, body: Any, steps: Callable[[Rig], Awaitable[None]]
) -> AsyncIterator[Rig]:
    """Engines with ``v1``; the proxy dies while a call hangs (``hang``) or is slow (``slow``); yields the next one."""
    engines = [await MockEngine().start() for _ in range(2)]
    async with proxy_for(engines) as first:
        await first.sync("w1", "v1")
        await steps(first)
        before = first.seen(path)
        for mock in engines:
            mock.fail(path, kind, times=1, seconds=0.3)
        call = asyncio.ensure_future(first.call(path, json=body, status=None))
        await first.until(lambda: first.seen(path) == [count + 1 for count in before])
        for mock in engines:
            mock.faults.clear()
    call.cancel()
    if kind == "slow":
        # The engines go on with what they were asked for, whoever asked.
        await asyncio.sleep(0.4)
    for mock in engines:
        mock.heal()
    async with proxy_for(engines) as second:
        yield second
    for mock in engines:
        await mock.kill()


async def in_a_round(fleet: Rig) -> None:
    await fleet.call("/pause")
    await fleet.call("/start_weight_update")
    await fleet.call("/update_weights", json=UPDATE)


async def paused(fleet: Rig) -> None:
    await fleet.call("/pause")


async def test_the_automatic_label_is_there_before_the_finish():
    async with rig(2) as fleet:
        await in_a_round(fleet)
        shown: list[str] = []
        for mock in fleet.engines:
            mock.fail("/finish_weight_update", "slow", seconds=0.1, times=1)
        finish = asyncio.ensure_future(fleet.call("/finish_weight_update"))
        await fleet.until(lambda: fleet.seen("/finish_weight_update") == [1, 1])
        shown = labels(fleet)
        await finish
        assert shown == labels(fleet) == ["u1", "u1"]
        assert fleet.seen("/update_weight_version") == [1, 1]


async def test_a_proxy_that_dies_before_the_finish_leaves_sessions_that_tell():
    async with a_proxy_that_dies_in("/finish_weight_update", "hang", None, in_a_round) as second:
        assert labels(second) == ["u1", "u1"]
        await second.call("/resume")
        assert second.states() == ["fenced", "fenced"]
        await second.sync("w3")
        assert labels(second) == ["u2", "u2"]
        assert second.states() == ["ready", "ready"]


async def test_a_proxy_that_dies_in_the_finish_leaves_labels_that_are_true():
    async with a_proxy_that_dies_in("/finish_weight_update", "slow", None, in_a_round) as second:
        await second.call("/resume")
        assert second.states() == ["ready", "ready"]
        assert second.plane.fleet.version == "u1"
        assert all("w2" in mock.weights for mock in second.engines)


@pytest.mark.parametrize("kind", ["hang", "slow"])
async def test_a_proxy_that_dies_in_a_whole_update_leaves_marks(kind):
    async with a_proxy_that_dies_in("/update_weights", kind, RELOAD, paused) as second:
        assert labels(second) == [MARKED, MARKED]
        assert await second.get("/weight_info") == {"weight_version": "v1"}
        await second.call("/resume")
        assert second.states() == ["fenced", "fenced"]
        assert all("half done" in engine.reason for engine in second.plane.fleet)
        await second.call("/update_weights", json=RELOAD)
        assert second.states() == ["ready", "ready"]
        assert len(set(labels(second))) == 1
        # An earlier proxy may have given any label that the marks hide.
        assert int(labels(second)[0][1:]) > 1_000_000


async def test_an_update_that_failed_everywhere_is_not_forgotten_with_the_proxy():
    """vLLM closes the session then, so that its counts say nothing any more."""
    engines = [await MockEngine().start() for _ in range(2)]
    async with proxy_for(engines) as first:
        await first.sync("w1", "v1")
        await first.call("/pause")
        await first.call("/start_weight_update")
        for mock in engines:
            mock.fail("/update_weights", times=1)
        await first.call("/update_weights", json=UPDATE, status=424)
        await first.until(lambda: labels(first) == [MARKED, MARKED])
        assert await first.get("/weight_info") == {"weight_version": "v1"}
        await first.call("/resume")
    async with proxy_for(engines) as second:
        assert second.states() == ["fenced", "fenced"]
        await second.sync("w3", "v3")
        assert labels(second) == ["v3", "v3"]
        assert second.states() == ["ready", "ready"]
    for mock in engines:
        await mock.kill()


async def test_an_engine_whose_session_is_told_by_no_other_is_marked():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/update_weights", times=1)
        await fleet.call("/start_weight_update")
        await fleet.call("/update_weights", json=UPDATE, status=424)
        await asyncio.sleep(0.2)
        assert labels(fleet) == ["v1", "v1"]
        await fleet.restart(0)
        await fleet.until(lambda: labels(fleet) == ["default", MARKED])


async def test_wiped_weights_are_not_forgotten_with_the_proxy():
    engines = [await MockEngine().start()]
    async with proxy_for(engines) as first:
        await first.sync("w1", "v1")
        await first.call("/sleep?level=2")
        await first.call("/wake_up")
        await first.until(lambda: labels(first) == [MARKED])
    async with proxy_for(engines) as second:
        assert second.states() == ["fenced"]
    await engines[0].kill()


async def test_an_engine_that_takes_no_mark_is_left_out_of_the_whole_update():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/update_weight_version")
        data = await fleet.call("/update_weights", json=RELOAD, status=424)
        assert fleet.engines[1].id in data["message"]
        assert fleet.seen("/update_weights") == [2, 1]
        assert fleet.states() == ["ready", "fenced"]
        assert labels(fleet) == ["u1", "v1"]


async def test_an_engine_that_took_the_mark_and_said_no_gets_its_label_back():
    async with rig(2, probe_interval=30) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/update_weight_version", times=3)
        fleet.engines[1].version = MARKED
        await fleet.call("/update_weights", json=RELOAD, status=424)
        assert labels(fleet) == ["u1", "v1"]


async def test_a_whole_update_that_all_refuse_leaves_the_labels_as_they_were():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        for mock in fleet.engines:
            mock.fail("/update_weights", status=422, times=1)
        await fleet.call("/update_weights", json=RELOAD, status=422)
        assert labels(fleet) == ["v1", "v1"]
        assert fleet.states() == ["ready", "ready"]


async def test_a_finish_that_all_refuse_leaves_the_labels_as_they_were():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await in_a_round(fleet)
        for mock in fleet.engines:
            mock.fail("/finish_weight_update", status=422, times=1)
        await fleet.call("/finish_weight_update", json={"odd": 1}, status=422)
        assert labels(fleet) == ["v1", "v1"]
        await fleet.call("/finish_weight_update")
        await fleet.call("/resume")
        assert labels(fleet) == ["u1", "u1"]
        assert fleet.states() == ["ready", "ready"]


async def test_where_no_engine_takes_the_label_none_is_finished():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await in_a_round(fleet)
        for mock in fleet.engines:
            mock.fail("/update_weight_version")
        data = await fleet.call("/finish_weight_update", status=424)
        assert all(mock.id in data["message"] for mock in fleet.engines)
        assert fleet.seen("/finish_weight_update") == [1, 1]
        await fleet.call("/resume")
        assert fleet.states() == ["fenced", "fenced"]
        for mock in fleet.engines:
            mock.heal()
        await fleet.sync("w3")
        assert fleet.states() == ["ready", "ready"]


async def test_a_resume_while_the_label_hangs_gives_the_finish_up():
    async with rig(2, control_timeout=0.5) as fleet:
        await fleet.sync("w1", "v1")
        await in_a_round(fleet)
        fleet.engines[1].fail("/update_weight_version", "hang")
        finish = asyncio.ensure_future(fleet.call("/finish_weight_update", status=409))
        await fleet.until(lambda: fleet.seen("/update_weight_version") == [1, 1])
        await fleet.call("/resume")
        await finish
        assert fleet.seen("/finish_weight_update") == [1, 1]
        assert fleet.states() == ["fenced", "fenced"]


async def test_an_operator_who_admits_a_marked_engine_is_remembered():
    engines = [await MockEngine().start() for _ in range(2)]
    async with proxy_for(engines) as first:
        await first.sync("w1", "v1")
        engines[1].fail("/update_weights", times=1)
        await first.call("/update_weights", json=RELOAD, status=424)
        assert labels(first) == ["u1", MARKED]
        await first.call(f"/fleet/engines/{engines[1].id}/admit")
        assert first.states() == ["ready", "ready"]
        await first.until(lambda: labels(first) == ["u1", "v1"])
    for mock in engines:
        await mock.kill()


async def test_equal_checksums_take_a_mark_away():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.call("/weight_checker", json={"action": "checksum"})
        fleet.engines[1].fail("/update_weights", times=1)
        await fleet.call("/update_weights", json=RELOAD, status=424)
        assert labels(fleet) == ["u1", MARKED]
        fleet.engines[1].weights = fleet.engines[0].weights
        await fleet.call("/weight_checker", json={"action": "checksum"})
        await fleet.until(lambda: fleet.states() == ["ready", "ready"])
        assert labels(fleet) == ["u1", "u1"]


async def test_labels_off_means_no_marks_either():
    async with rig(2, label_updates="off") as fleet:
        fleet.engines[1].fail("/update_weights", times=1)
        await fleet.call("/update_weights", json=RELOAD, status=424)
        await asyncio.sleep(0.2)
        assert labels(fleet) == ["default", "default"]


async def test_a_mark_that_is_late_is_waited_for_by_the_next_round():
    async with rig(1) as fleet:
        await fleet.sync("w1", "v1")
        await in_a_round(fleet)
        fleet.engines[0].fail("/update_weight_version", "slow", seconds=0.4, times=1)
        fleet.engines[0].fail("/update_weights", times=1)
        await fleet.call("/update_weights", json={"update_info": {"names": ["w2.1"]}}, status=424)
        await fleet.until(lambda: fleet.seen("/update_weight_version") == [1])
        await fleet.sync("w3", "v3")
        assert labels(fleet) == ["v3"]
        await asyncio.sleep(0.2)
        assert labels(fleet) == ["v3"]
        assert fleet.states() == ["ready"]


async def test_a_finish_that_fails_publishes_no_label():
    async with rig(3) as fleet:
        await fleet.sync("w1", "v1")
        await in_a_round(fleet)
        fleet.engines[1].fail("/finish_weight_update", times=1)
        await fleet.call("/finish_weight_update", status=424)
        assert await fleet.get("/weight_info") == {"weight_version": "v1"}
        # The session is open still at the second; the others hold weights that were not published.
        assert labels(fleet) == [MARKED, "v1", MARKED]
        await fleet.call("/resume")
        assert fleet.states() == ["fenced"] * 3
        await fleet.sync("w3")
        assert labels(fleet) == ["u2"] * 3
        assert fleet.states() == ["ready"] * 3


async def test_a_label_that_is_seen_before_its_finish_is_not_the_engines_version():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await in_a_round(fleet)
        for mock in fleet.engines:
            mock.fail("/finish_weight_update", "slow", seconds=0.3, times=1)
        finish = asyncio.ensure_future(fleet.call("/finish_weight_update"))
        await fleet.until(lambda: labels(fleet) == ["u1", "u1"])
        for engine in fleet.plane.fleet:
            fleet.plane.fleet.set_version(engine, "u1")
        assert [engine.version for engine in fleet.plane.fleet] == ["v1", "v1"]
        await finish
        assert [engine.version for engine in fleet.plane.fleet] == ["u1", "u1"]


async def test_a_finish_whose_answer_is_lost_may_have_worked():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await in_a_round(fleet)
        fleet.engines[1].fail("/finish_weight_update", "lost", times=1)
        await fleet.call("/finish_weight_update", status=424)
        assert labels(fleet) == [MARKED, MARKED]
        assert "w2" in fleet.engines[1].weights
        await fleet.sync("w3")
        assert fleet.states() == ["ready", "ready"]


async def test_a_start_closes_an_old_session_under_a_mark():
    async with rig(1) as fleet:
        await fleet.sync("w1", "v1")
        await in_a_round(fleet)
        await fleet.call("/resume")
        fleet.engines[0].fail("/finish_weight_update", "slow", seconds=0.2, times=1)
        start = asyncio.ensure_future(fleet.call("/start_weight_update"))
        await fleet.until(lambda: fleet.seen("/finish_weight_update") == [2])
        assert labels(fleet) == [MARKED]
        await start


@pytest.mark.parametrize(("path", "body"), [("/sleep?level=2", None), ("/weight_checker", {"action": "reset"})])
async def test_a_lost_answer_to_what_wipes_weights_taints(path, body):
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail(path.partition("?")[0], "lost")
        await fleet.call(path, json=body, status=None)
        assert all(engine.tainted for engine in fleet.plane.fleet)
        assert labels(fleet) == [MARKED, MARKED]


async def test_what_refused_to_sleep_keeps_its_label():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/sleep", status=400)
        await fleet.call("/sleep?level=2", status=424)
        assert labels(fleet) == [MARKED, "v1"]
        assert not fleet.engine(1).tainted


async def test_a_tainted_engine_that_is_removed_takes_a_mark_along():
    async with rig(3) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/update_weights", times=1)
        await fleet.call("/start_weight_update")
        await fleet.call("/update_weights", json=UPDATE, status=424)
        leaving = fleet.engine(1)
        await fleet.call(f"/fleet/engines/{leaving.id}", method="DELETE")
        assert labels(fleet)[1] == MARKED
        await fleet.call("/fleet/engines", json={"url": leaving.url}, status=201)
        await fleet.until(lambda: "half done" in fleet.engine(1).reason)


async def test_checksums_that_are_older_than_a_sync_are_not_recorded():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/weight_checker", "slow", seconds=0.3, times=1)
        check = asyncio.ensure_future(fleet.call("/weight_checker", json={"action": "checksum"}))
        await fleet.until(lambda: fleet.seen("/weight_checker") == [1, 1])
        await fleet.sync("w2", "v2")
        await check
        assert fleet.plane.fleet.checksums == {}


async def test_a_mark_that_came_after_the_next_whole_update_is_taken_back():
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")
        await fleet.sync("w2", "v2")
        fleet.engines[1].version = MARKED
        await fleet.until(lambda: labels(fleet) == ["v2", "v2"])
        assert fleet.states() == ["ready", "ready"]
        assert await fleet.get("/weight_info") == {"weight_version": "v2"}


async def test_a_label_of_a_finish_that_was_given_up_does_not_stay():
    async with rig(3) as fleet:
        await fleet.sync("w1", "v1")
        await in_a_round(fleet)
        fleet.engines[1].fail("/update_weight_version", "slow", seconds=0.5, times=1)
        finish = asyncio.ensure_future(fleet.call("/finish_weight_update", status=409))
        await fleet.until(lambda: labels(fleet) == ["u1", "v1", "u1"])
        await fleet.call("/resume")
        await finish
        assert labels(fleet) == ["v1", "v1", "v1"]
        assert await fleet.get("/weight_info") == {"weight_version": "v1"}
