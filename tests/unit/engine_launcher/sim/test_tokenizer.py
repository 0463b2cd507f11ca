"""The byte-level tokenizer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_launcher.sim import tokenizer
from engine_launcher.sim.model import BOS, EOS, PAD


@given(st.text())
def test_text_survives(text: str) -> None:
    if text.isprintable():
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_token_is_a_byte() -> None:
    assert tokenizer.encode("é") == [0xC3, 0xA9]


def test_specials_are_shown_or_not() -> None:
    tokens = [BOS, 72, EOS, PAD, 105]
    assert tokenizer.decode(tokens) == "Hi"
    assert tokenizer.decode(tokens, skip_special=False) == "<s>H</s><pad>i"


def test_broken_bytes_become_the_replacement_character() -> None:
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.piece(0xC3) == "\ufffd"


def test_vocabulary_entries_are_those_of_byte_level_bpe() -> None:
    assert [tokenizer.symbol(token) for token in (65, 32, 10, EOS, 259)] == ["A", "Ġ", "Ċ", "</s>", None]


def test_chat_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    assert tokenizer.render_chat(messages) == "system: s\nuser: ab\nassistant: "
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "system: s\nuser: ab\n"
