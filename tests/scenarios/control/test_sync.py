import asyncio
import json

import pytest

from proxy.core.engine_state import State
from tests.scenarios.control.mock import MockEngine
from tests.scenarios.control.rig import proxy_for, rig


async def test_a_whole_sync_reaches_every_engine_and_sets_the_fleet_version():
    async with rig(3) as fleet:
        assert fleet.states() == ["ready"] * 3
        await fleet.sync(version="v1")
        assert [engine.version for engine in fleet.engines] == ["v1"] * 3
        assert fleet.plane.fleet.version == "v1"
        assert fleet.states() == ["ready"] * 3
        assert await fleet.get("/weight_info") == {"weight_version": "v1"}
        assert not fleet.data.gate.closed
