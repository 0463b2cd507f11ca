"""GPUs are divided among engines, none twice, and too few are said to be too few."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_launcher.errors import UsageError
from engine_launcher.gpus import divide, parallel_arguments, read_visible, sizes, visible, wanted
from engine_launcher.settings import flag_value


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0,1,2,3", ("0", "1", "2", "3")),
        (" 2 , 0 ", ("2", "0")),
        ("", ()),
        ("-1", ()),
        ("0,-1,2", ("0",)),
        ("GPU-8932f937,MIG-GPU-1/0/0", ("GPU-8932f937", "MIG-GPU-1/0/0")),
    ],
)
def test_visible_devices_are_read_as_cuda_does(text: str, devices: tuple[str, ...]) -> None:
    assert read_visible(text) == devices


def test_a_device_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="names 1 twice"):
        read_visible("1,0,1")


@pytest.mark.parametrize(
    ("extra", "needed"),
    [
        ((), 1),
        (("--tensor-parallel-size", "4"), 4),
        (("--tensor_parallel_size=4",), 4),
        (("-tp", "2", "-pp=2"), 4),
        (("--data-parallel-size", "2", "--tensor-parallel-size", "2", "--max-model-len", "8"), 4),
    ],
)
def test_an_engine_needs_the_product_of_its_parallel_sizes(extra: tuple[str, ...], needed: int) -> None:
    assert sizes(extra) == needed
    assert wanted(None, extra) == needed


@pytest.mark.parametrize("extra", [("-tp", "two"), ("--tensor-parallel-size=0",)])
def test_a_size_that_is_no_number_is_named(extra: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="--tensor-parallel-size"):
        sizes(extra)


def test_gpus_without_sizes_are_tensor_parallel() -> None:
    assert wanted(4, ("--max-model-len", "8")) == 4
    assert parallel_arguments(4, ()) == ["--tensor-parallel-size", "4"]
    assert parallel_arguments(4, ("-pp", "4")) == []
    assert parallel_arguments(1, ()) == parallel_arguments(0, ()) == []


def test_gpus_that_contradict_the_sizes_are_refused() -> None:
    assert wanted(4, ("-tp", "4")) == 4
    with pytest.raises(UsageError, match=r"--gpus-per-engine 2 does not fit.*need 4"):
        wanted(2, ("-tp", "4"))


def test_neighbours_stay_together() -> None:
    assert divide("01234567", [4, 4]) == [("0", "1", "2", "3"), ("4", "5", "6", "7")]
    assert divide("0123", [1, 2]) == [("0",), ("1", "2")]
    assert divide((), [0, 0]) == [(), ()]


@pytest.mark.parametrize(
    ("devices", "wants", "message"),
    [
        (("0", "1", "2", "3"), [4, 4], r"2 engines need 4 each, 8 GPUs in all, but 4 can be used \(0, 1, 2, 3\)"),
        (("5",), [1, 2], r"the engines need 1\+2, 3 GPUs in all, but 1 can be used \(5\)"),
        ((), [1], r"1 engines need 1 each, 1 GPUs in all, but 0 can be used: start fewer"),
    ],
)
def test_too_few_are_refused_with_the_numbers(devices: tuple[str, ...], wants: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        divide(devices, wants)


def smi(directory: Path, script: str) -> dict[str, str]:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": str(directory)}


async def test_all_that_nvidia_smi_lists_may_be_used(tmp_path: Path) -> None:
    assert await visible(smi(tmp_path, "echo 0; echo 1; echo 2")) == ("0", "1", "2")


async def test_the_variable_beats_nvidia_smi(tmp_path: Path) -> None:
    assert await visible(smi(tmp_path, "exit 1") | {"CUDA_VISIBLE_DEVICES": "3"}) == ("3",)


async def test_without_nvidia_smi_there_are_none(tmp_path: Path) -> None:
    assert await visible({"PATH": str(tmp_path)}) == ()


async def test_a_broken_driver_is_said_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="driver/library version mismatch"):
        await visible(smi(tmp_path, "echo driver/library version mismatch; exit 18"))


def test_the_last_value_of_a_flag_counts() -> None:
    assert flag_value(("--a-b=1", "--a_b", "2"), "--a-b") == "2"
    assert flag_value(("a-b", "1", "--a-b"), "--a-b") is None
