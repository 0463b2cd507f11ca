"""vLLM's own trainer side: the client that its trainer engines drive."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient


def call(url: str, calls: list[tuple[str, list[Any]]]) -> list[Any]:
    """Methods of one client, one after the other."""
    client = HTTPVLLMWeightSyncClient(url)
    return [getattr(client, method)(*arguments) for method, arguments in calls]


def update_with_handles(url: str) -> None:
    """An IPC update: tuples of whatever, which the client pickles for the wire."""
    handles = [{"gpu-0": (b"handle", 0, 128)}, {"gpu-1": (b"handle", 1, 128)}]
    info = {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[1], [1]], "ipc_handles": handles}
    HTTPVLLMWeightSyncClient(url).update_weights(info)
