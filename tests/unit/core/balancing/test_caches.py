import pytest

from proxy.core.balancing.caches import CacheWatch
from proxy.core.calls import CALLS


@pytest.mark.parametrize(
    ("name", "query", "emptied"),
    [
        ("pause", "", True),
        ("pause", "mode=keep", True),
        ("pause", "mode=abort&clear_cache=true", True),
        ("pause", "clear_cache=1", True),
        ("pause", "mode=keep&clear_cache=false", False),
        ("pause", "clear_cache=False&mode=wait", False),
        ("pause", "clear_cache=0", False),
        ("pause", "clear_cache=true&clear_cache=no", False),
        ("pause", "clear_cache=no&clear_cache=true", True),
        ("pause", "other_clear_cache=false", True),
        ("sleep", "", True),
        ("sleep", "level=2&mode=wait", True),
        ("sleep", "level=0", False),
        ("reset_prefix_cache", "reset_external=true", True),
        ("release_kv_cache_memory", "", True),
        ("update_weights", "", True),
        ("finish_weight_update", "", True),
    ],
)
def test_what_a_call_alone_does(name, query, emptied):
    assert CacheWatch().empties(name, query) is emptied


def test_no_other_call_empties_anything():
    said = {call.name for call in CALLS.values() if CacheWatch().empties(call.name, "")}
    assert said == {
        "pause",
        "sleep",
        "reset_prefix_cache",
        "release_kv_cache_memory",
        "update_weights",
        "finish_weight_update",
    }
    assert not CacheWatch().empties("areal_pause_generation", "")


def test_a_sync_that_keeps_the_caches_keeps_them_to_its_end():
    watch = CacheWatch()
    calls = [("pause", "mode=keep&clear_cache=false"), ("start_weight_update", ""), ("update_weights", "")]
    calls += [("finish_weight_update", ""), ("resume", "")]
    assert not any(watch.empties(*call) for call in calls)
    # The next one says nothing of caches.
    assert watch.empties("update_weights", "")


def test_a_later_pause_that_clears_them_counts():
    watch = CacheWatch()
    assert not watch.empties("pause", "clear_cache=false")
    assert watch.empties("pause", "")
    assert watch.empties("update_weights", "")
