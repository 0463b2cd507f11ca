"""A fleet's settings: what cannot work is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_launcher.errors import UsageError
from engine_launcher.settings import MAX_ENGINES, FleetSpec, has_flag


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "--count 0"),
        ({"count": MAX_ENGINES + 1}, "--count"),
        ({"ready_wait": 0.0}, "--ready-wait 0"),
        ({"stop_grace": -1.0}, "--stop-grace -1"),
    ],
)
def test_numbers_out_of_range_are_named(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FleetSpec(**{"count": 1, "kind": "sim", **change}).check()


def test_a_simulated_engine_needs_no_model() -> None:
    FleetSpec(count=1, kind="sim").check()


def test_vllm_needs_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--model is missing"):
        FleetSpec(count=1).check()
    with pytest.raises(UsageError, match="is not a directory here"):
        FleetSpec(count=1, model=tmp_path / "absent").check()
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        FleetSpec(count=1, model=tmp_path).check()
    (tmp_path / "config.json").write_text("{}")
    FleetSpec(count=1, model=tmp_path).check()


@pytest.mark.parametrize(
    "given", ["--max-model-len", "--max-model-len=9", "--max_model_len", "--no-max-model-len", "--max_model_len=9"]
)
def test_a_flag_is_seen_in_every_spelling(given: str) -> None:
    assert has_flag(("--other", given), "--max-model-len")


def test_a_value_or_another_flag_is_not_the_flag() -> None:
    assert not has_flag(("max-model-len", "--max-model-length", "--max"), "--max-model-len")
