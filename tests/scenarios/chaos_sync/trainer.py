"""A trainer as they are in the field: careless with labels, stubborn about failures, sometimes gone in mid-call.

Each call carries an ``X-Request-Id`` of its own, which the proxy passes on, so that the engines' logs tell how often one
call of the trainer reached each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from engine_launcher.sim.trainer import SimTrainer
from proxy.tasks import spawn
from tests.scenarios.chaos_sync.engines import RELOAD, Engines
from tests.scenarios.chaos_sync.truth import Truth

CALL_LIMIT = 15.0
"""Seconds for any call of the trainer: the longest limit of a leg in these runs is 3 s, and a call may need a few."""
ATTEMPTS = 8
"""Tries of one sync; then the trainer goes on with the next weights."""
EXPECTED = (200, 409, 424)


class CallFailedError(Exception):
    """The proxy said no: the sync has to begin anew."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"{path}: {status} {message}")
        self.status = status


class ProxyGoneError(Exception):
    """The proxy was killed under the call."""


class TrainerGoneError(Exception):
    """This trainer ends here, without tidying up; another one begins."""


@dataclass
class Plan:
    """How one try of a sync is made."""

    style: str
    mode: str
    chunks: int
    label: str
    rendezvous: bool
    drops: bool
    gone_after: str | None

    def __str__(self) -> str:
        return f"{self.style} {self.mode} chunks={self.chunks} label={self.label} rendezvous={self.rendezvous}"


def make_plan(rng: random.Random) -> Plan:
    """A random one."""
    style = rng.choices(["paused", "unpaused", "reload", "reload unpaused"], [84, 6, 7, 3])[0]
    steps = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    return Plan(
        style=style,
        mode=rng.choice(["keep", "keep", "abort", "wait"]),
        chunks=rng.choice([1, 1, 2, 3]),
        label=rng.choices(["finish", "auto", "after"], [45, 40, 15])[0],
        rendezvous=style == "paused" and rng.random() < 0.25,
        drops=rng.random() < 0.25,
        gone_after=rng.choice(steps) if rng.random() < 0.03 else None,
    )


