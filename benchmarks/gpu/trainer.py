"""A trainer on GPUs, driven by JSON lines on standard input; each answer is one JSON line with ``ok`` and ``seconds``.

``python trainer.py --backend ipc|nccl|fleetgate_cpu|sim --model PATH --device 0 [--device 1 ...]``

It uses vLLM's own trainer engines and its ``HTTPVLLMWeightSyncClient`` unmodified, against one URL. ``ipc`` needs one
rank on each engine's GPU (the handles are of one GPU each); the ranks beyond 0 are children of this process. Commands:

- ``{"do": "init", "url": "http://..."}`` joins all engines behind the URL into one group; by NCCL with ``"unpacked": true``
  one broadcast a tensor, with ``"plain": true`` by vLLM as it is, whatever its NCCL lacks (see old_nccl.py)
- ``{"do": "send", "seed": 1}`` makes the weights of seed 1 the model's, and sends them (start, update, finish)
- ``{"do": "judge", "seed": 1, "prompt": [...], "output": [...]}`` compares with ``transformers``, token by token
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

SEEDS: Final = (0, 1, 2)
"""Sets of weights held on the GPU, so that a sync never waits for random numbers; 0 is what the model was made with."""

FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Tensors that vLLM keeps as one, in the order in which a Llama names them: rows one below the other."""

VOCABULARY_STEP: Final = 64
"""vLLM fills the rows of a vocabulary with zeros up to a multiple of this."""

GROUP_TIMEOUT: Final = 3600
"""Seconds that a rank waits for the next command; other phases lie between two of them."""


def world_size(url: str) -> int:
    """Workers behind the URL."""
    with urllib.request.urlopen(f"{url}/get_world_size", timeout=60) as answer:
        return int(json.load(answer)["world_size"])


