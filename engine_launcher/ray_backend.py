"""Engines as actors of a Ray cluster: each on the node that has room for it, and on another when that node is lost.

One placement group holds a bundle for each engine: a processor and its GPUs. A bundle lies on one node as a whole, so
a tensor-parallel engine is never split; the bundles are spread over the nodes as far as that goes. What a lost node
held is placed anew by Ray as soon as another has room; the engine is then started there by the same care that restarts
it after a crash, under a new URL, which the proxy is told of.

The other nodes need this package, the model and the vLLM at the same paths.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from engine_launcher.errors import LauncherError, UsageError
from engine_launcher.gpus import wanted
from engine_launcher.process import ProcessInfo
from engine_launcher.ray_actor import End, EngineHost
from engine_launcher.settings import TAIL_LINES, EngineSpec, FleetSpec
from proxy.tasks import spawn

_log = logging.getLogger("fleetgate.launcher")

CPUS: Final = 1
"""Processors that an engine reserves: its API server; what its GPU workers use besides is theirs by the machine."""

LOST: Final = 255
"""Exit code of an engine whose node or actor is gone: nobody is left who could say more."""

TAIL_INTERVAL: Final = 2.0
"""Seconds between two looks at the log of a running engine, for the progress view."""


def _ray() -> Any:
    try:
        import ray  # noqa: PLC0415 - Ray is an extra
    except ImportError:
        raise UsageError("--backend ray needs Ray: pip install 'fleetgate[ray]'") from None
    return ray


class RayEngine:
    """One engine somewhere in the cluster."""

    def __init__(self, cluster: Cluster, index: int, spec: EngineSpec) -> None:
        self.name = f"engine {spec.name} ({spec.kind}, on Ray)"
        self.log = cluster.log_dir / f"engine-{spec.name}.log"
        self._cluster = cluster
        self._index = index
        self._spec = spec
        self._actor: Any = None
        self._url = ""
        self._tail = ""
        self._returncode: int | None = None
        self._watch: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<RayEngine {self.name} {self._url or 'not placed'} {'running' if self.alive else self._returncode}>"

    @property
    def url(self) -> str:
        """Where it serves; another one after its node was lost."""
        return self._url

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._watch is not None and not self._watch.done()

    @property
    def returncode(self) -> int | None:
        """Exit code; ``LOST`` when its node or actor is gone."""
        return self._returncode

    async def start(self) -> None:
        """Place it if it has no place, and start it there; raises ``LauncherError``."""
        if self.alive:
            raise LauncherError(f"{self.name} is running already")
        if self._actor is None:
            self._actor = self._cluster.place(self._index, self._spec)
        try:
            async with asyncio.timeout(self._cluster.spec.ready_wait):
                self._url = await self._actor.start.remote()
                node = await self._cluster.node_of(self._actor)
        except TimeoutError:
            raise LauncherError(
                f"{self.name} found no place in the cluster within {self._cluster.spec.ready_wait:g} s (--ready-wait): "
                f"it needs {self._cluster.needs(self._index)} on one node"
            ) from None
        except self._cluster.error as error:
            self._lost(error)
            raise LauncherError(f"{self.name} could not be started: {_cause(error)}") from None
        self._returncode = None
        self._tail = ""
        self._watch = spawn(self._watching(), name=f"watch {self.name}")
        _log.info("%s runs on node %s at %s", self.name, node, self._url)

    async def _watching(self) -> None:
        tail = spawn(self._read_tail(), name=f"log of {self.name}")
        try:
            end: End = await self._actor.wait.remote()
            self._returncode, self._tail = end.code, end.tail
        except self._cluster.error as error:
            self._lost(error)
        finally:
            tail.cancel()
            await asyncio.gather(tail, return_exceptions=True)

    async def _read_tail(self) -> None:
        while True:
            await asyncio.sleep(TAIL_INTERVAL)
            try:
                self._tail = await self._actor.tail.remote()
            except self._cluster.error:
                return

    def _lost(self, error: Exception) -> None:
        """Forget the actor: the next start makes another, wherever there is room then."""
        self._returncode = LOST
        self._tail = f"its node or its actor is gone: {_cause(error)}"
        actor, self._actor = self._actor, None
        if actor is not None:
            self._cluster.discard(actor)

    async def wait(self) -> int:
        """Wait until it ends, and return its exit code."""
        if self._watch is None:
            raise LauncherError(f"{self.name} was never started")
        await asyncio.shield(self._watch)
        return LOST if self._returncode is None else self._returncode

    async def stop(self) -> None:
        """End it in order; it keeps its place."""
        await self._end("stop")

    async def kill(self) -> None:
        """End it at once; it keeps its place."""
        await self._end("kill")

    async def _end(self, how: str) -> None:
        watch = self._watch
        if watch is None or watch.done() or self._actor is None:
            return
        try:
            await getattr(self._actor, how).remote()
        except self._cluster.error as error:
            self._lost(error)
        await asyncio.shield(watch)

    def processes(self) -> list[ProcessInfo]:
        """None: they are on another machine."""
        return []

    def signal_all(self, signum: signal.Signals) -> None:
        """Not possible from here."""
        raise LauncherError(f"{self.name} is on another machine: signal {signum.name} cannot be sent to it from here")

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its log, at most some seconds old."""
        return "\n".join(self._tail.splitlines()[-lines:])


