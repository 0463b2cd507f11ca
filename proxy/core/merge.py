"""Many engines' answers to one control call become one answer, in the shape that a single vLLM server gives.

Pure functions of the legs. A leg is one engine's part of a call; what became of it is an `Outcome`. If all legs went
well their bodies are merged by the rule of the call; if all engines refused for the same 4xx the trainer made a mistake
and gets that answer as it is; everything else is a partial failure that names the engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from proxy.core.calls import Call, Kind, Merge

REPORT_BODY_LIMIT = 65_536
"""Bytes of one engine's body in a report; checksums of a large model times many engines would be megabytes."""


class Outcome(StrEnum):
    """What became of one leg."""

    ANSWERED = "answered"
    UNSUCCESSFUL = "unsuccessful"
    """``{"success": false}`` inside a 200."""
    REFUSED = "refused"
    """A status of 300 or more: the engine itself said no, and what it said tells how far it got."""
    MISSING = "missing"
    """404 or 405: the route does not exist there."""
    UNREACHABLE = "unreachable"
    """No connection: the engine saw nothing."""
    DIED = "died"
    """The connection broke: the engine may have done it, or half of it."""
    TIMED_OUT = "timed_out"
    """No answer within the limit: likewise."""
    ABANDONED = "abandoned"
    """Nobody waits for it any more, because ``/resume`` came; likewise."""


_MAY_FAIL = frozenset({Kind.PLAIN, Kind.READ, Kind.CHECK, Kind.ABORT, Kind.CUSTOM})
"""Calls whose ``{"success": false}`` from everybody is an answer like another: nothing hangs on it. Weights, pauses and
adapters do: there it is a failure of each engine that says so."""

UNCERTAIN = frozenset({Outcome.DIED, Outcome.TIMED_OUT, Outcome.ABANDONED})
"""The engine may have done any part of it."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One engine's part of a call.

    Attributes:
        engine: its id.
        outcome: what became of it.
        status: HTTP status, or None without an answer.
        body: of the answer.
        content_type: of the answer, or empty.
        seconds: from the start of the leg to its end.
        detail: for people, where there is no answer.
    """

    engine: str
    outcome: Outcome
    status: int | None = None
    body: bytes = b""
    content_type: str = ""
    seconds: float = 0.0
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the engine did what was asked."""
        return self.outcome is Outcome.ANSWERED

    def json(self) -> Any:
        """The body as JSON, or None."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    def said(self) -> str:
        """What went wrong, in a few words."""
        if self.status is None:
            return f"{self.outcome}: {self.detail}" if self.detail else str(self.outcome)
        return f"{self.status} {error_text(self.body)}".strip()


@dataclass(frozen=True, slots=True)
class Merged:
    """One answer for the trainer.

    Attributes:
        status: HTTP status.
        body: as it is sent.
        content_type: of the body.
        failed: the legs that make it a failure; empty if all went well.
        passed: all engines refused alike, so nobody is to blame but the request; the answer is theirs.
    """

    status: int
    body: bytes
    content_type: str = "application/json"
    failed: tuple[Leg, ...] = ()
    passed: bool = False

    @property
    def ok(self) -> bool:
        """Whether every engine did it."""
        return not self.failed and not self.passed


