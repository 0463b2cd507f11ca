"""Weight transfer without GPUs: what both sides agree on, and the registration with vLLM.

The backend ``fleetgate_cpu`` moves dense weights from a trainer (rank 0) into any number of vLLM servers over TCP. It
takes the init fields (``master_address``, ``master_port``, ``rank_offset``, ``world_size``) and the update fields
(``names``, ``dtype_names``, ``shapes``; empty lists mean the last ones) of vLLM's ``nccl`` backend, and has its habit:
init and update are collectives, which every rank must enter before any returns. The data plane is torch's ``TCPStore``,
which the trainer serves:

======================  ==========  ====================================================================
key                     set by      value
======================  ==========  ====================================================================
``joined/RANK``         each rank   anything: the rank has joined the group
``round``               trainer     number of the newest round, one for each ``update_weights`` call
``R/head``              trainer     ``+`` and JSON ``{"digest", "bytes", "chunks"}``, or ``!`` and why the round ended
``R/in/RANK``           worker      ``+`` when it has entered the round, or ``!`` and why it cannot
``R/chunk/I``           trainer     ``+`` and bytes of the stream, or ``!`` and why there will be no more
======================  ==========  ====================================================================

The round number makes each update stand for itself: a worker that failed half-way in one cannot read its left-overs in
the next. The stream is every tensor in the order of ``names``, each begun at a multiple of 16 bytes.

This module imports neither vLLM nor torch until it must: vLLM loads it as a ``vllm.general_plugins`` entry point.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

BACKEND: Final = "fleetgate_cpu"
"""Name of the backend in ``--weight-transfer-config '{"backend": "fleetgate_cpu"}'``."""

TIMEOUT_VARIABLE: Final = "FLEETGATE_TRANSFER_TIMEOUT"
"""Environment variable that changes the limit below, in seconds, for a trainer or an engine."""

DEFAULT_TIMEOUT: Final = 240.0
"""Longest wait for a peer, in seconds. Below the 300 s after which vLLM's HTTP client gives up, so that the trainer
reads why an engine failed instead of a bare timeout."""

CHUNK_BYTES: Final = 4 * 2**20
"""Bytes of one piece of the stream: torch's store refuses values above 8 MiB (``TCPStoreLibUvBackend``)."""

ALIGNMENT: Final = 16
"""Each tensor starts at a multiple of this, in bytes, so that any dtype can be viewed in place."""

DTYPES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Dense dtypes that are carried, with their bytes per element."""

GOOD: Final = b"+"
BAD: Final = b"!"


class TransferError(RuntimeError):
    """A transfer failed; the message says at which step and what the peers were waiting for."""


def timeout() -> float:
    """Longest wait for a peer, in seconds."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return DEFAULT_TIMEOUT
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise TransferError(f"{TIMEOUT_VARIABLE}={text!r} is not a number of seconds above 0")
    return value


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor lies in the stream of one update."""

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    total: int
    """Bytes of the whole stream."""

    @classmethod
    def of(cls, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Layout:
        """Lay the tensors out in the order given; raises ``ValueError`` for lists that do not fit together."""
        if not len(names) == len(dtype_names) == len(shapes):
            raise ValueError(
                f"`names`, `dtype_names` and `shapes` must be of one length, not {len(names)}, {len(dtype_names)} "
                f"and {len(shapes)}"
            )
        offsets, end = [], 0
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            if dtype not in DTYPES:
                raise ValueError(f"{name}: dtype {dtype} is not carried by {BACKEND}; use one of {', '.join(DTYPES)}")
            offsets.append(end)
            end += -(-math.prod(shape) * DTYPES[dtype] // ALIGNMENT) * ALIGNMENT
        return cls(tuple(names), tuple(dtype_names), tuple(tuple(each) for each in shapes), tuple(offsets), end)

    def digest(self) -> str:
        """Fingerprint of names, dtypes and shapes, so that a peer that remembers other ones is found out."""
        text = json.dumps([self.names, self.dtype_names, self.shapes])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def chunks(self) -> int:
        """How many pieces the stream is cut into."""
        return -(-self.total // CHUNK_BYTES)

    def head(self) -> bytes:
        """What the trainer announces before the pieces."""
        return GOOD + json.dumps({"digest": self.digest(), "bytes": self.total, "chunks": self.chunks}).encode()

    def check_head(self, head: bytes) -> None:
        """Compare with what the trainer announced; raises ``TransferError`` when it sends something else."""
        sent = json.loads(taken(head, "the trainer ended the round"))
        if sent["digest"] != self.digest() or sent["bytes"] != self.total:
            raise TransferError(
                f"the trainer sends {sent['bytes']} bytes under other names, dtypes or shapes than the {self.total} "
                f"bytes in {len(self.names)} tensors that this engine was told of; initialise the transfer anew, then "
                "send names, dtype_names and shapes in full"
            )


def taken(value: bytes, failure: str) -> bytes:
    """The payload of a value, or ``TransferError`` with what its writer said went wrong."""
    if value[:1] == GOOD:
        return value[1:]
    raise TransferError(f"{failure}: {value[1:].decode(errors='replace')}")


def refused(reason: object) -> bytes:
    """A value that tells whoever waits for it why there is none."""
    return BAD + str(reason).encode()


def worker_ranks(world_size: int) -> range:
    """Ranks of the engines' workers: the trainer is rank 0."""
    return range(1, world_size)


def wait_for(store: Any, keys: Iterable[str], limit: float, what: str) -> list[bytes]:
    """Values of ``keys`` of a ``TCPStore``, waiting at most ``limit`` seconds for each.

    Raises ``TransferError`` when one does not come, or when the store's server, which is the trainer, has gone.
    """
    found: list[bytes] = []
    for key in keys:
        try:
            store.wait([key], timedelta(seconds=limit))
            found.append(store.get(key))
        except Exception as error:  # torch raises DistStoreError, DistNetworkError or RuntimeError by version
            gone = "timeout" not in str(error).lower()
            reason = f"the connection to the trainer failed ({error})" if gone else f"nothing came within {limit:g} s"
            raise TransferError(f"waiting for {what} ({key}): {reason}") from error
    return found


def check_joined(store: Any, world_size: int) -> None:
    """Raise ``TransferError`` unless every rank has joined the group."""
    missing = [rank for rank in worker_ranks(world_size) if not store.check([f"joined/{rank}"])]
    if missing:
        raise TransferError(
            f"the engines answered, but of a group of {world_size} these ranks have not joined: {missing}; "
            "world_size must be 1 plus the engines' world sizes"
        )


def register() -> None:
    """Make the backend known to vLLM, on the engine's side and on the trainer's (entry point; may be called again)."""
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 - only where vLLM is
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    # vLLM calls plugins in every process, some of them more than once; a second registration is an error there.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            BACKEND, "engine_launcher.cpu_transfer_worker", "CpuWeightTransferEngine"
        )
    with contextlib.suppress(ValueError):
        WeightTransferTrainerFactory.register_engine(
            BACKEND, "engine_launcher.cpu_transfer_trainer", "CpuTrainerWeightTransferEngine"
        )
