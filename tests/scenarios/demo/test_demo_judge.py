"""The validation finds what it is there to find."""

from __future__ import annotations

import pytest

from engine_launcher.sim.model import generate
from examples.demo.client import KINDS, Piece
from examples.demo.judge import SimulatedJudge, Verdict, spans_of, swapped, validate
from examples.demo.rollouts import Rollout

WEIGHTS = {"default": "old", "new": "newer", "newest": "newest"}
PROMPT = [1, 2, 3]


def frozen_piece() -> Piece:
    """20 tokens by the old weights, 30 by the new ones."""
    before = generate("old", PROMPT, 20)
    after = generate("newer", PROMPT + before, 30)
    spans = [{"version": "default", "start": 0, "end": 20}, {"version": "new", "start": 20, "end": 50}]
    return Piece(PROMPT, before + after, spans, "length")


def rollout(*pieces: Piece) -> Rollout:
    return Rollout(0, KINDS[0], "keep", list(pieces))


async def judged(*pieces: Piece) -> Verdict:
    return await validate(SimulatedJudge(), [rollout(*pieces)], WEIGHTS)


async def test_a_frozen_rollout_is_right_on_both_sides_of_its_border() -> None:
    verdict = await judged(frozen_piece())
    assert (verdict.tokens, verdict.frozen, verdict.borders) == (50, 1, 1)
    assert (verdict.frozen_before, verdict.frozen_after, verdict.mismatches) == (20, 30, 0)
    assert not verdict.failed


async def test_swapped_weights_are_noticed() -> None:
    verdict = await judged(frozen_piece())
    assert verdict.counter_tokens == 50
    assert verdict.counter_wrong >= 45


@pytest.mark.parametrize("position", [0, 19, 20, 49])
async def test_one_wrong_token_is_found_wherever_it_is(position: int) -> None:
    piece = frozen_piece()
    piece.tokens[position] = piece.tokens[position] % 95 + 1
    assert (await judged(piece)).mismatches >= 1


@pytest.mark.parametrize("shift", [-1, 1])
async def test_a_border_that_is_off_by_one_is_found(shift: int) -> None:
    piece = frozen_piece()
    piece.spans[0]["end"] = piece.spans[1]["start"] = 20 + shift
    verdict = await judged(piece)
    assert verdict.mismatches == 1
    assert verdict.failed


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [("default", 0, 49)],
        [("default", 0, 51)],
        [("default", 1, 50)],
        [("default", 0, 20), ("new", 21, 50)],
        [("default", 0, 20), ("unheard-of", 20, 50)],
        [("new", 0, 20), ("default", 20, 50)],
    ],
    ids=["none", "short", "long", "late", "gap", "unknown version", "back to older weights"],
)
async def test_spans_that_say_too_little_count_as_bad(spans: list[tuple[str, int, int]]) -> None:
    piece = frozen_piece()
    piece.spans = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    verdict = await judged(piece)
    assert verdict.malformed == 1
    assert verdict.failed


async def test_the_part_before_an_abort_is_judged_like_any_other() -> None:
    first = Piece(PROMPT, generate("old", PROMPT, 5), [{"version": "default", "start": 0, "end": 5}], "abort")
    prompt = PROMPT + first.tokens
    second = Piece(prompt, generate("newest", prompt, 5), [{"version": "newest", "start": 0, "end": 5}], "length")
    verdict = await judged(first, second, Piece(PROMPT, [], [], "abort"))
    assert (verdict.pieces, verdict.tokens, verdict.frozen) == (2, 10, 0)
    assert not verdict.failed


def test_a_border_at_the_very_start_is_no_border() -> None:
    piece = Piece(PROMPT, [5], [{"version": "default", "start": 0, "end": 0}, {"version": "new", "start": 0, "end": 1}])
    assert spans_of(piece, WEIGHTS) == [("newer", 0, 1)]


def test_swapping_gives_every_span_other_weights() -> None:
    spans = [("a", 0, 1), ("b", 1, 2), ("c", 2, 3)]
    assert swapped(spans) == [("b", 0, 1), ("a", 1, 2), ("b", 2, 3)]
