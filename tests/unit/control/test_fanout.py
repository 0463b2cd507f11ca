import asyncio
from types import SimpleNamespace

import pytest

from proxy.control.fanout import Fanout, Shot
from proxy.core.calls import CALLS
from proxy.core.merge import Leg, Outcome

SHOT = Shot(CALLS["/pause"], "POST", "/pause")


def engines(count):
    return [SimpleNamespace(id=f"e{index}") for index in range(count)]


async def test_all_legs_start_in_the_same_turn_and_answers_keep_the_engines_order():
    started = []
    gate = asyncio.Event()

    async def runner(engine, shot):
        started.append(engine.id)
        await gate.wait()
        return Leg(engine.id, Outcome.ANSWERED, 200)

    members = engines(5)
    fanout = Fanout([(engine, SHOT) for engine in members], runner)
    task = asyncio.ensure_future(fanout.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert started == [engine.id for engine in members]
    assert fanout.pending == members
    gate.set()
    assert [leg.engine for leg in await task] == started
    assert fanout.pending == []


async def test_a_fan_out_to_nobody_ends_at_once():
    assert await Fanout([]).run() == []


async def test_giving_up_keeps_what_was_answered_and_reports_what_comes_late():
    late = []
    gate = asyncio.Event()

    async def runner(engine, shot):
        if engine.id == "e1":
            await gate.wait()
        return Leg(engine.id, Outcome.ANSWERED, 200)

    fanout = Fanout([(engine, SHOT) for engine in engines(2)], runner)
    fanout.on_late = lambda engine, leg: late.append(leg.engine)
    task = asyncio.ensure_future(fanout.run())
    await asyncio.sleep(0.01)
    fanout.abandon()
    legs = await task
    assert [leg.outcome for leg in legs] == [Outcome.ANSWERED, Outcome.ABANDONED]
    assert late == []
    gate.set()
    await asyncio.sleep(0.01)
    assert late == ["e1"]


async def test_a_runner_that_breaks_does_not_leave_the_call_waiting():
    async def runner(engine, shot):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await Fanout([(engine, SHOT) for engine in engines(1)], runner).run()


async def test_a_collective_that_lost_a_member_is_not_waited_for():
    async def runner(engine, shot):
        if engine.id == "e0":
            return Leg(engine.id, Outcome.REFUSED, 500)
        await asyncio.Event().wait()
        raise AssertionError

    fanout = Fanout([(engine, SHOT) for engine in engines(3)], runner, grace=0.01)
    legs = await fanout.run()
    assert [leg.outcome for leg in legs] == [Outcome.REFUSED, Outcome.TIMED_OUT, Outcome.TIMED_OUT]
    assert "after e0 failed" in legs[1].detail
    fanout.cancel()


async def test_other_calls_give_each_leg_its_own_time():
    gate = asyncio.Event()

    async def runner(engine, shot):
        if engine.id == "e0":
            return Leg(engine.id, Outcome.REFUSED, 500)
        await gate.wait()
        return Leg(engine.id, Outcome.ANSWERED, 200)

    fanout = Fanout([(engine, SHOT) for engine in engines(2)], runner)
    task = asyncio.ensure_future(fanout.run())
    await asyncio.sleep(0.05)
    assert not task.done()
    gate.set()
    assert [leg.outcome for leg in await task] == [Outcome.REFUSED, Outcome.ANSWERED]


async def test_an_engine_that_went_down_is_not_waited_for():
    async def runner(engine, shot):
        if engine.id == "e1":
            await asyncio.Event().wait()
        return Leg(engine.id, Outcome.ANSWERED, 200)

    members = engines(2)
    fanout = Fanout([(engine, SHOT) for engine in members], runner)
    task = asyncio.ensure_future(fanout.run())
    await asyncio.sleep(0.01)
    fanout.lose(members[1])
    assert [leg.outcome for leg in await task] == [Outcome.ANSWERED, Outcome.DIED]


async def test_an_engine_that_went_down_before_its_leg_began_does_not_leave_the_call_waiting():
    async def runner(engine, shot):
        return Leg(engine.id, Outcome.ANSWERED, 200)

    members = engines(2)
    fanout = Fanout([(engine, SHOT) for engine in members], runner)
    task = asyncio.ensure_future(fanout.run())
    asyncio.get_running_loop().call_soon(fanout.lose, members[1])
    assert [leg.outcome for leg in await asyncio.wait_for(task, 5)] == [Outcome.ANSWERED, Outcome.DIED]