@dataclass
class Trainer:
    """Runs syncs through the proxy."""

    url: str
    truth: Truth
    engines: Engines
    seed: int
    unpaused: list[tuple[float, float]]
    proxy_down: list[tuple[float, float]]
    rng: random.Random = field(default_factory=random.Random)
    answers: Counter[str] = field(default_factory=Counter)
    results: Counter[str] = field(default_factory=Counter)
    grouped: bool = False
    gather: SimTrainer | None = None
    group_rendezvous: bool = False
    on_call: Callable[[], None] = lambda: None
    careless: bool = False
    """Resume whatever happened, also when the proxy died in the middle of a sync and is not the one it was."""
    owes_sync: bool = False
    """The proxy died in the middle of a sync: until one worked, generation stays paused."""
    calls: int = 0
    replayed: int = 0
    longest: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed} trainer")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Trainer:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._dissolve()
        assert self._session is not None
        await self._session.close()

    # One call

    async def call(self, path: str, body: Any = None, *, query: str = "", method: str = "POST") -> Any:
        """One call; a 409 or 424 is an exception.

        Raises:
            CallFailedError: the proxy refused, or an engine failed.
            ProxyGoneError: the proxy was killed meanwhile.
        """
        self.calls += 1
        request_id = f"t{self.calls}"
        self.on_call()
        loop = asyncio.get_running_loop()
        began = loop.time()
        drop = self._drops and self.rng.random() < 0.3
        try:
            async with asyncio.timeout(CALL_LIMIT):
                if drop:
                    await self._dropped(method, path + query, body, request_id)
                status, data = await self._send(method, path + query, body, request_id)
        except TimeoutError:
            self.truth.violation("trainer's call hung", f"{path} took over {CALL_LIMIT:g} s")
            raise CallFailedError(path, 0, "hung") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            if any(until >= began for _, until in self.proxy_down):
                raise ProxyGoneError from None
            self.truth.violation("trainer's connection broke", f"{path}: {error!r}")
            raise ProxyGoneError from None
        seconds = loop.time() - began
        self.longest = max(self.longest, seconds)
        self.answers[f"{path} {status}"] += 1
        if status == 200:
            self.truth.note(f"trainer {request_id} {path}{query} {body or ''}: 200 in {seconds:.3f} s")
            return data
        error = data.get("error", {}) if isinstance(data, dict) else {}
        message = str(error.get("message", data))
        self.truth.note(f"trainer {request_id} {path}{query} {body or ''}: {status} in {seconds:.3f} s: {message}")
        self._check_failure(path, status, message)
        raise CallFailedError(path, status, message)

    _drops = False

    async def _dropped(self, method: str, target: str, body: Any, request_id: str) -> None:
        """The same call, from which the trainer goes away in the middle."""
        self.replayed += 1
        self.truth.note(f"trainer drops {target} of {request_id}")
        first = asyncio.ensure_future(self._send(method, target, body, request_id))
        await asyncio.wait({first}, timeout=self.rng.uniform(0.0, 0.03))
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, ConnectionError):
            await first

    async def _send(self, method: str, target: str, body: Any, request_id: str) -> tuple[int, Any]:
        assert self._session is not None
        headers = {"X-Request-Id": request_id}
        async with self._session.request(method, self.url + target, json=body, headers=headers) as answer:
            with contextlib.suppress(ValueError):
                return answer.status, await answer.json(content_type=None)
            return answer.status, None

    def _check_failure(self, path: str, status: int, message: str) -> None:
        alike = status == 400 and "Injected fault" in message  # every engine that was called refused in these words
        if status not in EXPECTED and not alike:
            self.truth.violation("failure that is neither 409 nor 424", f"{path}: {status} {message}")
        named = any(slot.id in message for slot in self.engines.slots)
        if status == 424 and not named and "no engine" not in message:
            self.truth.violation("failure that names no engine", f"{path}: {message}")

    # A sync

    async def sync(self, number: int) -> bool:
        """Until it worked, or too many tries failed; True if it worked."""
        self.truth.target = f"w{number}"
        self.truth.weights[f"v{number}"] = f"w{number}"
        vanished = False
        for _ in range(ATTEMPTS):
            plan = make_plan(self.rng)
            if (vanished or self.owes_sync) and plan.style != "paused":
                # The next trainer is of the same kind as the one that left the fleet paused.
                plan.style = "paused"
            vanished = False
            self._drops = plan.drops
            self.truth.note(f"sync {number}: {plan}")
            try:
                await self._attempt(number, plan)
            except CallFailedError as error:
                self.grouped = False
                self.results[f"try failed with {error.status}"] += 1
                await asyncio.sleep(self.rng.uniform(0.0, 0.3))
                continue
            except ProxyGoneError:
                self.grouped = False
                self.owes_sync = not self.careless
                self.results["proxy killed in a try"] += 1
                await self._await_proxy()
                continue
            except TrainerGoneError:
                self.grouped = False
                self.results["trainer vanished in a try"] += 1
                await self._dissolve()
                vanished = True
                continue
            self.results["synced"] += 1
            self.owes_sync = False
            now = asyncio.get_running_loop().time()
            self.unpaused[:] = [(began, min(ended, now)) for began, ended in self.unpaused]
            return True
        self.results["given up"] += 1
        return False

    async def _await_proxy(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                status, _ = await self._send("GET", "/health", None, "health")
                if status:
                    return
            await asyncio.sleep(0.05)

    async def _attempt(self, number: int, plan: Plan) -> None:
        if plan.style.startswith("reload"):
            await self._reload(number, paused=plan.style == "reload")
            return
        paused = plan.style == "paused"
        try:
            if paused:
                await self.call("/pause", query=f"?mode={plan.mode}")
                self._vanish(plan, "/pause")
            if not self.grouped or plan.rendezvous != self.group_rendezvous:
                await self._init(rendezvous=plan.rendezvous)
            with self._generating(paused):
                await self._update(number, plan)
        except CallFailedError:
            await self._dissolve()
            if paused and not self.owes_sync:
                await self._resume()
            raise
        except ProxyGoneError:
            await self._dissolve()
            if paused and self.careless:
                await self._await_proxy()
                await self._resume()
            raise
        if paused:
            await self._resume()

    @contextlib.contextmanager
    def _generating(self, paused: bool) -> Any:
        """Note the time in which weights go to engines that generate; what runs then is of no single version."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        over = loop.time
        try:
            yield
        except ProxyGoneError:
            # Nobody knows what the engines have, and they go on: until a sync works.
            over = lambda: float("inf")  # noqa: E731
            raise
        finally:
            if not paused:
                self.unpaused.append((began, over()))

    async def _init(self, *, rendezvous: bool) -> None:
        await self._dissolve()
        world = 1 + int((await self.call("/get_world_size", method="GET"))["world_size"])
        if rendezvous:
            self.gather = SimTrainer(world)
            await self.gather.start()
            info = self.gather.init_info()
        else:
            info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": world}
        await self.call("/init_weight_transfer_engine", {"init_info": info})
        self.grouped, self.group_rendezvous = True, rendezvous

    async def _dissolve(self) -> None:
        gather, self.gather = self.gather, None
        self.grouped = False
        if gather is not None:
            await gather.stop()

    async def _update(self, number: int, plan: Plan) -> None:
        await self.call("/start_weight_update", {"is_checkpoint_format": True})
        self._vanish(plan, "/start_weight_update")
        for chunk in range(plan.chunks):
            last = chunk == plan.chunks - 1
            weights = f"w{number}" if last else f"w{number}.part{chunk}"
            await self._send_weights(weights)
        self._vanish(plan, "/update_weights")
        label = f"v{number}"
        body = {"weight_version": label} if plan.label == "finish" else None
        await self.call("/finish_weight_update", body)
        if plan.label == "after":
            self.truth.half_given.add(label)
            await self.call("/update_weight_version", {"new_version": label})
            self.truth.half_given.discard(label)
        self._vanish(plan, "/finish_weight_update")

    async def _send_weights(self, weights: str) -> None:
        if self.gather is None:
            await self.call("/update_weights", {"update_info": {"sim_weights": weights}})
            return
        sending = spawn(self.gather.broadcast(weights), name="broadcast")
        try:
            info = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[1]], "note": weights}
            await self.call("/update_weights", {"update_info": info})
        finally:
            sending.cancel()

    async def _reload(self, number: int, *, paused: bool) -> None:
        """A framework whose engines load weights from a path, and that knows no start and finish."""
        try:
            if paused:
                await self.call("/pause", query="?mode=keep")
            with self._generating(paused):
                await self.call(RELOAD, {"weight_dir": f"w{number}"})
        except ProxyGoneError:
            if paused and self.careless:
                await self._await_proxy()
                await self._resume()
            raise
        except CallFailedError:
            if paused:
                await self._resume()
            raise
        if paused:
            await self._resume()

    async def _resume(self) -> None:
        """The ``finally`` of every trainer: until it worked, or only engines that are out failed it."""
        self._drops = False
        with contextlib.suppress(CallFailedError):
            await self.call("/resume")

    def _vanish(self, plan: Plan, step: str) -> None:
        if plan.gone_after == step:
            raise TrainerGoneError

    # Looking

    async def fleet(self) -> dict[str, Any]:
        """``GET /fleet``."""
        assert self._session is not None
        async with self._session.get(self.url + "/fleet") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def publish(self) -> dict[str, Any] | None:
        """Learn the fleet's version; None if the proxy cannot be asked."""
        try:
            fleet = await self.fleet()
        except (aiohttp.ClientError, ConnectionError):
            return None
        self.truth.publish(fleet.get("weight_version"))
        return fleet
