"""The pure function behind every token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_launcher.sim import model

tokens = st.lists(st.integers(0, model.VOCAB_SIZE - 1), max_size=50)


@given(tokens, st.text())
def test_next_token_depends_on_nothing_else(context: list[int], weights: str) -> None:
    first = model.next_token(weights, context)
    assert first == model.next_token(weights, tuple(context))
    assert 0 <= first < model.VOCAB_SIZE


@given(tokens, tokens)
def test_folding_in_parts_is_folding_at_once(left: list[int], right: list[int]) -> None:
    assert model.fold_all(right, model.fold_all(left)) == model.fold_all(left + right)


@given(tokens)
def test_generate_is_next_token_repeated(prompt: list[int]) -> None:
    context = list(prompt)
    for token in model.generate("w", prompt, 20):
        assert token == model.next_token("w", context)
        context.append(token)


def test_other_weights_give_other_answers() -> None:
    prompt = list(b"hello")
    answers = {tuple(model.generate(f"w{i}", prompt, 16)) for i in range(100)}
    assert len(answers) == 100


def test_a_label_is_not_its_number() -> None:
    assert model.weights_seed("1") != model.weights_seed(1)


def test_order_of_the_context_counts() -> None:
    states = {model.fold_all(order) for order in ([1, 2, 3], [3, 2, 1], [2, 1, 3], [1, 2], [1, 2, 3, 0])}
    assert len(states) == 5


def test_the_end_comes_rarely_and_can_be_put_off() -> None:
    seed = model.weights_seed("w")
    ends = [state for state in range(200_000) if model.token_at(seed, state) == model.EOS]
    assert 50 < len(ends) < 1000
    assert all(model.token_at(seed, state, may_end=False) != model.EOS for state in ends)


def test_spans_are_checked_token_by_token() -> None:
    prompt = list(b"abc")
    head = model.generate("old", prompt, 10)
    tail = model.generate("new", prompt + head, 10)
    spans = [("old", 0, 10), ("new", 10, 20)]
    assert model.check_spans(prompt, head + tail, spans) == []
    shifted = model.check_spans(prompt, head + tail, [("old", 0, 9), ("new", 9, 20)])
    assert shifted == [9]


def test_a_token_in_no_span_is_wrong() -> None:
    prompt = list(b"abc")
    answer = model.generate("w", prompt, 4)
    assert model.check_spans(prompt, answer, [("w", 0, 3)]) == [3]


@pytest.mark.parametrize("count", [1, 2, 20, 1000])
def test_candidates_begin_with_the_chosen_one_and_fall(count: int) -> None:
    found = model.logprobs_at(7, 9, 65, count)
    assert len(found) == min(count, model.VOCAB_SIZE)
    assert found[0][0] == 65
    assert len({token for token, _ in found}) == len(found)
    values = [value for _, value in found]
    assert values == sorted(values, reverse=True)
    assert values[0] < 0


def test_checksums_differ_with_the_weights_only() -> None:
    assert model.checksums("a") == model.checksums("a")
    assert set(model.checksums("a").values()).isdisjoint(model.checksums("b").values())
    assert next(iter(model.checksums("a", "dp0:"))).startswith("dp0:model.")
