"""A fleet under its launcher, a proxy that watches its file, a trainer, and rollouts whose every token is judged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp

from engine_launcher import guard
from engine_launcher.restore import SIM_MODEL
from engine_launcher.sim.model import base_weights
from engine_launcher.trainer_process import TrainerProcess
from examples.demo.client import KINDS, ClientError, Piece, ask, request_body
from examples.demo.judge import Judge, RealJudge, SimulatedJudge, spans_of
from examples.demo.syncs import Control, RealTrainer, SimulatedTrainer, Sync, Trainer, sync_weights
from proxy.tasks import spawn
from tests.tools.process import ProxyProcess, proxy_process

POLL = 0.02
"""Seconds between two looks at ``/fleet``."""
SIM_SPEED = 60
"""Tokens a second of one simulated sequence: a rollout takes one to two seconds, so a fault strikes inside of many."""
JUDGED = 200
"""Rollouts of real engines that are judged besides those of the engine in question."""
MODEL = Path(".models/tiny")
ENGINE_PYTHON = Path(".engine/bin/python").absolute()

_headers: ContextVar[dict[str, str]] = ContextVar("headers")


class SeededTrainer(SimulatedTrainer):
    """Sends the weights that a simulated engine of another seed starts with, so that a checkpoint can hold them."""

    async def init(self) -> int:
        await self.stop()
        return await super().init()

    async def send(self, sync: Sync) -> None:
        assert self._group is not None
        weights = base_weights(len(self.weights))
        self.weights[sync.version] = weights
        await self._control.call(sync, "/start_weight_update")
        broadcast = spawn(self._group.broadcast(weights), name="broadcast")
        try:
            await self._control.call(sync, "/update_weights", {"update_info": self._update_info})
        finally:
            broadcast.cancel()
        await self._control.call(sync, "/finish_weight_update", {"weight_version": sync.version})


@dataclass
class Done:
    """One rollout as its client saw it; times are seconds of the monotonic clock."""

    started: float
    ended: float
    engine: str
    attempts: int
    piece: Piece | None
    error: str


@dataclass
class Move:
    """A change of an engine's state, as ``/fleet/events`` told it."""

    when: float
    engine: str
    state: str
    reason: str


@dataclass
class Look:
    """What ``/fleet`` said of one engine."""

    when: float
    state: str
    reason: str
    eligible: bool
    inflight: int