class GpuTrainer:
    """One rank: a model on its GPU, with several sets of weights beside it."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        import torch
        import weights
        from transformers import LlamaForCausalLM

        self.args, self.rank, self.torch = args, rank, torch
        self.device = torch.device("cuda", args.device[rank]) if torch.cuda.is_available() else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(self.device).eval()
        shapes = weights.shapes_of(self.model)
        self.sets = {0: {name: each.detach().clone() for name, each in self.model.named_parameters()}}
        for seed in SEEDS[1:]:
            self.sets[seed] = weights.weights(shapes, seed, str(self.device))
        self.bytes = sum(each.numel() * each.element_size() for each in self.model.parameters())
        self.engine: Any = None
        if len(args.device) > 1:
            from datetime import timedelta

            torch.distributed.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{args.group_port}",
                rank=rank,
                world_size=len(args.device),
                timeout=timedelta(seconds=GROUP_TIMEOUT),
            )

    def init(self, url: str, *, unpacked: bool = False, plain: bool = False) -> dict[str, Any]:
        """The group of the trainer and all engines."""
        import old_nccl
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

        if self.engine is not None and hasattr(self.engine, "shutdown"):
            self.engine.shutdown()
        if not plain:
            old_nccl.register()
        client = HTTPVLLMWeightSyncClient(url)
        source = ModuleSource(self.model)
        size = world_size(url) + 1
        if self.args.backend == "ipc":
            from vllm.distributed.weight_transfer import ipc_engine as module

            self.engine = module.IPCTrainerWeightTransferEngine.trainer_init(
                module.IPCTrainerInitInfo(rank=self.rank, packed=False), client=client, source=source
            )
        elif self.args.backend == "nccl":
            from vllm.distributed.weight_transfer import nccl_engine
            from vllm.utils.network_utils import get_open_port

            self.engine = nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(
                nccl_engine.NCCLTrainerInitInfo(
                    master_address="127.0.0.1",
                    master_port=get_open_port(),
                    world_size=size,
                    rank=0,
                    packed=not unpacked,
                ),
                client=client,
                source=source,
            )
        else:
            from engine_launcher.cpu_transfer_trainer import CpuTrainerInitInfo, CpuTrainerWeightTransferEngine

            self.engine = CpuTrainerWeightTransferEngine.trainer_init(
                CpuTrainerInitInfo("127.0.0.1", 0, size, rank=0), client=client, source=source
            )
        disabled = self.args.backend == "nccl" and self.engine.model_update_group.disabled
        if disabled and not plain:
            raise RuntimeError(f"vLLM has disabled NCCL here, so nothing would be sent: {old_nccl.facts()}")
        return {"world_size": size, "disabled": disabled}

    def send(self, seed: int) -> dict[str, Any]:
        """One whole update."""
        with self.torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.sets[seed][name])
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()
        self.engine.send_weights()
        return {"bytes": self.bytes}

    def judge(self, seed: int, prompt: list[int], output: list[int]) -> dict[str, Any]:
        """Which tokens are the greedy choice: in bfloat16 as served, in float32 as the exact reference.

        ``largest_gap`` is how far, in logits, a served token lies below the exact choice; ``own_gap`` is the same for
        the reference's own bfloat16, the noise floor; ``other_seed`` is how many tokens other weights would have made.
        """
        torch = self.torch
        ids = torch.tensor([[*prompt, *output[:-1]]], device=self.device)
        served = torch.tensor(output, device=self.device)
        with torch.no_grad():
            other = self._logits(SEEDS[(SEEDS.index(seed) + 1) % len(SEEDS)], ids, len(prompt))
            short = self._logits(seed, ids, len(prompt))
            generated = self.model.generate(
                ids[:, : len(prompt)], max_new_tokens=len(output), do_sample=False, min_new_tokens=len(output)
            )[0, len(prompt) :].tolist()
            exact = self.model.to(torch.float32)(ids).logits[0, len(prompt) - 1 :]
            self.model.to(torch.bfloat16)
        best = exact.max(dim=-1).values
        same = [a == b for a, b in zip(generated, output, strict=False)]
        return {
            "tokens": len(output),
            "equal_bfloat16": int((short.argmax(-1) == served).sum()),
            "equal_float32": int((exact.argmax(-1) == served).sum()),
            "largest_gap": float((best - exact.gather(1, served[:, None])[:, 0]).max()),
            "own_equal": int((exact.argmax(-1) == short.argmax(-1)).sum()),
            "own_gap": float((best - exact.gather(1, short.argmax(-1)[:, None])[:, 0]).max()),
            "other_seed": int((other.argmax(-1) == served).sum()),
            "generate_equal_until": same.index(False) if False in same else len(same),
            "distinct": len(set(output)),
        }

    def _logits(self, seed: int, ids: Any, start: int) -> Any:
        with self.torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.sets[seed][name])
        return self.model(ids).logits[0, start - 1 :].float()

    def sums(self, seed: int) -> dict[str, Any]:
        """SHA-256 of each tensor's bytes as ``/weight_checker`` computes it, for those too that vLLM lays together."""
        torch = self.torch
        found: dict[str, Any] = {}
        for name, each in self.sets[seed].items():
            into = next((name.replace(part, whole) for part, whole in FUSED.items() if part in name), name)
            found.setdefault(into, hashlib.sha256()).update(
                each.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
            )
            if len(each.shape) == 2 and ("embed_tokens" in name or "lm_head" in name):
                rows = -each.shape[0] % VOCABULARY_STEP
                found[into].update(bytes(rows * each.shape[1] * each.element_size()))
        return {"sums": {name: each.hexdigest() for name, each in found.items()}}


