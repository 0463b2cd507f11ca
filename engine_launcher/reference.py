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
    spans: Sequence[tuple[Any, int, int]], prompt: Sequence[int], output: Sequence[int], *, kept_cache: bool = False
) -> list[Mismatch]:
    """The same for an output that several sets of weights produced: ``(model, start, end)`` for each in turn.

    vLLM 0.33 computes a frozen request's keys and values anew after ``/pause?mode=keep``, so each model is asked about
    the whole context before a token. After ``clear_cache=false`` it keeps what the old weights computed, and the new
    ones choose on top of that: with ``kept_cache`` the judge does likewise, with one cache that each model fills for
    the tokens that went through it (the last token before a border has not: it is the next model's first input).

    One forward pass for each span, so each token is judged in its own context: one wrong token does not condemn those
    after it. ``prompt`` must not be empty. Raises ``ValueError`` for spans that do not cover the output.
    """
    import torch  # noqa: PLC0415 - only where the engine environment is

    ids = [*prompt, *output]
    found: list[Mismatch] = []
    cache, fed, covered = None, 0, 0
    for model, start, end in spans:
        if start != covered or end <= start:
            raise ValueError(f"span {start} to {end} does not follow {covered}: spans must cover the output")
        until = len(prompt) + end - 1
        with torch.no_grad():
            answer = model(torch.tensor([ids[fed:until]]), past_key_values=cache, use_cache=kept_cache)
        covered = end
        if kept_cache:
            cache, fed = answer.past_key_values, until
        for position, row in enumerate(answer.logits[0, start - end :].float(), start):
            expected = int(row.argmax())
            gap = float(row[expected] - row[output[position]])
            if gap > TIE:
                found.append(Mismatch(position, output[position], expected, gap))
    if covered != len(output):
        raise ValueError(f"the spans end at {covered}, the output at {len(output)}")
    return found
