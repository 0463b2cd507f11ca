"""The engine core: which sequences run, one step for all of them at a time, and the three ways to pause it.

One task ticks for every request. A timer a request would cost more than the tokens at the thousands of open streams
that a fleet under test holds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from engine_launcher.sim import model
from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.errors import PREFILL_BACKLOG_MESSAGE, BusyError, EngineDeadError, PausedError, WireError
from engine_launcher.sim.sequences import EngineRequest, Generation, SequenceState
from proxy.tasks import spawn

_T = TypeVar("_T")
PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")


@dataclass(slots=True)
class Speed:
    """How fast tokens come: seconds of a step are ``1 / tokens_per_second + step_overhead_seconds * running``."""

    tokens_per_second: float = 0.0
    step_overhead_seconds: float = 0.0

    def step_seconds(self, running: int) -> float:
        """Return how long one step of ``running`` sequences takes; 0 is as fast as the machine goes."""
        base = 1.0 / self.tokens_per_second if self.tokens_per_second > 0 else 0.0
        return base + self.step_overhead_seconds * running


@dataclass(slots=True)
class Counters:
    """What ``/metrics`` counts."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = None  # type: ignore[assignment]  # filled below: a mutable default needs it
    peak_unfinished: int = 0
    aborted_by_client: int = 0

    def __post_init__(self) -> None:
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}


