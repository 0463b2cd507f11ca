import asyncio

import pytest

from proxy.core.engine_state import Event, State
from proxy.fleet.engine import Engine
from proxy.fleet.ramps import Ramps
from proxy.fleet.registry import Fleet


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def fleet_of(*names, seconds=10.0):
    clock = Clock()
    fleet = Fleet(clock)
    ramps = Ramps(fleet, seconds)
    for name in names:
        join(fleet, name)
    clock.now = 60.0
    return fleet, ramps, clock


def join(fleet, name, world_size=1):
    engine = Engine(id=name, url=f"http://{name}", upstream=None, suspect=False, world_size=world_size)
    engine.weight = float(world_size)
    fleet.add(engine)
    fleet.apply(engine, Event.CAME, "test")
    fleet.apply(engine, Event.ADMIT, "test")
    assert engine.state is State.READY
    return engine


async def test_a_weight_grows_from_the_first_list_on():
    fleet, ramps, clock = fleet_of("a", "b")
    lists = []
    fleet.on_change.append(lambda: lists.append([engine.weight for engine in fleet.eligible]))
    engine = join(fleet, "c", world_size=4)
    assert lists[-1] == [1.0, 1.0, 0.4]
    before = fleet.eligible
    clock.now = 65.0
    ramps.step()
    assert engine.weight == 2.0
    assert fleet.eligible is not before
    clock.now = 70.0
    ramps.step()
    assert engine.weight == 4.0
    assert ramps._timer is None


async def test_a_look_at_the_engine_does_not_end_its_ramp():
    fleet, ramps, clock = fleet_of("a", "b")
    engine = join(fleet, "c")
    clock.now = 65.0
    engine.weight = 1.0
    fleet.emit("engine_checked", engine="c", seconds=0.0, ok=True)
    assert engine.weight == 0.5
    ramps.stop()


async def test_only_another_process_starts_anew():
    fleet, ramps, _ = fleet_of("a", "b")
    engine = fleet.engines["a"]
    fleet.apply(engine, Event.FENCE, "missed a call")
    fleet.apply(engine, Event.ADMIT, "test")
    assert engine.weight == 1.0
    fleet.emit("engine_restarted", engine="a", boot=1, why="test")
    fleet.apply(engine, Event.FENCE, "restarted")
    fleet.apply(engine, Event.ADMIT, "test")
    assert engine.weight == 0.1
    fleet.remove(engine)
    ramps.step()
    assert ramps._timer is None


async def test_the_timer_brings_it_to_the_end():
    fleet, ramps, clock = fleet_of("a", "b", seconds=0.05)
    clock = asyncio.get_running_loop().time
    fleet.clock = clock
    engine = join(fleet, "c")
    assert engine.weight == pytest.approx(0.1)
    async with asyncio.timeout(5):
        while ramps._timer is not None:
            await asyncio.sleep(0.005)
    assert engine.weight == 1.0


async def test_nothing_is_done_without_seconds():
    fleet, _, _ = fleet_of("a", "b", seconds=0.0)
    assert join(fleet, "c").weight == 1.0
    assert fleet.listeners == []
