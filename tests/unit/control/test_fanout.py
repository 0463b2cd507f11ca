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
