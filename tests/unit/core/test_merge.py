import orjson
import pytest

from proxy.core.calls import CALLS, custom
from proxy.core.merge import Leg, Outcome, error_text, merge, message, outcome_of, report, with_report

PAUSE, SIZE, INFO = CALLS["/pause"], CALLS["/get_world_size"], CALLS["/weight_info"]


def ok(engine, body, status=200):
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return Leg(engine, Outcome.ANSWERED, status, raw, "application/json", 0.1)


def bad(engine, status=500, text="boom"):
    return Leg(engine, Outcome.REFUSED, status, orjson.dumps({"error": {"message": text}}), "application/json", 0.1)


def body(call, *legs, **kw):
    return orjson.loads(merge(CALLS[call], legs, **kw).body)


def test_all_agree():
    merged = merge(PAUSE, [ok("a", {"status": "paused"}), ok("b", {"status": "paused"})])
    assert merged.ok
    assert merged.status == 200
    assert merged.body == b'{"status":"paused"}'


@pytest.mark.parametrize("content_type", ["", "text/plain; charset=utf-8"])
def test_text_is_not_called_json(content_type):
    legs = [Leg(engine, Outcome.ANSWERED, 200, b"Success: loaded", content_type, 0.1) for engine in ("a", "b")]
    merged = merge(CALLS["/v1/load_lora_adapter"], legs)
    assert (merged.body, merged.content_type) == (b"Success: loaded", content_type)


@pytest.mark.parametrize(
    ("call", "answers", "want"),
    [
        ("/get_world_size", [{"world_size": 2}, {"world_size": 1}], {"world_size": 3}),
        ("/is_paused", [{"is_paused": False}, {"is_paused": True}], {"is_paused": True}),
        ("/is_paused", [{"is_paused": False}, {"is_paused": False}], {"is_paused": False}),
        ("/is_sleeping", [{"is_sleeping": True}, {"is_sleeping": False}], {"is_sleeping": True}),
        ("/weight_info", [{"weight_version": "v"}, {"weight_version": "v"}], {"weight_version": "v"}),
        (
            "/weight_info",
            [{"weight_version": "v"}, {"weight_version": "w"}],
            {"weight_version": None, "versions": {"0": "v", "1": "w"}},
        ),
        ("/abort_requests", [{"status": "aborted", "aborted": 2}, {"aborted": 3}], {"status": "aborted", "aborted": 5}),
        ("/collective_rpc", [{"results": [1, 2]}, {"results": [3]}], {"results": [1, 2, 3]}),
        ("/weight_checker", [{"checksums": {"a": "1"}}, {"checksums": {"a": "1"}}], {"checksums": {"a": "1"}}),
        (
            "/weight_checker",
            [
                {"checksums": {"a": "1", "b": "2"}},
                {"checksums": {"a": "1", "b": "2"}},
                {"checksums": {"a": "1", "b": "3"}},
            ],
            {"checksums": {"a": "1"}, "match": False, "differing": {"2": ["b"]}},
        ),
        (
            "/weight_checker",
            [{"checksums": {"tp0:a": "1"}}, {"checksums": {"tp0:a": "2", "tp1:a": "3"}}],
            {"checksums": {}},
        ),
        (
            "/weight_checker",
            [
                {"checksums": {"tp0:a": "1"}},
                {"checksums": {"tp0:a": "2", "tp1:a": "3"}},
                {"checksums": {"tp0:a": "2", "tp1:a": "3"}},
                {"checksums": {"tp0:a": "2", "tp1:a": "4"}},
            ],
            {"checksums": {}, "match": False, "differing": {"3": ["tp1:a"]}},
        ),
        (
            "/weight_checker",
            [{"match": True, "mismatches": []}, {"match": False, "mismatches": ["w"]}],
            {"match": False, "mismatches": ["w"]},
        ),
        ("/weight_checker", [{"status": "reset"}, {"status": "reset"}], {"status": "reset"}),
        ("/reset_prefix_cache", [{"success": True}, {"success": True}], {"success": True}),
    ],
)
def test_bodies(call, answers, want):
    assert body(call, *(ok(str(index), answer) for index, answer in enumerate(answers))) == want


def test_the_gate_alone_makes_is_paused_true():
    assert body("/is_paused", ok("a", {"is_paused": False}), gate_closed=True) == {"is_paused": True}


def test_an_engine_with_an_empty_answer_lets_another_speak():
    call = CALLS["/reset_prefix_cache"]
    assert merge(call, [ok("a", b""), ok("b", b'{"success":true}')]).body == b'{"success":true}'
    assert merge(call, [ok("a", b""), ok("b", b"")]).body == b'{"success":true}'


@pytest.mark.parametrize("status", [400, 403, 409, 422])
def test_the_same_refusal_by_all_is_passed_on(status):
    merged = merge(PAUSE, [bad("a", status), bad("b", status)])
    assert merged.passed
    assert merged.status == status
    assert not merged.failed


