"""The trainer's side: weight syncs through the proxy's URL alone, with what each call took.

For simulated engines the calls are made here, one by one; for real ones vLLM's own ``HTTPVLLMWeightSyncClient`` makes
them, in the trainer's process. Either way there is one URL, one rank offset and one world size.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import aiohttp

from engine_launcher.errors import LauncherError
from engine_launcher.sim.trainer import SimTrainer
from engine_launcher.trainer_process import TrainerProcess
from examples.demo.settings import DemoFailed, Mode
from proxy.tasks import spawn

CALL_LIMIT: Final = 300.0
"""Seconds for a control call; a pause in `wait` mode lasts as long as the longest rollout."""

REPORT: Final = {"X-Fleetgate-Report": "1"}
"""Asks the proxy to say in its answer what each engine answered, and how fast."""

TRAINER_CALLS: Final = frozenset({"start_weight_update", "update_weights", "finish_weight_update"})
"""Calls of vLLM's own client, which asks for no report: what they took is read from the proxy's metrics."""

_SPENT = re.compile(r'^fleetgate_fanout(_overhead|)_seconds_sum\{call="([^"]+)"\} (\S+)$', re.MULTILINE)


@dataclass(slots=True)
class Sync:
    """One weight sync, times in seconds."""

    mode: str
    version: str
    in_flight: int
    """Rollouts in flight when it began."""
    window: float = 0.0
    """From sending ``/pause`` to the answer of ``/resume``."""
    engines: float = 0.0
    """Of that, the slowest engine's own answer to each call, added up."""
    added: float = 0.0
    """What the proxy's calls to all engines took beyond that. The rest of the window is the trainer's own work."""
    calls: dict[str, float] = field(default_factory=dict)
    """Each call as the trainer saw it."""


class Control:
    """Control calls to one URL."""

    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self._session = session
        self._base = base

    async def call(self, sync: Sync | None, path: str, body: Any = None) -> None:
        """POST, and book the time on ``sync``; raises ``DemoFailed`` unless every engine agreed."""
        started = time.perf_counter()
        timeout = aiohttp.ClientTimeout(total=CALL_LIMIT)
        try:
            async with self._session.post(self._base + path, json=body, headers=REPORT, timeout=timeout) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise DemoFailed(f"POST {path} answered {answer.status}: {text[:500]}")
                report = (await answer.json(content_type=None)).get("engines", {})
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DemoFailed(f"POST {path} failed: {type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - started
        if sync is not None:
            sync.calls[path.partition("?")[0].strip("/")] = seconds
            sync.engines += max((float(each["seconds"]) for each in report.values()), default=seconds)

    async def get(self, path: str) -> Any:
        """GET JSON."""
        async with self._session.get(self._base + path, timeout=aiohttp.ClientTimeout(total=CALL_LIMIT)) as answer:
            if answer.status != 200:
                raise DemoFailed(f"GET {path} answered {answer.status}: {(await answer.text())[:500]}")
            return await answer.json(content_type=None)

    async def spent(self) -> dict[tuple[str, str], float]:
        """Seconds by (metric, call) that control calls have taken so far, as the proxy publishes them."""
        async with self._session.get(f"{self._base}/metrics") as answer:
            found = _SPENT.findall(await answer.text())
        return {(metric, call): float(value) for metric, call, value in found}


class Trainer(Protocol):
    """Sends weights, and knows which weights each version is."""

    weights: dict[str, Any]
    """What the judge needs to know of each version."""

    async def init(self) -> int:
        """Join every engine into one transfer group; returns the world size."""
        ...

    async def send(self, sync: Sync) -> None:
        """Replace the weights of all engines and label them."""
        ...


class SimulatedTrainer:
    """Rank 0 of a group of simulated engines. The version goes with ``/finish_weight_update``."""

    def __init__(self, control: Control, base_weights: str) -> None:
        self.weights: dict[str, Any] = {"default": base_weights}
        self._control = control
        self._group: SimTrainer | None = None
        # Sent in full once; empty lists then mean "the same again", as with vLLM's dense engine.
        self._update_info: dict[str, list[Any]] = {
            "names": ["lm_head.weight"],
            "dtype_names": ["bfloat16"],
            "shapes": [[259, 64]],
        }

    async def init(self) -> int:
        """One world size, one rank offset: the proxy gives each engine its own."""
        size = int((await self._control.get("/get_world_size"))["world_size"]) + 1
        self._group = SimTrainer(size)
        await self._group.start()
        await self._control.call(None, "/init_weight_transfer_engine", {"init_info": self._group.init_info()})
        return size

    async def send(self, sync: Sync) -> None:
        """Start, update while the weights are broadcast, finish."""
        assert self._group is not None
        weights = f"weights of {sync.version}"
        self.weights[sync.version] = weights
        await self._control.call(sync, "/start_weight_update")
        broadcast = spawn(self._group.broadcast(weights), name="broadcast")
        try:
            await self._control.call(sync, "/update_weights", {"update_info": self._update_info})
        finally:
            broadcast.cancel()
        self._update_info = {"names": [], "dtype_names": [], "shapes": []}
        await self._control.call(sync, "/finish_weight_update", {"weight_version": sync.version})

    async def stop(self) -> None:
        """Leave the group."""
        if self._group is not None:
            await self._group.stop()


class RealTrainer:
    """torch and vLLM's own client in a process of their own. The version goes with ``/update_weight_version``."""

    def __init__(self, control: Control, process: TrainerProcess) -> None:
        self.weights: dict[str, Any] = {"default": 0}
        self._control = control
        self._process = process

    async def init(self) -> int:
        """The trainer's engine asks for the world size and sends one rank offset, as it would to one server."""
        return int((await self._ask("init"))["world_size"])

    async def send(self, sync: Sync) -> None:
        """New random weights, broadcast as real tensors."""
        seed = len(self.weights)
        self.weights[sync.version] = seed
        sync.calls["trainer's send"] = float((await self._ask("send", seed=seed))["seconds"])
        await self._control.call(sync, "/update_weight_version", {"new_version": sync.version})

    async def _ask(self, command: str, **fields: Any) -> dict[str, Any]:
        try:
            return await self._process.ask(command, **fields)
        except LauncherError as error:
            raise DemoFailed(str(error)) from error


async def sync_weights(control: Control, trainer: Trainer, mode: Mode, version: str, in_flight: int) -> Sync:
    """One whole sync: pause, new weights, resume."""
    sync = Sync(mode, version, in_flight)
    before = await control.spent()
    started = time.perf_counter()
    await control.call(sync, f"/pause?mode={mode}")
    await trainer.send(sync)
    await control.call(sync, "/resume")
    sync.window = time.perf_counter() - started
    for (metric, call), total in (await control.spent()).items():
        seconds = total - before.get((metric, call), 0.0)
        if metric == "_overhead":
            sync.added += seconds
        if call in TRAINER_CALLS and isinstance(trainer, RealTrainer):
            sync.engines += -seconds if metric == "_overhead" else seconds
    return sync
