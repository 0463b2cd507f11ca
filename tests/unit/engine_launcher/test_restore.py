"""Only whole checkpoints are loaded, and of those the newest."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from engine_launcher.restore import SIM_MODEL, checkpoint, is_whole, newest


def tensors(path: Path, size: int = 8, *, short: int = 0) -> Path:
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * (size - short))
    return path


def made(path: Path, when: int = 1000, **config: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    os.utime(tensors(path / "model.safetensors"), (when, when))
    return path


def sharded(path: Path) -> Path:
    made(path)
    (path / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for each in names:
        tensors(path / each)
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[1]}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_the_newest_is_the_one_written_last_whatever_its_number(tmp_path: Path) -> None:
    made(tmp_path / "step-100", 2000)
    last = made(tmp_path / "step-50", 3000)
    made(tmp_path / "step-20", 1000)
    found = newest(tmp_path)
    assert found is not None
    assert found.path == last


def test_of_two_written_at_once_the_higher_number_wins(tmp_path: Path) -> None:
    made(tmp_path / "step-9")
    made(tmp_path / "step-10")
    found = newest(tmp_path)
    assert found is not None
    assert found.path.name == "step-10"


def test_the_directory_itself_may_be_the_checkpoint(tmp_path: Path) -> None:
    made(tmp_path / "model")
    found = newest(tmp_path / "model")
    assert found is not None
    assert found.path == tmp_path / "model"


def test_nothing_is_nothing(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None


def test_all_shards_must_be_there_and_whole(tmp_path: Path) -> None:
    path = sharded(tmp_path / "step-1")
    assert checkpoint(path) is not None
    tensors(path / "model-00002-of-00002.safetensors", short=1)
    assert checkpoint(path) is None
    (path / "model-00002-of-00002.safetensors").unlink()
    assert checkpoint(path) is None


@pytest.mark.parametrize("name", ["model.safetensors.tmp", "x.incomplete", "weights.partial", "a.lock"])
def test_what_is_still_written_is_not_whole(name: str, tmp_path: Path) -> None:
    path = made(tmp_path / "step-1")
    (path / name).write_text("")
    assert checkpoint(path) is None


@pytest.mark.parametrize("name", ["step-1.tmp", "step-1.writing", ".step-1"])
def test_a_directory_with_the_name_of_something_unfinished_is_passed_over(name: str, tmp_path: Path) -> None:
    made(tmp_path / name)
    assert newest(tmp_path) is None


@pytest.mark.parametrize("config", ["", "[]", "{", "null"])
def test_a_config_that_is_none_is_no_checkpoint(config: str, tmp_path: Path) -> None:
    path = made(tmp_path / "step-1")
    (path / "config.json").write_text(config)
    assert checkpoint(path) is None


def test_weights_without_config_or_config_without_weights(tmp_path: Path) -> None:
    path = made(tmp_path / "step-1")
    (path / "config.json").unlink()
    assert checkpoint(path) is None
    path = made(tmp_path / "step-2")
    (path / "model.safetensors").unlink()
    assert checkpoint(path) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1",
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"{}x",
        b"\2" + b"\0" * 7 + b"[]",
    ],
)
def test_what_is_no_safetensors_file_is_not_whole(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    assert not is_whole(path)


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    whole = tensors(tmp_path / "whole", 64).read_bytes()
    path = tmp_path / "cut"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert not is_whole(path), length
    path.write_bytes(whole)
    assert is_whole(path)


def test_a_checkpoint_says_whether_it_has_a_tokenizer(tmp_path: Path) -> None:
    path = made(tmp_path / "step-1")
    bare = checkpoint(path)
    assert bare is not None
    assert not bare.has_tokenizer
    (path / "tokenizer.json").write_text("{}")
    assert bare.has_tokenizer
    assert bare.sim_seed is None


def test_a_simulated_checkpoint_is_a_seed(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": SIM_MODEL, "seed": 7}))
    found = newest(tmp_path)
    assert found is not None
    assert found.sim_seed == 7
