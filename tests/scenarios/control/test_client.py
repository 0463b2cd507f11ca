"""The trainers' client: whatever happens in the block, generation goes on afterwards."""

import asyncio

import pytest

from proxy.client import AsyncFleetClient, FleetCallError, FleetClient
from tests.scenarios.control.rig import rig

INFO = {"names": ["w"]}


async def test_a_sync_as_one_block_async():
    async with rig(2) as fleet, AsyncFleetClient(fleet.base) as client:
        assert await client.world_size() == 2
        await client.init_weight_transfer({"rank_offset": 1, "world_size": 3})
        sent = asyncio.Event()

        async def broadcast():
            sent.set()

        async with client.sync(version="v1") as sync:
            assert fleet.data.gate.closed
            await sync.update(INFO, send=broadcast())
        assert sent.is_set()
        assert sync.result.version == "v1"
        assert sync.result.fallen == {}
        assert await client.weight_version() == "v1"
        assert not fleet.data.gate.closed


async def test_a_sync_as_one_block_blocking():
    async with rig(2) as fleet:
        client = FleetClient(fleet.base)

        def train():
            assert client.world_size() == 2
            client.init_weight_transfer({"rank_offset": 1, "world_size": 3})
            with client.sync(version="v1", mode="wait") as sync:
                sync.update(INFO, send=lambda: None)
            with client.sync(native=False, version="v2") as plain:
                plain.call("/update_weights", {"weight_dir": "/x"})
            return sync.result, plain.result, client.weight_version()

        first, second, version = await asyncio.to_thread(train)
        assert (first.version, first.fallen, second.version, version) == ("v1", {}, "v2", "v2")
        assert fleet.engines[0].calls("/pause")[0].query == "mode=wait"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
async def test_an_error_in_the_block_resumes_and_publishes_nothing(error):
    async with rig(2) as fleet:
        await fleet.sync("w1", "v1")

        def train():
            client = FleetClient(fleet.base)
            with pytest.raises(error), client.sync(version="v2"):
                raise error
            return client.weight_version()

        assert await asyncio.to_thread(train) == "v1"
        assert not fleet.data.gate.closed
        assert fleet.plane.fleet.version == "v1"


async def test_a_cancelled_block_resumes():
    async with rig(2) as fleet, AsyncFleetClient(fleet.base) as client:

        async def train():
            async with client.sync(version="v2"):
                await asyncio.sleep(60)

        task = asyncio.ensure_future(train())
        await fleet.until(lambda: fleet.seen("/start_weight_update") == [1, 1])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not fleet.data.gate.closed


async def test_it_says_which_engines_fell_out():
    async with rig(3) as fleet, AsyncFleetClient(fleet.base) as client:
        await fleet.sync("w1", "v1")
        fleet.engines[1].fail("/update_weights", times=1)
        with pytest.raises(FleetCallError) as caught:
            async with client.sync(version="v2") as sync:
                await sync.update(INFO)
        assert caught.value.status == 424
        assert caught.value.fallen == [fleet.engines[1].id]
        assert fleet.engines[1].id in sync.result.fallen
        assert sync.result.version == "v1"
        async with client.sync(version="v3") as sync:
            await sync.update(INFO)
        assert sync.result.fallen == {}
        assert sync.result.version == "v3"


async def test_a_token_is_sent_and_its_lack_is_an_error():
    async with rig(1, control_token="t") as fleet:
        async with AsyncFleetClient(fleet.base, token="t") as client:
            assert await client.call("/pause") == {"status": "paused"}
        async with AsyncFleetClient(fleet.base) as client:
            with pytest.raises(FleetCallError, match="401"):
                await client.call("/resume")


def test_a_url_that_is_none_is_refused():
    with pytest.raises(ValueError, match="http://"):
        FleetClient("localhost:8000")


async def test_an_async_client_must_be_entered():
    with pytest.raises(RuntimeError, match="async with"):
        await AsyncFleetClient("http://127.0.0.1:1").call("/pause")
