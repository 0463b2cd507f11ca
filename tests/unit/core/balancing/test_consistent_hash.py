import subprocess
import sys
from collections import Counter
from math import inf

import pytest
from fleets import fleet, take

from proxy.core.balancing import ConsistentHash
from proxy.core.balancing.ring import MAX_POINTS, POINTS, Ring

KEYS = [b"session-%d" % n for n in range(2000)]


def policy(margin=1.25, slack=2.0):
    return ConsistentHash(margin=margin, slack=slack)


def homes(policy, engines, keys=KEYS):
    return {key: policy.select(engines, key, 0.0).id for key in keys}


def test_a_session_has_one_engine():
    engines = fleet(*[0] * 5)
    one = policy()
    assert homes(one, engines) == homes(one, engines)


def test_two_proxies_agree_in_whatever_order_they_list_the_engines():
    engines = fleet(*[0] * 5)
    assert homes(policy(), engines) == homes(policy(), engines[::-1])


def test_another_process_with_another_hash_seed_agrees():
    engines = fleet(*[0] * 4)
    program = (
        "from types import SimpleNamespace as N\n"
        "from proxy.core.balancing import ConsistentHash\n"
        "es = [N(id=f'10.0.0.{n}:8000', inflight=0, weight=1.0) for n in range(4)]\n"
        "p = ConsistentHash(margin=1.25, slack=2.0)\n"
        "print(*(p.select(es, b'session-%d' % n, 0.0).id for n in range(50)))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "12345"}
    ).stdout.split()
    assert out == list(homes(policy(), engines, KEYS[:50]).values())


def test_only_the_sessions_of_an_engine_that_leaves_move_and_they_come_back():
    engines = fleet(*[0] * 5)
    one = policy()
    before = homes(one, engines)
    without = engines[:2] + engines[3:]
    after = homes(one, without)
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == engines[2].id}
    assert homes(one, list(engines)) == before


def test_one_that_was_stepped_over_is_as_if_it_had_never_been_there():
    engines = fleet(*[0] * 5)
    one = policy()
    homes(one, engines)
    assert homes(one, engines[1:]) == homes(policy(), engines[1:])


def test_forgetting_an_engine_changes_nothing_for_those_that_stay():
    engines = fleet(*[0] * 5)
    one = policy()
    before = homes(one, engines)
    one.forget(engines[3].id)
    assert homes(one, engines) == before


def test_shares_follow_the_weights():
    engines = fleet(0, 0, 0, weights=(1, 1, 2))
    counts = Counter(homes(policy(margin=inf), engines).values())
    assert counts[engines[2].id] == pytest.approx(1000, rel=0.25)


def test_a_weight_that_changes_changes_the_share():
    engines = fleet(0, 0)
    one = policy(margin=inf)
    before = Counter(homes(one, engines).values())[engines[0].id]
    engines[0].weight = 8.0
    assert Counter(homes(one, list(engines)).values())[engines[0].id] > before * 1.3


def test_no_engine_goes_over_the_bound_even_with_one_hot_session():
    engines = fleet(*[0] * 8)
    take(policy(margin=1.25, slack=0.0), engines, 800, key=b"hot")
    assert sum(engine.inflight for engine in engines) == 800
    most = max(engine.inflight for engine in engines)
    assert most <= 1.25 * (800 - most) / 7 + 1


def test_a_saturated_engine_gives_its_sessions_to_the_next_one_only():
    engines = fleet(*[10] * 6)
    one = policy()
    home = one.select(engines, b"k", 0.0)
    home.inflight = 1000
    moved = {one.select(engines, b"k", 0.0).id for _ in range(20)}
    assert len(moved) == 1
    assert home.id not in moved


def test_without_a_bound_it_is_locked_in():
    engines = fleet(*[10] * 6)
    one = policy(margin=inf)
    home = one.select(engines, b"k", 0.0)
    home.inflight = 10_000
    assert one.select(engines, b"k", 0.0) is home


def test_an_idle_fleet_does_not_scatter_the_requests_of_a_session():
    assert len(set(take(policy(slack=4.0), fleet(*[0] * 8), 4, key=b"k"))) == 1


def test_requests_without_a_key_are_spread():
    assert Counter(take(policy(), fleet(0, 0, 0, 0), 8)) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_places_are_bounded_and_in_proportion():
    ring = Ring()
    engines = fleet(0, 0, 0, weights=(0.001, 2, 10_000))
    ring.cover(engines)
    assert Counter(ring.walk(b"k")) == {engines[0].id: 1, engines[1].id: 2 * POINTS, engines[2].id: MAX_POINTS}
    ring.remove(engines[2].id)
    ring.remove("nobody")
    assert set(ring.walk(b"k")) == {engines[0].id, engines[1].id}
