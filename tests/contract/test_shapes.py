"""Answers compared with the records of real vLLM, one case a row."""

from __future__ import annotations

from typing import Any

import pytest

from . import shapes
from .conftest import Target

MESSAGES = [{"role": "user", "content": "Count the fish."}]
FOUR: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
COMPLETION = {"model": "tiny", "prompt": "One fish two fish", **FOUR}
CHAT = {"model": "tiny", "messages": MESSAGES, **FOUR}
GENERATE = {"token_ids": [72, 105, 33], "sampling_params": FOUR}
RESPONSE = {"model": "tiny", "input": "Count the fish.", "max_output_tokens": 4, "temperature": 0}
MESSAGE = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
IDS = {"return_token_ids": True, "return_weight_versions": True}

V1 = "/v1/completions"
CC = "/v1/chat/completions"
GEN = "/inference/v1/generate"

CASES: list[tuple[str, str, str, Any]] = [
    ("completions", "POST", V1, COMPLETION),
    ("completions-ids-versions", "POST", V1, COMPLETION | IDS),
    ("completions-n", "POST", V1, COMPLETION | {"n": 2, "temperature": 1}),
    ("completions-prompts", "POST", V1, COMPLETION | {"prompt": ["One", "Two"]}),
    ("completions-token-prompt", "POST", V1, COMPLETION | {"prompt": [72, 105]}),
    ("completions-logprobs", "POST", V1, COMPLETION | {"logprobs": 2}),
    ("completions-logprobs-0", "POST", V1, COMPLETION | {"logprobs": 0, "return_tokens_as_token_ids": True}),
    ("completions-echo", "POST", V1, COMPLETION | {"echo": True}),
    ("completions-unknown-field", "POST", V1, COMPLETION | {"fleetgate_unknown": {"a": 1}}),
    ("completions-stream", "POST", V1, COMPLETION | STREAM),
    ("completions-stream-usage", "POST", V1, COMPLETION | USAGE),
    ("completions-stream-continuous", "POST", V1, COMPLETION | CONTINUOUS),
    ("completions-stream-ids-versions", "POST", V1, COMPLETION | STREAM | IDS),
    ("completions-stream-logprobs", "POST", V1, COMPLETION | STREAM | {"logprobs": 1}),
    ("chat", "POST", CC, CHAT),
    ("chat-ids-versions", "POST", CC, CHAT | IDS),
    ("chat-n", "POST", CC, CHAT | {"n": 2, "temperature": 1}),
    ("chat-logprobs", "POST", CC, CHAT | {"logprobs": True, "top_logprobs": 2}),
    ("chat-stream", "POST", CC, CHAT | STREAM),
    ("chat-stream-usage", "POST", CC, CHAT | USAGE),
    ("chat-stream-continuous", "POST", CC, CHAT | CONTINUOUS),
    ("chat-stream-ids-versions", "POST", CC, CHAT | STREAM | IDS),
    ("chat-stream-logprobs", "POST", CC, CHAT | STREAM | {"logprobs": True, "top_logprobs": 1}),
    ("generate", "POST", GEN, GENERATE),
    ("generate-ids", "POST", GEN, GENERATE | {"return_token_ids": True}),
    ("generate-n-logprobs", "POST", GEN, GENERATE | {"sampling_params": FOUR | {"n": 2, "logprobs": 1, "temperature": 1}}),
    ("generate-stream", "POST", GEN, GENERATE | STREAM),
    ("generate-stream-usage-ids", "POST", GEN, GENERATE | USAGE | {"return_token_ids": True}),
    ("generate-stream-continuous", "POST", GEN, GENERATE | CONTINUOUS),
    ("responses", "POST", "/v1/responses", RESPONSE),
    ("responses-stream", "POST", "/v1/responses", RESPONSE | STREAM),
    ("messages", "POST", "/v1/messages", MESSAGE),
    ("messages-stream", "POST", "/v1/messages", MESSAGE | STREAM),
    ("messages-count-tokens", "POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}),
    ("is-scaling", "POST", "/is_scaling_elastic_ep", None),
    ("responses-instructions", "POST", "/v1/responses", RESPONSE | {"instructions": "Be short."}),
    ("messages-system", "POST", "/v1/messages", MESSAGE | {"system": "Be short."}),
    ("chat-parts", "POST", CC, CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}),
    ("models", "GET", "/v1/models", None),
    ("version", "GET", "/version", None),
    ("health", "GET", "/health", None),
    ("ping", "GET", "/ping", None),
    ("load", "GET", "/load", None),
    ("tokenize", "POST", "/tokenize", {"model": "tiny", "prompt": "Hi \u00e9", "return_token_strs": True}),
    ("tokenize-chat", "POST", "/tokenize", {"model": "tiny", "messages": MESSAGES}),
    ("detokenize", "POST", "/detokenize", {"model": "tiny", "tokens": [72, 105, 33]}),
    ("server-info", "GET", "/server_info?config_format=json", None),
    ("world-size", "GET", "/get_world_size", None),
    ("world-size-no-dp", "GET", "/get_world_size?include_dp=false", None),
    ("is-paused", "GET", "/is_paused", None),
    ("is-sleeping", "GET", "/is_sleeping", None),
    ("weight-info", "GET", "/weight_info", None),
    ("weight-checksum", "POST", "/weight_checker", {"action": "checksum"}),
    ("weight-compare", "POST", "/weight_checker", {"action": "compare", "baseline": {"x": "y"}}),
    ("reset-prefix-cache", "POST", "/reset_prefix_cache", None),
    ("reset-mm-cache", "POST", "/reset_mm_cache", None),
    ("reset-encoder-cache", "POST", "/reset_encoder_cache", None),
    ("resume", "POST", "/resume", None),
    ("abort-all", "POST", "/abort_requests", {}),
    ("abort-ids", "POST", "/abort_requests", {"request_ids": ["nobody", "neither"]}),
    ("collective-rpc", "POST", "/collective_rpc", {"method": "check_health"}),
]  # fmt: skip

