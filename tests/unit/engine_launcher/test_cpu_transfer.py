"""The wire format of the CPU weight transfer, without torch or vLLM."""

from __future__ import annotations

import json

import pytest

from engine_launcher import cpu_transfer as wire


def layout(*shapes: tuple[int, ...], dtype: str = "bfloat16") -> wire.Layout:
    return wire.Layout.of([f"w{i}" for i in range(len(shapes))], [dtype] * len(shapes), shapes)


def test_each_tensor_starts_aligned_and_the_total_holds_them_all() -> None:
    found = layout((3,), (2, 5), ())
    assert found.offsets == (0, 16, 48)
    assert found.total == 64


def test_an_update_without_tensors_has_no_pieces() -> None:
    assert layout().chunks == 0


@pytest.mark.parametrize(("extra", "chunks"), [(-1, 1), (0, 1), (1, 2)])
def test_pieces_are_cut_at_the_chunk_size(extra: int, chunks: int) -> None:
    found = layout((wire.CHUNK_BYTES // 4 + extra * wire.ALIGNMENT,), dtype="float32")
    assert found.chunks == chunks


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="not 2, 1 and 1"):
        wire.Layout.of(["a", "b"], ["float32"], [[1]])


def test_a_dtype_that_is_not_carried_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"w0: dtype int8 .* bfloat16, float16, float32"):
        layout((1,), dtype="int8")


def test_a_head_of_the_same_layout_passes() -> None:
    layout((3,)).check_head(layout((3,)).head())


@pytest.mark.parametrize("other", [layout((4,)), layout((3,), dtype="float16"), layout((3,), (1,))])
def test_a_head_of_another_layout_is_found_out(other: wire.Layout) -> None:
    with pytest.raises(wire.TransferError, match="send names, dtype_names and shapes in full"):
        layout((3,)).check_head(other.head())


def test_a_round_that_has_ended_says_why() -> None:
    with pytest.raises(wire.TransferError, match="the trainer ended the round: it is over"):
        layout((3,)).check_head(wire.refused("it is over"))


def test_the_head_announces_what_follows() -> None:
    found = layout((3,))
    assert json.loads(found.head()[1:]) == {"digest": found.digest(), "bytes": 16, "chunks": 1}


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_limit_that_is_no_positive_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(wire.TIMEOUT_VARIABLE, text)
    with pytest.raises(wire.TransferError, match=wire.TIMEOUT_VARIABLE):
        wire.timeout()


def test_the_limit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.TIMEOUT_VARIABLE, "2.5")
    assert wire.timeout() == 2.5
    monkeypatch.delenv(wire.TIMEOUT_VARIABLE)
    assert wire.timeout() == wire.DEFAULT_TIMEOUT


class Store:
    """A store in memory: what is missing times out, unless the connection is down."""

    def __init__(self, values: dict[str, bytes], down: bool = False) -> None:
        self.values = values
        self.down = down

    def wait(self, keys: list[str], limit: object) -> None:
        if self.down:
            raise RuntimeError("Connection reset by peer")
        if any(key not in self.values for key in keys):
            raise RuntimeError("Wait timeout")

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_values_come_in_the_order_of_the_keys() -> None:
    assert wire.wait_for(Store({"a": b"1", "b": b"2"}), ["b", "a"], 1, "both") == [b"2", b"1"]


def test_a_wait_that_ends_says_what_for_and_how_long() -> None:
    with pytest.raises(wire.TransferError, match=r"waiting for rank 2 \(joined/2\): nothing came within 1.5 s"):
        wire.wait_for(Store({}), ["joined/2"], 1.5, "rank 2")


def test_a_trainer_that_is_gone_is_told_from_one_that_is_slow() -> None:
    with pytest.raises(wire.TransferError, match="connection to the trainer failed"):
        wire.wait_for(Store({}, down=True), ["round"], 1, "the trainer")


def test_ranks_that_have_not_joined_are_listed() -> None:
    store = Store({"joined/1": b"+"})
    wire.check_joined(store, 2)
    with pytest.raises(wire.TransferError, match=r"of a group of 4 these ranks have not joined: \[2, 3\]"):
        wire.check_joined(store, 4)