def error_text(body: bytes, limit: int = 300) -> str:
    """The message inside an engine's error body, in any of the shapes vLLM has."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:limit].decode("utf-8", "replace")
    found = data
    if isinstance(data, dict):
        found = data.get("error", data.get("detail", data.get("message", data)))
        if isinstance(found, dict):
            found = found.get("message", found)
    text = found if isinstance(found, str) else orjson.dumps(found).decode()
    return text[:limit]


def outcome_of(call: Call, status: int, body: bytes) -> Outcome:
    """What an answer means."""
    if status in (404, 405) and _route_is_missing(call, body):
        return Outcome.MISSING
    if not 200 <= status < 300:
        return Outcome.REFUSED
    if b'"success"' in body and len(body) <= REPORT_BODY_LIMIT:
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError:
            return Outcome.ANSWERED
        if isinstance(data, dict) and data.get("success") is False:
            return Outcome.UNSUCCESSFUL
    return Outcome.ANSWERED


def _route_is_missing(call: Call, body: bytes) -> bool:
    """A 404 about an adapter or a custom resource is an answer; a 404 about the route says no more than that."""
    if call.kind in (Kind.LORA_LOAD, Kind.LORA_UNLOAD):
        return error_text(body).strip().lower() in ("", "not found", "method not allowed")
    return True


def missing_hint(call: Call) -> str:
    """What an engine needs so that it has the route."""
    if call.kind in (Kind.LORA_LOAD, Kind.LORA_UNLOAD):
        return "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
    if call.path in ("/start_profile", "/stop_profile"):
        return "start it with --profiler-config"
    return "start it with VLLM_SERVER_DEV_MODE=1"


def agree_on_refusal(legs: Sequence[Leg]) -> bool:
    """Whether all engines refused with the same 4xx: the request was wrong, no engine is."""
    statuses = {leg.status for leg in legs}
    return (
        len(statuses) == 1
        and all(leg.outcome is Outcome.REFUSED for leg in legs)
        and all(leg.status is not None and 400 <= leg.status < 500 for leg in legs)
    )


def merge(call: Call, legs: Sequence[Leg], *, gate_closed: bool = False) -> Merged:
    """The one answer.

    Args:
        call: which call.
        legs: one per engine that was called, in engine order; at least one.
        gate_closed: for ``/is_paused``.
    """
    first = legs[0]
    if agree_on_refusal(legs):
        assert first.status is not None
        return Merged(first.status, first.body, first.content_type, passed=True)
    if call.kind in _MAY_FAIL and all(leg.outcome is Outcome.UNSUCCESSFUL for leg in legs):
        return Merged(first.status or 200, first.body, first.content_type, passed=True)
    failed = tuple(leg for leg in legs if not leg.ok)
    if failed:
        return Merged(424, b"", failed=failed)
    return _MERGERS[call.merge](call, legs, gate_closed)


def message(call: Call, merged: Merged, total: int) -> str:
    """What went wrong where, and what to do about it."""
    parts = []
    for leg in merged.failed:
        if leg.outcome is Outcome.MISSING:
            parts.append(f"{leg.engine} has no {call.path} ({leg.status}): {missing_hint(call)}")
        else:
            parts.append(f"{leg.engine}: {leg.said()}")
    return f"{call.path} failed on {len(merged.failed)} of {total} engines. " + "; ".join(parts)


def report(legs: Sequence[Leg]) -> dict[str, Any]:
    """Each engine's status, body and seconds, for ``X-Fleetgate-Report`` and for partial failures."""
    out: dict[str, Any] = {}
    for leg in legs:
        body: Any = leg.body[:REPORT_BODY_LIMIT].decode("utf-8", "replace")
        if len(leg.body) <= REPORT_BODY_LIMIT:
            parsed = leg.json()
            body = parsed if parsed is not None else body
        if leg.status is None:
            body = leg.detail
        out[leg.engine] = {
            "status": leg.status,
            "body": body,
            "seconds": round(leg.seconds, 6),
            "outcome": str(leg.outcome),
        }
    return out


def with_report(merged: Merged, legs: Sequence[Leg]) -> bytes:
    """The merged body with the report inside; a body that is no JSON object is wrapped."""
    try:
        data = orjson.loads(merged.body)
    except orjson.JSONDecodeError:
        data = merged.body.decode("utf-8", "replace")
    if not isinstance(data, dict):
        data = {"body": data}
    data["engines"] = report(legs)
    return orjson.dumps(data)


# One merger per rule. Each gets legs that all went well.

_Merger = Callable[[Call, Sequence[Leg], bool], Merged]


def _json(data: Any) -> Merged:
    return Merged(200, orjson.dumps(data))


def _objects(legs: Sequence[Leg]) -> list[dict[str, Any]]:
    return [data if isinstance(data := leg.json(), dict) else {} for leg in legs]


def _same(call: Call, legs: Sequence[Leg], gate_closed: bool) -> Merged:  # noqa: ARG001 - one signature for all
    first = legs[0]
    return Merged(first.status or 200, first.body, first.content_type)


def _success(call: Call, legs: Sequence[Leg], gate_closed: bool) -> Merged:
    # Older servers answer an empty 200 here, and clients parse JSON.
    for leg in legs:
        if leg.body:
            return _same(call, [leg], gate_closed)
    return _json({"success": True})


def _world_size(call: Call, legs: Sequence[Leg], gate_closed: bool) -> Merged:  # noqa: ARG001
    sizes = [data.get("world_size") for data in _objects(legs)]
    return _json({"world_size": sum(size for size in sizes if isinstance(size, int))})


