"""A byte-level tokenizer with the vocabulary of the tiny real model: token id = byte value, then three specials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine_launcher.sim.model import BOS, EOS, PAD, VOCAB_SIZE

_SPECIAL = {BOS: "<s>", EOS: "</s>", PAD: "<pad>"}


def _byte_symbols() -> list[str]:
    """Return the printable stand-in of each byte value that byte-level BPE vocabularies use."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {value: chr(value) for value in printable}
    spare = 0x100
    for value in range(256):
        if value not in symbols:
            symbols[value] = chr(spare)
            spare += 1
    return [symbols[value] for value in range(256)]


_SYMBOLS = _byte_symbols()


def encode(text: str) -> list[int]:
    """Return the token ids of ``text``: its UTF-8 bytes."""
    return list(text.encode("utf-8", "surrogatepass"))


def decode(tokens: Iterable[int], *, skip_special: bool = True) -> str:
    """Return the text of ``tokens``; bytes that are not UTF-8 become U+FFFD, as they do in a real tokenizer."""
    parts: list[str] = []
    raw = bytearray()
    for token in tokens:
        if token < BOS:
            raw.append(token)
            continue
        if raw:
            parts.append(raw.decode("utf-8", "replace"))
            raw.clear()
        if not skip_special:
            parts.append(_SPECIAL.get(token, ""))
    parts.append(raw.decode("utf-8", "replace"))
    return "".join(parts)


def piece(token: int) -> str:
    """Return one token as text, the way it is named in ``logprobs``."""
    if token >= BOS:
        return _SPECIAL.get(token, "")
    return bytes((token,)).decode("utf-8", "replace")


def symbol(token: int) -> str | None:
    """Return the vocabulary entry of ``token`` (``token_strs`` of ``/tokenize``), or None outside the vocabulary."""
    if token < BOS:
        return _SYMBOLS[token]
    return _SPECIAL.get(token)


def in_vocabulary(token: int) -> bool:
    """Say whether the model has an embedding for ``token``."""
    return 0 <= token < VOCAB_SIZE


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return ""


def render_chat(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
    """Return the prompt of a conversation under a one-line chat template."""
    lines = [f"{message.get('role', 'user')}: {_text_of(message.get('content'))}\n" for message in messages]
    if add_generation_prompt:
        lines.append("assistant: ")
    return "".join(lines)
