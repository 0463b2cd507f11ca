"""The control calls: what each is, how its answers are merged and how long one engine may take.

Source: ``vllm/entrypoints/rl/online/api_router.py``, ``vllm/entrypoints/serve/dev`` and the LoRA and profile routers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a call does to the fleet; decides the lock, the gate, replays and who is fenced."""

    PAUSE = "pause"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKE = "wake"
    INIT = "init"
    SHUTDOWN = "shutdown"
    START = "start"
    UPDATE = "update"
    FINISH = "finish"
    LABEL = "label"
    LORA_LOAD = "lora_load"
    LORA_UNLOAD = "lora_unload"
    CUSTOM = "custom"
    """A path of the setting ``fanout_paths`` that does not change weights."""
    RPC = "rpc"
    CHECK = "check"
    ABORT = "abort"
    PLAIN = "plain"
    """Idempotent and harmless: caches and profiles."""
    READ = "read"


class Merge(StrEnum):
    """How the answers of all engines become one."""

    SAME = "same"
    """All answered well: the first one's body."""
    SUCCESS = "success"
    """``{"success": bool}``, or an empty body on older servers."""
    WORLD_SIZE = "world_size"
    ANY_PAUSED = "is_paused"
    ANY_SLEEPING = "is_sleeping"
    VERSION = "weight_version"
    ABORTED = "aborted"
    RESULTS = "results"
    CHECKS = "checks"


class Limit(StrEnum):
    """Which setting limits one leg; the value is its name in `proxy.config.Settings`."""

    PAUSE = "pause_timeout"
    RESUME = "resume_timeout"
    TRANSFER = "transfer_timeout"
    OTHER = "control_timeout"
    PROBE = "probe_timeout"


@dataclass(frozen=True, slots=True)
class Call:
    """One control call.

    Attributes:
        path: canonical path, without a trailing slash.
        method: the one HTTP method that it takes; empty for any (custom paths).
        kind: what it does.
        merge: how answers are merged.
        limit: which setting limits one leg.
        rank_field: dotted name of the body field that holds an engine's first rank, or None.
        one_shot: a weight update that is whole by itself, without start and finish.
    """

    path: str
    method: str
    kind: Kind
    merge: Merge = Merge.SAME
    limit: Limit = Limit.OTHER
    rank_field: str | None = None
    one_shot: bool = False

    @property
    def name(self) -> str:
        """The value of the metric label ``call``."""
        return self.path.lstrip("/")

    @property
    def locks(self) -> bool:
        """Whether it is a life-cycle call: one at a time in the whole fleet."""
        return self.kind not in FREE

    @property
    def replayable(self) -> bool:
        """Whether a second one like the one that just ended gets that one's answer instead of a second fan-out."""
        return self.kind in ONCE

    @property
    def repeatable(self) -> bool:
        """Whether an engine may get it twice with no harm, so that it may go on a connection that was used before."""
        return self.kind in REPEATABLE


FREE: frozenset[Kind] = frozenset({Kind.RESUME, Kind.CHECK, Kind.ABORT, Kind.PLAIN, Kind.READ})
"""Calls that never wait behind another one."""

ONCE: frozenset[Kind] = frozenset(
    {
        Kind.INIT,
        Kind.SHUTDOWN,
        Kind.START,
        Kind.UPDATE,
        Kind.FINISH,
        Kind.LABEL,
        Kind.LORA_LOAD,
        Kind.LORA_UNLOAD,
        Kind.CUSTOM,
        Kind.RPC,
    }
)
"""Calls that must not run twice because a client re-sent them: TRL re-sends on 500, 502 and 503, prime-rl on any 5xx
and on lost connections, AReaL on anything but a 2xx."""


REPEATABLE: frozenset[Kind] = frozenset({Kind.PAUSE, Kind.RESUME, Kind.PLAIN, Kind.READ, Kind.CHECK})


def _table(*calls: Call) -> dict[str, Call]:
    return {call.path: call for call in calls}


