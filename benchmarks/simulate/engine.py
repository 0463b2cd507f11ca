"""A model of one vLLM server: simple, but honest about what balancing changes.

- Decode: every running sequence gets one token a step; a step takes a fixed time plus some for each sequence and for
  each token of context that attention reads, so a bigger batch is slower for everybody in it.
- Prefill: tokens that are not in the prefix cache are computed in chunks, in order of arrival, and each chunk delays
  the step that it rides on.
- Memory: a fixed number of KV tokens. Running requests hold theirs; the rest is a prefix cache that gives up the least
  recently used first. A request that does not fit waits, in order.

What it leaves out: preemption (the whole answer's room is kept from the start, so waiting comes a little earlier than
in vLLM), speculative decoding, the exact blocks of 16 tokens, the network.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Hardware:
    """What a server of world size 1 can do: about an 8B dense model in bf16 on one 80 GB GPU of 3.3 TB/s.

    Attributes:
        step: seconds of a decode step of an empty batch (weights read once, plus overhead).
        per_sequence: seconds that a sequence adds to a step.
        per_context_token: seconds that a token of context adds to a step (131 KB of KV read at 3 TB/s).
        prefill: tokens computed a second.
        chunk: tokens of prefill that ride on one step.
        kv_tokens: tokens of KV that fit (56 GB).
        max_seqs: sequences that run at once.
    """

    step: float = 0.009
    per_sequence: float = 5e-5
    per_context_token: float = 4.4e-8
    prefill: float = 25_000.0
    chunk: float = 2048.0
    kv_tokens: int = 420_000
    max_seqs: int = 256


@dataclass(eq=False, slots=True)
class Request:
    """One turn.

    Attributes:
        key: session key sent along, or None.
        segments: the prompt, cut where other prompts may differ: (name, tokens).
        answer: name and tokens of what will be generated.
        session: whose turn it is.
        engine: who has it.
        hit: prompt tokens found in the engine's cache.
        tokens: prompt tokens.
    """

    key: bytes | None
    segments: list[tuple[object, int]]
    answer: tuple[object, int]
    session: object = None
    engine: SimEngine | None = None
    hit: int = 0
    tokens: int = 0


class PrefixCache:
    """KV memory: segments in use, segments kept for later, room kept for answers."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used: dict[object, list[int]] = {}
        self._kept: OrderedDict[object, int] = OrderedDict()
        self._held = 0
        self._kept_tokens = 0

    def admit(self, request: Request, *, force: bool) -> bool:
        """Take a request in; False if it does not fit beside those that run."""
        matched = 0
        contiguous = True
        fresh = request.answer[1]
        for name, tokens in request.segments:
            if name in self._used:
                matched += tokens if contiguous else 0
            elif name in self._kept:
                matched += tokens if contiguous else 0
                fresh += tokens
            else:
                contiguous = False
                fresh += tokens
        if self._held + fresh > self.capacity and not force:
            return False
        for name, tokens in request.segments:
            used = self._used.get(name)
            if used is not None:
                used[1] += 1
                continue
            kept = self._kept.pop(name, None)
            if kept is not None:
                self._kept_tokens -= kept
            self._used[name] = [tokens, 1]
            self._held += tokens
        self._held += request.answer[1]
        self._shrink()
        request.hit = matched
        return True

    def release(self, request: Request) -> None:
        """The answer is whole: its segments stay until the room is needed, the end of the prompt to go first."""
        name, tokens = request.answer
        self._held -= tokens
        self._keep(name, tokens)
        for segment, size in reversed(request.segments):
            used = self._used[segment]
            used[1] -= 1
            if not used[1]:
                del self._used[segment]
                self._held -= size
                self._keep(segment, size)
        self._shrink()

    def _keep(self, name: object, tokens: int) -> None:
        if name in self._kept:
            self._kept.move_to_end(name)
        elif name not in self._used:
            self._kept[name] = tokens
            self._kept_tokens += tokens

    def _shrink(self) -> None:
        while self._kept and self._held + self._kept_tokens > self.capacity:
            _, tokens = self._kept.popitem(last=False)
            self._kept_tokens -= tokens

    def clear(self) -> None:
        """Everything that no running request holds is gone."""
        self._kept.clear()
        self._kept_tokens = 0


