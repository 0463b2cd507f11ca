"""Room in a cluster and what becomes of engines there, with a Ray that only remembers; the real one: `make ray-test`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_launcher.errors import LauncherError, UsageError
from engine_launcher.ray_actor import End, EngineHost
from engine_launcher.ray_backend import LOST, Cluster, RayEngine, ray_engines
from engine_launcher.settings import EngineSpec, FleetSpec, Rotation


class RayError(Exception):
    """Base class of Ray's errors."""


class FakeActor:
    """An actor whose engine ends when told."""

    def __init__(self) -> None:
        self.started = 0
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda: self.call(name))

    async def call(self, name: str) -> Any:
        if self.dead.done():
            raise RayError("the actor died")
        return await getattr(self, f"do_{name}")()

    async def do_start(self) -> str:
        self.started += 1
        self.ended = asyncio.get_running_loop().create_future()
        return "http://10.0.0.1:9000"

    async def do_node(self) -> str:
        return "node1"

    async def do_tail(self) -> str:
        return "a line"

    async def do_wait(self) -> End:
        await asyncio.wait({self.ended, self.dead}, return_when=asyncio.FIRST_COMPLETED)
        if self.dead.done():
            raise RayError("the node died\nand a long story")
        return self.ended.result()

    async def do_stop(self) -> None:
        self.ended.set_result(End(0, "bye"))

    async def do_kill(self) -> None:
        self.ended.set_result(End(137, ""))


class FakeRay:
    """A cluster of nodes with these resources."""

    def __init__(self, *nodes: dict[str, float], room: bool = True) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.groups: list[tuple[list[dict[str, float]], str]] = []
        self.killed: list[Any] = []
        self.placed: list[tuple[dict[str, Any], FakeActor]] = []
        self._nodes = nodes
        self._room = room
        self.util = SimpleNamespace(
            placement_group=self._group,
            remove_placement_group=self.groups.clear,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **given: given),
        )

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": each} for each in self._nodes] + [
            {"Alive": False, "Resources": {"GPU": 64}}
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 0.5}

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.groups.append((bundles, strategy))

        async def ready() -> None:
            if not self._room:
                await asyncio.Event().wait()

        return SimpleNamespace(ready=ready)

    def remote(self, _: type) -> Any:
        def options(**given: Any) -> Any:
            def make(*_: Any) -> FakeActor:
                actor = FakeActor()
                self.placed.append((given, actor))
                return actor

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def kill(self, actor: FakeActor, *, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor)


def fleet(**more: Any) -> FleetSpec:
    return FleetSpec(**{"count": 2, "model": Path("m"), "backend": "ray", "ready_wait": 5.0, **more})


async def test_each_engine_gets_a_bundle_that_lies_on_one_node() -> None:
    ray = FakeRay({"CPU": 8, "GPU": 8})
    spec = fleet(extra=("--tensor-parallel-size", "4"))
    counted = await Cluster(ray, spec).reserve(spec.plan())
    assert ray.groups == [([{"CPU": 1, "GPU": 4}, {"CPU": 1, "GPU": 4}], "SPREAD")]
    assert [each.gpus for each in counted] == [4, 4]
    assert counted[0].model == Path.cwd() / "m"


async def test_engines_without_gpus_need_a_processor_only() -> None:
    ray = FakeRay({"CPU": 8})
    spec = fleet()
    counted = await Cluster(ray, spec).reserve(spec.plan())
    assert ray.groups[0][0] == [{"CPU": 1}, {"CPU": 1}]
    assert counted[0].gpus is None


async def test_where_there_are_gpus_each_engine_gets_one() -> None:
    ray = FakeRay({"CPU": 8}, {"CPU": 8, "GPU": 2})
    spec = fleet()
    await Cluster(ray, spec).reserve(spec.plan())
    assert ray.groups[0][0] == [{"CPU": 1, "GPU": 1}] * 2


