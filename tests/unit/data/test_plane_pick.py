import pytest

from proxy.config import Policy, Settings
from proxy.core.balancing import ConsistentHash, LeastInflight, PowerOfTwo, Prefix, RoundRobin, Sticky
from proxy.core.engine_state import State
from proxy.data.plane import DataPlane, make_balancer
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet


def plane_of(count=4, **settings):
    fleet = Fleet(clock=lambda: 0.0)
    plane = DataPlane(Settings(**settings), fleet)
    for n in range(count):
        fleet.add(Engine(id=f"e{n}", url=f"http://e{n}", upstream=None, state=State.READY, suspect=False))
    fleet.refresh()
    return plane, fleet


def pick(plane, key=None, body=(), *, generation=True, now=0.0):
    engine = plane.pick((), key, now, generation=generation, body=body)
    engine.inflight += 1
    return engine


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (Policy.STICKY, Sticky),
        (Policy.LEAST_INFLIGHT, LeastInflight),
        (Policy.ROUND_ROBIN, RoundRobin),
        (Policy.POWER_OF_TWO, PowerOfTwo),
        (Policy.CONSISTENT_HASH, ConsistentHash),
        (Policy.PREFIX, Prefix),
    ],
)
def test_every_policy_has_its_class(policy, kind):
    assert type(make_balancer(Settings(policy=policy))) is kind


def test_a_session_in_the_body_counts_only_where_the_setting_says_so():
    body = [b'{"session_id": "s", "prompt": "hi"}']
    plane, _ = plane_of(session_body_fields=["session_id"])
    assert len({pick(plane, body=body).id for _ in range(4)}) == 1
    plane, _ = plane_of()
    assert len({pick(plane, body=body).id for _ in range(4)}) == 4


def test_the_header_is_stronger_than_the_body():
    body = [b'{"session_id": "s", "prompt": "hi"}']
    plane, _ = plane_of(session_body_fields=["session_id"])
    home = pick(plane, key=b"k", body=body)
    for n in range(3):
        pick(plane, body=body)
        assert pick(plane, key=b"k", body=[b'{"session_id": "other%d"}' % n]) is home


def test_the_body_is_not_looked_at_for_what_runs_no_model():
    body = [b'{"session_id": "s"}']
    plane, _ = plane_of(session_body_fields=["session_id"])
    assert len({pick(plane, body=body, generation=False).id for _ in range(4)}) == 4


BODY = (b'{"model": "m", "prompt": "', b"word " * 1000, b'"}')


def idle(fleet):
    for engine in fleet:
        engine.inflight = 0


def test_prompts_are_followed_and_forgotten_with_the_caches():
    plane, fleet = plane_of(policy=Policy.PREFIX)
    home = pick(plane, body=BODY)
    assert pick(plane, body=BODY) is home
    idle(fleet)
    fleet.emit("control_call", call="reset_prefix_cache", status=200, legs={home.id: (200, 0.1, "ok")})
    assert pick(plane, body=BODY) is not home


def test_a_prompt_whose_request_goes_on_is_computed_again_where_it_runs():
    plane, fleet = plane_of(policy=Policy.PREFIX)
    home = pick(plane, body=BODY)
    fleet.emit("control_call", call="pause", query="mode=keep", status=200, legs={each.id: () for each in fleet})
    assert pick(plane, body=BODY) is home


@pytest.mark.parametrize(("query", "emptied"), [("mode=keep&clear_cache=false", False), ("mode=keep", True)])
def test_a_pause_empties_the_caches_of_the_engines_that_it_reached(query, emptied):
    plane, fleet = plane_of(2, policy=Policy.PREFIX)
    home = pick(plane, body=BODY)
    other = next(engine for engine in fleet if engine is not home)
    idle(fleet)
    fleet.emit("control_call", call="pause", query=query, status=424, legs={other.id: (200, 0.1, "answered")})
    assert pick(plane, body=BODY) is home
    idle(fleet)
    fleet.emit("control_call", call="pause", query=query, status=200, legs={engine.id: () for engine in fleet})
    assert (pick(plane, body=BODY) is not home) is emptied


def test_an_engine_that_left_meanwhile_is_forgotten_without_a_word():
    plane, fleet = plane_of(2, policy=Policy.PREFIX)
    home = pick(plane, body=BODY)
    fleet.remove(home)
    fleet.emit("control_call", call="pause", query="", status=200, legs={home.id: (None, 0.1, "died")})
    assert not len(plane.balancer)


def test_a_restarted_engine_draws_no_sessions():
    plane, fleet = plane_of()
    home = pick(plane, key=b"k")
    fleet.emit("engine_restarted", engine=home.id, boot=1, why="test")
    assert pick(plane, key=b"k") is not home


def test_a_full_engine_is_left_out_and_the_list_is_kept_while_none_is():
    plane, fleet = plane_of(2, max_inflight=1)
    seen = []
    select = plane.balancer.select

    def spy(candidates, *args):
        seen.append(candidates)
        return select(candidates, *args)

    plane.balancer.select = spy
    first = pick(plane, key=b"k")
    assert seen[0] is fleet.eligible
    assert pick(plane, key=b"k") is not first
    assert plane.pick((), b"k", 0.0, generation=True) is None
