"""The receiving and the sending side of a simulated weight transfer."""

from __future__ import annotations

import asyncio

import pytest

from engine_launcher.sim.errors import WorkerFailedError
from engine_launcher.sim.trainer import SimTrainer
from engine_launcher.sim.transfer import WeightTransfer

INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}
META = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]}
EMPTY: dict[str, list[object]] = {"names": [], "dtype_names": [], "shapes": []}


async def ready(ranks: int = 1) -> WeightTransfer:
    transfer = WeightTransfer(ranks, "sim")
    await transfer.init({**INIT, "world_size": ranks + 1})
    return transfer


async def until_joined(trainer: SimTrainer, ranks: list[int]) -> None:
    for _ in range(10_000):
        if trainer.ranks == ranks:
            return
        await asyncio.sleep(0)
    pytest.fail(f"{trainer.ranks} joined, not {ranks}")


async def test_start_twice_leaves_the_session_open() -> None:
    transfer = await ready()
    transfer.start()
    with pytest.raises(WorkerFailedError, match="already active"):
        transfer.start()
    assert transfer.active
    transfer.finish()


async def test_update_and_finish_need_a_start() -> None:
    transfer = await ready()
    with pytest.raises(WorkerFailedError, match="must be called before"):
        await transfer.update({}, "w")
    with pytest.raises(WorkerFailedError, match="without a matching"):
        transfer.finish()


async def test_a_failed_update_closes_the_session() -> None:
    transfer = WeightTransfer(1, "sim")
    transfer.start()
    with pytest.raises(WorkerFailedError, match="not initialized"):
        await transfer.update({"sim_weights": "x"}, "w")
    assert not transfer.active


async def test_a_draft_update_is_refused() -> None:
    transfer = await ready()
    with pytest.raises(WorkerFailedError, match="draft"):
        transfer.start(draft=True)
    assert not transfer.active


async def test_shutdown_waits_for_no_session() -> None:
    transfer = await ready()
    transfer.start()
    with pytest.raises(WorkerFailedError, match="during a weight update"):
        await transfer.shutdown()
    transfer.finish()
    await transfer.shutdown()
    assert transfer.group is None


async def test_without_a_backend_everything_is_refused() -> None:
    transfer = WeightTransfer(1, None)
    with pytest.raises(WorkerFailedError, match="not configured"):
        await transfer.init(INIT)
    with pytest.raises(WorkerFailedError, match="not configured"):
        transfer.start()


@pytest.mark.parametrize(
    "info",
    [{"nonsense": 1}, {**INIT, "rank_offset": "1"}, {**INIT, "rank_offset": 3}, {**INIT, "world_size": 1}],
    ids=["unknown", "type", "offset", "world"],
)
async def test_bad_init(info: dict[str, object]) -> None:
    with pytest.raises(WorkerFailedError, match="Invalid init_info"):
        await WeightTransfer(1, "sim").init(info)


async def test_the_label_names_the_weights() -> None:
    transfer = await ready()
    transfer.start()
    assert await transfer.update({"sim_weights": "w2"}, "w1") == "w2"


async def test_a_list_is_indexed_from_zero() -> None:
    transfer = await ready(ranks=2)
    transfer.start()
    mine = [{"sim_weights": "same"}, {"sim_weights": "same"}, {"sim_weights": "of another engine"}]
    assert await transfer.update(mine, "w") == "same"
    assert await transfer.update([{"sim_weights": "a"}, {"sim_weights": "b"}], "w") == "a|b"
    with pytest.raises(WorkerFailedError, match="out of range"):
        await transfer.update(mine[:1], "w")


async def test_empty_lists_mean_the_last_ones() -> None:
    transfer = await ready()
    transfer.start()
    first = await transfer.update(META, "w")
    assert first.startswith("update-")
    assert await transfer.update(EMPTY, first) != first
    assert transfer.metadata == META


async def test_empty_lists_with_nothing_remembered_load_nothing() -> None:
    transfer = await ready()
    transfer.start()
    assert await transfer.update(EMPTY, "w") == "w"


async def test_init_forgets_the_metadata() -> None:
    transfer = await ready()
    transfer.start()
    await transfer.update(META, "w")
    await transfer.init(INIT)
    assert transfer.metadata is None
    assert transfer.active


async def test_lists_must_be_of_one_length() -> None:
    transfer = await ready()
    transfer.start()
    with pytest.raises(WorkerFailedError, match="same size"):
        await transfer.update({**META, "shapes": []}, "w")


async def test_a_group_blocks_until_every_rank_is_there() -> None:
    async with SimTrainer(world_size=4) as trainer:
        one, two = WeightTransfer(1, "sim"), WeightTransfer(2, "sim")
        first = asyncio.ensure_future(one.init(trainer.init_info(1)))
        async with asyncio.timeout(10):
            await until_joined(trainer, [1])
        assert not first.done()
        await asyncio.gather(first, two.init(trainer.init_info(2)), trainer.wait_joined())
        assert trainer.ranks == [1, 2, 3]
        one.start()
        two.start()
        update = asyncio.ensure_future(one.update({}, "old"))
        send = asyncio.ensure_future(trainer.broadcast("new"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not update.done()
        assert not send.done()
        assert await two.update({}, "old") == "new"
        assert await update == "new"
        await send
        await one.close()
        await two.close()


async def test_a_trainer_that_goes_away_fails_the_update() -> None:
    trainer = SimTrainer(world_size=2)
    await trainer.start()
    transfer = WeightTransfer(1, "sim")
    await transfer.init(trainer.init_info())
    transfer.start()
    update = asyncio.ensure_future(transfer.update({}, "old"))
    await asyncio.sleep(0.01)
    await trainer.stop()
    with pytest.raises(WorkerFailedError, match="closed by peer"):
        await update
    assert not transfer.active
    await transfer.close()


async def test_a_new_init_makes_a_new_group() -> None:
    async with SimTrainer(world_size=2) as trainer:
        transfer = WeightTransfer(1, "sim")
        await transfer.init(trainer.init_info())
        await transfer.init(trainer.init_info())
        transfer.start()
        result, _ = await asyncio.gather(transfer.update({}, "old"), trainer.broadcast("again"))
        assert result == "again"
        await transfer.close()


async def test_no_trainer_there() -> None:
    async with SimTrainer(world_size=2) as trainer:
        info = trainer.init_info()
    with pytest.raises(WorkerFailedError, match="cannot join"):
        await WeightTransfer(1, "sim").init(info)
