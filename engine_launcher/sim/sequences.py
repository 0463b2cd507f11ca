"""What one request is while it runs: its sequences, their text so far, and the weight versions that made it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_launcher.sim import model, tokenizer
from engine_launcher.sim.errors import WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters that a simulated engine obeys.

    Attributes:
        max_tokens: tokens after which a sequence ends with ``length``.
        n: sequences of each prompt.
        ignore_eos: go on after the end token.
        min_tokens: tokens before which the end token is not chosen.
        stop: strings that end a sequence.
        stop_token_ids: tokens that end a sequence.
        include_stop: keep a matched stop string in the text.
        candidates: candidates to report at each token, the chosen one first; 0 reports none.

    """

    max_tokens: int
    n: int = 1
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    candidates: int = 0

    @property
    def held_back(self) -> int:
        """Characters that a stream keeps back because they may turn out to begin a stop string."""
        if not self.stop or self.include_stop:
            return 0
        return max(len(text) for text in self.stop) - 1


Candidates = list[tuple[int, float]]


@dataclass(slots=True)
class Delta:
    """What one step added to one choice of a stream."""

    index: int
    tokens: list[int]
    text: str
    candidates: list[Candidates]
    finish_reason: str | None
    stop_reason: int | str | None
    spans: list[dict[str, Any]] | None
    first: bool


class SequenceState:
    """One choice of a request: prompt state, tokens, text and spans."""

    __slots__ = (
        "candidates",
        "finish_reason",
        "index",
        "owner",
        "reported",
        "sampling",
        "sent_text",
        "starts",
        "state",
        "stop_reason",
        "text",
        "tokens",
    )

    def __init__(self, owner: EngineRequest, index: int) -> None:
        self.owner = owner
        self.index = index
        self.sampling = owner.sampling
        self.state = owner.prompt_state
        self.tokens: list[int] = []
        self.text = ""
        self.sent_text = 0
        self.candidates: list[Candidates] = []
        self.starts: list[tuple[str, int]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.reported = False

    def advance(self, seed: int, version: str) -> bool:
        """Generate one token with the weights behind ``seed``; return whether the sequence ended."""
        sampling = self.sampling
        tokens = self.tokens
        may_end = len(tokens) >= sampling.min_tokens
        token = model.token_at(seed, self.state, may_end=may_end)
        if sampling.candidates:
            self.candidates.append(model.logprobs_at(seed, self.state, token, sampling.candidates))
        if not self.starts or self.starts[-1][0] != version:
            self.starts.append((version, len(tokens)))
        tokens.append(token)
        self.state = model.fold(self.state, token)
        if token < model.BOS:
            self.text += chr(token)
        elif token == model.EOS and not sampling.ignore_eos:
            self.finish_reason = "stop"
            return True
        if may_end and token in sampling.stop_token_ids:
            self.finish_reason = "stop"
            self.stop_reason = token
            return True
        if sampling.stop and may_end and self._hit_stop():
            return True
        if len(tokens) >= sampling.max_tokens:
            self.finish_reason = "length"
            return True
        return False

    def _hit_stop(self) -> bool:
        for stop in self.sampling.stop:
            if self.text.endswith(stop):
                if not self.sampling.include_stop:
                    self.text = self.text[: -len(stop)]
                self.finish_reason = "stop"
                self.stop_reason = stop
                return True
        return False

    def spans(self) -> list[dict[str, Any]]:
        """Return the weight versions over the output tokens, as half-open ranges."""
        ends = [start for _, start in self.starts[1:]] + [len(self.tokens)]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.starts, ends, strict=False)
        ]

    def take_delta(self, *, new_tokens: int) -> Delta:
        """Return what a stream has not been told yet; ``new_tokens`` tokens are new."""
        ended = self.finish_reason is not None
        until = len(self.text) if ended else max(self.sent_text, len(self.text) - self.sampling.held_back)
        text = self.text[self.sent_text : until]
        self.sent_text = until
        first = not self.reported
        self.reported = True
        return Delta(
            index=self.index,
            tokens=self.tokens[len(self.tokens) - new_tokens :] if new_tokens else [],
            text=text,
            candidates=self.candidates[len(self.candidates) - new_tokens :] if new_tokens and self.candidates else [],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            spans=self.spans() if ended else None,
            first=first,
        )


class EngineRequest:
    """One prompt of a generation, known to the engine by its external id."""

    __slots__ = ("external_id", "generation", "live", "prompt", "prompt_state", "sampling", "sequences", "weights_tag")

    def __init__(
        self, generation: Generation, external_id: str, prompt: Sequence[int], sampling: Sampling, base_index: int
    ) -> None:
        self.generation = generation
        self.external_id = external_id
        self.prompt = prompt
        self.prompt_state = model.fold_all(prompt)
        self.sampling = sampling
        self.weights_tag = generation.weights_tag
        self.sequences = [SequenceState(self, base_index + i) for i in range(sampling.n)]
        self.live = len(self.sequences)


@dataclass(slots=True)
class Generation:
    """All sequences of one HTTP request, and the place where its handler waits for them."""

    stream: bool
    weights_tag: str = ""
    requests: list[EngineRequest] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    live: int = 0
    error: WireError | None = None
    _waiter: asyncio.Future[None] | None = None

    def add(self, external_id: str, prompt: Sequence[int], sampling: Sampling) -> None:
        """Add one prompt."""
        base = sum(len(request.sequences) for request in self.requests)
        request = EngineRequest(self, external_id, prompt, sampling, base)
        self.requests.append(request)
        self.live += request.live

    @property
    def sequences(self) -> Iterable[SequenceState]:
        """Every sequence, in the order of the choices."""
        for request in self.requests:
            yield from request.sequences

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far by all sequences together."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    def notify(self) -> None:
        """Wake the handler."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Return when there is something new: deltas, the end, or an error."""
        if self.deltas or self.live == 0 or self.error is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def finished(self) -> None:
        """Return when every sequence has ended.

        Raises:
            WireError: the engine failed the request.

        """
        while self.live and self.error is None:
            await self.wait()
        if self.error is not None:
            raise self.error

    def drain(self) -> list[Delta]:
        """Return the deltas since the last call."""
        found, self.deltas = self.deltas, []
        return found


def text_of(sequence: SequenceState, *, skip_special: bool = True) -> str:
    """Return the text of a whole answer, with the special tokens if asked."""
    return sequence.text if skip_special else tokenizer.decode(sequence.tokens, skip_special=False)
