"""``GET /metrics``: the names of vLLM's own page, with its labels."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from engine_launcher.sim.server import SimEngine

_BLOCK_TOKENS = 128
_BLOCKS = 16384
"""Of the cache that the real tiny model's page tells of: clients compute a capacity from them."""
_SECONDS_BUCKETS = ("0.1", "0.5", "1.0", "5.0", "30.0", "120.0", "+Inf")


_UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
_OPERATIONS = {
    "/init_weight_transfer_engine": "init",
    "/shutdown_weight_transfer_engine": "shutdown",
    "/start_weight_update": "start",
    "/start_draft_weight_update": "start_draft",
    "/update_weights": "update",
    "/finish_weight_update": "finish",
}


class Counts:
    """Answers by path, method and class of status, and weight operations that run, as vLLM's page has them."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, str, str]] = Counter()
        self.operations: Counter[str] = Counter()

    def answered(self, request: web.Request, status: int) -> None:
        """Count an answer of a route."""
        found = request.match_info.route.resource
        if found is not None and found.canonical not in _UNCOUNTED:
            self.answers[found.canonical, request.method, f"{status // 100}xx"] += 1

    @contextmanager
    def operation(self, path: str) -> Iterator[None]:
        """Count a weight operation as running, if the path is one."""
        name = _OPERATIONS.get(path)
        if name is None:
            yield
            return
        self.operations[name] += 1
        try:
            yield
        finally:
            self.operations[name] -= 1

    def families(self) -> Iterator[str]:
        """Their part of the page."""
        yield _family(
            "http_requests_total",
            "counter",
            "Total number of requests by method, status and handler.",
            [
                (f'http_requests_total{{handler="{path}",method="{method}",status="{status}"}}', float(count))
                for (path, method, status), count in self.answers.items()
            ],
        )
        if self.operations:
            name = "vllm:rl_weight_update_operations_in_flight"
            yield _family(
                name,
                "gauge",
                "Weight-transfer operations currently awaited.",
                [(f'{name}{{operation="{operation}"}}', float(count)) for operation, count in self.operations.items()],
            )


def _family(name: str, kind: str, text: str, samples: list[tuple[str, float]]) -> str:
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    lines += [f"{sample} {value}" for sample, value in samples]
    return "\n".join(lines)


def page(engine: SimEngine) -> str:
    """Return the metrics page of ``engine``."""
    core = engine.core
    labels = f'engine="0",model_name="{engine.config.model_name}"'

    def one(name: str, value: float) -> list[tuple[str, float]]:
        return [(f"{name}{{{labels}}}", float(value))]

    counters = core.counters
    memory = resource.getrusage(resource.RUSAGE_SELF)
    running, waiting = len(core.running), len(core.waiting)
    used = min(1.0, (running + waiting) / engine.config.max_num_seqs)
    finished = [
        (f'vllm:request_success_total{{{labels},finished_reason="{reason}"}}', float(count))
        for reason, count in counters.finished.items()
    ]
    histograms = [
        ("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds."),
        ("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds."),
        ("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds."),
    ]
    total = float(sum(counters.finished.values()))
    sizes = {"block_size": _BLOCK_TOKENS, "num_gpu_blocks": _BLOCKS, "kv_cache_size_tokens": _BLOCKS * _BLOCK_TOKENS}
    cache = ",".join(['engine="0"', *(f'{key}="{value}"' for key, value in sizes.items())])
    families = [
        _family(
            "process_start_time_seconds",
            "gauge",
            "Start time of the process since unix epoch in seconds.",
            [("process_start_time_seconds", engine.started_at)],
        ),
        _family(
            "process_cpu_seconds_total",
            "counter",
            "Total user and system CPU time spent in seconds.",
            [("process_cpu_seconds_total", memory.ru_utime + memory.ru_stime)],
        ),
        _family(
            "process_resident_memory_bytes",
            "gauge",
            "Resident memory size in bytes.",
            [("process_resident_memory_bytes", float(memory.ru_maxrss * 1024))],
        ),
        _family(
            "vllm:num_requests_running",
            "gauge",
            "Number of requests in model execution batches.",
            one("vllm:num_requests_running", running),
        ),
        _family(
            "vllm:num_requests_waiting",
            "gauge",
            "Number of requests waiting to be processed.",
            one("vllm:num_requests_waiting", waiting),
        ),
        _family(
            "vllm:kv_cache_usage_perc",
            "gauge",
            "KV-cache usage. 1 means 100 percent usage.",
            one("vllm:kv_cache_usage_perc", used),
        ),
        _family(
            "vllm:cache_config_info",
            "gauge",
            "Information of the LLMEngine CacheConfig",
            [(f"vllm:cache_config_info{{{cache}}}", 1.0)],
        ),
        _family(
            "vllm:engine_sleep_state",
            "gauge",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake.",
            [
                (f'vllm:engine_sleep_state{{{labels},sleep_state="{state}"}}', float(engine.sleep_level == level))
                for state, level in (("awake", 0), ("weights_offloaded", 1), ("discard_all", 2))
            ],
        ),
        _family(
            "vllm:prompt_tokens_total",
            "counter",
            "Number of prefill tokens processed.",
            one("vllm:prompt_tokens_total", counters.prompt_tokens),
        ),
        _family(
            "vllm:generation_tokens_total",
            "counter",
            "Number of generation tokens processed.",
            one("vllm:generation_tokens_total", counters.generation_tokens),
        ),
        _family(
            "vllm:prefix_cache_queries_total",
            "counter",
            "Prefix cache queries, in terms of number of queried tokens.",
            one("vllm:prefix_cache_queries_total", counters.prompt_tokens),
        ),
        _family(
            "vllm:prefix_cache_hits_total",
            "counter",
            "Prefix cache hits, in terms of number of cached tokens.",
            one("vllm:prefix_cache_hits_total", 0),
        ),
        _family("vllm:request_success_total", "counter", "Count of successfully processed requests.", finished),
    ]
    for name, text in histograms:
        samples = [(f'{name}_bucket{{{labels},le="{bound}"}}', total) for bound in _SECONDS_BUCKETS]
        samples += [(f"{name}_count{{{labels}}}", total), (f"{name}_sum{{{labels}}}", 0.0)]
        families.append(_family(name, "histogram", text, samples))
    families += engine.counts.families()
    return "\n".join(families) + "\n"
