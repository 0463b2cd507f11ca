"""The engine's side of the ``fleetgate_cpu`` backend: joins a group, receives tensors, loads them into the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from engine_launcher import cpu_transfer as wire

# Under vLLM's own logger, so that the lines stand in the engine's log.
_log = init_logger("vllm.plugins.fleetgate_cpu")


@dataclass
class CpuWeightTransferInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The same rendezvous fields as vLLM's ``nccl`` backend takes."""

    master_address: str
    master_port: int
    rank_offset: int
    """Rank of this server's first worker: 1 plus the world sizes of the servers before it."""
    world_size: int
    """Trainer and all workers of all servers together."""


@dataclass
class CpuWeightTransferUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What the next round carries, in order; three empty lists mean the same as in the last one."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class CpuWeightTransferEngine(
    WeightTransferEngine[CpuWeightTransferInitInfo, CpuWeightTransferUpdateInfo]  # type: ignore[misc]
):
    """Receives a whole update before it touches the model.

    So a transfer that fails half-way leaves the old weights as they were, where vLLM's own backends have by then put
    the model's parameters on the meta device and filled some of them.
    """

    init_info_cls = CpuWeightTransferInitInfo
    update_info_cls = CpuWeightTransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store: TCPStore | None = None
        self._rank = 0
        self._world_size = 0
        self._layout: wire.Layout | None = None
        self._loading = False

    def init_transfer_engine(self, init_info: CpuWeightTransferInitInfo) -> None:
        """Join the group and wait until every rank has; raises ``TransferError`` when one stays away."""
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        if not 0 < rank < init_info.world_size:
            raise wire.TransferError(
                f"rank {rank} (rank_offset {init_info.rank_offset}) is outside a group of {init_info.world_size}: "
                "rank_offset is 1 plus the world sizes of the servers before this one"
            )
        self.shutdown()
        limit = wire.timeout()
        try:
            store = TCPStore(
                init_info.master_address,
                init_info.master_port,
                is_master=False,
                timeout=timedelta(seconds=limit),
            )
        except Exception as error:
            raise wire.TransferError(
                f"no trainer answers at {init_info.master_address}:{init_info.master_port} within {limit:g} s: {error}"
            ) from error
        store.set(f"joined/{rank}", wire.GOOD)
        everyone = [f"joined/{each}" for each in range(init_info.world_size)]
        wire.wait_for(store, everyone, limit, "the other ranks to join; every server must be initialised at once")
        self._store, self._rank, self._world_size = store, rank, init_info.world_size
        _log.info("joined the weight transfer group as rank %d of %d", rank, init_info.world_size)

    def start_weight_update(self) -> None:
        """Nothing to prepare: the model stays whole until the first update is here."""
        self._loading = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one round and load it; unlike the base class's, without an accelerator to synchronise."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: CpuWeightTransferUpdateInfo) -> None:
        """Take part in the newest round, then load what came."""
        store = self._store
        if store is None:
            raise wire.TransferError("weight transfer is not initialised: call /init_weight_transfer_engine first")
        limit = wire.timeout()
        number = int(wire.wait_for(store, ["round"], limit, "the trainer to begin a round")[0])
        try:
            layout = self._layout_of(update_info)
            layout.check_head(wire.wait_for(store, [f"{number}/head"], limit, "the trainer's announcement")[0])
        except Exception as error:
            # The others wait for this rank to enter the round; they fail at once instead of when their time is up.
            store.set(f"{number}/in/{self._rank}", wire.refused(error))
            raise
        store.set(f"{number}/in/{self._rank}", wire.GOOD)
        self._await_others(store, number, limit)
        buffer = self._receive(store, number, layout, limit)
        self._layout = layout
        self._load(layout, buffer)

    def _layout_of(self, info: CpuWeightTransferUpdateInfo) -> wire.Layout:
        if info.names or info.dtype_names or info.shapes:
            return wire.Layout.of(info.names, info.dtype_names, info.shapes)
        if self._layout is None:
            raise wire.TransferError(
                "empty names, dtype_names and shapes mean those of the last update, but this engine has had none since "
                "it was initialised: send them in full"
            )
        return self._layout

    def _await_others(self, store: TCPStore, number: int, limit: float) -> None:
        for rank in wire.worker_ranks(self._world_size):
            value = wire.wait_for(store, [f"{number}/in/{rank}"], limit, f"rank {rank} to enter round {number}")[0]
            wire.taken(value, f"rank {rank} cannot take part in round {number}")

    @staticmethod
    def _receive(store: TCPStore, number: int, layout: wire.Layout, limit: float) -> torch.Tensor:
        buffer = torch.empty(layout.total, dtype=torch.uint8)
        target = memoryview(buffer.numpy()) if layout.total else memoryview(b"")
        filled = 0
        for index in range(layout.chunks):
            what = f"piece {index + 1} of {layout.chunks} of round {number}"
            value = wire.wait_for(store, [f"{number}/chunk/{index}"], limit, what)[0]
            wire.taken(value[:1] if value[:1] == wire.GOOD else value, "the trainer broke off")
            size = len(value) - 1
            target[filled : filled + size] = memoryview(value)[1:]
            filled += size
        if filled != layout.total:
            raise wire.TransferError(f"round {number} brought {filled} bytes where {layout.total} were announced")
        return buffer

    def _load(self, layout: wire.Layout, buffer: torch.Tensor) -> None:
        from vllm.model_executor.model_loader.reload import (  # noqa: PLC0415 - heavy, and only needed here
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        if not self._loading:
            initialize_layerwise_reload(self.model)
            self._loading = True
        try:
            self.model.load_weights(self._tensors(layout, buffer))
        except BaseException:
            # Close the half-done reload: vLLM would take up its buffers again in the next session and count the tensors
            # that are sent anew twice.
            self._loading = False
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def _tensors(self, layout: wire.Layout, buffer: torch.Tensor) -> Any:
        rows = zip(layout.names, layout.dtype_names, layout.shapes, layout.offsets, strict=True)
        for name, dtype_name, shape, offset in rows:
            dtype = getattr(torch, dtype_name)
            count = torch.Size(shape).numel()
            flat = buffer[offset : offset + count * wire.DTYPES[dtype_name]].view(dtype)
            yield name, flat.view(shape).to(self.device)

    def finish_weight_update(self) -> None:
        """Bring the loaded tensors into the form that the kernels use."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # noqa: PLC0415 - as above

        if self._loading:
            finalize_layerwise_reload(self.model, self.model_config)
            self._loading = False

    def shutdown(self) -> None:
        """Leave the group and forget what its updates looked like."""
        self._store = None
        self._layout = None
