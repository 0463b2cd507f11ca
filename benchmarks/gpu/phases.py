"""The four phases of the GPU run; each returns plain data."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Final

from rig import Control, Counters, Load, Server, Trainer, cpu_seconds, idle, quantile, say
from stage import MODEL, Stage

RAMP: Final = 3.0
"""Seconds before a measurement begins; the rollouts start in their middle, so the load is steady at once."""
WINDOW: Final = 10.0
"""Seconds of one cell of the throughput table."""
MANY: Final = 1024
"""Rollouts in flight above which all takes twice as long: each runs slower, and the window must see whole ones."""
STEADY: Final = 60.0
"""Seconds until who came first no longer matters where more than `MANY` share engines that are behind: the straight half
joins their queues a second before the proxy's, and waits keep that order for several rollouts (see behind.py)."""

GOOD: Final = ("length", "stop")


def shape(rows: list[dict[str, Any]], start: float, end: float, *, streamed: bool) -> dict[str, Any]:
    """What clients saw of the rollouts that ended in a window."""
    inside = [each for each in rows if start <= each["ended"] <= end and each["outcome"] != "cut"]
    good = [each for each in inside if each["outcome"] in GOOD]
    whole = [each["ended"] - each["started"] for each in good]
    first = [each["first"] - each["started"] for each in rows if start <= each["first"] <= end] if streamed else []
    errors = [each for each in rows if each["outcome"] not in (*GOOD, "cut")]
    short = [each for each in good if each["tokens"] != each["wanted"]]
    return {
        "finished": len(good),
        "errors": len(errors),
        "error_examples": [[each["outcome"], each["detail"][:200]] for each in errors[:3]],
        "wrong_length": len(short),
        "ttft_p50": quantile(first, 0.5),
        "ttft_p99": quantile(first, 0.99),
        "rollout_p50": quantile(whole, 0.5),
        "rollout_p99": quantile(whole, 0.99),
        "resent": sum(each["attempts"] > 1 for each in rows),
    }


async def cell(
    stage: Stage, proxy: Server | None, concurrency: int, *, stream: bool, seed: int, **plan: Any
) -> dict[str, Any]:
    """One cell: a steady load by one route."""
    options = stage.options
    longer = 2.0 if concurrency > MANY else 1.0
    ramp, window = RAMP * longer * options.scale, WINDOW * longer * options.scale
    load = Load()
    clients = min(concurrency, options.clients * (2 if concurrency > MANY else 1))
    urls = stage.urls if proxy is None else [proxy.url]
    watched = {f"engine {index}": each for index, each in enumerate(stage.engines)}
    if proxy is not None:
        watched["proxy"] = proxy
    try:
        await load.start(urls, concurrency, clients, seed, stream=stream, model=MODEL, **plan)
        async with Counters(stage.urls, stage.session) as counters:
            await asyncio.sleep(ramp)
            start = time.time()
            before = {name: cpu_seconds(each.process.pid) for name, each in watched.items() if each.process}
            pids = [each.pid for each in load.processes]
            clients_before = sum(cpu_seconds(each) for each in pids)
            await asyncio.sleep(window)
            end = time.time()
            after = {name: cpu_seconds(each.process.pid) for name, each in watched.items() if each.process}
            client_cores = (sum(cpu_seconds(each) for each in pids) - clients_before) / (end - start)
            await asyncio.sleep(0.6)
        rows = await load.stop()
    finally:
        load.kill()
    for each in watched.values():
        each.check()
    await idle(stage.urls, stage.session)
    cores = {name: (after[name] - before[name]) / (end - start) for name in before}
    return {
        "route": "straight" if proxy is None else proxy.name,
        "concurrency": concurrency,
        "stream": stream,
        "tokens_per_second": counters.rate(start, end),
        "cores": cores,
        "client_cores_each": client_cores / clients,
        "clients": clients,
        **shape(rows, start, end, streamed=stream),
    }


