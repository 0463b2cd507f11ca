"""The names that vLLM gives to a request, from the client's ``X-Request-Id`` and the route.

Source: ``_base_request_id`` and its callers in vllm/entrypoints (0.33). ``/abort_requests`` takes these names only.
"""

from __future__ import annotations

_FORMS: dict[str, tuple[str, ...]] = {
    "/v1/completions": ("cmpl-{}-0",),
    "/v1/chat/completions": ("chatcmpl-{}",),
    "/v1/chat/completions/batch": ("chatcmpl-{}",),
    "/v1/messages": ("chatcmpl-{}",),
    "/v1/responses": ("resp_{}",),
    "/inference/v1/generate": ("generate-tokens-{}",),
}
_PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-", "resp_")


def engine_ids(route: str, request_id: str) -> list[str]:
    """The engine's names for a request on a route; the id itself where the route is not known."""
    forms = _FORMS.get(route.rstrip("/"), ("{}",))
    return [form.format(request_id) for form in forms]


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
