"""The receiving side of a weight transfer: the order of its calls, its group, and what it remembers.

The order is that of vLLM's workers: start twice, update or finish without start, and an update that fails closes the
session. A restarted engine has no group and remembers no metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass, field
from typing import Any

import orjson

from engine_launcher.sim.errors import WorkerFailedError

RENDEZVOUS_KEY = "sim_rendezvous"
"""In ``init_info``: join the group of a `SimTrainer` at ``master_address:master_port``, and block as NCCL does."""
WEIGHTS_KEY = "sim_weights"
"""In ``update_info``: the label of the new weights. Real backends receive tensors at this point."""
_INIT_FIELDS = frozenset(
    {
        "master_address",
        "master_port",
        "nccl_unique_id_b64",
        "rank_offset",
        "world_size",
        "packed",
        "dst_mesh_dims",
        "source_digest",
        "params",
        "replica_rank",
        "trainer_actors",
        RENDEZVOUS_KEY,
    }
)
"""Fields of vLLM's backends; one of them must be there, so that a misspelt init is refused as in vLLM."""
_METADATA = ("names", "dtype_names", "shapes")


@dataclass(slots=True)
class Group:
    """A joined transfer group."""

    rank_offset: int
    world_size: int
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None


async def _hang_up(group: Group) -> None:
    if group.writer is not None:
        group.writer.close()
        with contextlib.suppress(ConnectionError):
            await group.writer.wait_closed()


