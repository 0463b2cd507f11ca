import pytest

from proxy.core.history import History, read

PAGE = b"""# TYPE http_requests_total counter
http_requests_total{handler="/start_weight_update",method="POST",status="2xx"} 3.0
http_requests_total{handler="/start_weight_update",method="POST",status="5xx"} 9.0
http_requests_total{handler="/start_draft_weight_update",method="POST",status="2xx"} 1.0
http_requests_total{handler="/update_weights",method="POST",status="2xx"} 7.0
http_requests_total{handler="/update_weights",method="POST",status="4xx"} 5.0
http_requests_total{handler="/update_weights",method="POST",status="5xx"} 1.0
http_requests_total{method="POST",status="2xx",handler="/finish_weight_update"} 2.0
http_requests_total{handler="/update_weight_version",method="POST",status="2xx"} 1e1
http_requests_total{handler="/fetch_weights",method="POST",status="2xx"} 2.0
http_requests_total{handler="/areal_update_weights",method="POST",status="5xx"} 4.0
http_requests_total{handler="/weight_info",method="GET",status="2xx"} 8.0
http_requests_total{handler="/weight_checker",method="POST",status="2xx"} 8.0
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.5e+06
# TYPE vllm:rl_weight_update_operations_in_flight gauge
vllm:rl_weight_update_operations_in_flight{operation="update"} 1.0
vllm:rl_weight_update_operations_in_flight{operation="init"} 1.0
vllm:rl_weight_update_operations_in_flight{operation="finish"} 0.0
"""


def test_a_page_is_read():
    assert read(PAGE) == History(started=4, finished=2, failed=1, running=1, counted=True)


@pytest.mark.parametrize(
    ("states", "asleep"),
    [
        ({"awake": 1, "weights_offloaded": 0, "discard_all": 0}, set()),
        ({"awake": 0, "weights_offloaded": 1, "discard_all": 0}, {"weights", "kv_cache"}),
        ({"awake": 0, "weights_offloaded": 0, "discard_all": 1}, {"weights", "kv_cache"}),
        ({"awake": 0, "weights_offloaded": 0, "discard_all": 0}, {"kv_cache"}),
    ],
)
def test_sleep_is_read_from_the_page(states, asleep):
    page = "".join(
        f'vllm:engine_sleep_state{{engine="0",sleep_state="{name}"}} {on}.0\n' for name, on in states.items()
    )
    assert read(page.encode()).asleep == asleep


@pytest.mark.parametrize(
    ("history", "behind"),
    [
        (History(started=5, finished=5, failed=3), False),
        (History(started=5, finished=4, failed=3), True),
        (History(running=1), True),
    ],
)
def test_a_round_that_did_not_end_well_leaves_it_behind(history, behind):
    assert history.behind is behind


def test_a_page_without_counts_has_no_history():
    assert read(b"process_start_time_seconds 1.0\n") == History()


@pytest.mark.parametrize(
    ("history", "is_open"),
    [
        (History(), False),
        (History(started=5, finished=5), False),
        (History(started=5, finished=4), True),
        (History(started=5, finished=4, failed=1), False),
        (History(started=6, finished=4, failed=1), True),
        (History(started=5, finished=5, running=1), True),
        (History(finished=1), False),
    ],
)
def test_a_session_is_open_until_a_finish_or_a_failed_update(history, is_open):
    assert history.open is is_open
