"""The last phase of the GPU run: an engine killed in the middle of rollouts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from phases import GOOD, RAMP, check, sync
from rig import Control, Counters, Load, RunFailed, Server, Trainer, idle
from stage import MODEL, Stage


async def kill(stage: Stage, proxy: Server, trainer: Trainer, version: str) -> dict[str, Any]:
    """(d) One engine killed in the middle of streamed and whole rollouts, started again, and synced."""
    scale = stage.options.scale
    control = Control(proxy.url, stage.session)
    victim = stage.engines[-1]
    survivor_urls = stage.urls[:-1]
    half = stage.facts["sync_load"] // 4
    loads = [Load(), Load()]
    states: list[tuple[float, str]] = []
    watching = asyncio.ensure_future(watch(control, victim.url, states))
    clients = max(1, stage.options.clients // 2)
    try:
        await loads[0].start([proxy.url], half, clients, 17, model=MODEL, stream=True)
        await loads[1].start([proxy.url], half, clients, 19, model=MODEL, stream=False)
        async with Counters(survivor_urls, stage.session, 0.25) as counters:
            await asyncio.sleep((RAMP + 6) * scale)
            killed = time.time()
            victim.kill()
            assert victim.process is not None
            await victim.process.wait()
            await victim.start()
            up = asyncio.ensure_future(victim.healthy(stage.session, 240))
            await asyncio.sleep(8 * scale)
            one_left = counters.rate(killed + 2 * scale, time.time())
            before = counters.rate(killed - 6 * scale, killed)
            await up
            healthy = time.time()
            await asyncio.sleep(3)
            fenced = states[-1][1] if states else "?"
            joined = time.time()
            await trainer.ask("init", url=proxy.url)
            await sync(control, trainer, "keep", 1, version)
            synced = time.time()
            await asyncio.sleep(4 * scale)
        rows = [row for load in loads for row in await load.stop()]
    finally:
        for each in loads:
            each.kill()
        watching.cancel()
    await idle(stage.urls, stage.session)
    ours = victim.url.removeprefix("http://")
    bad = [each for each in rows if each["outcome"] not in (*GOOD, "cut")]
    later = [(when - killed, state) for when, state in states if when >= killed]
    ready = [when for when, state in later if state == "ready" and when > healthy - killed - 1]
    return {
        "rollouts": len(rows),
        "finished": sum(each["outcome"] in GOOD for each in rows),
        "lost_on_killed": sum(each["engine"] == ours for each in bad),
        "lost_elsewhere": sum(each["engine"] != ours for each in bad),
        "outcomes": sorted({f"{each['outcome']}: {each['detail'][:120]}" for each in bad}),
        "lost_not_streamed": sum(each["first"] == 0 or not each["engine"] for each in bad),
        "sent_again_by_proxy": sum(each["attempts"] > 1 for each in rows),
        "seconds_to_out_of_service": later[0][0] if later else None,
        "seconds_to_healthy_again": healthy - killed,
        "state_when_back": fenced,
        "seconds_init_and_sync": synced - joined,
        "seconds_to_ready": ready[0] if ready else None,
        "states": later,
        "others_tokens_per_second": {"before": before, "after": one_left},
        "used_after_ready": sum(
            each["engine"] == ours and bool(ready) and each["started"] > killed + ready[0] for each in rows
        ),
        "check": await check(stage, stage.urls, proxy, trainer, 1, version),
    }


async def watch(control: Control, url: str, states: list[tuple[float, str]]) -> None:
    """Note each change of an engine's state."""
    last = ""
    while True:
        try:
            fleet = await control.get("/fleet")
            state = next((each["state"] for each in fleet["engines"] if each["url"] == url), "gone")
        except (OSError, TimeoutError, ValueError, RunFailed):
            state = "?"
        if state != last:
            states.append((time.time(), state))
            last = state
        await asyncio.sleep(0.02)