CALLS: dict[str, Call] = _table(
    Call("/pause", "POST", Kind.PAUSE, limit=Limit.PAUSE),
    Call("/resume", "POST", Kind.RESUME, limit=Limit.RESUME),
    Call("/sleep", "POST", Kind.SLEEP, limit=Limit.PAUSE),
    Call("/wake_up", "POST", Kind.WAKE, limit=Limit.RESUME),
    Call("/reset_prefix_cache", "POST", Kind.PLAIN, merge=Merge.SUCCESS),
    Call("/reset_mm_cache", "POST", Kind.PLAIN),
    Call("/reset_encoder_cache", "POST", Kind.PLAIN),
    Call("/release_kv_cache_memory", "POST", Kind.PLAIN),
    Call("/start_profile", "POST", Kind.PLAIN),
    Call("/stop_profile", "POST", Kind.PLAIN),
    Call("/init_weight_transfer_engine", "POST", Kind.INIT, limit=Limit.TRANSFER, rank_field="init_info.rank_offset"),
    Call("/shutdown_weight_transfer_engine", "POST", Kind.SHUTDOWN),
    Call("/start_weight_update", "POST", Kind.START),
    Call("/start_draft_weight_update", "POST", Kind.START),
    Call("/update_weights", "POST", Kind.UPDATE, limit=Limit.TRANSFER),
    Call("/finish_weight_update", "POST", Kind.FINISH, limit=Limit.TRANSFER),
    Call("/update_weight_version", "POST", Kind.LABEL),
    Call("/v1/load_lora_adapter", "POST", Kind.LORA_LOAD, limit=Limit.PAUSE),
    Call("/v1/unload_lora_adapter", "POST", Kind.LORA_UNLOAD),
    Call("/abort_requests", "POST", Kind.ABORT, merge=Merge.ABORTED),
    Call("/collective_rpc", "POST", Kind.RPC, merge=Merge.RESULTS, limit=Limit.TRANSFER),
    Call("/weight_checker", "POST", Kind.CHECK, merge=Merge.CHECKS, limit=Limit.PAUSE),
    Call("/get_world_size", "GET", Kind.READ, merge=Merge.WORLD_SIZE),
    Call("/is_paused", "GET", Kind.READ, merge=Merge.ANY_PAUSED, limit=Limit.PROBE),
    Call("/is_sleeping", "GET", Kind.READ, merge=Merge.ANY_SLEEPING, limit=Limit.PROBE),
    Call("/weight_info", "GET", Kind.READ, merge=Merge.VERSION, limit=Limit.PROBE),
)
"""Finish has the limit of a transfer because real loaders do their post-processing there; loading an adapter reads it
from a disk that may be remote."""

OWN_PATHS: tuple[str, ...] = ("/health", "/ready", "/metrics", "/fleet", "/finish_session")
"""Answered by the proxy itself."""

OWN_PREFIXES: tuple[str, ...] = ("/fleet/",)


def custom(path: str, rank_field: str | None, *, method: str = "") -> Call:
    """The call behind a path of the setting ``fanout_paths``.

    A path with a rank field builds a transfer group, so it is an init. Adapter paths keep their rule. A GET reads. A
    path that speaks of weights changes them (``/areal_update_weights``, ``/fetch_weights``), unless it only prepares
    (``/areal_set_update_weight_meta``, ``/areal_init_weights_update_group``).
    """
    last = path.rstrip("/").rpartition("/")[2].lower()
    if last == "load_lora_adapter":
        return Call(path, "POST", Kind.LORA_LOAD, limit=Limit.PAUSE)
    if last == "unload_lora_adapter":
        return Call(path, "POST", Kind.LORA_UNLOAD)
    if rank_field is not None:
        return Call(path, "", Kind.INIT, limit=Limit.TRANSFER, rank_field=rank_field)
    if method in ("GET", "HEAD"):
        return Call(path, "", Kind.READ)
    if "weight" in last and not any(word in last for word in ("init", "meta", "group", "info", "version", "check")):
        return Call(path, "", Kind.UPDATE, limit=Limit.TRANSFER, one_shot=True)
    return Call(path, "", Kind.CUSTOM, limit=Limit.TRANSFER)
