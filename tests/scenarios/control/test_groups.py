"""Transfer groups: ranks, sizes, slices, and what happens when a member is lost."""

import json

import pytest

from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import rig

INIT = "/init_weight_transfer_engine"
NCCL = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 5, "packed": True}


def sizes(*world_sizes):
    return [MockEngine(world_size=size) for size in world_sizes]


async def test_offsets_follow_the_world_sizes_and_every_other_byte_stays():
    async with rig(engines=sizes(1, 2, 1)) as fleet:
        body = b'{"init_info": {"master_address":"127.0.0.1", "master_port": 29500,\n "rank_offset" : 1, "x": [1.50], "world_size": 5}}'
        await fleet.call(INIT, data=body)
        got = [mock.calls(INIT)[0].body for mock in fleet.engines]
        assert got[0] == body
        assert got[1] == body.replace(b'"rank_offset" : 1', b'"rank_offset" : 2')
        assert got[2] == body.replace(b'"rank_offset" : 1', b'"rank_offset" : 4')
        assert await fleet.get("/get_world_size") == {"world_size": 4}
        group = (await fleet.get("/fleet"))["group"]
        assert list(group["first_ranks"].values()) == [1, 2, 4]


async def test_sizes_are_asked_anew_at_each_init():
    async with rig(engines=sizes(1, 1)) as fleet:
        fleet.engines[0].world_size = 2
        await fleet.call(INIT, json={"init_info": {"rank_offset": 1}})
        assert fleet.engines[1].calls(INIT)[0].json()["init_info"]["rank_offset"] == 3


async def test_a_list_is_cut_into_each_engines_own_part():
    async with rig(engines=sizes(1, 2)) as fleet:
        await fleet.call("/start_weight_update")
        await fleet.call("/update_weights", data=b'{"update_info": [{"r":0}, {"r": 1},{"r":2}], "k":1}')
        assert fleet.engines[0].calls("/update_weights")[0].body == b'{"update_info": [{"r":0}], "k":1}'
        assert fleet.engines[1].calls("/update_weights")[0].body == b'{"update_info": [{"r": 1},{"r":2}], "k":1}'
        data = await fleet.call("/update_weights", json={"update_info": [{}, {}]}, status=400)
        assert "3 workers" in data["error"]["message"]


async def test_one_mesh_cannot_be_split():
    async with rig(2) as fleet:
        info = {"rank_offset": 1, "dst_mesh_dims": [2], "source_digest": "x", "params": []}
        data = await fleet.call(INIT, json={"init_info": info}, status=409)
        assert "nccl_m2n" in data["error"]["message"]
        assert fleet.seen(INIT) == [0, 0]


async def test_sharded_rdt_gets_its_replica_ranks():
    async with rig(2) as fleet:
        await fleet.call(INIT, json={"init_info": {"num_consumers": 2, "num_replicas": 2, "rank_offset": 0}})
        infos = [mock.calls(INIT)[0].json()["init_info"] for mock in fleet.engines]
        assert [info["replica_rank"] for info in infos] == [0, 1]
        assert [info["num_replicas"] for info in infos] == [2, 2]


async def test_backends_without_ranks_get_the_same_bytes():
    async with rig(2) as fleet:
        body = b'{"init_info":{"packed":false}}'
        await fleet.call(INIT, data=body)
        assert [mock.calls(INIT)[0].body for mock in fleet.engines] == [body, body]


async def test_custom_rank_fields_count_from_whatever_was_sent():
    async with rig(engines=sizes(2, 1), fanout_paths=["/init_broadcaster=rank_offset", "/areal_*"]) as fleet:
        await fleet.call("/init_broadcaster/", json={"host": "x", "rank_offset": 0, "inference_world_size": 3})
        assert [mock.calls("/init_broadcaster")[0].json()["rank_offset"] for mock in fleet.engines] == [0, 2]
        await fleet.call("/areal_pause_generation")
        assert fleet.seen("/areal_pause_generation") == [1, 1]
        assert fleet.states() == ["ready", "ready"]


async def test_a_group_that_is_too_small_for_its_engines_is_refused():
    async with rig(engines=sizes(2, 2)) as fleet:
        data = await fleet.call(INIT, json={"init_info": {**NCCL, "world_size": 3}}, status=409)
        assert "world_size 5" in data["error"]["message"]
        assert fleet.seen(INIT) == [0, 0]


