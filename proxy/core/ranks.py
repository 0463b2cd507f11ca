"""Ranks of a transfer group that spans several engines.

A trainer knows one URL, so it sends one ``rank_offset`` for all workers behind it. A worker's rank is
``rank_offset + data_parallel_index * (TP * PP) + local rank`` (vllm/distributed/weight_transfer), so each engine needs
its own offset: the one that the trainer sent, plus the world sizes of the engines before it. The trainer's number is
the base, whatever it is: vLLM, TRL and SkyRL send 1, prime-rl's ``/init_broadcaster`` counts from 0.

Everything else of the body goes on byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import orjson

from proxy.core import jsonspan
from proxy.errors import BadRequest, Conflict

_RENDEZVOUS = ("master_address", "master_port", "nccl_unique_id_b64")
_M2N = ("dst_mesh_dims", "dst_mesh")
_SHARDED = ("replica_rank", "num_replicas", "num_consumers")


def offsets(sizes: Sequence[int], base: int = 0) -> list[int]:
    """The first rank of each engine: ``base`` plus the world sizes before it."""
    return [base + before for before in accumulate(sizes, initial=0)][: len(sizes)]


def parse(body: bytes | None) -> Any:
    """The body as JSON, or None where it is empty or no JSON: then nothing in it can be ours to change."""
    if not body:
        return None
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _at(data: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        if not isinstance(data, dict):
            return None
        data = data.get(part)
    return data


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def needs_sizes(body: bytes | None, rank_field: str | None) -> bool:
    """Whether the body of an init or update cannot be sent without knowing every engine's world size."""
    data = parse(body)
    if rank_field is not None and _int(_at(data, rank_field)) is not None:
        return True
    return isinstance(data, dict) and isinstance(data.get("update_info"), list)


def group_size(body: bytes | None, rank_field: str | None) -> int | None:
    """Workers that a trainer's init has ranks for, its own not counted; None if it does not say."""
    data = parse(body)
    world = _int(_at(data, "init_info.world_size"))
    base = _int(_at(data, rank_field)) if rank_field is not None else None
    return None if world is None or base is None else world - base


@dataclass(frozen=True, slots=True)
class InitPlan:
    """What each engine gets of an init call.

    Attributes:
        bodies: one per engine, in order.
        base: the offset that the trainer sent, or None if there was none.
        offsets: the first rank of each engine; empty if there was no offset.
        world_size: the group's size as the trainer sent it, or None.
    """

    bodies: list[bytes | None]
    base: int | None
    offsets: list[int]
    world_size: int | None


def plan_init(body: bytes | None, rank_field: str | None, sizes: Sequence[int]) -> InitPlan:
    """Shift the ranks of an init call.

    Args:
        body: as the trainer sent it.
        rank_field: dotted name of the field with the first rank.
        sizes: world size of each engine, in order.

    Raises:
        Conflict: the backend cannot span several engines (nccl_m2n), or the group's size does not fit the engines.
    """
    data = parse(body)
    info = data.get("init_info") if isinstance(data, dict) else None
    info = info if isinstance(info, dict) else {}
    count = len(sizes)
    if count > 1 and any(key in info for key in _M2N):
        raise Conflict(
            f"nccl_m2n describes one destination mesh and cannot be split over {count} engines; "
            "use the nccl or sharded_rdt backend, or one engine"
        )
    base = _int(_at(data, rank_field)) if rank_field is not None else None
    world = _int(info.get("world_size"))
    if base is not None and world is not None and any(info.get(key) is not None for key in _RENDEZVOUS):
        need = base + sum(sizes)
        if world < need:
            raise Conflict(
                f"world_size is {world}, but rank_offset {base} and the {sum(sizes)} workers of {count} engines "
                f"need {need}: ask GET /get_world_size and init with world_size {need}"
            )
    if count == 1 or body is None:
        return InitPlan([body] * count, base, [base] if base is not None else [], world)
    bodies: list[bytes | None] = [body] * count
    firsts: list[int] = []
    if base is not None and rank_field is not None:
        firsts = offsets(sizes, base)
        bodies = [
            body if first == base else jsonspan.replace(body, rank_field, str(first).encode()) for first in firsts
        ]
    if any(key in info for key in _SHARDED):
        bodies = [_stamp_replica(text, info, index, count) for index, text in enumerate(bodies)]
    return InitPlan(bodies, base, firsts, world)


def _stamp_replica(body: bytes | None, info: dict[str, Any], index: int, count: int) -> bytes | None:
    """Give one engine of a sharded RDT fleet its ordinal; the fleet is one server to the trainer, so it sent none."""
    assert body is not None
    if info.get("num_replicas") in (None, 1):
        body = jsonspan.replace(body, "init_info.num_replicas", str(count).encode())
    first = _int(info.get("replica_rank"))
    rank = (first or 0) + index
    if rank == first:
        return body
    return jsonspan.replace(body, "init_info.replica_rank", str(rank).encode())


def plan_update(body: bytes | None, sizes: Sequence[int]) -> list[bytes | None]:
    """Cut a list ``update_info`` (one entry per worker of the whole group) into each engine's own slice.

    A server indexes the list from its own first worker, so it must not see the others' entries. An object goes to all
    as it is.

    Raises:
        BadRequest: the list has another length than the group has workers.
    """
    data = parse(body)
    count = len(sizes)
    if body is None or count == 1 or not isinstance(data, dict) or not isinstance(data.get("update_info"), list):
        return [body] * count
    total = sum(sizes)
    entries = len(data["update_info"])
    if entries != total:
        raise BadRequest(
            f"update_info has {entries} entries, but the {count} engines have {total} workers; "
            "send one entry per worker rank, or one object for all"
        )
    span = jsonspan.find(body, "update_info")
    assert span is not None
    spans = jsonspan.elements(body, span[0])
    bodies: list[bytes | None] = []
    for first, size in zip(offsets(sizes), sizes, strict=True):
        own = spans[first : first + size]
        middle = body[own[0][0] : own[-1][1]] if own else b""
        bodies.append(body[: span[0]] + b"[" + middle + b"]" + body[span[1] :])
    return bodies


def is_native_update(body: bytes | None) -> bool:
    """Whether the update belongs to vLLM's start, update, finish; prime-rl's ``weight_dir`` is whole alone."""
    data = parse(body)
    return not isinstance(data, dict) or "update_info" in data