class Cluster:
    """The cluster and the room in it that is this fleet's.

    Args:
        ray: the module.
        spec: of the fleet.
    """

    def __init__(self, ray: Any, spec: FleetSpec) -> None:
        self._ray = ray
        self.spec = spec
        self.log_dir = spec.log_dir.absolute()
        self.error: type[Exception] = ray.exceptions.RayError
        self._group: Any = None
        self._bundles: list[dict[str, float]] = []

    async def reserve(self, plan: Sequence[EngineSpec]) -> list[EngineSpec]:
        """Reserve room for all; returns them with their GPUs counted.

        Raises ``UsageError`` where no node could ever hold one of them, ``LauncherError`` where there is no room now.
        """
        nodes = [each["Resources"] for each in self._ray.nodes() if each["Alive"]]
        on_gpus = any(each.get("GPU") for each in nodes)
        counted = [replace(_absolute(each), gpus=_gpus(each, on_gpus=on_gpus) or None) for each in plan]
        self._bundles = [{"CPU": CPUS, **({"GPU": each.gpus} if each.gpus else {})} for each in counted]
        for index, bundle in enumerate(self._bundles):
            if not any(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes):
                largest = max((node.get("GPU", 0) for node in nodes), default=0)
                raise UsageError(
                    f"engine {counted[index].name} needs {self.needs(index)} on one node, and no node of the cluster "
                    f"has that (most GPUs on a node: {largest:g}); lower --gpus-per-engine or its parallel sizes"
                )
        self._group = self._ray.util.placement_group(self._bundles, strategy="SPREAD")
        try:
            async with asyncio.timeout(self.spec.ready_wait):
                await self._group.ready()
        except TimeoutError:
            raise LauncherError(
                f"the cluster has no room for {len(counted)} engines within {self.spec.ready_wait:g} s (--ready-wait); "
                f"free: {self._ray.available_resources()}"
            ) from None
        return counted

    def needs(self, index: int) -> str:
        """What an engine needs, in words."""
        bundle = self._bundles[index]
        return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())

    def place(self, index: int, spec: EngineSpec) -> Any:
        """An actor in the engine's own room; Ray starts it once that room is on a living node."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )
        remote = self._ray.remote(_Placed).options(
            num_cpus=CPUS,
            num_gpus=spec.gpus or 0,
            scheduling_strategy=strategy,
            # A call waits for the actor to be placed; one that was lost is replaced here, not by Ray.
            max_restarts=0,
            max_concurrency=16,
        )
        return remote.remote(spec, self.log_dir, self.spec.stop_grace, self.spec.rotation)

    async def node_of(self, actor: Any) -> str:
        """Id of the node that an actor is on."""
        found: str = await actor.node.remote()
        return found

    def discard(self, actor: Any) -> None:
        """See to it that a lost actor holds its room no more."""
        self._ray.kill(actor, no_restart=True)

    async def close(self) -> None:
        """Give the room back and leave the cluster."""
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()


class _Placed(EngineHost):
    """``EngineHost`` with what only Ray can tell it about its node."""

    def __init__(self, spec: EngineSpec, log_dir: Path, stop_grace: float, rotation: Any) -> None:
        address = _ray().util.get_node_ip_address()
        super().__init__(spec, address, log_dir=log_dir, stop_grace=stop_grace, rotation=rotation)

    async def node(self) -> str:
        """Id of its node."""
        found: str = _ray().get_runtime_context().get_node_id()
        return found


def _gpus(spec: EngineSpec, *, on_gpus: bool) -> int:
    """GPUs of one engine; none on a cluster without any, and for a simulated one only those it was given by number."""
    if spec.kind == "sim":
        return spec.gpus or 0
    needed = wanted(spec.gpus, spec.extra)
    return needed if on_gpus or spec.gpus or needed > 1 else 0


def _absolute(spec: EngineSpec) -> EngineSpec:
    """Paths that mean the same in an actor's working directory."""
    model = spec.model.absolute() if spec.model is not None and spec.kind == "vllm" else spec.model
    return replace(
        spec,
        model=model,
        vllm=spec.vllm.absolute() if spec.vllm is not None else None,
        restore_from=spec.restore_from.absolute() if spec.restore_from is not None else None,
    )


def _cause(error: Exception) -> str:
    """What went wrong, without Ray's account of where."""
    cause = getattr(error, "cause", None)
    return str(cause or error).strip().partition("\n")[0]


async def ray_engines(spec: FleetSpec) -> tuple[list[RayEngine], Cluster]:
    """The engines of a spec in the cluster, with room reserved; nothing is started.

    Raises ``UsageError`` without Ray, without a cluster, or for an engine that no node can hold.
    """
    ray = _ray()
    address = spec.ray_address or "auto"
    try:
        # In another thread Ray leaves SIGTERM alone; its handler would end the launcher without ending the engines.
        await asyncio.to_thread(ray.init, address=address, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UsageError(f"no Ray cluster at {address}: {_cause(error)}; name it with --ray-address") from None
    cluster = Cluster(ray, spec)
    try:
        counted = await cluster.reserve(spec.plan())
    except BaseException:
        await cluster.close()
        raise
    return [RayEngine(cluster, index, each) for index, each in enumerate(counted)], cluster
