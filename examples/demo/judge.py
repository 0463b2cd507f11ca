"""The validation: which weights made each token, checked by computing every token again.

A piece of a rollout says by its spans which version made which tokens. Each token is compared with the greedy choice
of that version's weights for the context before it: `transformers` computes it for real engines, a pure function for
simulated ones. To show that the check can fail, some pieces are judged a second time with neighbouring weights swapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from engine_launcher.sim.model import check_spans
from engine_launcher.trainer_process import TrainerProcess
from examples.demo.client import Piece
from examples.demo.rollouts import Rollout

COUNTER_CHECKS: Final = 5
"""Frozen pieces in each mode that are judged with their weights swapped as well."""

COUNTER_SHARE: Final = 0.5
"""At least this share of the tokens must then be wrong; about 1 in 95 agrees by chance on simulated engines."""

Spans = Sequence[tuple[Any, int, int]]
"""``(weights, start, end)`` over the tokens."""


class Judge(Protocol):
    """Finds tokens that the weights which are said to have made them would not have chosen."""

    async def wrong(self, prompt: list[int], tokens: list[int], spans: Spans) -> int:
        """How many tokens are wrong."""
        ...


class SimulatedJudge:
    """The pure function of the simulated engine."""

    async def wrong(self, prompt: list[int], tokens: list[int], spans: Spans) -> int:
        """How many tokens are wrong."""
        return len(check_spans(prompt, tokens, spans))


class RealJudge:
    """`transformers`, in the trainer's process: the weights of a version are those of its seed."""

    def __init__(self, process: TrainerProcess) -> None:
        self._process = process

    async def wrong(self, prompt: list[int], tokens: list[int], spans: Spans) -> int:
        """How many tokens are wrong."""
        named = [{"seed": seed, "start": start, "end": end} for seed, start, end in spans]
        answer = await self._process.ask("judge", prompt=prompt, output=tokens, spans=named)
        return len(answer["mismatches"])


@dataclass(slots=True)
class Verdict:
    """What was validated in one mode."""

    pieces: int = 0
    """Answers whose tokens were all computed again."""
    tokens: int = 0
    frozen: int = 0
    """Answers that an update came into the middle of."""
    borders: int = 0
    frozen_before: int = 0
    """Tokens of frozen answers before their last border, so made by old weights."""
    frozen_after: int = 0
    mismatches: int = 0
    malformed: int = 0
    """Answers whose spans leave a gap, name an unknown version, or go back to older weights."""
    counter_tokens: int = 0
    """Tokens judged with their weights swapped."""
    counter_wrong: int = 0
    """How many of those were found wrong, as nearly all should be."""

    @property
    def blind(self) -> bool:
        """Whether the judge failed to notice swapped weights."""
        return self.counter_wrong < COUNTER_SHARE * self.counter_tokens

    @property
    def failed(self) -> bool:
        """Whether anything is not as it should be."""
        return bool(self.mismatches or self.malformed or self.blind)


def spans_of(piece: Piece, weights: Mapping[str, Any]) -> list[tuple[Any, int, int]] | None:
    """The spans with weights for versions; ``None`` unless they cover the tokens in the order of the updates."""
    order = {version: index for index, version in enumerate(weights)}
    found: list[tuple[Any, int, int]] = []
    covered, latest = 0, -1
    for span in piece.spans:
        version, start, end = span["version"], span["start"], span["end"]
        if start == end:
            continue
        if version not in order or order[version] <= latest or start != covered or end < start:
            return None
        found.append((weights[version], start, end))
        covered, latest = end, order[version]
    return found if covered == len(piece.tokens) else None


def swapped(spans: Spans) -> list[tuple[Any, int, int]]:
    """The same borders, with each span's weights taken from its neighbour."""
    return [(spans[index - 1][0] if index else spans[1][0], *spans[index][1:]) for index in range(len(spans))]


async def validate(judge: Judge, rollouts: Sequence[Rollout], weights: Mapping[str, Any]) -> Verdict:
    """Judge every piece of these rollouts."""
    verdict = Verdict()
    for piece in (each for rollout in rollouts for each in rollout.pieces if each.tokens):
        spans = spans_of(piece, weights)
        if spans is None:
            verdict.malformed += 1
            continue
        verdict.pieces += 1
        verdict.tokens += len(piece.tokens)
        verdict.mismatches += await judge.wrong(piece.prompt, piece.tokens, spans)
        if len(spans) == 1:
            continue
        verdict.frozen += 1
        verdict.borders += len(spans) - 1
        verdict.frozen_before += spans[-1][1]
        verdict.frozen_after += len(piece.tokens) - spans[-1][1]
        if verdict.frozen <= COUNTER_CHECKS:
            verdict.counter_tokens += len(piece.tokens)
            verdict.counter_wrong += await judge.wrong(piece.prompt, piece.tokens, swapped(spans))
    return verdict
