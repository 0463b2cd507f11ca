"""The kinds of event that `Fleet.emit` tells its listeners: logs, metrics and ``/fleet/events`` live on them.

| kind | details |
|---|---|
| ``engine_added`` | engine, url |
| ``engine_removed`` | engine |
| ``engine_state`` | engine, before, state, reason |
| ``engine_version`` | engine, version, before |
| ``engine_tainted`` | engine: its weights are nobody's until a whole update |
| ``engine_restarted`` | engine, boot, why |
| ``engine_suspect`` | engine, why |
| ``engine_left_out`` | engine, seconds, why: it keeps breaking requests |
| ``engine_checked`` | engine, seconds, ok |
| ``engine_paused`` | engine, paused |
| ``probe`` | engine, ok, seconds, error |
| ``control_call`` | call, query, status, seconds, overhead_seconds, client, request_id, legs: {engine: leg} |
| ``control_refused`` | call, status, code, holder |
| ``control_replayed`` | call, status, running |
| ``gate_closed`` | by |
| ``gate_opened`` | by, seconds: how long it was closed |
| ``pause_overdue`` | by, seconds |
| ``pause_lease_ended`` | by, seconds |
| ``sync_phase`` | phase, before: values of `proxy.core.lifecycle.Phase` |
| ``lifecycle`` | holder: null or {call, client, request_id, since} |
| ``weight_version`` | version, before, epoch, by: ``trainer``, ``auto``, ``start``, ``admit`` |
| ``round_broken`` | why, engines |
| ``group`` | members: {engine: first rank or null}, world_size, base |
| ``leg_late`` | call, engine, status, seconds: an answer that came after nobody waited for it |

Engines are named by id, durations are seconds; a leg is (status or null, seconds, outcome). No event carries a body, a
prompt or a credential.
"""

from __future__ import annotations

KINDS: frozenset[str] = frozenset(
    {
        "engine_added",
        "engine_removed",
        "engine_state",
        "engine_version",
        "engine_tainted",
        "engine_restarted",
        "engine_suspect",
        "engine_left_out",
        "engine_checked",
        "engine_paused",
        "probe",
        "control_call",
        "control_refused",
        "control_replayed",
        "gate_closed",
        "gate_opened",
        "pause_overdue",
        "pause_lease_ended",
        "sync_phase",
        "lifecycle",
        "weight_version",
        "round_broken",
        "group",
        "leg_late",
    }
)
"""Every kind there is; ``probe`` is left out of ``/fleet/events`` because it would drown the rest."""