async def throughput(stage: Stage, save: Any) -> list[dict[str, Any]]:
    """(a) Each load straight, through the proxy, through the proxy, straight, so that drift of the machine cancels.

    Each cell has the same prompts and lengths.
    """
    found: list[dict[str, Any]] = []
    proxy = await stage.proxy("proxy", stage.urls)
    await warm(stage)
    for concurrency in stage.options.turns:
        for stream in stage.options.turn_forms:
            for route in (None, proxy, proxy, None) * stage.options.rounds:
                row = await cell(stage, route, concurrency, stream=stream, seed=7)
                found.append(row)
                say(
                    f"a: {concurrency} {'stream' if stream else 'whole'} {row['route']}: "
                    f"{row['tokens_per_second']:.0f} tok/s, errors {row['errors']}, cores {row['cores']}"
                )
                save(found)
    return found


async def warm(stage: Stage) -> None:
    """Kernels are chosen and caches filled on first use."""
    if "warm" not in stage.facts:
        await cell(stage, None, min(stage.options.in_flight), stream=False, seed=1)
        stage.facts["warm"] = True


async def paired(stage: Stage, save: Any) -> list[dict[str, Any]]:
    """(a) Half of the load straight and half through the proxy, at once and on the same engines.

    What the machine does to the engines' speed then happens to both halves alike. The engines give each running rollout
    a token a step, whatever way it came, so the time of a token of whole rollouts compares the routes. The same client
    processes take both routes in turn, and only rollouts that began in the window count: neither half has a start.
    """
    found: list[dict[str, Any]] = []
    options = stage.options
    proxy = await stage.proxy("proxy", stage.urls)
    await warm(stage)
    urls = [each for engine in stage.urls for each in (engine, proxy.url)]
    for concurrency in options.in_flight:
        ramp, window = (STEADY, STEADY) if concurrency > MANY else (RAMP, 1.5 * WINDOW)
        for stream in options.forms:
            load = Load()
            clients = options.clients * (2 if concurrency > MANY else 1)
            try:
                await load.start(urls, concurrency, clients, 23, stream=stream, model=MODEL)
                async with Counters(stage.urls, stage.session) as counters:
                    await asyncio.sleep(ramp * options.scale)
                    start = time.time()
                    watched = {each.name: each.process.pid for each in (*stage.engines, proxy) if each.process}
                    watched |= {f"client {index}": each.pid for index, each in enumerate(load.processes)}
                    before = {name: cpu_seconds(pid) for name, pid in watched.items()}
                    await asyncio.sleep(window * options.scale)
                    end = time.time()
                    cores = {name: (cpu_seconds(pid) - before[name]) / (end - start) for name, pid in watched.items()}
                    await asyncio.sleep(0.6)
                rows = await load.stop()
            finally:
                load.kill()
            await idle(stage.urls, stage.session)
            row: dict[str, Any] = {
                "concurrency": concurrency,
                "stream": stream,
                "tokens_per_second": counters.rate(start, end),
                "proxy_cores": cores["proxy"],
                "engine_cores": [each for name, each in cores.items() if name.startswith("engine")],
                "client_cores_most": max(each for name, each in cores.items() if name.startswith("client")),
            }
            for name in ("straight", "proxy"):
                mine = [each for each in rows if (each["url"] == proxy.url) == (name == "proxy")]
                fresh = [each for each in mine if each["started"] >= start]
                row[name] = shape(fresh, start, end, streamed=stream) | per_token(fresh, end, streamed=stream)
                row[name]["errors"] = shape(mine, start, end, streamed=stream)["errors"]
            found.append(row)
            kept = options.out / f"rollouts-{len(found)}.json"  # what a later question about this cell is put to
            kept.write_text(
                json.dumps([seen(each, start, "proxy" if each["url"] == proxy.url else "") for each in rows])
            )
            say(
                f"p: {concurrency} {'stream' if stream else 'whole'}: {row['straight']['ms_per_token']:.2f} ms/token "
                f"straight, {row['proxy']['ms_per_token']:.2f} by the proxy ({cores['proxy']:.2f} cores)"
            )
            save(found)
    return found


