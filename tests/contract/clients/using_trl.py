"""TRL's clients: the one of ``vllm_mode="server"`` and those of the async GRPO trainer, on a machine without a GPU."""

from __future__ import annotations

import queue
import threading
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate import PartialState
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncGrpoClient
from trl.generation.vllm_client import VLLMClient

from engine_launcher.tiny_model import byte_tokenizer

CHAT_TEMPLATE = Path(trl.__file__).parent / "chat_templates/qwen3.jinja"
"""The rollout loop takes tokenizers whose template it knows."""
PartialState(cpu=True)  # TRL's loggers ask for it; the trainer has made it by the time it makes a client
PARAMETERS = [("model.embed_tokens.weight", [259, 64]), ("lm_head.weight", [259, 64])]


def call(url: str, method: str, **kwargs: Any) -> Any:
    """One method of the server client."""
    return getattr(VLLMClient(base_url=url, connection_timeout=10.0), method)(**kwargs)


def connect(url: str) -> dict[str, Any]:
    """What the client knows after its constructor: it takes a host from ``X-Forwarded-For`` in an answer."""
    client = VLLMClient(base_url=url)
    return {"host": client.host, "model": client.model, "base_url": client.base_url}


def init_communicator(url: str, device: str) -> None:
    """Asks the server and then needs a GPU: raises ``NotImplementedError`` here, after its questions."""
    VLLMClient(base_url=url).init_communicator(torch.device(device))


def init_info(client: VLLMClient) -> dict[str, Any]:
    """As ``init_communicator`` builds it with vLLM 0.28 or newer."""
    return {
        "master_address": "127.0.0.1",
        "master_port": client.group_port,
        "rank_offset": 1,
        "world_size": client.get_world_size() + 1,
        "packed": True,
    }


def init_group(url: str) -> dict[str, Any]:
    """The HTTP half of ``init_communicator``: the same call with the same session and retries."""
    client = VLLMClient(base_url=url)
    info = init_info(client)
    return {"sent": info, "answer": client._post(f"{url}/init_weight_transfer_engine", json={"init_info": info})}


def update(url: str, step: int, *, grouped: bool) -> list[Any]:
    """The HTTP half of ``update_named_params``, which broadcasts over NCCL between; one call for each tensor."""
    client = VLLMClient(base_url=url)

    def send(name: str, shape: list[int]) -> Any:
        info = {"names": [f"{name}.{step}"], "dtype_names": ["float32"], "shapes": [shape]}
        return client._post(f"{url}/update_weights", json={"update_info": info})

    if grouped:
        with client.weight_update():
            return [send(name, shape) for name, shape in PARAMETERS]
    answers = []
    for name, shape in PARAMETERS:
        client._start_weight_update()
        answers.append(send(name, shape))
        client._finish_weight_update()
    return answers


def async_client(url: str, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Methods of the async trainer's client, one after the other."""
    client = AsyncGrpoClient(url, server_timeout=10.0)
    return [getattr(client, method)(**kwargs) for method, kwargs in calls]


def _reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(index) for index, _ in enumerate(completions)]


class _Rollouts:
    """The loop that TRL runs in a process of its own, in a thread instead: nothing of it is changed."""

    def __init__(self, url: str, generations: int, inflight: int, tokens: int) -> None:
        from datasets import Dataset

        tokenizer = byte_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE.read_text()
        context = get_context("spawn")
        self.samples: Any = context.Queue()
        self.failed = context.Event()
        self.why: Any = context.Queue(maxsize=1)
        self.metrics: Any = queue.Queue()
        rows = [{"prompt": [{"role": "user", "content": f"question {index}"}]} for index in range(1000)]
        self.loop = _AsyncRolloutLoop(
            model_name="tiny",
            dataset=Dataset.from_list(rows),
            reward_funcs=[_reward],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            rollout_buffer=self.samples,
            model_version_value=context.Value("i", 0),
            heartbeat_value=context.Value("d", 0.0),
            failed_event=self.failed,
            exception_info_queue=self.why,
            metrics_queue=self.metrics,
            num_generations=generations,
            max_inflight_tasks=inflight,
            vllm_server_url=url,
            max_tokens=tokens,
            temperature=0.0,
        )
        self.thread = threading.Thread(target=self.loop.run, daemon=True)


_running: dict[int, _Rollouts] = {}


def start_rollouts(url: str, *, generations: int, inflight: int, tokens: int) -> int:
    """Begin; returns a number to ask about it by."""
    number = len(_running)
    _running[number] = _Rollouts(url, generations, inflight, tokens)
    _running[number].thread.start()
    return number


def take_rollouts(number: int, count: int, seconds: float = 60.0) -> list[dict[str, Any]]:
    """The next samples that the loop made."""
    rollouts = _running[number]
    taken: list[dict[str, Any]] = []
    while len(taken) < count:
        try:
            sample = rollouts.samples.get(timeout=seconds)
        except queue.Empty:
            if rollouts.failed.is_set():
                raise RuntimeError(str(rollouts.why.get())) from None
            raise
        mask = sample.completion_mask.tolist()
        ids = sample.input_ids.tolist()
        first = mask.index(1)
        taken.append({"prompt": ids[:first], "completion": ids[first:], "mask": mask, "group": sample.group_id})
    return taken


def stop_rollouts(number: int) -> dict[str, Any]:
    """End it; returns how often it retried and how it ended."""
    rollouts = _running[number]
    rollouts.loop._loop.call_soon_threadsafe(rollouts.loop._stop_event.set)
    rollouts.thread.join(30.0)
    rollouts.samples.cancel_join_thread()
    retries = 0.0
    while not rollouts.metrics.empty():
        retries += rollouts.metrics.get().get("rollout/vllm_retry_total", 0.0)
    return {"ended": not rollouts.thread.is_alive(), "failed": rollouts.failed.is_set(), "retries": retries}
