"""Makes a tiny Llama with seeded random weights and a byte-level tokenizer, so that nothing is downloaded.

Runs in the engine environment: ``python -m engine_launcher.tiny_model PATH [--seed N] [--layers N ...]``. The weights
are a pure function of the seed and the shapes, so a trainer can make a second set for a sync, or a check the same set
again, from two numbers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

RECIPE: Final = "fleetgate-tiny.json"
"""File in the model's directory that says how it was made; the same recipe is not made twice."""

RECIPE_VERSION: Final = 1
"""Raised whenever the same recipe would give other weights or another tokenizer."""

BYTES: Final = 256
SPECIAL: Final = ("<s>", "</s>", "<pad>")
"""Tokens 256, 257 and 258; the tokens below are the bytes themselves."""

VOCABULARY: Final = BYTES + len(SPECIAL)

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

LOGIT_SCALE: Final = 4.0
"""Standard deviation of the logits: far enough apart that the greedy choice seldom hangs on the last bit."""

ATTENTION_GAIN: Final = 2.0
"""Factor on query and key weights. Sharper attention makes each token depend on the whole context; without it greedy
output soon repeats one token, which would prove little about the weights that produced it."""


@dataclass(frozen=True, slots=True)
class TinySize:
    """Shapes of the model; the defaults hold 0.2 million parameters."""

    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    positions: int = 4096
    """Longest context, in tokens."""

    def check(self) -> None:
        """Raise ``ValueError`` for shapes that no Llama can have."""
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")


def llama_config(size: TinySize) -> Any:
    """The ``transformers`` configuration of these shapes."""
    from transformers import LlamaConfig  # noqa: PLC0415 - only where the engine environment is

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.positions,
        tie_word_embeddings=False,
        bos_token_id=BYTES,
        eos_token_id=BYTES + 1,
        pad_token_id=BYTES + 2,
        dtype="bfloat16",
    )


def tiny_weights(shapes: Sequence[tuple[str, tuple[int, ...]]], seed: int) -> dict[str, Any]:
    """Random bfloat16 tensors for ``(name, shape)`` pairs, the same for the same seed, shapes and order.

    The special tokens get the logit 0, which never wins: a rollout runs to its ``max_tokens`` unless a ``stop`` string
    ends it.
    """
    import torch  # noqa: PLC0415 - only where the engine environment is

    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    for name, shape in shapes:
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        if len(shape) == 1:
            value = 1.0 + 0.1 * noise
        elif "embed_tokens" in name:
            value = noise
        elif "lm_head" in name:
            value = noise * (LOGIT_SCALE / shape[-1] ** 0.5)
            value[BYTES:] = 0.0
        else:
            gain = ATTENTION_GAIN if "q_proj" in name or "k_proj" in name else 1.0
            value = noise * (gain / shape[-1] ** 0.5)
        found[name] = value.to(torch.bfloat16)
    return found


def tiny_model(size: TinySize, seed: int) -> Any:
    """A ``LlamaForCausalLM`` in bfloat16 with the weights of ``seed``."""
    import torch  # noqa: PLC0415 - only where the engine environment is
    from transformers import LlamaForCausalLM  # noqa: PLC0415

    model = LlamaForCausalLM(llama_config(size)).to(torch.bfloat16)
    reseed(model, seed)
    return model.eval()


def set_weights(model: Any, weights: dict[str, Any]) -> None:
    """Copy ``weights`` into the parameters of the same names."""
    import torch  # noqa: PLC0415 - only where the engine environment is

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def reseed(model: Any, seed: int) -> None:
    """Give a model the weights of another seed, in place, as a trainer's optimiser step would change them."""
    set_weights(model, tiny_weights([(name, tuple(each.shape)) for name, each in model.named_parameters()], seed))


def byte_characters() -> list[str]:
    """The character that a byte-level tokenizer writes for each byte, by byte value (GPT-2's table)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in plain else next(spare)) for byte in range(BYTES)]


def byte_tokenizer() -> Any:
    """One token a byte, with the byte's value as its id, and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - as above
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary |= {token: BYTES + index for index, token in enumerate(SPECIAL)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    begin, end, pad = SPECIAL
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=begin, eos_token=end, pad_token=pad)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make(path: Path, size: TinySize, seed: int) -> bool:
    """Write the model to ``path``; ``False`` when it is there already. An unfinished one never has the final name.

    Raises ``FileExistsError`` when something else is there.
    """
    size.check()
    recipe = {"version": RECIPE_VERSION, "seed": seed, **asdict(size)}
    if path.exists():
        try:
            known = json.loads((path / RECIPE).read_text())
        except (OSError, ValueError):
            raise FileExistsError(f"{path} holds something else than a tiny model; choose another path") from None
        if known == recipe:
            return False
    scratch = path.with_name(path.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    tiny_model(size, seed).save_pretrained(scratch)
    byte_tokenizer().save_pretrained(scratch)
    (scratch / RECIPE).write_text(json.dumps(recipe, indent=1) + "\n")
    shutil.rmtree(path, ignore_errors=True)
    scratch.rename(path)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: 0 when the model is there, 2 for a wrong size or a path that holds something else."""
    defaults = TinySize()
    parser = argparse.ArgumentParser(prog="python -m engine_launcher.tiny_model", description=__doc__)
    parser.add_argument("path", type=Path, help="directory to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    args = parser.parse_args(argv)
    try:
        size = TinySize(**{name: getattr(args, name) for name in asdict(defaults)})
        made = make(args.path, size, args.seed)
    except (ValueError, FileExistsError) as error:
        print(f"tiny model: {error}", file=sys.stderr)  # noqa: T201 - a command line tool
        return 2
    print(f"tiny model: {args.path} {'made' if made else 'is there already'} (seed {args.seed})")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
