"""Is this call the one that is running, or the one that just ended?

A trainer whose connection broke sends its call again. A second ``/update_weights`` into a collective that is half done
would hang every worker, so a call with the same path, query and body gets the answer of the first one:

- while the first one runs, every life-cycle call joins it;
- when it ended less than a window ago and no other life-cycle call came since, calls that must not run twice
  (`proxy.core.calls.ONCE`) are answered from memory, failures too. Calls that may run again do.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from proxy.core.calls import Call

_A = TypeVar("_A")


def fingerprint(method: str, path: str, query: bytes, body: bytes | None) -> bytes:
    """What makes two calls the same. A trailing slash does not count, an absent body is not an empty one."""
    digest = hashlib.sha256()
    for part in (method.encode(), path.encode(), query, b"-" if body is None else b"+" + body):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


@dataclass(slots=True)
class Memory(Generic[_A]):
    """The life-cycle call that ended last, and its answer.

    Attributes:
        window: seconds that an answer is kept for.
    """

    window: float
    _key: bytes | None = field(default=None, repr=False)
    _answer: _A | None = field(default=None, repr=False)
    _ended: float = 0.0

    def keep(self, key: bytes, answer: _A, now: float) -> None:
        """Remember the answer of a call that ended at ``now`` (seconds, monotonic)."""
        self._key, self._answer, self._ended = key, answer, now

    def forget(self) -> None:
        """Another life-cycle call came: what was remembered is no longer the last one."""
        self._key = self._answer = None

    def answer(self, call: Call, key: bytes, now: float) -> _A | None:
        """The answer to give instead of calling the engines, or None."""
        if not call.replayable or key != self._key or now - self._ended > self.window:
            return None
        return self._answer
