"""Reduces an answer to its shape, and compares it with what real vLLM was recorded to answer.

A shape keeps keys, their order, types, and every text that is part of the protocol; what differs from run to run
(tokens, ids, times) becomes the name of its type. Equal neighbours in a list or a stream count once: how many tokens
share a chunk is a matter of timing.

``pytest tests/contract -m vllm --record`` writes the records anew from the real server.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from .wire import Answer

RECORDS = Path(__file__).parent / "records"

VOLATILE = frozenset(
    {
        "id", "item_id", "request_id", "created", "created_at", "text", "content", "delta", "token", "tokens", "logprob",
        "token_logprobs", "text_offset", "token_id", "token_ids", "prompt_token_ids", "rank", "start", "end", "original_input_tokens",
        "system_fingerprint", "root", "prompt_tokens", "completion_tokens", "total_tokens", "input_tokens",
        "output_tokens", "cached_tokens", "prompt", "count", "token_strs", "server_load", "sequence_number",
        "max_output_tokens", "aborted",
    }
)  # fmt: skip
"""Keys whose scalar values differ from run to run."""

OPEN = frozenset({"top_logprobs", "checksums", "mismatches"})
"""Keys of objects whose own keys are data; the entries of other dialects under these keys have a key ``token``."""

OPAQUE = frozenset({"vllm_env", "system_env", "vllm_config", "bytes", "token_ids"})
"""Keys of which only the type of the value is compared: data, or how many tokens share a chunk."""

ENGINE_CLASS = re.compile(r"\b\w+WeightTransferEngine\b")
"""Transfer backends name their own class in errors."""


def shape(value: Any, key: str = "") -> Any:
    """The shape of a JSON value that stood under ``key``."""
    if key in OPAQUE:
        return f"<{type(value).__name__}>"
    if isinstance(value, dict):
        if key in OPEN and not value.keys() & {"token", "token_id"}:
            return {"*": collapse([shape(item, "*") for item in value.values()])[:1]}
        return {name: shape(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return collapse([shape(item, key) for item in value])
    if value is None or isinstance(value, bool):
        return value
    if key in VOLATILE or key in OPEN or key == "*":
        return f"<{type(value).__name__}>"
    return ENGINE_CLASS.sub("<engine class>", value) if isinstance(value, str) else value


def collapse(items: list[Any]) -> list[Any]:
    """The list without repetitions of the item before."""
    found: list[Any] = []
    for item in items:
        if not found or found[-1] != item:
            found.append(item)
    return found


def shape_of(answer: Answer) -> dict[str, Any]:
    """The shape of a whole answer."""
    found: dict[str, Any] = {"status": answer.status, "media_type": answer.media_type, "whole": answer.whole}
    if answer.media_type == "text/event-stream":
        found["events"] = collapse([[name, shape(data)] for name, data in answer.events()])
    elif answer.media_type == "application/json":
        found["json"] = shape(answer.json())
    else:
        found["text"] = answer.body.decode()
    return found


def check(name: str, answer: Answer, *, record: bool) -> None:
    """Compare with the record called ``name``, or write it. Key order counts: people read JSON too."""
    path = RECORDS / f"{name}.json"
    found = json.dumps(shape_of(answer), indent=1, ensure_ascii=False) + "\n"
    if record:
        RECORDS.mkdir(exist_ok=True)
        path.write_text(found)
        return
    assert path.exists(), f"real vLLM was never recorded for {name}; run pytest tests/contract -m vllm --record"
    wanted = path.read_text()
    if found != wanted:
        lines = difflib.unified_diff(wanted.splitlines(), found.splitlines(), "recorded", "found", lineterm="", n=2)
        pytest.fail(f"{name} is not what real vLLM was recorded to answer:\n" + "\n".join(lines))
