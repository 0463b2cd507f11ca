"""What an engine's answers to small questions say; None where it did not say, or not in the form that vLLM has."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.data.upstream import Answer
from proxy.fleet.engine import Engine


def fields_of(answer: Answer | None) -> dict[str, Any]:
    """The fields of a JSON object that was answered with 200; none of anything else."""
    if answer is None or answer.status != 200:
        return {}
    try:
        data = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}


def version_of(answer: Answer | None) -> str | None:
    """The label in an answer of ``GET /weight_info``."""
    version = fields_of(answer).get("weight_version")
    return None if version is None else str(version)


def paused_of(answer: Answer | None) -> bool | None:
    """Whether generation is paused, from ``GET /is_paused``."""
    paused = fields_of(answer).get("is_paused")
    return paused if isinstance(paused, bool) else None


def world_size_of(answer: Answer | None) -> int | None:
    """Workers of the server, from ``GET /get_world_size``."""
    size = fields_of(answer).get("world_size")
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


async def nothing(engine: Engine, target: str) -> Answer | None:  # noqa: ARG001 - stands in for a question
    """What an engine says that is not asked."""
    return None