async def test_an_engine_that_no_living_node_can_hold_is_refused() -> None:
    spec = fleet(gpus_per_engine=8)
    with pytest.raises(UsageError, match=r"engine 0 needs 1 CPU and 8 GPU on one node.*most GPUs on a node: 4"):
        await Cluster(FakeRay({"CPU": 8, "GPU": 4}, {"CPU": 8}), spec).reserve(spec.plan())


async def test_a_full_cluster_is_waited_for_only_so_long() -> None:
    spec = fleet(ready_wait=0.01)
    with pytest.raises(LauncherError, match=r"no room for 2 engines within 0\.01 s .*'CPU': 0\.5"):
        await Cluster(FakeRay({"CPU": 8}, room=False), spec).reserve(spec.plan())


@pytest.fixture
async def placed() -> AsyncIterator[tuple[FakeRay, RayEngine]]:
    ray = FakeRay({"CPU": 8, "GPU": 2})
    spec = fleet()
    cluster = Cluster(ray, spec)
    counted = await cluster.reserve(spec.plan())
    engine = RayEngine(cluster, 1, counted[1])
    yield ray, engine
    await engine.kill()


async def test_an_engine_is_started_in_its_own_room(placed: tuple[FakeRay, RayEngine]) -> None:
    ray, engine = placed
    await engine.start()
    ((options, actor),) = ray.placed
    assert options["num_gpus"] == 1
    assert options["scheduling_strategy"]["placement_group_bundle_index"] == 1
    assert (engine.url, engine.alive, engine.returncode) == ("http://10.0.0.1:9000", True, None)
    with pytest.raises(LauncherError, match="running already"):
        await engine.start()
    assert actor.started == 1


async def test_one_that_ends_is_started_again_where_it_was(placed: tuple[FakeRay, RayEngine]) -> None:
    ray, engine = placed
    await engine.start()
    await asyncio.sleep(0)
    ray.placed[0][1].ended.set_result(End(1, "first\nlast words"))
    assert await engine.wait() == 1
    assert engine.tail(1) == "last words"
    await engine.start()
    assert len(ray.placed) == 1
    assert engine.alive


async def test_one_whose_node_is_lost_is_placed_anew(placed: tuple[FakeRay, RayEngine]) -> None:
    ray, engine = placed
    await engine.start()
    actor = ray.placed[0][1]
    await asyncio.sleep(0)
    actor.dead.set_result(None)
    assert await engine.wait() == LOST
    assert engine.tail() == "its node or its actor is gone: the node died"
    assert ray.killed == [actor]
    await engine.start()
    assert len(ray.placed) == 2
    await engine.stop()
    assert engine.returncode == 0


async def test_no_place_in_time_is_an_error_that_says_what_it_needs(placed: tuple[FakeRay, RayEngine]) -> None:
    ray, engine = placed
    await engine.start()
    await engine.stop()

    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    ray.placed[0][1].do_start = never  # type: ignore[method-assign]
    engine._cluster.spec = fleet(ready_wait=0.01)
    with pytest.raises(LauncherError, match=r"no place in the cluster.*1 CPU and 1 GPU on one node"):
        await engine.start()


async def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'fleetgate\[ray\]'"):
        await ray_engines(fleet())


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://10.0.0.7:9000"), ("0.0.0.0", "http://10.0.0.7:9000"), ("10.9.9.9", "http://10.9.9.9:9000")],
)
async def test_an_engine_listens_where_other_nodes_reach_it(host: str, url: str, tmp_path: Path) -> None:
    spec = EngineSpec(name="0", kind="sim", host=host, port=9000)
    made = EngineHost(spec, "10.0.0.7", log_dir=tmp_path, stop_grace=1.0, rotation=Rotation())
    assert made._url == url


async def test_a_host_runs_a_real_process(tmp_path: Path) -> None:
    spec = EngineSpec(name="0", kind="sim")
    made = EngineHost(spec, "127.0.0.1", log_dir=tmp_path, stop_grace=5.0, rotation=Rotation())
    url = await made.start()
    waiting = asyncio.ensure_future(made.wait())
    while url not in await made.tail():
        await asyncio.sleep(0.01)
    await made.kill()
    assert (await waiting).code == 137
    assert await made.start() == url
    await made.stop()
