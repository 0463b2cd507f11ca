import orjson
import pytest

from proxy.config import Settings
from proxy.control.asked import Asked, forwarded, limit_of, reply_error, reply_merged
from proxy.core.calls import CALLS
from proxy.core.lifecycle import Holder
from proxy.core.merge import Leg, Outcome, merge
from proxy.errors import Conflict


def names(fields):
    return [name.decode() for name, _ in fields]


def test_end_to_end_fields_go_on_in_order_and_case():
    raw = [(b"Host", b"x"), (b"X-A", b"1"), (b"x-a", b"2"), (b"Connection", b"close, X-Hop"), (b"X-Hop", b"1"),
           (b"TE", b"trailers"), (b"Content-Length", b"3"), (b"Expect", b"100-continue"), (b"traceparent", b"t"),
           (b"X-Fleetgate-Report", b"1"), (b"Transfer-Encoding", b"chunked")]  # fmt: skip
    assert names(forwarded(raw, token=None, engine_key=None)) == ["X-A", "x-a", "traceparent"]


@pytest.mark.parametrize(
    ("sent", "token", "key", "want"),
    [
        (None, None, None, None),
        (b"Bearer mine", None, None, b"Bearer mine"),
        (b"Bearer t", b"t", None, None),
        (b"bearer t", b"t", b"k", b"Bearer k"),
        (b"Bearer mine", b"t", b"k", b"Bearer mine"),
        (None, b"t", b"k", b"Bearer k"),
    ],
)
def test_the_control_token_stays_here_and_the_engines_key_goes(sent, token, key, want):
    raw = [] if sent is None else [(b"Authorization", sent)]
    fields = dict(forwarded(raw, token=token, engine_key=key))
    assert fields.get(b"Authorization") == want


@pytest.mark.parametrize(
    ("path", "query", "want"),
    [
        ("/pause", "", 300.0),
        ("/pause", "mode=keep", 300.0),
        ("/pause", "mode=wait", None),
        ("/pause", "clear_cache=1&mode=wait", None),
        ("/resume", "", 300.0),
        ("/update_weights", "", 1800.0),
        ("/init_weight_transfer_engine", "", 1800.0),
        ("/reset_prefix_cache", "", 60.0),
        ("/update_weight_version", "", 60.0),
    ],
)
def test_each_call_has_its_limit(path, query, want):
    assert limit_of(Settings(), Asked(CALLS[path], "POST", path, query)) == want


def test_a_report_is_added_only_where_it_was_asked_for_and_legs_ran():
    leg = Leg("e1", Outcome.ANSWERED, 200, b'{"status":"paused"}', "application/json", 0.5)
    reply = reply_merged(CALLS["/pause"], merge(CALLS["/pause"], [leg]), [leg])
    assert reply.response(with_legs=False).body == b'{"status":"paused"}'
    assert orjson.loads(reply.response(with_legs=True).body)["engines"]["e1"]["seconds"] == 0.5


def test_a_partial_failure_carries_its_report_either_way():
    leg = Leg("e1", Outcome.TIMED_OUT, detail="no answer within 1 s")
    reply = reply_merged(CALLS["/pause"], merge(CALLS["/pause"], [leg]), [leg], note=" Do this.")
    for with_legs in (False, True):
        response = reply.response(with_legs=with_legs)
        data = orjson.loads(response.body)
        assert response.status == 424
        assert response.headers["x-should-retry"] == "false"
        assert data["message"].endswith("no answer within 1 s Do this.")
        assert data["engines"]["e1"]["outcome"] == "timed_out"


def test_a_conflict_names_the_holder():
    holder = Holder("/pause", "10.0.0.1", "t", 5.0)
    data = orjson.loads(reply_error(Conflict("no"), holder=holder).body)
    assert data["holder"]["request_id"] == "t"
    assert data["error"]["message"] == "no"