@dataclass(eq=False, slots=True)
class SimEngine:
    """One server; also what the policy sees as a candidate: its weight is its size, or less while it starts slowly."""

    id: str
    size: float = 1.0
    slowdown: float = 1.0
    hardware: Hardware = field(default_factory=Hardware)
    inflight: int = 0
    weight: float = field(init=False)
    cache: PrefixCache = field(init=False)
    waiting: deque[Request] = field(default_factory=deque)
    prefilling: deque[Request] = field(default_factory=deque)
    left: float = 0.0
    decoding: list[tuple[float, int, Request]] = field(default_factory=list)
    clock: float = 0.0
    at: float = 0.0
    context: int = 0
    running: int = 0
    frozen: bool = False
    version: int = 0
    order: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    _decode_rate: float = 0.0
    _prefill_rate: float = 0.0

    def __post_init__(self) -> None:
        self.weight = self.size
        self.cache = PrefixCache(int(self.hardware.kv_tokens * self.size))

    def _rates(self) -> None:
        """Tokens a second: of each decoding sequence, and of the prefill at the head of the line."""
        if self.frozen:
            self._decode_rate = self._prefill_rate = 0.0
            return
        hw = self.hardware
        # Tensor parallelism divides the work but not the overhead of a step, some third of it.
        scale = self.slowdown / self.size
        step = hw.step * self.slowdown * (1 / 3 + 2 / 3 / self.size)
        step += scale * (len(self.decoding) * hw.per_sequence + self.context * hw.per_context_token)
        if self.prefilling:
            step += scale * hw.chunk / hw.prefill
            self._prefill_rate = hw.chunk / step
        else:
            self._prefill_rate = 0.0
        self._decode_rate = 1 / step

    def advance(self, now: float) -> None:
        """Let time pass at the rates of the last change."""
        passed = now - self.at
        self.at = now
        if passed > 0:
            self.clock += passed * self._decode_rate
            if self.prefilling:
                self.left -= passed * self._prefill_rate

    def arrive(self, request: Request, now: float) -> None:
        """A request comes."""
        self.advance(now)
        self.waiting.append(request)
        self._fill()

    def _fill(self) -> None:
        while self.waiting and self.running < self.hardware.max_seqs * self.size:
            request = self.waiting[0]
            if not self.cache.admit(request, force=not self.running):
                break
            self.waiting.popleft()
            self.running += 1
            request.tokens = sum(tokens for _, tokens in request.segments)
            self.prompt_tokens += request.tokens
            self.hit_tokens += request.hit
            self.prefilling.append(request)
            if len(self.prefilling) == 1:
                self.left = self._to_compute(request)
        self.version += 1
        self._rates()

    @staticmethod
    def _to_compute(request: Request) -> float:
        return max(1.0, request.tokens - request.hit)

    def next_change(self) -> float | None:
        """When something ends, if nothing else happens before."""
        times = []
        if self._prefill_rate:
            times.append(self.left / self._prefill_rate)
        if self.decoding and self._decode_rate:
            times.append((self.decoding[0][0] - self.clock) / self._decode_rate)
        return self.at + max(0.0, min(times)) if times else None

    def step(self, now: float) -> list[Request]:
        """Go to a time at which something ends; the requests that are done."""
        self.advance(now)
        done: list[Request] = []
        while self.prefilling and self.left <= 1e-6:
            request = self.prefilling.popleft()
            self.order += 1
            heapq.heappush(self.decoding, (self.clock + request.answer[1], self.order, request))
            self.context += request.tokens + request.answer[1] // 2
            self.left = self._to_compute(self.prefilling[0]) if self.prefilling else 0.0
        while self.decoding and self.decoding[0][0] <= self.clock + 1e-6:
            _, _, request = heapq.heappop(self.decoding)
            self.context -= request.tokens + request.answer[1] // 2
            self.running -= 1
            self.cache.release(request)
            done.append(request)
        self._fill()
        return done

    def freeze(self, now: float, *, frozen: bool) -> None:
        """A weight sync begins (the prefix cache is emptied) or ends."""
        self.advance(now)
        self.frozen = frozen
        if frozen:
            self.cache.clear()
        self.version += 1
        self._rates()