@pytest.mark.parametrize(
    "legs",
    [
        [bad("a", 500), bad("b", 500)],
        [bad("a", 400), bad("b", 422)],
        [bad("a", 400), ok("b", {})],
        [Leg("a", Outcome.TIMED_OUT), ok("b", {})],
        [Leg("a", Outcome.MISSING, 404), Leg("b", Outcome.MISSING, 404)],
        [Leg("a", Outcome.UNSUCCESSFUL, 200, b'{"success":false}'), ok("b", {"success": True})],
    ],
)
def test_everything_else_is_a_partial_failure(legs):
    merged = merge(CALLS["/reset_prefix_cache"], legs)
    assert merged.status == 424
    assert {leg.engine for leg in merged.failed} == {leg.engine for leg in legs if not leg.ok}


def test_no_success_anywhere_is_the_servers_own_answer():
    legs = [Leg(name, Outcome.UNSUCCESSFUL, 200, b'{"success":false}', "application/json") for name in "ab"]
    merged = merge(CALLS["/reset_prefix_cache"], legs)
    assert (merged.status, merged.body, merged.ok) == (200, b'{"success":false}', False)


@pytest.mark.parametrize(
    "path", ["/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
             "/finish_weight_update", "/update_weight_version", "/v1/load_lora_adapter"]
)  # fmt: skip
def test_no_success_anywhere_is_a_failure_where_something_hangs_on_it(path):
    legs = [Leg(name, Outcome.UNSUCCESSFUL, 200, b'{"success":false}', "application/json") for name in "ab"]
    merged = merge(CALLS[path], legs)
    assert (merged.status, len(merged.failed), merged.ok) == (424, 2, False)


@pytest.mark.parametrize(
    ("call", "status", "raw", "want"),
    [
        (PAUSE, 200, b'{"status":"paused"}', Outcome.ANSWERED),
        (PAUSE, 200, b'{"success": false}', Outcome.UNSUCCESSFUL),
        (PAUSE, 200, b'{"success": "maybe', Outcome.ANSWERED),
        (PAUSE, 204, b"", Outcome.ANSWERED),
        (PAUSE, 302, b"", Outcome.REFUSED),
        (PAUSE, 404, b'{"detail":"Not Found"}', Outcome.MISSING),
        (PAUSE, 405, b"", Outcome.MISSING),
        (PAUSE, 500, b"", Outcome.REFUSED),
        (
            CALLS["/v1/unload_lora_adapter"],
            404,
            b'{"error":{"message":"The adapter x cannot be found"}}',
            Outcome.REFUSED,
        ),
        (CALLS["/v1/load_lora_adapter"], 404, b'{"detail":"Not Found"}', Outcome.MISSING),
    ],
)
def test_what_an_answer_means(call, status, raw, want):
    assert outcome_of(call, status, raw) is want


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/pause", "VLLM_SERVER_DEV_MODE=1"),
        ("/v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ("/start_profile", "--profiler-config"),
    ],
)
def test_a_missing_route_is_named_with_what_makes_it_exist(path, hint):
    call = CALLS[path]
    legs = [Leg("e1", Outcome.MISSING, 404), ok("e2", {})]
    text = message(call, merge(call, legs), 2)
    assert hint in text
    assert "e1" in text
    assert "e2" not in text


def test_messages_name_only_who_failed_and_why():
    legs = [ok("e1", {}), bad("e2", 500, "out of memory"), Leg("e3", Outcome.TIMED_OUT, detail="no answer within 9 s")]
    text = message(PAUSE, merge(PAUSE, legs), 3)
    assert "2 of 3" in text
    assert "e2: 500 out of memory" in text
    assert "e3: timed_out: no answer within 9 s" in text


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        (b'{"error":{"message":"a"}}', "a"),
        (b'{"error":"b"}', "b"),
        (b'{"detail":"c"}', "c"),
        (b'{"detail":[1]}', "[1]"),
        (b"plain", "plain"),
        (b"[1]", "[1]"),
    ],
)
def test_error_text_in_every_shape(raw, want):
    assert error_text(raw) == want


def test_reports():
    legs = [ok("a", {"x": 1}), Leg("b", Outcome.DIED, detail="gone"), ok("c", b"text"), ok("d", b"x" * 70_000)]
    data = report(legs)
    assert data["a"]["body"] == {"x": 1}
    assert data["b"] == {"status": None, "body": "gone", "seconds": 0.0, "outcome": "died"}
    assert data["c"]["body"] == "text"
    assert len(data["d"]["body"]) == 65_536
    wrapped = orjson.loads(with_report(merge(custom("/x", None), [ok("a", b"plain text")]), legs[:1]))
    assert wrapped["body"] == "plain text"
    assert list(wrapped["engines"]) == ["a"]
