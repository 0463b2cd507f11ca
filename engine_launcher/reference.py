"""What a set of weights would have answered, computed by ``transformers``: the judge of which weights made a token.

Runs in the engine environment. Engines should serve with ``--dtype float32`` (the launcher's default on a CPU): in
bfloat16 two implementations round differently, and a greedy choice between near equals is then a matter of luck.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

TIE: Final = 1e-3
"""Logits closer than this are a tie: either token is right. Float32 implementations differ by about 1e-5."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A token that these weights would not have chosen."""

    position: int
    """Index among the generated tokens."""
    served: int
    expected: int
    gap: float
    """How much higher the expected token's logit is."""


def float_model(model: Any) -> Any:
    """A float32 copy of a bfloat16 model: the same values, computed exactly enough to judge by."""
    import torch  # noqa: PLC0415 - only where the engine environment is

    return copy.deepcopy(model).to(torch.float32).eval()


def mismatches(model: Any, prompt: Sequence[int], output: Sequence[int]) -> list[Mismatch]:
    """Tokens of ``output`` that are not the greedy choice of ``model`` for the context served before them."""
    return span_mismatches([(model, 0, len(output))], prompt, output)


def span_mismatches(
    spans: Sequence[tuple[Any, int, int]], prompt: Sequence[int], output: Sequence[int]
) -> list[Mismatch]:
    """The same for an output that several sets of weights produced: ``(model, start, end)`` for each in turn.

    An engine paused in ``keep`` mode keeps the keys and values that the old weights computed, so the new weights choose
    on top of those. The judge does likewise: one cache, filled by each model for the tokens that went through it (the
    last token before a border has not: it is the first input of the next model).

    One forward pass for each span, so each token is judged in its own context: one wrong token does not condemn those
    after it. ``prompt`` must not be empty, and the spans must cover the output without gaps.
    """
    import torch  # noqa: PLC0415 - only where the engine environment is

    ids = [*prompt, *output]
    found: list[Mismatch] = []
    cache, fed, expected_start = None, 0, 0
    for model, start, end in spans:
        if start != expected_start or end <= start:
            raise ValueError(f"span {start} to {end} does not follow {expected_start}: spans must cover the output")
        until = len(prompt) + end - 1
        with torch.no_grad():
            answer = model(torch.tensor([ids[fed:until]]), past_key_values=cache, use_cache=True)
        rows = answer.logits[0, start - end :].float()
        cache, fed, expected_start = answer.past_key_values, until, end
        for position, row in enumerate(rows, start):
            expected = int(row.argmax())
            gap = float(row[expected] - row[output[position]])
            if gap > TIE:
                found.append(Mismatch(position, output[position], expected, gap))
    if expected_start != len(output):
        raise ValueError(f"the spans end at {expected_start}, the output at {len(output)}")
    return found
