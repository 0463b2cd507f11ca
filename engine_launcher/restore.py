"""The newest whole checkpoint that a trainer left in a directory.

A checkpoint counts as whole when an engine could load it and nobody is still writing it:

- ``config.json`` is there and is JSON;
- its weights are: every file that ``model.safetensors.index.json`` names, or ``model.safetensors``, or any
  ``*.safetensors`` where there is neither; each as long as its own header says (a file that was cut short is not);
- nothing in it is called like something unfinished (`PARTIAL`).

The newest is the one whose weights were written last; of two written in the same instant, the one with the higher
number in its name. Times decide rather than numbers, because a trainer that went back to an earlier step and on from
there writes lower numbers after higher ones.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PARTIAL: Final = (".tmp", ".part", ".partial", ".incomplete", ".writing", ".lock")
"""Endings of files (and of whole directories) that somebody is still writing."""

HEADER_LIMIT: Final = 100_000_000
"""Longest header in bytes that the safetensors format allows; a greater number means that it is no such file."""

SIM_MODEL: Final = "fleetgate_sim"
"""``model_type`` of a checkpoint for simulated engines: nothing but ``config.json``, with the seed of its weights."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that can be loaded."""

    path: Path
    written: int
    """Nanoseconds since the epoch at which the last of its weights was written."""
    config: dict[str, Any]

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer lies beside the weights; trainers often save weights only."""
        return any((self.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))

    @property
    def sim_seed(self) -> int | None:
        """Seed of a simulated engine's weights, or ``None`` for a real checkpoint."""
        if self.config.get("model_type") != SIM_MODEL:
            return None
        return int(self.config.get("seed", 0))


def weights_of(path: Path) -> list[Path]:
    """The files that hold the weights of a checkpoint, there or not; raises ``ValueError`` for an unreadable index."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        found = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        return sorted({path / str(name) for name in found.values()})
    single = path / "model.safetensors"
    return [single] if single.exists() else sorted(path.glob("*.safetensors"))


def is_whole(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
    try:
        with path.open("rb") as source:
            raw = source.read(8)
            (length,) = struct.unpack("<Q", raw)
            if length > HEADER_LIMIT:
                return False
            header = json.loads(source.read(length))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
        size: int = 8 + length + max(ends, default=0)
        return path.stat().st_size == size
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error):
        return False


def checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in ``path``, or ``None`` if there is none that is whole."""
    if path.name.endswith(PARTIAL) or path.name.startswith("."):
        return None
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict) or any(each.name.endswith(PARTIAL) for each in path.iterdir()):
            return None
        if config.get("model_type") == SIM_MODEL:
            return Checkpoint(path, (path / "config.json").stat().st_mtime_ns, config)
        weights = weights_of(path)
        if not weights or not all(is_whole(each) for each in weights):
            return None
        return Checkpoint(path, max(each.stat().st_mtime_ns for each in weights), config)
    except (OSError, ValueError, AttributeError):
        # Cleaned up or still being written while we look: another look will show.
        return None


def newest(directory: Path) -> Checkpoint | None:
    """The newest whole checkpoint in ``directory`` or one level below it, or ``None``."""
    candidates = [directory]
    with contextlib.suppress(OSError):
        candidates += sorted(each for each in directory.iterdir() if each.is_dir())
    found = [each for each in map(checkpoint, candidates) if each is not None]
    return max(found, key=lambda each: (each.written, _numbers(each.path.name)), default=None)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", name))