def _any_paused(call: Call, legs: Sequence[Leg], gate_closed: bool) -> Merged:  # noqa: ARG001
    return _json({"is_paused": gate_closed or any(data.get("is_paused") is True for data in _objects(legs))})


def _any_sleeping(call: Call, legs: Sequence[Leg], gate_closed: bool) -> Merged:  # noqa: ARG001
    return _json({"is_sleeping": any(data.get("is_sleeping") is True for data in _objects(legs))})


def _version(call: Call, legs: Sequence[Leg], gate_closed: bool) -> Merged:  # noqa: ARG001
    versions = {leg.engine: data.get("weight_version") for leg, data in zip(legs, _objects(legs), strict=True)}
    return _json(version_body(versions))


def checksums_of(leg: Leg) -> dict[str, Any] | None:
    """The checksums in an answer of ``/weight_checker``, or None."""
    data = leg.json() if leg.ok else None
    sums = data.get("checksums") if isinstance(data, dict) else None
    return sums if isinstance(sums, dict) and sums else None


def version_body(versions: dict[str, Any]) -> dict[str, Any]:
    """The body of ``/weight_info``: one version if all agree, otherwise who holds what."""
    values = list(versions.values())
    if values and all(value == values[0] for value in values):
        return {"weight_version": values[0]}
    return {"weight_version": None, "versions": versions}


def _aborted(call: Call, legs: Sequence[Leg], gate_closed: bool) -> Merged:  # noqa: ARG001
    counts = [data.get("aborted") for data in _objects(legs)]
    return _json({"status": "aborted", "aborted": sum(count for count in counts if isinstance(count, int))})


def _results(call: Call, legs: Sequence[Leg], gate_closed: bool) -> Merged:
    if not any(leg.body for leg in legs):
        return _same(call, legs, gate_closed)
    results: list[Any] = []
    for data in _objects(legs):
        found = data.get("results", [])
        results += found if isinstance(found, list) else [found]
    return _json({"results": results})


def _checks(call: Call, legs: Sequence[Leg], gate_closed: bool) -> Merged:
    data = _objects(legs)
    if all(isinstance(item.get("checksums"), dict) for item in data):
        return _checksums(legs, [item["checksums"] for item in data])
    if all("match" in item for item in data):
        missed = sorted({name for item in data for name in item.get("mismatches") or []})
        return _json({"match": all(item["match"] is True for item in data), "mismatches": missed})
    return _same(call, legs, gate_closed)


def _checksums(legs: Sequence[Leg], sums: list[dict[str, Any]]) -> Merged:
    """All alike: that body. Otherwise what all have in common, and who differs from most engines of its layout.

    The names say which worker holds a parameter (``dp0:pp0:pcp0:tp1:...``), so engines with other names split the model
    in another way: their sums say nothing about each other.
    """
    keys = [orjson.dumps(item, option=orjson.OPT_SORT_KEYS) for item in sums]
    if len(set(keys)) == 1:
        return _same(CHECKSUM, legs, False)
    layouts: dict[frozenset[str], list[int]] = {}
    for index, item in enumerate(sums):
        layouts.setdefault(frozenset(item), []).append(index)
    differing: dict[str, list[str]] = {}
    for members in layouts.values():
        most, _ = Counter(keys[index] for index in members).most_common(1)[0]
        reference = sums[keys.index(most)]
        for index in members:
            if keys[index] != most:
                wrong = sorted(name for name, value in sums[index].items() if value != reference[name])
                differing[legs[index].engine] = wrong
    common = {name: value for name, value in sums[0].items() if all(item.get(name) == value for item in sums)}
    if not differing:
        return _json({"checksums": common})
    return _json({"checksums": common, "match": False, "differing": differing})


CHECKSUM = Call("/weight_checker", "POST", Kind.CHECK, merge=Merge.CHECKS)

_MERGERS: dict[Merge, _Merger] = {
    Merge.SAME: _same,
    Merge.SUCCESS: _success,
    Merge.WORLD_SIZE: _world_size,
    Merge.ANY_PAUSED: _any_paused,
    Merge.ANY_SLEEPING: _any_sleeping,
    Merge.VERSION: _version,
    Merge.ABORTED: _aborted,
    Merge.RESULTS: _results,
    Merge.CHECKS: _checks,
}
