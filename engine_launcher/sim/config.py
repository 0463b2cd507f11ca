"""Settings of one simulated engine."""

from __future__ import annotations

from dataclasses import dataclass

VLLM_KEEP_ALIVE_SECONDS = 5.0
"""uvicorn under vLLM closes an idle connection after this long (``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``)."""
MAX_BODY_BYTES = 1 << 30
"""vLLM sets no limit on a request body; this one only keeps a runaway client from eating the machine."""
MAX_MODEL_LEN_TOKENS = 65536
"""Long enough for a rollout of any test; ``--max-model-len`` lowers it to that of the real tiny model."""
MAX_RUNNING_SEQUENCES = 8192
"""A simulated engine is used to hold thousands of open streams; a real one is started with 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """How one simulated engine is started; the defaults are those of ``vllm serve`` in development mode.

    Attributes:
        model_name: name under which the model is served.
        seed: picks the base weights; engines with equal seeds answer alike.
        tokens_per_second: speed of one sequence; 0 means as fast as the machine goes.
        step_overhead_seconds: added to each step for each running sequence, so that a full batch is slower.
        world_size: workers of this engine (tensor times pipeline parallel), each a rank of a transfer group.
        data_parallel_size: replicas behind this one URL; multiplies the world size.
        max_num_seqs: sequences that run at once; the rest waits.
        max_num_queued_reqs: unfinished sequences beyond which requests are refused with "busy"; None is no limit.
        max_num_queued_tokens: prompt tokens waiting for their first token beyond which requests are refused.
        max_model_len: tokens of prompt and answer together.
        keep_alive_seconds: how long an idle connection stays open.
        api_key: guards ``/v1``, ``/v2`` and ``/inference``, and nothing else, as in vLLM.
        dev_mode: False leaves out the control routes (``VLLM_SERVER_DEV_MODE=0``).
        scale_out: False answers 403 on ``/inference/v1/generate``.
        runtime_lora: adapters can be loaded and unloaded (``VLLM_ALLOW_RUNTIME_LORA_UPDATING``).
        request_id_headers: echo ``X-Request-Id`` (``--enable-request-id-headers``).
        profiler: the profile routes exist (``--profiler-config``).
        weight_transfer_backend: None refuses every transfer call, as a server started without a backend does.
        compat: version of vLLM to imitate; "0.32" hangs where 0.33 rejects.
        extra_control_paths: more POST paths that are recorded and answered like a framework's own control calls.

    """

    model_name: str = "tiny"
    seed: int = 0
    tokens_per_second: float = 0.0
    step_overhead_seconds: float = 0.0
    world_size: int = 1
    data_parallel_size: int = 1
    max_num_seqs: int = MAX_RUNNING_SEQUENCES
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_model_len: int = MAX_MODEL_LEN_TOKENS
    keep_alive_seconds: float = VLLM_KEEP_ALIVE_SECONDS
    api_key: str | None = None
    dev_mode: bool = True
    scale_out: bool = True
    runtime_lora: bool = True
    request_id_headers: bool = False
    profiler: bool = True
    weight_transfer_backend: str | None = "sim"
    compat: str = "0.33"
    extra_control_paths: tuple[str, ...] = ()

    @property
    def rejects_while_paused(self) -> bool:
        """Whether new requests are rejected in ``abort`` and ``wait``; before 0.33 they hung until resume."""
        return self.compat != "0.32"

    @property
    def version(self) -> str:
        """What ``GET /version`` answers."""
        return f"{self.compat}.0"
