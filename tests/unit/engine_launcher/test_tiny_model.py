"""The tiny model's parts that need no torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_launcher.tiny_model import RECIPE, TinySize, byte_characters, main


def test_every_byte_has_its_own_printable_character() -> None:
    found = byte_characters()
    assert len(set(found)) == 256
    assert all(character.isprintable() and not character.isspace() for character in found)
    assert found[ord("A")] == "A"
    assert found[ord(" ")] == "Ġ"


@pytest.mark.parametrize("change", [{"layers": 0}, {"hidden": -1}, {"heads": 3, "kv_heads": 2}])
def test_shapes_that_no_llama_has_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        TinySize(**change).check()


def test_a_path_that_holds_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("x")
    assert main([str(tmp_path)]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "x"


def test_the_same_recipe_is_not_made_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = {"version": 1, "seed": 3, "hidden": 64, "intermediate": 128, "layers": 2, "heads": 4, "kv_heads": 2}
    (tmp_path / RECIPE).write_text(json.dumps({**recipe, "head_dim": 32, "positions": 4096}))
    assert main([str(tmp_path), "--seed", "3"]) == 0
    assert "is there already" in capsys.readouterr().out
