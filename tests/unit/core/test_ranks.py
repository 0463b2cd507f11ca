import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import ranks
from proxy.errors import BadRequest, Conflict

FIELD = "init_info.rank_offset"


def init(**info):
    return orjson.dumps({"init_info": info})


def infos(plan):
    return [orjson.loads(body)["init_info"] for body in plan.bodies]


@given(st.lists(st.integers(1, 16), min_size=1, max_size=8), st.integers(0, 64))
def test_ranks_of_all_engines_are_a_gapless_range(sizes, base):
    world = base + sum(sizes)
    plan = ranks.plan_init(init(rank_offset=base, world_size=world, master_port=1), FIELD, sizes)
    got = [info["rank_offset"] for info in infos(plan)]
    covered = [rank for first, size in zip(got, sizes, strict=True) for rank in range(first, first + size)]
    assert covered == list(range(base, world))
    assert plan.world_size == world


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_slices_of_a_list_are_the_list(sizes):
    entries = [{"rank": rank, "s": "],[{"} for rank in range(sum(sizes))]
    bodies = ranks.plan_update(orjson.dumps({"update_info": entries, "x": 1}), sizes)
    parts = [orjson.loads(body) for body in bodies]
    assert [entry for part in parts for entry in part["update_info"]] == entries
    assert [len(part["update_info"]) for part in parts] == sizes
    assert all(part["x"] == 1 for part in parts)


def test_the_first_engine_gets_the_bytes_that_were_sent():
    body = b'{"init_info": {"rank_offset":  1 , "world_size": 4}}'
    plan = ranks.plan_init(body, FIELD, [1, 2])
    assert plan.bodies[0] is body
    assert plan.bodies[1] == body.replace(b":  1 ,", b":  2 ,")
    assert plan.offsets == [1, 2]


@pytest.mark.parametrize(
    "body", [None, b"", b"not json", b"[]", b'{"init_info": 3}', b'{"init_info": {"packed": true}}']
)
def test_what_has_no_ranks_goes_on_as_it_is(body):
    plan = ranks.plan_init(body, FIELD, [1, 1])
    assert plan.bodies == [body, body]
    assert not ranks.needs_sizes(body, FIELD)


def test_a_boolean_is_no_rank():
    assert ranks.plan_init(init(rank_offset=True), FIELD, [1, 1]).base is None


@pytest.mark.parametrize("key", ["dst_mesh_dims", "dst_mesh"])
def test_one_mesh_is_for_one_engine(key):
    body = init(rank_offset=1, **{key: [2, 2]})
    with pytest.raises(Conflict, match="nccl_m2n"):
        ranks.plan_init(body, FIELD, [2, 2])
    assert ranks.plan_init(body, FIELD, [4]).bodies == [body]


def test_a_unique_id_needs_only_its_offset():
    plan = ranks.plan_init(init(nccl_unique_id_b64="eA==", rank_offset=1, world_size=3), FIELD, [1, 1])
    assert [(info["nccl_unique_id_b64"], info["rank_offset"]) for info in infos(plan)] == [("eA==", 1), ("eA==", 2)]


@pytest.mark.parametrize(
    ("sent", "want"),
    [
        ({"num_consumers": 4}, [(0, 2), (1, 2)]),
        ({"num_consumers": 4, "num_replicas": 2, "replica_rank": 0}, [(0, 2), (1, 2)]),
        ({"num_replicas": 6, "replica_rank": 4}, [(4, 6), (5, 6)]),
    ],
)
def test_replica_ranks(sent, want):
    plan = ranks.plan_init(init(**sent), FIELD, [2, 2])
    assert [(info["replica_rank"], info["num_replicas"]) for info in infos(plan)] == want


def test_a_group_must_hold_all_its_workers():
    with pytest.raises(Conflict, match="world_size 4"):
        ranks.plan_init(init(rank_offset=1, world_size=3, master_port=1), FIELD, [1, 2])
    ranks.plan_init(init(rank_offset=1, world_size=3), FIELD, [1, 2])  # no rendezvous: it may mean anything


def test_a_list_of_another_length_is_the_clients_mistake():
    with pytest.raises(BadRequest, match=r"3 entries.*4 workers"):
        ranks.plan_update(orjson.dumps({"update_info": [1, 2, 3]}), [2, 2])


@pytest.mark.parametrize("body", [None, b"{}", b'{"update_info": {}}', b'{"weight_dir": "/x"}', b"oops"])
def test_one_payload_goes_to_all(body):
    assert ranks.plan_update(body, [1, 1, 1]) == [body] * 3


def test_native_updates_are_told_from_whole_ones():
    assert ranks.is_native_update(b'{"update_info": {}}')
    assert ranks.is_native_update(None)
    assert not ranks.is_native_update(b'{"weight_dir": "/x"}')


def test_custom_fields_count_from_what_was_sent():
    plan = ranks.plan_init(b'{"rank_offset": 0, "inference_world_size": 3}', "rank_offset", [2, 1])
    assert [orjson.loads(body)["rank_offset"] for body in plan.bodies] == [0, 2]