def seen(row: dict[str, Any], start: float, route: str) -> list[Any]:
    """A rollout in few characters; seconds since the window began, a first token's only where there was one."""
    first = round(row["first"] - start, 3) if row["first"] else None
    ended = row["outcome"] if row["outcome"] in (*GOOD, "cut") else "error"
    return [
        route,
        row["engine"],
        round(row["started"] - start, 3),
        first,
        round(row["ended"] - start, 3),
        row["tokens"],
        ended,
    ]


def per_token(rows: list[dict[str, Any]], end: float, *, streamed: bool) -> dict[str, Any]:
    """Milliseconds a token of the whole rollouts in a window, and their mean length: unequal lengths compare nothing."""
    good = [each for each in rows if each["ended"] <= end and each["outcome"] in GOOD]
    tokens = sum(each["tokens"] for each in good)
    whole = sum(each["ended"] - each["started"] for each in good)
    decode = sum(each["ended"] - each["first"] for each in good)
    return {
        "tokens": tokens,
        "ms_per_token": 1000 * whole / max(1, tokens),
        "ms_per_token_after_first": 1000 * decode / max(1, tokens) if streamed else None,
    }


async def sync(control: Control, trainer: Trainer, mode: str, seed: int, version: str) -> dict[str, Any]:
    """One whole sync through one URL, as its trainer sees it, and what the proxy says of its parts."""
    started = time.time()
    await control.post(f"/pause?mode={mode}")
    paused = time.time()
    await trainer.ask("send", seed=seed)
    sent = time.time()
    await control.post("/update_weight_version", {"new_version": version})
    await control.post("/resume")
    ended = time.time()
    last = (await control.get("/fleet/syncs?last=1"))["syncs"][0]
    calls = last["calls"]
    overhead = sum(each["overhead_seconds"] for each in calls)
    named = {each["call"]: each["seconds"] for each in calls}
    return {
        "version": version,
        "started": started,
        "window": ended - started,
        "pause": paused - started,
        "send": sent - paused,
        "engines": sum(each["seconds"] for each in calls) - overhead,
        "proxy": overhead,
        "calls": named,
        "overheads": {each["call"]: each["overhead_seconds"] for each in calls},
        "trouble": last["trouble"],
    }


async def syncs(
    stage: Stage, urls: list[str], proxy: Server, trainer: Trainer, mode: str, count: int, label: str, gap: float
) -> dict[str, Any]:
    """(b) Syncs under load in one mode, with a stretch of the same load without any before and after."""
    scale = stage.options.scale
    control = Control(proxy.url, stage.session)
    plan: dict[str, Any] = {"stream": mode != "abort", "resubmit": mode == "abort", "median": 192, "longest": 2048}
    if mode == "wait":
        plan |= {"median": 48, "longest": 96}  # a pause lasts as long as the longest rollout
    load, done = Load(), []
    try:
        await load.start([proxy.url], stage.facts["sync_load"], stage.options.clients, 11, model=MODEL, **plan)
        async with Counters(urls, stage.session, 0.25) as counters:
            await asyncio.sleep(RAMP * scale)
            quiet = time.time()
            await asyncio.sleep(5 * scale)
            begin = time.time()
            for index in range(count):
                done.append(await sync(control, trainer, mode, 1 + index % 2, f"{label}{index + 1}"))
                await asyncio.sleep(gap * scale)
            end = time.time()
            await asyncio.sleep(5 * scale)
            over = time.time()
            await asyncio.sleep(0.6)
        rows = await load.stop()
    finally:
        load.kill()
    await idle(urls, stage.session)
    before = counters.between(quiet, begin) / (begin - quiet)
    after = counters.between(end + 1.0 * scale, over) / (over - end - 1.0 * scale)
    rate = (before + after) / 2
    made = counters.between(begin, end)
    return {
        "mode": mode,
        "syncs": len(done),
        "window": spread([each["window"] for each in done]),
        "pause": spread([each["pause"] for each in done]),
        "send": spread([each["send"] for each in done]),
        "engines_own": spread([each["engines"] for each in done]),
        "proxy_added": spread([each["proxy"] for each in done]),
        "tokens_per_second_without": rate,
        "without_before_and_after": [before, after],
        "tokens_per_second_with": made / (end - begin),
        "tokens_lost_per_sync": (rate * (end - begin) - made) / max(1, len(done)),
        "every_seconds": (end - begin) / max(1, len(done)),
        "overhead_by_call": {
            name: spread([each["overheads"].get(name, 0.0) for each in done])
            for name in (done[0]["overheads"] if done else ())
        },
        "seconds_by_call": {
            name: spread([each["calls"].get(name, 0.0) for each in done]) for name in (done[0]["calls"] if done else ())
        },
        "trouble": [each["trouble"] for each in done if each["trouble"]],
        "example": done[len(done) // 2]["calls"] if done else {},
        "parts_max": max((each["parts"] for each in rows), default=0),
        **shape(rows, begin, end, streamed=plan["stream"]),
        "check": await check(stage, urls, proxy, trainer, 1 + (count - 1) % 2, f"{label}{count}"),
    }


def spread(values: list[float]) -> dict[str, float | None]:
    """Median, 99th percentile and longest."""
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "max": max(values, default=None)}


