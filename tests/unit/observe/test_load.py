from __future__ import annotations

from proxy.observe.exposition import PageReader
from proxy.observe.load import Meter


def page(tokens, **more):
    lines = [f'vllm:generation_tokens_total{{engine="{rank}"}} {value}' for rank, value in enumerate(tokens)]
    lines += [f"vllm:{name} {value}" for name, value in more.items()]
    return PageReader("e").read("\n".join(lines).encode())


def test_the_rate_is_over_all_ranks_between_two_pages():
    meter = Meter()
    meter.feed(page([100, 50]), 10.0)
    assert meter.load.tokens_per_second is None
    meter.feed(page([300, 150]), 12.0)
    assert meter.load.tokens_per_second == 150.0


def test_a_restart_is_no_negative_rate():
    meter = Meter()
    meter.feed(page([1000]), 10.0)
    meter.feed(page([40]), 12.0)
    assert meter.load.tokens_per_second == 20.0


def test_pages_that_follow_too_closely_keep_the_last_rate():
    meter = Meter()
    meter.feed(page([0]), 10.0)
    meter.feed(page([100]), 11.0)
    meter.feed(page([101]), 11.1)
    assert meter.load.tokens_per_second == 100.0
    meter.feed(page([200]), 12.0)
    assert meter.load.tokens_per_second == 100.0


def test_a_page_without_the_families_says_nothing():
    meter = Meter()
    meter.feed({}, 1.0)
    assert set(meter.load.as_json().values()) == {None}


def test_the_fullest_cache_counts():
    meter = Meter()
    meter.feed(
        PageReader("e").read(b'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.7\n'), 1
    )
    assert meter.load.cache == 0.7