@dataclass(slots=True)
class WeightTransfer:
    """State of one engine's transfer.

    Attributes:
        ranks: worker ranks of this engine; the engine's local ranks are 0 to ``ranks - 1``.
        backend: None refuses every call, as a server without ``--weight-transfer-config``.
        group: None until init.
        active: a session is open: start was called, finish not yet.
        metadata: names, dtypes and shapes of the last update that sent them.
        records: everything the trainer sent, oldest first, for a test to look at.

    """

    ranks: int
    backend: str | None
    group: Group | None = None
    active: bool = False
    metadata: dict[str, Any] | None = None
    records: list[dict[str, Any]] = field(default_factory=list)

    def _check_configured(self) -> None:
        if self.backend is None:
            raise WorkerFailedError(
                "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
            )

    async def init(self, init_info: dict[str, Any]) -> None:
        """Join the group that ``init_info`` names.

        Raises:
            WorkerFailedError: fields are missing or of a wrong type, or the trainer went away.

        """
        self._check_configured()
        self.records.append({"call": "init", "init_info": init_info})
        if init_info and not init_info.keys() & _INIT_FIELDS:
            raise WorkerFailedError(
                f"Invalid init_info for SimWeightTransferEngine: unexpected fields {sorted(init_info)}; "
                f"known are {sorted(_INIT_FIELDS)}"
            )
        offset, world = init_info.get("rank_offset", 1), init_info.get("world_size", self.ranks + 1)
        if not isinstance(offset, int) or not isinstance(world, int):
            raise WorkerFailedError("Invalid init_info for SimWeightTransferEngine: ranks and sizes are integers")
        if offset + self.ranks > world:
            raise WorkerFailedError(
                f"Invalid init_info for SimWeightTransferEngine: ranks {offset} to {offset + self.ranks - 1} do not "
                f"fit a world of {world}"
            )
        await self._leave()
        self.metadata = None
        group = Group(offset, world)
        if init_info.get(RENDEZVOUS_KEY):
            await self._join(group, str(init_info["master_address"]), int(init_info["master_port"]))
        self.group = group

    async def _join(self, group: Group, host: str, port: int) -> None:
        try:
            group.reader, group.writer = await asyncio.open_connection(host, port)
        except OSError as error:
            raise WorkerFailedError(f"cannot join the group of {host}:{port}: {error}") from error
        ranks = list(range(group.rank_offset, group.rank_offset + self.ranks))
        try:
            await self._exchange(group, {"join": ranks, "world_size": group.world_size})
        except BaseException:
            await _hang_up(group)
            raise

    async def _exchange(self, group: Group, message: dict[str, Any]) -> dict[str, Any]:
        assert group.reader is not None
        assert group.writer is not None
        try:
            group.writer.write(orjson.dumps(message) + b"\n")
            await group.writer.drain()
            line = await group.reader.readline()
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            raise WorkerFailedError("Connection closed by peer")
        answer: dict[str, Any] = orjson.loads(line)
        return answer

    async def _leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            await _hang_up(group)

    async def shutdown(self) -> None:
        """Leave the group.

        Raises:
            WorkerFailedError: a session is open.

        """
        if self.active:
            raise WorkerFailedError("Cannot release a trainer connection during a weight update")
        self.records.append({"call": "shutdown"})
        await self._leave()

    async def close(self) -> None:
        """Drop the group as a dying process does."""
        await self._leave()

    def start(self, *, draft: bool = False) -> None:
        """Open a session.

        Raises:
            WorkerFailedError: one is open already, or there is no draft model.

        """
        self._check_configured()
        self.records.append({"call": "start_draft" if draft else "start"})
        if self.active:
            raise WorkerFailedError(
                "start_weight_update called while a weight update is already active. Call finish_weight_update first."
            )
        if draft:
            raise WorkerFailedError("SimWeightTransferEngine does not support draft model weight updates.")
        self.active = True

    async def update(self, update_info: dict[str, Any] | list[dict[str, Any]], weights: str) -> str:
        """Receive one chunk of weights.

        Args:
            update_info: of the whole group's call, or a list with one entry a local rank.
            weights: label of the weights in use.

        Returns:
            The label of the weights after this chunk.

        Raises:
            WorkerFailedError: no session, no group, wrong lists, or the trainer went away; the session is closed.

        """
        self._check_configured()
        self.records.append({"call": "update", "update_info": update_info})
        if not self.active:
            raise WorkerFailedError("start_weight_update must be called before update_weights.")
        try:
            return await self._receive(self._slices(update_info), weights)
        except BaseException:
            self.active = False
            raise

    def _slices(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
        if isinstance(update_info, dict):
            return [update_info]
        if len(update_info) < self.ranks:
            raise WorkerFailedError("list index out of range")
        return update_info[: self.ranks]

    async def _receive(self, slices: list[dict[str, Any]], weights: str) -> str:
        if self.group is None:
            raise WorkerFailedError("Weight transfer not initialized. Call init_transfer_engine() first.")
        for info in slices:
            names = info.get("names", [])
            for key in _METADATA[1:]:
                if len(info.get(key, [])) != len(names):
                    raise WorkerFailedError(
                        f"`{key}` should be of the same size as `names`: got {len(info.get(key, []))} and {len(names)}"
                    )
        if slices[0].get("names"):
            self.metadata = {key: slices[0][key] for key in _METADATA}
        if self.group.writer is not None:
            answer = await self._exchange(self.group, {"update": True})
            return str(answer["weights"])
        labels = [str(info[WEIGHTS_KEY]) for info in slices if WEIGHTS_KEY in info]
        if labels:
            return labels[0] if len(set(labels)) == 1 else "|".join(labels)
        if self.metadata is None and set(slices[0]) <= set(_METADATA):
            # Empty lists mean "the parameters of last time"; with none remembered nothing is loaded, silently.
            return weights
        described = orjson.dumps([slices, self.metadata], option=orjson.OPT_SORT_KEYS)
        return "update-" + hashlib.sha256(described).hexdigest()[:16]

    def finish(self) -> None:
        """Close the session.

        Raises:
            WorkerFailedError: none is open.

        """
        self._check_configured()
        self.records.append({"call": "finish"})
        if not self.active:
            raise WorkerFailedError("finish_weight_update called without a matching start_weight_update.")
        self.active = False