async def test_a_group_that_counts_a_dead_engine_is_refused():
    async with rig(engines=sizes(1, 1)) as fleet:
        await fleet.engines[1].kill()
        await fleet.until_state(1, "down")
        data = await fleet.call(INIT, json={"init_info": {**NCCL, "world_size": 3}}, status=409)
        assert fleet.engines[1].id in data["error"]["message"]
        assert "world_size 2" in data["error"]["message"]


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights"])
async def test_a_lost_member_refuses_the_collective_with_what_to_do(path):
    async with rig(3) as fleet:
        await fleet.call(INIT, json={"init_info": {**NCCL, "world_size": 4}})
        await fleet.engines[1].kill()
        await fleet.until_state(1, "down")
        data = await fleet.call(path, json={"update_info": {}}, status=409)
        assert "world_size 3" in data["error"]["message"]
        assert fleet.engines[1].id in data["error"]["message"]
        await fleet.engines[1].restart()
        await fleet.until(lambda: fleet.engine(1).boot == 1 and fleet.engine(1).alive)
        data = await fleet.call(path, json={"update_info": {}}, status=409)
        assert "world_size 4" in data["error"]["message"]
        assert fleet.seen(path) == [0, 0, 0]
        await fleet.call(INIT, json={"init_info": {**NCCL, "world_size": 4, "master_port": 29501}})
        await fleet.sync("w1", "v1")
        assert fleet.states() == ["ready"] * 3


async def test_a_failed_init_leaves_no_group_to_update():
    async with rig(2) as fleet:
        fleet.engines[1].fail(INIT, times=1)
        await fleet.call(INIT, json={"init_info": NCCL}, status=424)
        data = await fleet.call("/start_weight_update", status=409)
        assert "init" in data["error"]["message"]
        await fleet.until_state(1, "ready")
        await fleet.call(INIT, json={"init_info": {**NCCL, "master_port": 1}})
        await fleet.call("/start_weight_update")


async def test_a_world_size_that_nobody_says_is_named():
    async with rig(2) as fleet:
        fleet.engines[1].fail("/get_world_size", status=404)
        fleet.engine(1).world_size = None
        data = await fleet.call(INIT, json={"init_info": NCCL}, status=409)
        assert fleet.engines[1].id in data["error"]["message"]
        assert fleet.seen(INIT) == [0, 0]


async def test_a_double_start_is_refused_and_one_after_a_pause_is_a_retry():
    async with rig(2, replay_window=0) as fleet:
        await fleet.call("/start_weight_update")
        data = await fleet.call("/start_weight_update", status=409)
        assert "open already" in data["error"]["message"]
        await fleet.call("/pause")
        await fleet.call("/start_weight_update")
        assert fleet.seen("/finish_weight_update") == [1, 1]
        await fleet.call("/update_weights", json={"update_info": {"names": ["a"]}})
        await fleet.call("/finish_weight_update", json={"weight_version": "v1"})
        await fleet.call("/resume")
        assert fleet.states() == ["ready", "ready"]
        data = await fleet.call("/finish_weight_update", status=409)
        assert "no update round" in data["error"]["message"]


async def test_strict_fleets_update_only_while_paused():
    async with rig(2, require_pause=True) as fleet:
        await fleet.call("/start_weight_update", status=409)
        await fleet.call("/pause")
        await fleet.call("/start_weight_update")


async def test_one_engine_alone_gets_what_the_trainer_sent():
    async with rig(1) as fleet:
        body = json.dumps({"init_info": NCCL}).encode()
        await fleet.call(INIT, data=body)
        assert fleet.engines[0].calls(INIT)[0].body == body


async def test_a_member_that_was_only_silent_keeps_its_group():
    async with rig(2) as fleet:
        await fleet.call(INIT, json={"init_info": {**NCCL, "world_size": 3}})
        fleet.engines[1].health = 500
        await fleet.until_state(1, "down")
        await fleet.call("/start_weight_update", status=409)
        fleet.engines[1].health = 200
        await fleet.until_state(1, "ready")
        await fleet.call("/start_weight_update")


async def test_an_engine_that_came_after_the_world_size_was_asked_is_left_out():
    async with rig(2) as fleet:
        await fleet.engines[1].kill()
        await fleet.until_state(1, "down")
        size = (await fleet.get("/get_world_size"))["world_size"]
        await fleet.engines[1].restart()
        await fleet.until_state(1, "ready")
        info = {"init_info": {**NCCL, "world_size": size + 1}}
        await fleet.call(INIT, json=info)
        assert fleet.seen(INIT) == [1, 0]
        await fleet.sync("w1", "v1")
        assert fleet.states() == ["ready", "fenced"]
