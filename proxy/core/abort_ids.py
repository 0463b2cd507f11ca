"""The names that vLLM gives to a request, from the client's ``X-Request-Id`` and the route.

Source: ``_base_request_id`` and its callers in vllm/entrypoints (0.33). ``/abort_requests`` takes these names only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import orjson

_PROMPT = b'"prompt"'
_SEVERAL = re.compile(_PROMPT + rb'\s*:\s*\[\s*["\[]')
_COMPLETIONS = "/v1/completions"
_COMPLETIONS_PATH = _COMPLETIONS.encode("ascii")
_FORMS = {
    "/v1/chat/completions": "chatcmpl-{}",
    "/v1/chat/completions/batch": "chatcmpl-{}",
    "/v1/messages": "chatcmpl-{}",
    "/v1/responses": "resp_{}",
    "/inference/v1/generate": "generate-tokens-{}",
}
_PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-", "resp_")


def engine_ids(route: str, request_id: str, prompts: int = 1) -> list[str]:
    """The engine's names for a request on a route; the id itself where the route is not known.

    Args:
        route: path.
        request_id: ``X-Request-Id``.
        prompts: of a completion: each has a name of its own.
    """
    route = route.rstrip("/")
    if route == _COMPLETIONS:
        return [f"cmpl-{request_id}-{index}" for index in range(prompts)]
    return [_FORMS.get(route, "{}").format(request_id)]


def count_prompts(body: bytes) -> int:
    """Prompts of a completion: a list of texts or of token lists holds several. 1 where it cannot be told."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return 1
    prompt = data.get("prompt") if isinstance(data, dict) else None
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return len(prompt)
    return 1


def count_streamed(path: bytes, body: Sequence[bytes]) -> int:
    """Prompts of a request whose body is about to be forgotten because its stream begins.

    Only what looks like a list of prompts is parsed: a list of tokens, however long, is passed over.

    Args:
        path: of the request.
        body: its pieces.
    """
    if not path.startswith(_COMPLETIONS_PATH):
        return 1
    whole = b"".join(body)
    place = whole.find(_PROMPT)
    while place >= 0:
        if _SEVERAL.match(whole, place):
            return count_prompts(whole)
        place = whole.find(_PROMPT, place + len(_PROMPT))
    return 1


def candidates(name: str) -> list[str]:
    """The ``X-Request-Id`` values that a name may stand for, the name itself first."""
    out = [name]
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            head, _, index = rest.rpartition("-")
            if prefix == "cmpl-" and head and index.isdecimal():
                out.append(head)
            out.append(rest)
            break
    return out
