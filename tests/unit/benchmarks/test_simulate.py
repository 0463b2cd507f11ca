"""The field's findings, in small and seeded runs: if a policy loses what it is for, this says so."""

import json
from math import inf
from xml.etree import ElementTree as ET

import pytest

from benchmarks.simulate import plot, tables
from benchmarks.simulate.__main__ import main
from benchmarks.simulate.engine import PrefixCache, Request, SimEngine
from benchmarks.simulate.policies import POLICIES, consistent_hash, sticky
from benchmarks.simulate.traces import make, names
from benchmarks.simulate.world import World


def run(trace, policy, *, engines=4, each=32):
    return World(make(trace, engines, each, 1), policy, "a policy", engines).run()


@pytest.mark.parametrize("trace", list(names()))
def test_every_rollout_ends_once_and_the_same_seed_gives_the_same_run(trace):
    one = run(trace, sticky(), each=8)
    assert one.row() == run(trace, sticky(), each=8).row()
    made = make(trace, 4, 8, 1)
    assert len(one.completions) == len(made.sessions)
    assert one.requests == sum(len(session.turns) for session in made.sessions)
    assert 0 <= one.hits < 1
    assert one.makespan >= max(one.completions)


def test_hashing_without_a_bound_spirals_where_an_engine_is_slow():
    bounded, unbounded = run("slow", consistent_hash()), run("slow", consistent_hash(margin=inf))
    assert unbounded.quantile(0.99) > 1.3 * bounded.quantile(0.99)
    assert unbounded.mean > 1.1 * bounded.mean


def test_sticky_beats_hashing_and_what_knows_no_sessions():
    names = ("sticky", "consistent_hash", "hash, no bound", "least_inflight")
    mean = {name: run("agents", POLICIES[name](), engines=8, each=64).mean for name in names}
    assert mean["sticky"] < mean["consistent_hash"] < mean["least_inflight"]
    assert mean["sticky"] < mean["hash, no bound"]


def test_a_way_out_is_needed_and_a_tight_one_undoes_affinity():
    free, locked, tight = (
        run("slow", sticky(margin=margin, slack=slack), engines=8, each=64)
        for margin, slack in ((1.25, 2), (inf, 0), (1.0, 0))
    )
    assert locked.quantile(0.99) > 1.2 * free.quantile(0.99)
    assert tight.hits < free.hits


def test_samples_of_one_prompt_are_level_by_default():
    assert run("groups", sticky()).imbalance < 1.05


def test_engines_that_join_get_work():
    world = World(make("joining", 4, 32, 1), sticky(), "sticky", 4)
    world.run()
    late = sum(engine.prompt_tokens for engine in world.engines[2:])
    assert late > 0.25 * sum(engine.prompt_tokens for engine in world.engines)


def test_work_follows_the_world_sizes():
    world = World(make("sizes", 4, 16, 1), sticky(), "sticky", 4)
    world.run()
    done = [engine.prompt_tokens for engine in world.engines]
    assert done[3] > 1.5 * done[2] > 2 * done[0]


def test_a_bigger_batch_is_slower_for_each_and_a_hit_saves_its_prefill():
    def finish(count, *, cached=False):
        engine = SimEngine("e")
        if cached:
            first = Request(None, [("p", 4000)], ("warm", 1))
            engine.arrive(first, 0.0)
            while engine.running:
                engine.step(engine.next_change())
        start = engine.at
        for n in range(count):
            engine.arrive(Request(None, [("p", 4000)] if cached else [(n, 4000)], (f"a{n}", 100)), start)
        while engine.running:
            engine.step(engine.next_change())
        return engine.at - start

    assert finish(1) < finish(8) < finish(64)
    assert finish(8, cached=True) < finish(8) - 7 * 4000 / 25_000


def test_the_cache_keeps_what_runs_and_gives_up_the_oldest():
    cache = PrefixCache(100)
    one = Request(None, [("a", 40)], ("b", 10))
    assert cache.admit(one, force=False)
    assert not cache.admit(Request(None, [("c", 60)], ("d", 1)), force=False)
    cache.release(one)
    again = Request(None, [("a", 40), ("b", 10)], ("e", 10))
    assert cache.admit(again, force=False)
    assert again.hit == 50
    cache.release(again)
    big = Request(None, [("f", 45)], ("g", 5))
    assert cache.admit(big, force=False)
    cache.release(big)
    third = Request(None, [("a", 40), ("b", 10)], ("h", 1))
    assert cache.admit(third, force=False)
    # The answer e was the oldest of what was kept; the rest still fits.
    assert third.hit == 50
    cache.release(third)
    cache.clear()
    assert cache.admit(third, force=False)
    assert third.hit == 0


def test_a_run_writes_tables_and_plots(tmp_path, capsys):
    main(
        [
            *("--engines", "2", "--sessions", "4", "--traces", "agents,slow", "--policies", "sticky,round_robin"),
            *("--processes", "1", "--out", str(tmp_path), "--img", str(tmp_path)),
            *("--runs", str(tmp_path / "runs.jsonl")),
        ]
    )
    text = capsys.readouterr().out
    assert (tmp_path / "balancing.md").read_text() == text.rstrip("\n") + "\n"
    assert "| `slow` | sticky |" in text
    rows = json.loads((tmp_path / "balancing.json").read_text())["runs"]
    assert {(row["trace"], row["policy"]) for row in rows} == {
        (trace, policy) for trace in ("agents", "slow") for policy in ("sticky", "round_robin")
    }
    ET.fromstring((tmp_path / "balancing.svg").read_text())


def test_the_sweep_is_relative_to_the_best_and_drawn():
    rows = [
        {"trace": "t", "policy": "p", "margin": margin, "slack": 0.0, "mean": mean, "p99": mean}
        for margin, mean in ((1.0, 12.0), (2.0, 10.0), (inf, 20.0))
    ]
    assert tables.limits(rows, "p")[2:] == [
        "| 1 | 1.20 / 1.20 |",
        "| 2 | 1.00 / 1.00 |",
        "| none | 2.00 / 2.00 |",
    ]
    ET.fromstring(plot.sweep([{**row, "margin": None if row["margin"] == inf else row["margin"]} for row in rows]))


def test_a_bar_that_goes_off_the_plot_says_how_far():
    rows = [{"engines": 8, "trace": "t", "policy": name, "p99": p99} for name, p99 in (("a < b", 10.0), ("c", 93.0))]
    texts = [item.text for item in ET.fromstring(plot.bars(rows)).iter("{http://www.w3.org/2000/svg}text")]
    assert "9x" in texts
    assert "a < b" in texts
