"""Adapters: an engine that may have one that the others lack serves nobody until that is over."""

import asyncio

import pytest

from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import rig

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
BODY = {"lora_name": "a", "lora_path": "/x"}
DEBT = f"{UNLOAD} a"


def never_alone(fleet):
    """Fails as soon as an engine is ready that has an adapter which the others lack."""

    def look(kind, details):
        for mock in fleet.engines:
            engine = fleet.plane.fleet.engines[mock.id]
            assert engine.state != "ready" or set(mock.loaded) <= set(fleet.plane.fleet.adapters), mock.loaded

    fleet.plane.fleet.listeners.append(look)


async def again(fleet, index, path, count):
    """The engine was asked so many times more."""
    mock = fleet.engines[index]
    asked = len(mock.calls(path))
    await fleet.until(lambda: len(mock.calls(path)) >= asked + count)


async def half_a_load(fleet, **kw):
    """Engine 0 loads, engine 1 does not."""
    fleet.engines[1].fail(LOAD, times=1)
    return (await fleet.call(LOAD, json=BODY, status=424, **kw))["message"]


async def test_an_undo_that_failed_is_owed_until_it_worked():
    async with rig(2) as fleet:
        fleet.engines[0].fail(UNLOAD)
        note = await half_a_load(fleet)
        assert "undone on 0 of 1 engines" in note
        assert fleet.engines[0].id in note
        assert fleet.states() == ["fenced", "ready"]
        await again(fleet, 0, UNLOAD, 2)
        assert fleet.states() == ["fenced", "ready"]
        assert DEBT in fleet.engine(0).owed
        assert "still owes" in fleet.engine(0).reason
        never_alone(fleet)
        fleet.engines[0].heal()
        await fleet.until_state(0, "ready")
        assert fleet.engines[0].loaded == {}
        assert fleet.engine(0).owed == {}


async def test_an_undo_that_is_not_needed_any_more_is_not_owed():
    async with rig(2) as fleet:
        fleet.engines[0].fail(UNLOAD, times=1)
        await half_a_load(fleet)
        fleet.engines[0].loaded.clear()
        await fleet.until_state(0, "ready")


async def test_every_adapter_is_owed_by_itself():
    async with rig(2) as fleet:
        fleet.engines[0].fail(UNLOAD)
        await half_a_load(fleet)
        fleet.engines[1].fail(LOAD, times=1)
        await fleet.call(LOAD, json={"lora_name": "b", "lora_path": "/y"}, status=424)
        assert sorted(fleet.engine(0).owed) == [DEBT, f"{UNLOAD} b"]
        never_alone(fleet)
        fleet.engines[0].heal()
        await fleet.until_state(0, "ready")
        assert fleet.engines[0].loaded == {}


async def test_a_load_that_ends_after_its_limit_is_undone_then():
    async with rig(2, pause_timeout=0.2) as fleet:
        # It is let go of at the limit, and the adapter is there only when the test says so.
        fleet.engines[1].fail(LOAD, "hang")
        note = (await fleet.call(LOAD, json=BODY, status=424))["message"]
        assert "undone on 1 of 2 engines" in note
        assert fleet.states() == ["ready", "fenced"]
        await again(fleet, 1, UNLOAD, 2)
        assert fleet.states() == ["ready", "fenced"]
        never_alone(fleet)
        fleet.engines[1].loaded["a"] = "/x"
        await fleet.until_state(1, "ready")
        assert fleet.engines[1].loaded == {}


async def test_what_may_still_be_loading_is_settled_by_a_load_that_works_everywhere():
    async with rig(2) as fleet:
        fleet.engines[1].fail(LOAD, "drop", times=1)
        await fleet.call(LOAD, json=BODY, status=424)
        await again(fleet, 1, UNLOAD, 1)
        assert fleet.states() == ["ready", "fenced"]
        await fleet.call(LOAD, json={**BODY, "again": 1})
        await fleet.until_state(1, "ready")
        assert [mock.loaded for mock in fleet.engines] == [{"a": "/x"}] * 2
        assert fleet.engine(1).adapters.keys() == {"a"}


async def test_what_may_still_be_loading_is_settled_by_a_restart():
    async with rig(2) as fleet:
        fleet.engines[1].fail(LOAD, "drop", times=1)
        await fleet.call(LOAD, json=BODY, status=424)
        await fleet.until_state(1, "fenced")
        await fleet.engines[1].restart()
        await fleet.until_state(1, "ready")


async def test_nothing_is_owed_by_a_process_that_came_after_the_load():
    async with rig(3) as fleet:
        # While one engine still loads, another one dies in it and is there again, with nothing to undo.
        for mock in (fleet.engines[0], fleet.engines[2]):
            mock.fail(LOAD, "hang", times=1)
        call = asyncio.ensure_future(fleet.call(LOAD, json=BODY, status=424))
        await fleet.until(lambda: all(fleet.seen(LOAD)))
        await fleet.restart(2)
        fleet.engines[0].heal()
        await call
        await fleet.until(lambda: fleet.states() == ["ready"] * 3)
        assert [mock.loaded for mock in fleet.engines] == [{}] * 3


