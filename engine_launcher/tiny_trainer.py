"""A small real trainer, driven by JSON lines: the demo, the tests and the benchmarks sync real weights with it.

Runs in the engine environment, because it is torch and vLLM's own trainer side::

    python -m engine_launcher.tiny_trainer --model .models/tiny --url http://127.0.0.1:8000

With one ``--url``, which may be a proxy in front of many engines, it uses vLLM's ``HTTPVLLMWeightSyncClient``
unmodified. With several it calls each engine itself, all at once, with the rank offset that each needs.

Each line on standard input is a command, and each gets one line of JSON on standard output, with ``"ok"`` and
``"seconds"``, or ``"error"``:

- ``{"do": "init"}``: join all engines into one transfer group
- ``{"do": "send", "seed": 1}``: give the model the weights of seed 1, and send them (start, update, finish); with
  ``"break_after": 3`` the source of the weights fails after 3 tensors, as a trainer that dies half-way would
- ``{"do": "judge", "prompt": [...], "output": [...], "spans": [{"seed": 1, "start": 0, "end": 20}]}``: token ids, and
  which seed's weights made which of them; answers ``"mismatches"``, those that are not the greedy choice.
  ``"kept_cache": true`` after ``/pause?mode=keep&clear_cache=false`` (see ``reference.span_mismatches``)
- ``{"do": "greedy", "seed": 1, "prompt": [...], "tokens": 20}``: answers ``"output"``
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import requests
from transformers import LlamaForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from engine_launcher.cpu_transfer_trainer import CpuTrainerInitInfo, CpuTrainerWeightTransferEngine
from engine_launcher.reference import float_model, span_mismatches
from engine_launcher.tiny_model import reseed

ASK_TIMEOUT: Final = 60.0
"""Seconds for ``GET /get_world_size``."""


class DirectClient:
    """vLLM's client for several servers without a proxy: each call to all at once, with each server's rank offset."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._clients = [HTTPVLLMWeightSyncClient(each) for each in urls]
        self._sizes = [world_size(each) for each in urls]

    def _all(self, call: Callable[[int, Any], None]) -> None:
        with ThreadPoolExecutor(len(self._clients)) as executor:
            for done in [executor.submit(call, index, each) for index, each in enumerate(self._clients)]:
                done.result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Shift the offset by the world sizes of the servers before each one."""
        base = int(init_info["rank_offset"])
        self._all(
            lambda index, client: client.init_weight_transfer_engine(
                init_info | {"rank_offset": base + sum(self._sizes[:index])}
            )
        )

    def start_weight_update(self) -> None:
        """Open the update session on each server."""
        self._all(lambda _, client: client.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        """Have each server receive the round."""
        self._all(lambda _, client: client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update session on each server."""
        self._all(lambda _, client: client.finish_weight_update(weight_version))


def world_size(url: str) -> int:
    """Number of workers behind a URL (``GET /get_world_size``)."""
    answer = requests.get(f"{url}/get_world_size", timeout=ASK_TIMEOUT)
    answer.raise_for_status()
    return int(answer.json()["world_size"])


class BreakingSource(ModuleSource):  # type: ignore[misc]
    """A model's weights that fail after a number of tensors when told to."""

    break_after: int | None = None

    def iter_full(self) -> Iterator[tuple[str, Any]]:
        """The weights in turn."""
        for index, each in enumerate(super().iter_full()):
            if index == self.break_after:
                raise RuntimeError(f"told to break off after {index} tensors")
            yield each


class Trainer:
    """Holds a model and, after ``init``, a transfer group."""

    def __init__(self, model: Path, urls: Sequence[str], master_address: str) -> None:
        self._model = LlamaForCausalLM.from_pretrained(model, dtype="bfloat16").eval()
        self._source = BreakingSource(self._model)
        self._urls = urls
        self._master_address = master_address
        self._engine: CpuTrainerWeightTransferEngine | None = None

    def init(self) -> dict[str, Any]:
        """Join all engines into one group; an older group is given up."""
        if self._engine is not None:
            self._engine.shutdown()
        client = HTTPVLLMWeightSyncClient(self._urls[0]) if len(self._urls) == 1 else DirectClient(self._urls)
        size = 1 + sum(world_size(each) for each in self._urls)
        info = CpuTrainerInitInfo(self._master_address, 0, size, rank=0)
        self._engine = CpuTrainerWeightTransferEngine.trainer_init(info, client=client, source=self._source)
        return {"world_size": size}

    def send(self, seed: int, break_after: int | None = None) -> dict[str, Any]:
        """One whole update with the weights of ``seed``."""
        if self._engine is None:
            raise RuntimeError('send {"do": "init"} first')
        reseed(self._model, seed)
        self._source.break_after = break_after
        self._engine.send_weights()
        return {"bytes": sum(each.numel() * each.element_size() for each in self._model.parameters())}

    def judge(
        self, prompt: list[int], output: list[int], spans: list[dict[str, int]], *, kept_cache: bool = False
    ) -> dict[str, Any]:
        """Tokens that the weights that are said to have made them would not have chosen greedily."""
        models = [(self._float(each["seed"]), each["start"], each["end"]) for each in spans]
        found = span_mismatches(models, prompt, output, kept_cache=kept_cache)
        return {"mismatches": [asdict(each) for each in found]}

    def greedy(self, seed: int, prompt: list[int], tokens: int) -> dict[str, Any]:
        """What ``transformers`` itself generates with the weights of ``seed``."""
        import torch  # noqa: PLC0415 - last of the heavy imports, and only used here

        with torch.no_grad():
            ids = self._float(seed).generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False)
        return {"output": ids[0, len(prompt) :].tolist()}

    def _float(self, seed: int) -> Any:
        model = float_model(self._model)
        reseed(model, seed)
        return model


def main(argv: Sequence[str] | None = None) -> int:
    """Answer commands until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m engine_launcher.tiny_trainer", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model that the engines serve")
    parser.add_argument("--url", action="append", required=True, help="a proxy, or each engine in turn")
    parser.add_argument("--master-address", default="127.0.0.1", help="address that the transfer group meets at")
    args = parser.parse_args(argv)
    # vLLM and transformers print as they please: answers keep standard output to themselves.
    answers, sys.stdout = sys.stdout, sys.stderr
    trainer = Trainer(args.model, [each.rstrip("/") for each in args.url], args.master_address)
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "init": trainer.init,
        "send": trainer.send,
        "judge": trainer.judge,
        "greedy": trainer.greedy,
    }
    print(json.dumps({"ok": True, "ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        started = time.monotonic()
        try:
            fields = json.loads(line)
            answer = {"ok": True} | commands[fields.pop("do")](**fields)
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answer["seconds"] = time.monotonic() - started
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
