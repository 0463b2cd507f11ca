"""What an engine's ``/metrics`` tells a new proxy about the updates that it took before.

The proxy keeps nothing of its own, so after its restart only the engines can say whether an update was going on. vLLM
has no route for that, but its page counts the answers of every route (``http_requests_total``) and the weight
operations that run (``vllm:rl_weight_update_operations_in_flight``). A start opens a session in the worker; a finish
that worked or an update that failed closes it. An engine with an open session holds weights that its label does not
name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.core.admission import is_automatic
from proxy.core.calls import CALLS, custom

_ANSWERS = re.compile(rb"^http_requests_total\{([^}]*)\} ([0-9.eE+]+)", re.MULTILINE)
_RUNNING = re.compile(rb"^vllm:rl_weight_update_operations_in_flight\{([^}]*)\} ([0-9.eE+]+)", re.MULTILINE)
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
        labelled: ``/update_weight_version`` calls that it answered with 2xx.
        whole: updates by routes of their own, whole by themselves, that it answered with 2xx.
        running: weight operations that it was in the middle of.
    """

    started: int = 0
    finished: int = 0
    failed: int = 0
    labelled: int = 0
    whole: int = 0
    running: int = 0

    @property
    def open(self) -> bool:
        """Whether it is in the middle of an update round, or was when the round was given up."""
        return self.running > 0 or self.started > self.finished + self.failed

    def doubtful(self, version: str | None) -> bool:
        """Whether something went wrong once; counts do not tell whether a later round put it right.

        Args:
            version: its label. One of the proxy's own is set after each update, so fewer labels than updates leave the
                last one without.
        """
        unlabelled = version is not None and is_automatic(version) and self.labelled < self.finished + self.whole
        return self.failed > 0 or unlabelled


def read(page: bytes) -> History:
    """The counts on a Prometheus page; zeros where it has none."""
    started = finished = failed = labelled = whole = 0
    for match in _ANSWERS.finditer(page):
        labels = dict(_LABEL.findall(match[1]))
        handler, status, count = labels.get(b"handler"), labels.get(b"status", b""), int(float(match[2]))
        if status[:1] == b"2":
            started += count if handler in _STARTS else 0
            finished += count if handler == b"/finish_weight_update" else 0
            labelled += count if handler == b"/update_weight_version" else 0
            whole += count if _is_whole_update(handler) else 0
        elif status[:1] == b"5":
            failed += count if handler == b"/update_weights" else 0
    running = sum(
        int(float(match[2]))
        for match in _RUNNING.finditer(page)
        if dict(_LABEL.findall(match[1])).get(b"operation") in _CHANGING
    )
    return History(started, finished, failed, labelled, whole, running)


def _is_whole_update(handler: bytes | None) -> bool:
    path = handler.decode("latin-1") if handler is not None else ""
    return bool(path) and path not in CALLS and custom(path, None).one_shot