async def test_a_process_that_came_during_a_load_loads_it_too():
    async with rig(2) as fleet:
        fleet.engines[0].fail(LOAD, "slow", seconds=0.7, times=1)
        call = asyncio.ensure_future(fleet.call(LOAD, json=BODY))
        await fleet.until(lambda: bool(fleet.engines[1].loaded))
        await fleet.engines[1].restart()
        await fleet.until_state(1, "ready")
        await call
        await fleet.until(lambda: fleet.engine(1).eligible and fleet.engines[1].loaded == {"a": "/x"})


async def test_a_load_that_meets_the_unload_that_was_owed_is_made_once_more():
    async with rig(2) as fleet:
        fleet.engines[0].fail(UNLOAD, times=1)
        fleet.engines[0].fail(UNLOAD, "slow", seconds=0.5, times=1)
        await half_a_load(fleet)
        await again(fleet, 0, UNLOAD, 1)
        await fleet.call(LOAD, json={**BODY, "again": 1})
        await fleet.until_state(0, "ready")
        assert [mock.loaded for mock in fleet.engines] == [{"a": "/x"}] * 2


async def test_a_load_that_nobody_took_is_not_remembered():
    async with rig(2) as fleet:
        for mock in fleet.engines:
            mock.fail(LOAD, "false", times=1)
        await fleet.call(LOAD, json=BODY, status=None)
        assert fleet.plane.fleet.adapters == {}
        assert all(not engine.adapters for engine in fleet.plane.fleet)


@pytest.mark.parametrize("kind", ["false", "status"])
async def test_a_reload_that_nobody_took_leaves_the_adapter_and_the_engines_as_they_were(kind):
    async with rig(2) as fleet:
        await fleet.call(LOAD, json=BODY)
        for mock in fleet.engines:
            mock.fail(LOAD, kind, times=1)
        await fleet.call(LOAD, json={"lora_name": "a", "lora_path": "/2"}, status=424)
        assert fleet.states() == ["ready", "ready"]
        await fleet.restart(1)
        await fleet.until_state(1, "ready")
        assert fleet.engines[1].loaded == {"a": "/x"}


async def test_half_an_unload_of_what_the_proxy_never_loaded_is_owed():
    async with rig(2) as fleet:
        for mock in fleet.engines:
            mock.loaded["a"] = "/x"
        fleet.engines[1].fail(UNLOAD)
        data = await fleet.call(UNLOAD, json={"lora_name": "a"}, status=424)
        assert "not undone" in data["message"]
        await again(fleet, 1, UNLOAD, 1)
        assert fleet.states() == ["ready", "fenced"]
        never_alone(fleet)
        fleet.engines[1].heal()
        await fleet.until_state(1, "ready")
        assert fleet.engines[1].loaded == {}


async def test_an_unload_that_some_had_done_already_fences_nobody():
    async with rig(2) as fleet:
        fleet.engines[0].loaded["a"] = "/x"
        await fleet.call(UNLOAD, json={"lora_name": "a"}, status=424)
        assert fleet.states() == ["ready", "ready"]


async def test_an_unload_that_failed_where_some_lack_the_adapter_loads_it_there_too():
    async with rig(3) as fleet:
        await fleet.call(LOAD, json=BODY)
        fleet.engines[0].loaded.clear()
        fleet.engines[1].fail(UNLOAD, times=1)
        await fleet.call(UNLOAD, json={"lora_name": "a"}, status=424)
        assert [mock.loaded for mock in fleet.engines] == [{"a": "/x"}] * 3


async def test_a_loader_of_ones_own_without_an_unload_keeps_its_engine_out():
    async with rig(2) as fleet:
        fleet.engines[0].fail(UNLOAD, "body", status=404, body={"detail": "Not Found"})
        await half_a_load(fleet)
        await again(fleet, 0, UNLOAD, 1)
        assert fleet.states() == ["fenced", "ready"]


async def test_a_debt_that_comes_while_an_engine_catches_up_is_paid_first():
    async with rig(engines=[MockEngine(), MockEngine()]) as fleet:
        await fleet.call(LOAD, json={"lora_name": "b", "lora_path": "/y"})
        await fleet.engines[0].restart()
        fleet.engines[0].fail(LOAD, "slow", seconds=0.3, times=1)
        await fleet.until(lambda: bool(fleet.engines[0].calls(LOAD)[1:]))
        since = len(fleet.events)
        fleet.engines[0].fail(UNLOAD)
        await half_a_load(fleet)
        await again(fleet, 0, UNLOAD, 1)
        assert fleet.states() == ["fenced", "ready"]
        assert all(what["state"] != "ready" for kind, what in fleet.events[since:] if kind == "engine_state")


async def test_an_adapter_that_some_have_from_before_is_loaded_afresh_everywhere():
    """An earlier proxy died in the middle of a load: nobody knows that what they have is the same."""
    async with rig(2) as fleet:
        fleet.engines[0].loaded["a"] = "/old"
        await fleet.call(LOAD, json=BODY)
        assert [mock.loaded for mock in fleet.engines] == [{"a": "/x"}, {"a": "/x"}]
        await fleet.call(UNLOAD, json={"lora_name": "a"})
        for mock in fleet.engines:
            mock.loaded["a"] = "/old"
        await fleet.call(LOAD, json=BODY, status=400)
        assert fleet.states() == ["ready", "ready"]