class EngineCore:
    """Running and waiting sequences of one engine, its weights and its weight version.

    Attributes:
        weights: opaque label of the weights in use; see `engine_launcher.sim.model`.
        version: the weight-version label, ``default`` after every start.
        speed: may be changed while requests run.
        dead: the engine process is gone; every request fails from then on.

    """

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.weights: str = model.base_weights(config.seed)
        self.version = "default"
        self.speed = Speed(config.tokens_per_second, config.step_overhead_seconds)
        self.counters = Counters()
        self.dead = False
        self.paused: Literal["no", "new", "all"] = "no"
        self.pause_mode: PauseMode | None = None
        self.rejecting = False
        self.running: list[SequenceState] = []
        self.waiting: deque[SequenceState] = deque()
        self._by_external_id: dict[str, list[EngineRequest]] = {}
        self._work = asyncio.Event()
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._seeds: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._collective: asyncio.Task[WireError | None] | None = None
        self._turn = asyncio.Lock()

    def start(self) -> None:
        """Start ticking."""
        self._task = spawn(self._run(), name="sim-engine-core")

    async def stop(self) -> None:
        """Stop ticking; requests that run stay unanswered, as when a process is killed."""
        for task in (self._task, self._collective):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._task = None

    # -- the engine's main loop --------------------------------------------------------------------------------------

    async def turn(self) -> None:
        """Return when the main loop is free to look at a call: it waits inside a collective until that ends."""
        if self._turn.locked():
            async with self._turn:
                pass

    async def collective(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Run ``call`` in the main loop: no token is generated and no other call is looked at meanwhile.

        A client that goes away does not end it; vLLM's workers stay inside a collective that nobody waits for.

        Raises:
            WireError: what ``call`` raised.

        """
        results: list[_T] = []

        async def run() -> WireError | None:
            async with self._turn:
                try:
                    results.append(await call())
                except WireError as error:
                    return error
            return None

        task = self._collective = spawn(run(), name="sim-collective")
        error = await asyncio.shield(task)
        if error is not None:
            raise error
        return results[0]

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self.running) + len(self.waiting)

    def check_admission(self, sequences: int) -> None:
        """Refuse a request before its response is begun.

        Raises:
            EngineDeadError: the engine process is gone.
            BusyError: a queue limit would be exceeded.

        """
        if self.dead:
            raise EngineDeadError
        limit = self.config.max_num_queued_reqs
        if limit is not None and self.unfinished + sequences > limit:
            raise BusyError
        token_limit = self.config.max_num_queued_tokens
        if token_limit is not None:
            queued = sum(len(s.owner.prompt) for s in self.waiting) + sum(
                len(s.owner.prompt) for s in self.running if not s.tokens
            )
            if queued >= token_limit:
                raise BusyError(PREFILL_BACKLOG_MESSAGE)

    def submit(self, generation: Generation) -> None:
        """Queue every sequence of ``generation``.

        Raises:
            PausedError: generation is paused in ``abort`` or ``wait``.
            BusyError: a queue limit would be exceeded.
            EngineDeadError: the engine process is gone.

        """
        self.check_admission(generation.live)
        if self.rejecting:
            raise PausedError
        for request in generation.requests:
            self._by_external_id.setdefault(request.external_id, []).append(request)
            self.waiting.extend(request.sequences)
            self.counters.prompt_tokens += len(request.prompt)
        self.counters.peak_unfinished = max(self.counters.peak_unfinished, self.unfinished)
        self._work.set()

    def abandon(self, generation: Generation) -> None:
        """Abort what is left of a generation whose client went away."""
        if generation.live and generation.error is None:
            self.counters.aborted_by_client += 1
            self._abort(generation.requests)

    def abort_all(self) -> int:
        """Abort everything; return the number of sequences and of parents of several, as vLLM counts."""
        requests = [request for found in self._by_external_id.values() for request in found]
        count = sum(request.live for request in requests) + sum(1 for r in requests if r.sampling.n > 1)
        self._abort(requests)
        return count

    def abort_ids(self, external_ids: list[str]) -> int:
        """Abort the requests with these ids; return how many ids were sent, found or not, as vLLM counts."""
        self._abort([request for found in external_ids for request in self._by_external_id.get(found, ())])
        return len(external_ids)

    def _abort(self, requests: list[EngineRequest]) -> None:
        gone = [s for request in requests for s in request.sequences if s.finish_reason is None]
        for sequence in gone:
            sequence.finish_reason = "abort"
            self._ended(sequence, new_tokens=0)
        if gone:
            dropped = set(map(id, gone))
            self.running = [s for s in self.running if id(s) not in dropped]
            self.waiting = deque(s for s in self.waiting if id(s) not in dropped)
            self._check_idle()

    def kill(self) -> None:
        """Fail everything as when the engine process behind the API server is killed."""
        self.dead = True
        generations = {id(s.owner.generation): s.owner.generation for s in (*self.running, *self.waiting)}
        self.running = []
        self.waiting.clear()
        self._by_external_id.clear()
        for generation in generations.values():
            generation.error = EngineDeadError()
            generation.notify()
        self._check_idle()

    # -- pause -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, *, reject: bool = True) -> None:
        """Pause and return when the pause is complete.

        Args:
            mode: ``keep`` freezes what runs; ``wait`` returns when what runs has ended; ``abort`` ends it.
            reject: refuse new requests in ``wait`` and ``abort``; a sleeping engine queues them instead.

        """
        if mode == "abort":
            self.abort_all()
        self.paused = "all" if mode == "keep" else "new"
        if reject:
            self.pause_mode = mode
            self.rejecting = mode != "keep" and self.config.rejects_while_paused
        if self.paused == "new" and self.running:
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter

    def resume(self) -> None:
        """Go on; harmless when not paused."""
        self.paused = "no"
        self.pause_mode = None
        self.rejecting = False
        self._work.set()

    def _check_idle(self) -> None:
        if self.running:
            return
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Generate one token for each running sequence; return how many were generated."""
        if self.paused == "all":
            return 0
        if self.paused == "no" and self.waiting:
            room = self.config.max_num_seqs - len(self.running)
            while room > 0 and self.waiting:
                self.running.append(self.waiting.popleft())
                room -= 1
        base_seed = model.weights_seed(self.weights)
        version = self.version
        ended = False
        for sequence in self.running:
            owner = sequence.owner
            seed = self._seed_for(owner.weights_tag) if owner.weights_tag else base_seed
            if sequence.advance(seed, version):
                ended = True
                self._ended(sequence, new_tokens=1)
            elif owner.generation.stream:
                owner.generation.deltas.append(sequence.take_delta(new_tokens=1))
                owner.generation.notify()
        generated = len(self.running)
        self.counters.generation_tokens += generated
        if ended:
            self.running = [s for s in self.running if s.finish_reason is None]
            self._check_idle()
        return generated

    def _seed_for(self, tag: str) -> int:
        return model.weights_seed(f"{self.weights}{tag}")

    def _ended(self, sequence: SequenceState, *, new_tokens: int) -> None:
        request = sequence.owner
        generation = request.generation
        request.live -= 1
        generation.live -= 1
        self.counters.finished[sequence.finish_reason or "error"] += 1
        if request.live == 0:
            same_id = self._by_external_id.get(request.external_id, [])
            if request in same_id:
                same_id.remove(request)
            if not same_id:
                self._by_external_id.pop(request.external_id, None)
        if generation.stream:
            generation.deltas.append(sequence.take_delta(new_tokens=new_tokens))
            generation.notify()
        elif generation.live == 0:
            generation.notify()

    def _can_step(self) -> bool:
        if self.paused == "all":
            return False
        return bool(self.running) or (self.paused == "no" and bool(self.waiting))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self.turn()
            if not self._can_step():
                self._work.clear()
                await self._work.wait()
                due = max(due, loop.time())
                continue
            self.step()
            seconds = self.speed.step_seconds(len(self.running))
            now = loop.time()
            due = max(due + seconds, now)
            await asyncio.sleep(due - now)
