"""What an engine's ``/metrics`` tells a new proxy about the updates that it took before.

The proxy keeps nothing of its own, so after its restart only the engines can say whether an update was going on. vLLM
has no route for that, but its page counts the answers of every route (``http_requests_total``) and the weight
operations that run (``vllm:rl_weight_update_operations_in_flight``). A start opens a session in the worker; a finish
that worked or an update that failed closes it. An engine with an open session holds weights that its label does not
name. What no session tells, the label does (`proxy.core.marks`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ANSWERS = re.compile(rb"^http_requests_total\{([^}]*)\} ([0-9.eE+]+)", re.MULTILINE)
_RUNNING = re.compile(rb"^vllm:rl_weight_update_operations_in_flight\{([^}]*)\} ([0-9.eE+]+)", re.MULTILINE)
_SLEEP = re.compile(rb"^vllm:engine_sleep_state\{([^}]*)\} ([0-9.eE+]+)", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')
_CHANGING = frozenset({b"start", b"start_draft", b"update", b"finish"})
_STARTS = (b"/start_weight_update", b"/start_draft_weight_update")


@dataclass(frozen=True, slots=True)
class History:
    """Counts of one process since it started.

    Attributes:
        started: starts that it answered with 2xx.
        finished: finishes that it answered with 2xx.
        failed: updates that it answered with 5xx; vLLM closes the session then.
        running: weight operations that it was in the middle of.
        asleep: what it sleeps with, as in `Engine.asleep`.
        paused: generation was paused there when the counts were read, or it did not say.
        counted: the page has counts at all.
    """

    started: int = 0
    finished: int = 0
    failed: int = 0
    running: int = 0
    asleep: frozenset[str] = frozenset()
    paused: bool = False
    counted: bool = False

    @property
    def open(self) -> bool:
        """Whether it is in the middle of an update round, or was when the round was given up."""
        return self.running > 0 or self.started > self.finished + self.failed

    @property
    def behind(self) -> bool:
        """Whether some round did not end well, or may be open: updates that fail outside any hide an open one."""
        return self.running > 0 or self.started > self.finished


def read(page: bytes) -> History:
    """The counts on a Prometheus page; zeros where it has none."""
    started = finished = failed = 0
    answers = list(_ANSWERS.finditer(page))
    for match in answers:
        labels = dict(_LABEL.findall(match[1]))
        handler, status, count = labels.get(b"handler"), labels.get(b"status", b""), int(float(match[2]))
        if status[:1] == b"2":
            started += count if handler in _STARTS else 0
            finished += count if handler == b"/finish_weight_update" else 0
        elif status[:1] == b"5":
            failed += count if handler == b"/update_weights" else 0
    running = sum(
        int(float(match[2]))
        for match in _RUNNING.finditer(page)
        if dict(_LABEL.findall(match[1])).get(b"operation") in _CHANGING
    )
    sleep = {dict(_LABEL.findall(match[1])).get(b"sleep_state"): float(match[2]) > 0 for match in _SLEEP.finditer(page)}
    asleep: frozenset[str] = frozenset()
    if sleep.get(b"awake") is False:
        weights = sleep.get(b"weights_offloaded") or sleep.get(b"discard_all")
        asleep = frozenset({"weights", "kv_cache"} if weights else {"kv_cache"})
    return History(started, finished, failed, running, asleep, counted=bool(answers))