BAD: list[tuple[str, str, str, Any]] = [
    ("bad-unknown-path", "GET", "/nothing/here", None),
    ("bad-method", "GET", V1, None),
    ("bad-json", "POST", V1, b"{not json"),
    ("bad-empty-body", "POST", V1, b""),
    ("bad-model", "POST", V1, COMPLETION | {"model": "nobody"}),
    ("bad-model-chat-stream", "POST", CC, CHAT | STREAM | {"model": "nobody"}),
    ("bad-model-generate", "POST", GEN, GENERATE | {"model": "nobody"}),
    ("bad-model-responses", "POST", "/v1/responses", RESPONSE | {"model": "nobody"}),
    ("bad-model-messages", "POST", "/v1/messages", MESSAGE | {"model": "nobody"}),
    ("bad-no-prompt", "POST", V1, {"model": "tiny", "max_tokens": 4}),
    ("bad-no-messages", "POST", CC, {"model": "tiny", "max_tokens": 4}),
    ("bad-no-token-ids", "POST", GEN, {"sampling_params": FOUR}),
    ("bad-no-sampling-params", "POST", GEN, {"token_ids": [72]}),
    ("bad-empty-token-ids", "POST", GEN, GENERATE | {"token_ids": []}),
    ("bad-n-greedy", "POST", V1, COMPLETION | {"n": 2}),
    ("bad-n-type", "POST", CC, CHAT | {"n": 0}),
    ("bad-max-tokens-type", "POST", V1, COMPLETION | {"max_tokens": "many"}),
    ("bad-max-tokens-negative", "POST", V1, COMPLETION | {"max_tokens": -1}),
    ("bad-stream-options", "POST", V1, COMPLETION | {"stream_options": {"include_usage": True}}),
    ("bad-prompt-too-long", "POST", V1, COMPLETION | {"prompt": "x" * 3000}),
    ("bad-chat-too-long", "POST", CC, CHAT | {"messages": [{"role": "user", "content": "x" * 3000}]}),
    ("bad-token-id", "POST", V1, COMPLETION | {"prompt": [72, 9999]}),
    ("bad-pause-mode", "POST", "/pause?mode=gently", None),
    ("bad-sleep-level", "POST", "/sleep?level=7", None),
    ("bad-abort-empty", "POST", "/abort_requests", None),
    ("bad-abort-list", "POST", "/abort_requests", ["a"]),
    ("bad-init-empty", "POST", "/init_weight_transfer_engine", None),
    ("bad-init-no-field", "POST", "/init_weight_transfer_engine", {}),
    ("bad-init-type", "POST", "/init_weight_transfer_engine", {"init_info": "x"}),
    ("bad-update-empty", "POST", "/update_weights", None),
    ("bad-update-type", "POST", "/update_weights", {"update_info": "x"}),
    ("bad-version-no-field", "POST", "/update_weight_version", {}),
    ("bad-version-type", "POST", "/update_weight_version", {"new_version": 7}),
    ("bad-finish-type", "POST", "/finish_weight_update", {"weight_version": 7}),
    ("bad-checker-action", "POST", "/weight_checker", {"action": "guess"}),
    ("bad-checker-no-baseline", "POST", "/weight_checker", {"action": "compare"}),
    ("bad-rpc-json", "POST", "/collective_rpc", b"{"),
    ("bad-rpc-list", "POST", "/collective_rpc", []),
    ("bad-rpc-no-method", "POST", "/collective_rpc", {}),
    ("bad-release-kv", "POST", "/release_kv_cache_memory", None),
    ("bad-update-before-start", "POST", "/update_weights", {"update_info": {}}),
    ("bad-finish-before-start", "POST", "/finish_weight_update", None),
    ("bad-start-draft", "POST", "/start_draft_weight_update", None),
    ("bad-lora-no-name", "POST", "/v1/load_lora_adapter", {"lora_path": "x"}),
    ("bad-lora-base-name", "POST", "/v1/load_lora_adapter", {"lora_name": "tiny", "lora_path": "x"}),
    ("bad-lora-unload", "POST", "/v1/unload_lora_adapter", {"lora_name": "nobody"}),
    ("bad-scale", "POST", "/scale_elastic_ep", {}),
    ("bad-profile", "POST", "/start_profile", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "method", "path", "body"), CASES, ids=[case[0] for case in CASES])
async def test_answer(engine: Target, record: bool, name: str, method: str, path: str, body: Any) -> None:
    shapes.check(name, await engine.call(method, path, body), record=record)


@pytest.mark.parametrize(("name", "method", "path", "body"), BAD, ids=[case[0] for case in BAD])
async def test_refusal(engine: Target, record: bool, name: str, method: str, path: str, body: Any) -> None:
    shapes.check(name, await engine.call(method, path, body), record=record)


GUARDED: list[tuple[str, str, str, Any]] = [
    ("guarded-generate", "POST", GEN, GENERATE),
    ("guarded-pause", "POST", "/pause", None),
    ("guarded-weight-info", "GET", "/weight_info", None),
    ("guarded-load-lora", "POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
    ("guarded-completions", "POST", V1, COMPLETION),
]


@pytest.mark.parametrize(("name", "method", "path", "body"), GUARDED, ids=[case[0] for case in GUARDED])
async def test_answer_of_a_guarded_server(
    guarded: Target, record: bool, name: str, method: str, path: str, body: Any
) -> None:
    shapes.check(name, await guarded.call(method, path, body), record=record)
