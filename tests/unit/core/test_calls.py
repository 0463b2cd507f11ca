import pytest

from proxy.config import Settings
from proxy.core.abort_ids import candidates, count_prompts, count_streamed, engine_ids
from proxy.core.calls import CALLS, FREE, ONCE, Kind, custom


def test_every_limit_is_a_setting():
    for call in CALLS.values():
        assert call.limit in Settings.model_fields


def test_calls_that_must_not_run_twice_are_under_the_lock():
    assert not FREE & ONCE
    assert all(call.locks for call in CALLS.values() if call.replayable)


@pytest.mark.parametrize("path", ["/resume", "/is_paused", "/weight_info", "/abort_requests", "/reset_prefix_cache"])
def test_calls_that_never_wait(path):
    assert not CALLS[path].locks


@pytest.mark.parametrize(
    ("path", "field", "method", "kind"),
    [
        ("/init_broadcaster", "rank_offset", "POST", Kind.INIT),
        ("/load_lora_adapter", None, "POST", Kind.LORA_LOAD),
        ("/skyrl/v1/unload_lora_adapter", None, "POST", Kind.LORA_UNLOAD),
        ("/areal_update_weights", None, "POST", Kind.UPDATE),
        ("/areal_update_weights_xccl", None, "POST", Kind.UPDATE),
        ("/fetch_weights", None, "POST", Kind.UPDATE),
        ("/receive_weight_update", None, "POST", Kind.UPDATE),
        ("/areal_set_update_weight_meta", None, "POST", Kind.CUSTOM),
        ("/areal_init_weights_update_group", None, "POST", Kind.CUSTOM),
        ("/areal_pause_generation", None, "POST", Kind.CUSTOM),
        ("/skyrl/state", None, "GET", Kind.READ),
    ],
)
def test_custom_paths(path, field, method, kind):
    assert custom(path, field, method=method).kind is kind


@pytest.mark.parametrize(
    ("route", "name"),
    [
        ("/v1/completions", "cmpl-r-1-0"),
        ("/v1/chat/completions", "chatcmpl-r-1"),
        ("/v1/responses/", "resp_r-1"),
        ("/inference/v1/generate", "generate-tokens-r-1"),
        ("/v1/messages", "chatcmpl-r-1"),
        ("/other", "r-1"),
    ],
)
def test_engine_names_and_back(route, name):
    assert engine_ids(route, "r-1") == [name]
    assert "r-1" in candidates(name)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b'{"prompt": "a"}', 1),
        (b'{"prompt": [1, 2, 3]}', 1),
        (b'{"prompt": ["a", "b"]}', 2),
        (b'{"prompt": [[1], [2], [3]]}', 3),
        (b'{"prompt": []}', 1),
        (b'{"user": "prompt", "x": {"prompt": 1}, "prompt" : [ "a", "b", "c"]}', 3),
        (b"[]", 1),
        (b'{"prompt": ["a", ', 1),
        (b"", 1),
    ],
)
def test_each_prompt_of_a_completion_has_a_name(body, count):
    assert count_prompts(body) == count
    assert count_streamed(b"/v1/completions", [body[:5], body[5:]]) == count
    assert count_streamed(b"/v1/chat/completions", [body]) == 1
    assert engine_ids("/v1/completions", "r", count) == [f"cmpl-r-{index}" for index in range(count)]
