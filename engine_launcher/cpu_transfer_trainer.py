"""The trainer's side of the ``fleetgate_cpu`` backend, in the shape of vLLM's trainer engines.

It drives any ``VLLMWeightSyncClient``, vLLM's own ``HTTPVLLMWeightSyncClient`` unmodified among them::

    register()
    engine = WeightTransferTrainerFactory.trainer_init(
        CpuTrainerInitInfo("127.0.0.1", 0, world_size=3, rank=0),
        client=HTTPVLLMWeightSyncClient("http://127.0.0.1:8000"),
        source=ModuleSource(model),
    )
    engine.send_weights()
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from engine_launcher import cpu_transfer as wire


@dataclass
class CpuTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Where rank 0 serves the group. ``master_port`` 0 takes a free port and tells the engines which."""

    backend: ClassVar[str] = wire.BACKEND

    master_address: str
    master_port: int
    world_size: int
    """This trainer and all workers of all servers together."""


class CpuTrainerWeightTransferEngine(TrainerWeightTransferEngine[CpuTrainerInitInfo]):  # type: ignore[misc]
    """Serves the group and sends a ``WeightSource`` into it, round after round."""

    init_info_cls = CpuTrainerInitInfo

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._store: TCPStore | None = None
        self._world_size = 0
        self._round = 0
        self._sent: wire.Layout | None = None

    @classmethod
    def trainer_init(cls, init_info: CpuTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Serve the group, and have the engines join it; ranks other than 0 only take part in gathers of the source.

        Raises what the client raises when an engine refuses, and ``TransferError`` when one has not joined.
        """
        if source is None or not source.implements_iter_full():
            raise TypeError(f"{wire.BACKEND} sends full tensors: give a WeightSource that implements iter_full()")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        if engine.is_sender:
            engine._open(init_info)
        return engine

    def _open(self, init_info: CpuTrainerInitInfo) -> None:
        limit = wire.timeout()
        family = socket.AF_INET6 if ":" in init_info.master_address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Bound here, because the store itself would listen on every interface.
            listener.bind((init_info.master_address, init_info.master_port))
            listener.listen()
            port = int(listener.getsockname()[1])
            store = TCPStore(
                init_info.master_address,
                port,
                world_size=init_info.world_size,
                is_master=True,
                timeout=timedelta(seconds=limit),
                # The ranks are waited for below: here the wait would outlast a call that the engines refused.
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        finally:
            listener.close()
        store.set("joined/0", wire.GOOD)
        self._store, self._world_size = store, init_info.world_size
        payload = {
            "master_address": init_info.master_address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": init_info.world_size,
        }
        try:
            self.client.init_weight_transfer_engine(payload)
            wire.check_joined(store, init_info.world_size)
        except BaseException:
            self.shutdown()
            raise

    def send_weights(self) -> None:
        """One whole update: start, update while the tensors are sent, finish.

        Raises what the client raises (an engine's refusal) or what the source raises. The engines are then told that
        the round has ended, so that none of them waits for the rest of it.
        """
        if not self.is_sender:
            for _ in self.source.iter_full():
                pass
            return
        store = self._store
        if store is None:
            raise wire.TransferError("this trainer has been shut down; initialise it anew")
        meta = self.source.metadata
        names = [each.name for each in meta]
        dtype_names = [str(each.dtype).removeprefix("torch.") for each in meta]
        shapes = [list(each.shape) for each in meta]
        layout = wire.Layout.of(names, dtype_names, shapes)
        update_info: dict[str, Any] = {"names": names, "dtype_names": dtype_names, "shapes": shapes}
        if self._sent == layout:
            update_info = {"names": [], "dtype_names": [], "shapes": []}
        self.client.start_weight_update()
        self._round += 1
        store.set(f"{self._round}/head", layout.head())
        store.set("round", str(self._round))
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="update_weights")
        try:
            called = executor.submit(self.client.update_weights, update_info)
            self._send(store, layout)
            called.result()
        except BaseException as error:
            self._sent = None
            self._close_round(store, layout, f"the trainer gave up: {error}")
            raise
        finally:
            # A call that hangs ends with the client's own timeout; waiting for it here would hide the error above.
            executor.shutdown(wait=False)
        self._close_round(store, layout, "it is over")
        self.client.finish_weight_update()
        self._sent = layout

    def _send(self, store: TCPStore, layout: wire.Layout) -> None:
        index, buffered = 0, bytearray(wire.GOOD)
        try:
            for piece in self._stream(layout):
                view = memoryview(piece)
                while view:
                    room = wire.CHUNK_BYTES + 1 - len(buffered)
                    buffered += view[:room]
                    view = view[room:]
                    if len(buffered) == wire.CHUNK_BYTES + 1:
                        store.set(f"{self._round}/chunk/{index}", bytes(buffered))
                        index, buffered = index + 1, bytearray(wire.GOOD)
            if len(buffered) > 1:
                store.set(f"{self._round}/chunk/{index}", bytes(buffered))
        except BaseException as error:
            store.set(f"{self._round}/chunk/{index}", wire.refused(error))
            raise

    def _stream(self, layout: wire.Layout) -> Iterator[Any]:
        """Bytes of each tensor in turn, padded; raises ``ValueError`` when the source differs from its metadata."""
        count = 0
        for name, tensor in self.source.iter_full():
            if count >= len(layout.names):
                raise ValueError(f"the source yields {name} after all {count} tensors that its metadata declares")
            declared = (layout.names[count], layout.dtype_names[count], layout.shapes[count])
            yielded = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            if declared != yielded:
                raise ValueError(f"the source yields {yielded} as tensor {count}, where its metadata says {declared}")
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            yield flat.numpy()
            yield bytes(-flat.numel() % wire.ALIGNMENT)
            count += 1
        if count != len(layout.names):
            raise ValueError(f"the source yields {count} tensors where its metadata declares {len(layout.names)}")

    def _close_round(self, store: TCPStore, layout: wire.Layout, reason: str) -> None:
        """Free what the round held, and tell engines that come late, or wait still, that there is nothing to get."""
        with contextlib.suppress(Exception):
            store.set(f"{self._round}/head", wire.refused(reason))
            for rank in wire.worker_ranks(self._world_size):
                if not store.check([f"{self._round}/in/{rank}"]):
                    store.set(f"{self._round}/in/{rank}", wire.refused(reason))
                store.delete_key(f"{self._round - 1}/in/{rank}")
            for index in range(layout.chunks):
                store.delete_key(f"{self._round}/chunk/{index}")
            store.delete_key(f"{self._round - 1}/head")

    def shutdown(self) -> None:
        """Stop serving the group; engines that are still in it notice at their next update."""
        self._store = None
