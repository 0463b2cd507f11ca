"""Faults that a test switches on while an engine runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

Action = Literal[
    "status",
    "hang",
    "delay",
    "cut",
    "reset",
    "garbage",
    "error_event",
    "success_false",
    "die",
    "engine_dead",
]
ACTIONS: tuple[str, ...] = get_args(Action)
_FIELDS = frozenset(
    {
        "path",
        "method",
        "action",
        "when",
        "status",
        "body",
        "headers",
        "seconds",
        "after_bytes",
        "after_tokens",
        "times",
        "probability",
    }
)


@dataclass(slots=True, kw_only=True)
class Fault:
    """One rule: what happens to which requests.

    Attributes:
        path: exact path, or a glob as ``/v1/*``; ``*`` is every path but the admin ones.
        action: ``status`` answers ``status``, ``headers`` and ``body`` · ``hang`` never answers (or not for
            ``seconds``, then the connection is closed) · ``delay`` waits ``seconds`` and goes on · ``cut`` closes the
            connection · ``reset`` closes it with RST · ``garbage`` writes bytes that are not HTTP · ``error_event``
            puts an error event into a stream and ends it cleanly · ``success_false`` answers ``{"success": false}`` ·
            ``die`` ends the server as SIGKILL would · ``engine_dead`` kills the engine process behind the API server.
        method: only this HTTP method; None is all.
        when: ``before`` the request is carried out, or ``after`` (it took effect, its answer is what fails).
        after_bytes: bytes of the response body after which the action strikes; None strikes at the start.
        after_tokens: stream chunks that carry tokens after which the action strikes.
        times: how often it still strikes; None is for ever.
        probability: of striking, for each matching request.
        seconds: of a ``delay`` or a ``hang``; None hangs until the client goes away.
        status: of ``status`` and ``error_event``.
        body: text, or a value that is sent as JSON.
        headers: more headers of ``status``.

    """

    path: str
    action: Action
    method: str | None = None
    when: Literal["before", "after"] = "before"
    after_bytes: int | None = None
    after_tokens: int | None = None
    times: int | None = None
    probability: float = 1.0
    seconds: float | None = None
    status: int = 500
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def mid_body(self) -> bool:
        """Whether it strikes inside the response body."""
        return self.after_bytes is not None or self.after_tokens is not None

    def matches(self, method: str, path: str) -> bool:
        """Say whether the rule is about this request."""
        if self.times is not None and self.times <= 0:
            return False
        if self.method is not None and self.method.upper() != method:
            return False
        return fnmatchcase(path, self.path)


def parse_fault(raw: Any) -> Fault:
    """Read one rule.

    Raises:
        TypeError: not an object.
        ValueError: an unknown field or action; the message names what would be right.

    """
    if not isinstance(raw, dict):
        raise TypeError(f"a fault is a JSON object with 'path' and 'action', not {type(raw).__name__}")
    unknown = sorted(set(raw) - _FIELDS)
    if unknown:
        raise ValueError(f"unknown fault fields {unknown}; there are {sorted(_FIELDS)}")
    if raw.get("action") not in ACTIONS:
        raise ValueError(f"unknown fault action {raw.get('action')!r}; there are {list(ACTIONS)}")
    if raw.get("when", "before") not in ("before", "after"):
        raise ValueError(f"a fault strikes 'before' or 'after', not {raw['when']!r}")
    return Fault(**{"path": "*", **raw})


class Faults:
    """The rules in force; the first that matches and strikes is the one."""

    def __init__(self, seed: int = 0) -> None:
        self.rules: list[Fault] = []
        self._random = random.Random(seed)

    def replace(self, rules: list[Fault]) -> None:
        """Put these rules in force instead of all others."""
        self.rules = rules

    def strike(self, method: str, path: str) -> Fault | None:
        """Return the rule that strikes this request, and count it."""
        for rule in self.rules:
            if rule.matches(method, path) and (rule.probability >= 1.0 or self._random.random() < rule.probability):
                if rule.times is not None:
                    rule.times -= 1
                return rule
        return None