class SimulatedTrainer:
    """The same for simulated engines."""

    def __init__(self) -> None:
        self.url = ""
        self.loop = asyncio.new_event_loop()
        self.group: Any = None
        self.info: dict[str, Any] = {}
        self.sent = 0

    def _post(self, path: str, body: Any = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        ask = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(ask, timeout=300).close()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read()[:300]!r}") from error

    async def _beside(self, path: str, body: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._post, path, body)

    def init(self, url: str, *, unpacked: bool = False, plain: bool = False) -> dict[str, Any]:
        """The group."""
        from engine_launcher.sim.trainer import SimTrainer

        del unpacked, plain
        self.url = url

        async def join() -> int:
            if self.group is not None:
                await self.group.stop()
            size = world_size(url) + 1
            self.group = SimTrainer(size)
            await self.group.start()
            await self._beside("init_weight_transfer_engine", {"init_info": self.group.init_info()})
            return size

        self.info = {"names": ["lm_head.weight"], "dtype_names": ["bfloat16"], "shapes": [[259, 64]]}
        return {"world_size": self.loop.run_until_complete(join())}

    def send(self, seed: int) -> dict[str, Any]:
        """One update."""

        async def update() -> None:
            await self._beside("start_weight_update", None)
            update = asyncio.ensure_future(self._beside("update_weights", {"update_info": self.info}))
            broadcast = asyncio.ensure_future(self.group.broadcast(f"weights {seed}"))
            try:
                await update
            finally:
                broadcast.cancel()
            await self._beside("finish_weight_update", None)

        self.loop.run_until_complete(update())
        self.info = {"names": [], "dtype_names": [], "shapes": []}
        return {"bytes": 0}

    def judge(self, seed: int, prompt: list[int], output: list[int]) -> dict[str, Any]:
        """Nothing to compare with."""
        del seed, prompt
        return {
            "tokens": len(output),
            "equal_bfloat16": len(output),
            "equal_float32": len(output),
            "largest_gap": 0.0,
            "other_seed": 0,
        }

    def sums(self, seed: int) -> dict[str, Any]:
        """Nothing to compare with."""
        del seed
        return {"sums": {}}


def obey(trainer: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """One command on this rank."""
    do = fields.pop("do")
    if do not in ("init", "send", "judge", "sums"):
        raise ValueError(f"there is no command {do!r}")
    found: dict[str, Any] = getattr(trainer, do)(**fields)
    return found


def follow(trainer: GpuTrainer) -> None:
    """A rank beyond 0: do what rank 0 does, until it leaves."""
    while True:
        box: list[Any] = [None]
        trainer.torch.distributed.broadcast_object_list(box, src=0)
        if box[0] is None:
            return
        try:
            obey(trainer, dict(box[0]))
        except Exception as error:
            print(f"rank {trainer.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def main() -> int:
    """Answer commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["ipc", "nccl", "fleetgate_cpu", "sim"], required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", type=int, action="append", default=[])
    parser.add_argument("--group-port", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    args.device = args.device or [0]
    answers, sys.stdout = sys.stdout, sys.stderr
    if args.backend == "sim":
        trainer: Any = SimulatedTrainer()
        children = []
    else:
        if len(args.device) > 1 and not args.group_port:
            from engine_launcher.ports import free_ports

            args.group_port = free_ports("127.0.0.1", 1)[0]
        children = []
        if args.rank == 0 and len(args.device) > 1:
            again = [sys.executable, __file__, *sys.argv[1:], "--group-port", str(args.group_port)]
            children = [
                subprocess.Popen([*again, "--rank", str(rank)], stdin=subprocess.DEVNULL, stdout=sys.stderr)
                for rank in range(1, len(args.device))
            ]
        trainer = GpuTrainer(args, args.rank)
        if args.rank:
            follow(trainer)
            return 0
    print(json.dumps({"ok": True, "ready": True}), file=answers, flush=True)
    shared = len(args.device) > 1 and args.backend != "sim"
    for line in sys.stdin:
        started = time.time()
        try:
            fields = json.loads(line)
            if shared and fields["do"] in ("init", "send"):
                trainer.torch.distributed.broadcast_object_list([dict(fields)], src=0)
            answer = {"ok": True} | obey(trainer, fields)
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        answer["seconds"] = time.time() - started
        print(json.dumps(answer), file=answers, flush=True)
    if shared:
        trainer.torch.distributed.broadcast_object_list([None], src=0)
    for each in children:
        try:
            each.wait(20)
        except subprocess.TimeoutExpired:
            each.kill()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that wait in a broken transfer would hold the exit up
