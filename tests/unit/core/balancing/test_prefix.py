from collections import Counter
from math import inf
from random import Random

from fleets import fleet, take
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.balancing import Prefix
from proxy.core.balancing.prefix import KEPT_PROMPTS


def policy(*, size=4096, blocks=1000, margin=1.25, slack=2.0, match=0.5, block=16):
    return Prefix(prompt_bytes=size, max_blocks=blocks, margin=margin, slack=slack, min_match=match, block_bytes=block)


def text(seed, size=256):
    return Random(seed).randbytes(size)


def ask(one, engines, prompt, now=0.0):
    return one.select(engines, None, now, prompt)


def test_a_prompt_goes_where_its_beginning_was_seen():
    engines = fleet(0, 0, 0, 0)
    one = policy()
    homes = [ask(one, engines, text(n)) for n in range(4)]
    assert len(set(map(id, homes))) == 4
    for n in range(4):
        assert ask(one, engines, text(n) + text(99, 64)) is homes[n]


def test_the_longest_beginning_wins():
    engines = fleet(0, 0)
    one = policy()
    short = ask(one, engines, text(1))
    short.inflight = 1
    # Half of it is new, so that the other, idle engine is tried with a copy of its own.
    long = ask(one, [engines[1 - engines.index(short)]], text(1) + text(2))
    short.inflight = 0
    assert ask(one, engines, text(1) + text(2) + text(3, 64)) is long


def test_of_two_that_have_as_much_the_less_busy_takes_it():
    engines = fleet(0, 0)
    one = policy()
    ask(one, engines[:1], text(1))
    ask(one, engines[1:], text(1))
    engines[0].inflight = 1
    assert ask(one, engines, text(1)) is engines[1]


def test_a_short_match_does_not_count():
    engines = fleet(0, 0)
    one = policy(match=0.5)
    home = ask(one, engines, text(1, 64))
    home.inflight = 1
    assert ask(one, engines, text(1, 64) + text(2, 256)) is not home


def test_load_goes_before_affinity_beyond_the_limit():
    engines = fleet(0, 0, 0)
    one = policy(margin=1.25, slack=2.0)
    home = ask(one, engines, text(1))
    home.inflight = 3
    assert ask(one, engines, text(1)) is home
    home.inflight = 4
    assert ask(one, engines, text(1)) is not home


def test_many_samples_of_one_prompt_end_up_everywhere():
    engines = fleet(*[0] * 4)
    counts = Counter(take(policy(), engines, 256, prompt=text(1)))
    assert max(counts.values()) <= 1.25 * 64 + 3
    assert len(counts) == 4


def test_without_a_margin_all_of_them_go_to_one():
    assert len(set(take(policy(margin=inf), fleet(0, 0, 0), 50, prompt=text(1)))) == 1


def test_nothing_to_look_at_means_the_least_busy():
    engines = fleet(3, 0, 5)
    assert take(policy(), engines, 1, prompt=b"") == [1]
    assert take(policy(), engines, 1, prompt=b"shorter than") == [1]


def test_only_so_much_of_a_prompt_is_looked_at():
    engines = fleet(0, 0)
    one = policy(size=64)
    home = ask(one, engines, text(1, 64) + text(2, 4096))
    home.inflight = 1
    assert ask(one, engines, text(1, 64) + text(3, 4096)) is home
    assert len(one) == 4


def test_an_engine_whose_caches_were_emptied_draws_nothing():
    engines = fleet(0, 0)
    one = policy()
    for lose in (one.emptied, one.forget):
        home = ask(one, engines, text(1))
        home.inflight = 1
        assert ask(one, engines, text(1)) is home
        lose(home.id)
        assert len(one) == 0
        assert ask(one, engines, text(1)) is not home
        home.inflight = 0
        for engine in engines:
            one.forget(engine.id)


def test_emptying_one_leaves_the_others():
    engines = fleet(0, 0)
    one = policy()
    ask(one, engines[:1], text(1))
    ask(one, engines[1:], text(1))
    one.emptied(engines[0].id)
    engines[1].inflight = 1
    assert ask(one, engines, text(1)) is engines[1]


def test_the_least_recently_used_is_given_up_and_of_a_prompt_its_end():
    engines = fleet(0)
    one = policy(blocks=20)
    ask(one, engines, text(1, 160))
    ask(one, engines, text(2, 160))
    ask(one, engines, text(1, 160))
    ask(one, engines, text(3, 80))
    assert len(one) == 20
    assert one._longest(engines, one._blocks(text(1, 160))) is engines[0]
    # Half of the older prompt went, its end.
    assert one._longest(engines, one._blocks(text(2, 80))) is engines[0]
    assert one._longest(engines, one._blocks(text(2, 96))[-1:]) is None


def test_a_prompt_longer_than_the_whole_memory_is_remembered_alone():
    engines = fleet(0, 0)
    one = policy(blocks=4)
    home = ask(one, engines, text(1))
    home.inflight = 1
    assert ask(one, engines, text(1)) is home


def test_engines_that_come_and_go_do_not_let_the_table_grow():
    one = policy()
    for n in range(500):
        engines = fleet(0)
        engines[0].id = f"engine-{n}"
        ask(one, engines, text(n % 7))
        one.forget(engines[0].id)
    assert len(one) == 0
    assert one._holders == {}
    assert one._free == [1]


def test_sessions_are_not_remembered():
    assert policy().finish(b"k") is False


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(-1, 3)), max_size=60), st.integers(8, 40))
def test_the_tree_and_the_lists_of_engines_agree(steps, blocks):
    engines = fleet(0, 0, 0)
    one = policy(blocks=blocks, margin=inf)
    for seed, length, lost in steps:
        if lost >= 0:
            one.emptied(engines[lost % 3].id)
        ask(one, engines, text(seed, length * 16))
        seen = {}
        for engine_id, cached in one._cached.items():
            for block in cached:
                seen[block] = seen.get(block, 0) | one._slots[engine_id]
            assert len(cached) <= max(blocks // 3, 12)
        assert seen == one._holders
        assert len(one) == sum(map(len, one._cached.values()))


def test_emptied_caches_keep_the_newest_prompts_of_those_that_run_on():
    engines = fleet(0)
    one = policy(match=1.0)
    for seed in range(20):
        ask(one, engines, text(seed))
    blocks = len(one) // 20
    one.emptied(engines[0].id, running=3)
    assert len(one) == 3 * KEPT_PROMPTS * blocks
    # The newest ones are there, the others are not.
    assert [one._longest(engines, one._blocks(text(seed))) is not None for seed in (13, 14, 19)] == [False, True, True]
    one.emptied(engines[0].id)
    assert len(one) == 0


def test_a_prompt_that_was_seen_again_is_as_new_as_that():
    engines = fleet(0)
    one = policy(match=1.0)
    for seed in (0, 1, 2, 3, 4, 0):
        ask(one, engines, text(seed))
    one.emptied(engines[0].id, running=1)
    assert [one._longest(engines, one._blocks(text(seed))) is not None for seed in (0, 3, 4)] == [True, False, True]


def test_nothing_was_known_of_an_engine_that_is_emptied():
    one = policy()
    one.emptied("nobody", running=5)
    one.emptied("nobody")
    assert len(one) == 0
