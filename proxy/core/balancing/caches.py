"""Which control calls leave an engine without its prefix cache, by the code of vLLM 0.33.

``/pause`` and ``/sleep`` end in ``EngineCore._finish_pause(clear_cache)``, which resets the caches in every mode, in
``keep`` too, whatever the docstring of the route says; ``/sleep?level=0`` only pauses. A weight update resets no cache:
what the old weights computed is still found. A trainer that asked to keep the caches (``/pause?clear_cache=false``)
means that, so prompts stay where they are; after any other update nothing that was computed before is worth finding.
"""

from __future__ import annotations

from urllib.parse import parse_qs

from proxy.core.calls import CALLS, Kind

_FALSE = frozenset({"false", "f", "no", "n", "off", "0"})
"""What pydantic reads as false in a query, in any case."""
_ALWAYS = frozenset({"/reset_prefix_cache", "/release_kv_cache_memory"})
_UPDATES = frozenset({Kind.UPDATE, Kind.FINISH})


def _last(query: str, name: str, default: str) -> str:
    """A parameter as vLLM reads it: of several the last one counts."""
    return parse_qs(query, keep_blank_values=True).get(name, [default])[-1].strip().lower()


class CacheWatch:
    """Follows the calls of a sync; one for each fleet."""

    def __init__(self) -> None:
        self._kept = False

    def empties(self, name: str, query: str) -> bool:
        """Whether a call that engines were sent has emptied their prefix caches.

        Args:
            name: of the call: its path without the first slash.
            query: of its target, without the question mark.
        """
        path = f"/{name}"
        call = CALLS.get(path)
        if path in _ALWAYS:
            return True
        if call is None:
            return False
        if call.kind is Kind.PAUSE:
            self._kept = _last(query, "clear_cache", "true") in _FALSE
            return not self._kept
        if call.kind is Kind.RESUME:
            self._kept = False
        if call.kind is Kind.SLEEP:
            return _last(query, "level", "1") != "0"
        return call.kind in _UPDATES and not self._kept
