"""The model of the GPU run: random weights made on the GPU itself, conditioned so that bfloat16 decides its tokens.

``python weights.py PATH --shape '{"hidden": 2048, ...}'`` writes it. The recipe of ``engine_launcher.tiny_model`` is meant
for two layers: at sixteen its sharp attention makes the network chaotic, and two bfloat16 implementations of the same
weights then disagree on every fourth greedy token. Here each layer adds little to what it is given.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

BRANCH_GAIN: Final = 0.2
"""Factor on what attention and feed-forward add to the residual stream."""

LOGIT_SCALE: Final = 6.0
"""Standard deviation of the logits, so that near ties are rare."""

BYTES: Final = 256


def weights(shapes: Sequence[tuple[str, tuple[int, ...]]], seed: int, device: str) -> dict[str, Any]:
    """Random bfloat16 tensors by name, the same for the same seed, shapes and kind of device."""
    import torch

    generator = torch.Generator(device).manual_seed(seed + 1)
    found: dict[str, Any] = {}
    for name, shape in shapes:
        noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        if len(shape) == 1:
            value = 1.0 + 0.1 * noise
        elif "embed_tokens" in name:
            value = noise
        elif "lm_head" in name:
            value = noise * (LOGIT_SCALE / shape[-1] ** 0.5)
            value[BYTES:] = 0.0
        else:
            gain = BRANCH_GAIN if "o_proj" in name or "down_proj" in name else 1.0
            value = noise * (gain / shape[-1] ** 0.5)
        found[name] = value.to(torch.bfloat16)
    return found


def put(model: Any, values: dict[str, Any]) -> None:
    """Copy tensors into the parameters of the same names."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def shapes_of(model: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter."""
    return [(name, tuple(each.shape)) for name, each in model.named_parameters()]


def main() -> int:
    """Write the model of seed 0."""
    import torch
    from transformers import LlamaForCausalLM

    from engine_launcher.tiny_model import TinySize, byte_tokenizer, llama_config

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--shape", type=json.loads, required=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = LlamaForCausalLM(llama_config(TinySize(**args.shape))).to(torch.bfloat16)
    put(model, weights(shapes_of(model), 0, device))
    model.save_pretrained(args.path)
    byte_tokenizer().save_pretrained(args.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