async def check(
    stage: Stage, urls: list[str], proxy: Server, trainer: Trainer, seed: int, version: str
) -> dict[str, Any]:
    """Versions and checksums of every engine, and whether its greedy tokens are those of ``transformers``."""
    labels, judged = [], []
    prompt = [(7 * each + 3) % 256 for each in range(48)]
    for url in urls:
        engine = Control(url, stage.session)
        labels.append((await engine.get("/weight_info"))["weight_version"])
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 128, "temperature": 0.0, "ignore_eos": True}
        answer = await engine.post("/v1/completions", body | {"return_token_ids": True})
        judged.append(await trainer.ask("judge", seed=seed, prompt=prompt, output=answer["choices"][0]["token_ids"]))
    # Side by side: of the larger model each takes its time.
    asked = [Control(url, stage.session).post("/weight_checker", {"action": "checksum"}) for url in urls]
    known, *answers = await asyncio.gather(trainer.ask("sums", seed=seed), *asked)
    ours, sums = known["sums"], [each["checksums"] for each in answers]
    theirs = {name.rpartition(":")[2]: value for name, value in sums[0].items()}
    common = ours.keys() & theirs.keys()
    others = sorted(each for each in common if ours[each] != theirs[each])
    through = await Control(proxy.url, stage.session).post("/weight_checker", {"action": "checksum"})
    return {
        "versions": labels,
        "versions_right": all(each == version for each in labels),
        "checksums": len(sums[0]),
        "checksums_equal": all(each == sums[0] for each in sums),
        "trainers_checksums": len(common),
        "trainers_checksums_equal": len(common) - len(others),
        "trainers_checksums_other": others[:4],
        "proxy_says_match": through.get("match", True),
        "greedy": judged,
    }


async def policies(stage: Stage, proxy: Server, trainer: Trainer, mode: str, window: float) -> dict[str, Any]:
    """(c) Finished rollouts with a sync every few seconds, by one way of pausing."""
    scale = stage.options.scale
    control = Control(proxy.url, stage.session)
    load, done = Load(), []
    every = 5.0 * scale
    try:
        await load.start(
            [proxy.url], stage.facts["sync_load"], stage.options.clients, 13, model=MODEL, stream=False, resubmit=True,
            median=192, longest=1024,
        )  # fmt: skip
        async with Counters(stage.urls, stage.session) as counters:
            await asyncio.sleep(RAMP * scale)
            begin = time.time()
            while time.time() < begin + window * scale - 1:
                if mode != "none":
                    done.append(await sync(control, trainer, mode, 1 + len(done) % 2, f"c-{mode}-{len(done) + 1}"))
                await asyncio.sleep(every)
            end = time.time()
            await asyncio.sleep(0.6)
        rows = await load.stop()
    finally:
        load.kill()
    await idle(stage.urls, stage.session)
    result = shape(rows, begin, end, streamed=False)
    return {
        "mode": mode,
        "seconds": end - begin,
        "syncs": len(done),
        "finished_per_minute": result["finished"] / (end - begin) * 60,
        "tokens_per_second": counters.between(begin, end) / (end - begin),
        "window": spread([each["window"] for each in done]),
        "asked_again": sum(each["parts"] > 1 for each in rows),
        **result,
    }
