"""Engines that somebody took out of rotation: nothing but a word of an operator, or their name, brings them back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from proxy.config import Settings
from proxy.fleet.discovery import Discovery
from tests.scenarios.control.rig import Rig, rig

RESET = "/reset_prefix_cache"


@asynccontextmanager
async def removal_of(fleet: Rig, index: int, **kw: Any) -> AsyncIterator[asyncio.Future[Any]]:
    """An engine with a request is being removed."""
    engine = fleet.engine(index)
    engine.inflight = 1
    path = f"/fleet/engines/{engine.id}?drain=60"
    removal = asyncio.ensure_future(fleet.call(path, method="DELETE", **kw))
    await fleet.until(lambda: engine.leaving)
    yield removal
    engine.inflight = 0
    await removal


async def fail_a_call(fleet: Rig, index: int) -> None:
    """It fails a call once, so it is fenced, and owes the call until it may be admitted again."""
    fleet.engines[index].fail(RESET, times=1)
    await fleet.call(RESET, status=424)
    assert fleet.engine(index).state == "fenced"


async def test_an_engine_that_is_fenced_while_it_is_removed_takes_no_new_requests() -> None:
    async with rig(2) as fleet:
        since = len(fleet.events)
        await fail_a_call(fleet, 1)
        async with removal_of(fleet, 1):
            engine = fleet.engine(1)
            await fleet.until_state(1, "draining")
            assert not engine.owed
            assert engine.reason == "being removed"
            await fleet.sync("w1", "v1")
            assert fleet.states() == ["ready", "draining"]
        moves = [what for kind, what in fleet.events[since:] if kind == "engine_state"]
        assert [move["state"] for move in moves if move["engine"] == engine.id] == ["fenced", "draining"]
        assert len(fleet.plane.fleet) == 1


async def test_an_engine_that_fails_a_call_while_it_is_removed_leaves_all_the_same() -> None:
    async with rig(2) as fleet, removal_of(fleet, 1):
        await fail_a_call(fleet, 1)
        await fleet.until_state(1, "draining")
        await fleet.call(f"/fleet/engines/{fleet.engines[1].id}/admit", status=409)
        assert fleet.states() == ["ready", "draining"]


async def test_a_drain_outlives_a_failed_call_and_ends_with_an_admission_by_hand() -> None:
    async with rig(2) as fleet:
        name = fleet.engines[1].id
        await fleet.call(f"/fleet/engines/{name}/drain")
        await fail_a_call(fleet, 1)
        await fleet.until_state(1, "draining")
        await fleet.sync("w1", "v1")
        assert fleet.states() == ["ready", "draining"]
        assert "/admit ends that" in fleet.engine(1).reason
        await fleet.call(f"/fleet/engines/{name}/admit")
        assert fleet.states() == ["ready", "ready"]


async def test_a_fenced_engine_can_be_drained() -> None:
    async with rig(2) as fleet:
        await fail_a_call(fleet, 1)
        await fleet.call(f"/fleet/engines/{fleet.engines[1].id}/drain")
        await fleet.until_state(1, "draining")


async def test_a_drain_is_of_a_process_and_ends_with_it() -> None:
    async with rig(2) as fleet:
        await fleet.call(f"/fleet/engines/{fleet.engines[1].id}/drain")
        await fleet.engines[1].restart()
        await fleet.until(lambda: fleet.engine(1).boot == 1)
        await fleet.until_state(1, "ready")


async def test_a_trailing_slash_is_tolerated() -> None:
    async with rig(2) as fleet:
        name, url = fleet.engines[1].id, fleet.engines[1].url
        await fleet.call(f"/fleet/engines/{name}/drain/")
        assert fleet.states() == ["ready", "draining"]
        await fleet.call(f"/fleet/engines/{name}/admit/")
        await fleet.call(f"/fleet/engines/{name}/?drain=1", method="DELETE")
        await fleet.call("/fleet/engines/", json={"url": url}, status=201)
        await fleet.until_state(1, "ready")


async def test_an_engine_added_again_while_it_is_removed_stays() -> None:
    async with rig(2) as fleet, removal_of(fleet, 1, status=409) as removal:
        engine = fleet.engine(1)
        await fleet.call("/fleet/engines", json={"url": engine.url}, status=201)
        await fleet.until_state(1, "ready")
        assert "it stays" in (await removal)["error"]["message"]
        assert fleet.plane.fleet.engines[engine.id] is engine


async def test_a_removal_with_less_time_ends_one_with_more() -> None:
    async with rig(2) as fleet, removal_of(fleet, 1):
        name = fleet.engines[1].id
        assert (await fleet.call(f"/fleet/engines/{name}", method="DELETE"))["idle"] is False
        assert len(fleet.plane.fleet) == 1


async def test_a_line_taken_out_and_put_back_while_its_engine_drains(tmp_path: Path) -> None:
    listed = tmp_path / "engines"
    async with rig(2) as fleet:
        plane = fleet.plane
        await fleet.call(f"/fleet/engines/{fleet.engines[1].id}", method="DELETE")
        listed.write_text(fleet.engines[1].url)
        discovery = Discovery(Settings(engines_file=listed), plane.fleet, plane.members)
        (source,) = discovery._sources
        await discovery._step(source)
        await fleet.until_state(1, "ready")
        engine = fleet.engine(1)
        engine.inflight = 1
        listed.write_text(f"{fleet.engines[0].url}\n")
        await discovery._step(source)
        await fleet.until_state(1, "draining")
        listed.write_text(f"{fleet.engines[0].url}\n{engine.url}\n")
        await discovery._step(source)
        await fleet.until_state(1, "ready")
        assert fleet.engine(1) is engine
        assert engine.eligible
        discovery._ramps.stop()