@dataclass
class Stage:
    """Everything together.

    Attributes:
        looks: at each engine, by id, one entry for each change.
        moves: every change of state, however short.
        done: rollouts that ended.
    """

    kind: str
    launcher: asyncio.subprocess.Process
    proxy: ProxyProcess
    session: aiohttp.ClientSession
    control: Control
    trainer: Trainer
    judge: Judge
    urls: list[str]
    checkpoints: Path
    lines: list[tuple[float, str]]
    looks: dict[str, list[Look]] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    running: int = 0
    _over: bool = False

    # Looking

    def ids(self) -> list[str]:
        return [url.removeprefix("http://") for url in self.urls]

    async def watch(self) -> None:
        """Note every change of every engine."""
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                fleet = await self.control.get("/fleet")
                now = time.monotonic()
                for each in fleet["engines"]:
                    look = Look(now, each["state"], each["reason"], each["eligible"], each["inflight"])
                    seen = self.looks.setdefault(each["id"], [])
                    if not seen or (seen[-1].state, seen[-1].reason, seen[-1].eligible, seen[-1].inflight) != (
                        look.state,
                        look.reason,
                        look.eligible,
                        look.inflight,
                    ):
                        seen.append(look)
            await asyncio.sleep(POLL)

    async def listen(self) -> None:
        """Note every change of state."""
        limit = aiohttp.ClientTimeout(total=None)
        async with self.session.get(f"{self.proxy.url}/fleet/events", timeout=limit) as answer:
            buffered = b""
            async for chunk in answer.content.iter_any():
                *whole, buffered = (buffered + chunk).split(b"\n\n")
                for event in whole:
                    head, _, data = event.partition(b"\n")
                    if head == b"event: engine_state":
                        told = json.loads(data.removeprefix(b"data: "))
                        self.moves.append(Move(time.monotonic(), told["engine"], told["state"], told["reason"]))

    async def until(self, engine: str, state: str, after: float, seconds: float) -> Move:
        """Its first change to this state after a moment."""
        deadline = time.monotonic() + seconds
        while True:
            for move in self.moves:
                if move.engine == engine and move.when > after and move.state == state:
                    return move
            assert time.monotonic() < deadline, f"{engine} never became {state}: {self.moves[-5:]}"
            assert self.launcher.returncode is None, "\n".join(line for _, line in self.lines)
            await asyncio.sleep(POLL)

    async def in_rotation(self) -> None:
        """Wait until every engine is."""
        async with asyncio.timeout(60):
            while not all(self.looks.get(each) and self.looks[each][-1].eligible for each in self.ids()):
                await asyncio.sleep(POLL)

    async def said(self, text: str, seconds: float) -> float:
        """When the launcher first logged a line with this text."""
        deadline = time.monotonic() + seconds
        while True:
            for when, line in self.lines:
                if text in line:
                    return when
            assert time.monotonic() < deadline, f"never logged {text!r}:\n" + "\n".join(line for _, line in self.lines)
            await asyncio.sleep(POLL)

    # Doing

    def kill(self, index: int) -> list[int]:
        """SIGKILL an engine's server and all below it; returns the process ids."""
        port = self.urls[index].rpartition(":")[2]
        for pid in guard.descendants(self.launcher.pid):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "-I" not in words and "--port" in words and words[words.index("--port") + 1] == port:
                pids = [pid, *guard.descendants(pid)]
                guard.send(pids, signal.SIGKILL)
                return pids
        raise AssertionError(f"no engine on port {port}")

    async def sync(self, version: str) -> None:
        """New weights for all, and their checksums recorded by the proxy."""
        await self.trainer.init()
        await sync_weights(self.control, self.trainer, "keep", version, self.running)
        await self.control.call(None, "/weight_checker", {"action": "checksum"})

    async def save(self, name: str) -> None:
        """Leave a checkpoint of the weights sent last, as a trainer does: under another name until it is whole."""
        seed = len(self.trainer.weights) - 1
        scratch = self.checkpoints / f"{name}.writing"
        if self.kind == "sim":
            scratch.mkdir()
            (scratch / "config.json").write_text(json.dumps({"model_type": SIM_MODEL, "seed": seed}))
        else:
            making = await asyncio.create_subprocess_exec(
                str(ENGINE_PYTHON), "-m", "engine_launcher.tiny_model", str(scratch), "--seed", str(seed)
            )
            assert await making.wait() == 0
        scratch.rename(self.checkpoints / name)

    @asynccontextmanager
    async def load(self, workers: int, lengths: tuple[int, int]) -> AsyncIterator[None]:
        """Keep this many rollouts going; those that run at the end are waited for."""
        model = (await self.control.get("/v1/models"))["data"][0]["id"]
        self._over = False
        tasks = [spawn(self._client(number, model, lengths), name=f"client {number}") for number in range(workers)]
        try:
            yield
        finally:
            self._over = True
            await asyncio.gather(*tasks)

    async def _client(self, number: int, model: str, lengths: tuple[int, int]) -> None:
        rng = random.Random(number)
        while not self._over:
            kind = KINDS[rng.randrange(len(KINDS))]
            words = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(4, 60)))
            prompt: Any = words if kind.route == "chat" else list(words.encode())
            started = time.monotonic()
            _headers.set({})
            self.running += 1
            piece, error = None, ""
            try:
                piece = await ask(
                    self.session, self.proxy.url, kind, request_body(kind, model, prompt, rng.randint(*lengths))
                )
            except ClientError as failed:
                error = f"{kind}: {failed}"
            self.running -= 1
            headers = _headers.get()
            engine, attempts = headers.get("X-Fleetgate-Engine", ""), int(headers.get("X-Fleetgate-Attempts", "0"))
            self.done.append(Done(started, time.monotonic(), engine, attempts, piece, error))
            if error:
                await asyncio.sleep(0.05)

    async def mismatches(self, *always: str) -> tuple[int, int]:
        """Judge whole rollouts: (tokens, those that the weights they name would not have chosen).

        All of simulated engines; of real ones, a forward pass each, those of the engines named and an even share of the
        rest.
        """
        tokens = wrong = 0
        whole = [each for each in self.done if each.piece is not None and each.piece.tokens]
        step = 1 if self.kind == "sim" else max(1, len(whole) // JUDGED)
        for number, each in enumerate(whole):
            assert each.piece is not None
            if number % step and each.engine not in always:
                continue
            spans = spans_of(each.piece, self.trainer.weights)
            assert spans is not None, each.piece.spans
            tokens += len(each.piece.tokens)
            wrong += await self.judge.wrong(each.piece.prompt, each.piece.tokens, spans)
        return tokens, wrong

    def versions(self) -> set[str]:
        """Every version that made a token."""
        pieces = [each.piece for each in self.done if each.piece is not None]
        return {span["version"] for piece in pieces for span in piece.spans if span["start"] < span["end"]}


async def _keep_headers(_session: object, _context: SimpleNamespace, end: aiohttp.TraceRequestEndParams) -> None:
    _headers.set(dict(end.response.headers))


def own_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FLEETGATE_")}


@asynccontextmanager
async def stage(
    kind: str, directory: Path, *arguments: str, count: int = 3, seconds: float = 60
) -> AsyncIterator[Stage]:
    """Start a proxy on an empty fleet, engines under the launcher, and a trainer."""
    checkpoints = directory / "checkpoints"
    checkpoints.mkdir(parents=True)
    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(_keep_headers)
    async with contextlib.AsyncExitStack() as stack:
        file = directory / "engines"
        proxy = await stack.enter_async_context(proxy_process(engines_file=file, ready=0, min_engines=count))
        argv = ["--kind", kind, "--count", str(count), "--engines-file", str(file), "--proxy", proxy.url]
        argv += ["--log-dir", str(directory / "logs"), "--restore-from", str(checkpoints)]
        if kind == "vllm":
            argv += ["--model", str(MODEL), *arguments]
        else:
            argv += [*arguments, "--", "--tokens-per-second", str(SIM_SPEED)]
        launcher = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "engine_launcher", *argv),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=own_environment(),
        )
        lines: list[tuple[float, str]] = []
        reading = spawn(_read(launcher, lines), name="launcher's log")
        stack.push_async_callback(_end, launcher, reading, lines)
        assert launcher.stdout is not None
        urls = []
        async with asyncio.timeout(seconds):
            for _ in range(count):
                raw = await launcher.stdout.readline()
                assert raw, "\n".join(line for _, line in lines)
                urls.append(raw.decode().strip())
        plain = await stack.enter_async_context(aiohttp.ClientSession())
        session = await stack.enter_async_context(aiohttp.ClientSession(trace_configs=[trace]))
        control = Control(plain, proxy.url)
        trainer: Trainer
        judge: Judge
        if kind == "vllm":
            process = TrainerProcess(ENGINE_PYTHON, MODEL, [proxy.url], log=directory / "trainer.log")
            await stack.enter_async_context(process)
            trainer, judge = RealTrainer(control, process), RealJudge(process)
        else:
            trainer, judge = SeededTrainer(control, base_weights(0)), SimulatedJudge()
            stack.push_async_callback(trainer.stop)
        made = Stage(kind, launcher, proxy, session, control, trainer, judge, urls, checkpoints, lines)
        for each in (made.watch(), made.listen()):
            stack.callback(spawn(each, name="watch the fleet").cancel)
        await made.in_rotation()
        yield made


async def _read(launcher: asyncio.subprocess.Process, lines: list[tuple[float, str]]) -> None:
    assert launcher.stderr is not None
    async for raw in launcher.stderr:
        lines.append((time.monotonic(), raw.decode(errors="replace").rstrip()))  # noqa: PERF401 - read while it is written


async def _end(launcher: asyncio.subprocess.Process, reading: asyncio.Task[None], lines: list[Any]) -> None:
    """SIGTERM is a clean stop, whatever happened before."""
    if launcher.returncode is None:
        launcher.terminate()
    try:
        code = await asyncio.wait_for(launcher.wait(), 90)
    except TimeoutError:
        launcher.kill()
        raise
    await reading
    assert code == 0, f"exit code {code}:\n" + "\n".join(line for _, line in lines[-30:])
