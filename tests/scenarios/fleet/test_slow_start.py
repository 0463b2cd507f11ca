"""An engine that joins a proxy at work: its share of new requests, by the setting."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from proxy.app import App
from tests.tools.fault_engine import FaultEngine, answer_bytes
from tests.tools.fault_scripts import reply
from tests.tools.rig import eventually, proxy_for

SECONDS = 60.0


async def joined(app: App, engine: FaultEngine) -> str:
    """Take it in an hour after the others came."""
    clock = asyncio.get_running_loop().time
    app.fleet.clock = lambda: clock() + 3600
    added = app.control.members.add(engine.url)
    await eventually(lambda: added.eligible, "the newcomer")
    return added.id


def given(app: App, count: int) -> Counter[str]:
    """Who gets so many requests that do not end."""
    picked: Counter[str] = Counter()
    for _ in range(count):
        chosen = app.plane.pick((), None, 0.0, generation=True)
        assert chosen is not None
        chosen.inflight += 1
        picked[chosen.id] += 1
    return picked


@pytest.mark.parametrize("policy", ["sticky", "least_inflight"])
@pytest.mark.parametrize(("seconds", "most"), [(0.0, 20), (SECONDS, 2)])
async def test_a_newcomer_is_filled_up_to_its_share(policy: str, seconds: float, most: int) -> None:
    script = reply(answer_bytes(200, b"{}"))
    async with FaultEngine(script) as a, FaultEngine(script) as b, FaultEngine(script) as c:
        async with proxy_for(a, b, policy=policy, slow_start=seconds) as app:
            for engine in app.fleet:
                engine.inflight = 20
            newcomer = await joined(app, c)
            picked = given(app, 20)
            assert picked[newcomer] in (most - 1, most)
            clock = app.fleet.clock
            app.fleet.clock = lambda: clock() + SECONDS
            if seconds:
                app.discovery._ramps.step()
                assert {engine.weight for engine in app.fleet} == {1.0}
                assert given(app, 20)[newcomer] >= 15
            for engine in app.fleet:
                engine.inflight = 0
