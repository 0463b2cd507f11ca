"""Prompts, outputs and credentials appear in no log record and on no page of the proxy."""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import pytest

from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.server import SimEngine
from proxy import app as proxy_app
from proxy.config import Settings
from proxy.observe.logs import JsonFormatter, TextFormatter

PROMPT = "canary-prompt-51c0"
USER_TOKEN = "canary-user-51c1"
CONTROL_TOKEN = "canary-control-51c2"
ENGINE_KEY = "canary-engine-51c3"
CANARIES = ("canary-", PROMPT, USER_TOKEN, CONTROL_TOKEN, ENGINE_KEY)
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/inference/v1/generate",
    "/tokenize",
)
PAGES = ("/metrics", "/fleet", "/fleet/load", "/fleet/syncs", "/fleet/ui", "/health", "/ready")


def body(path, *, stream):
    text = {"model": "tiny", "max_tokens": 5, "stream": stream, "user": USER_TOKEN}
    if path in ("/v1/chat/completions", "/v1/messages"):
        return {**text, "messages": [{"role": "user", "content": PROMPT}]}
    if path == "/v1/responses":
        return {"model": "tiny", "input": PROMPT, "stream": stream}
    return {**text, "prompt": PROMPT}


@pytest.fixture
async def watched(caplog):
    caplog.set_level(logging.DEBUG)
    logging.getLogger("fleetgate").setLevel(logging.DEBUG)
    engines = [SimEngine(SimConfig(api_key=ENGINE_KEY)) for _ in range(2)]
    for engine in engines:
        await engine.start()
    app = await proxy_app.start(
        Settings(
            engine=[engine.url for engine in engines],
            port=0,
            control_token=CONTROL_TOKEN,
            engine_api_key=ENGINE_KEY,
            access_log=True,
            drain_timeout=0.0,
            probe_interval=0.2,
            hold_timeout=0.5,
            max_attempts=2,
        )
    )
    yield app, engines
    await app.stop()
    for engine in engines:
        await engine.stop()


async def test_nothing_that_is_secret_is_ever_written(watched, caplog):
    app, engines = watched
    control = {"Authorization": f"Bearer {CONTROL_TOKEN}"}
    async with aiohttp.ClientSession() as session:

        async def post(path, data, headers):
            try:
                async with session.post(app.url + path, json=data, headers=headers) as answer:
                    await answer.read()
            except aiohttp.ClientError:
                pass

        async def traffic():
            for path in PATHS:
                for stream in (False, True):
                    await post(path, body(path, stream=stream), {"X-Secret": USER_TOKEN})
                    await post(path, body(path, stream=stream), {"Authorization": f"Bearer {USER_TOKEN}"})

        events = await session.get(app.url + "/fleet/events", headers=control)
        await traffic()
        await post("/pause", None, {"Authorization": f"Bearer {USER_TOKEN}"})
        await post("/pause", None, control)
        await post("/v1/completions", body("/v1/completions", stream=False), {})
        await post("/update_weights", {"update_info": {"note": PROMPT}}, control)
        await post("/collective_rpc", {"method": PROMPT}, control)
        await post("/fleet/engines", {"url": f"http://{USER_TOKEN}@127.0.0.1:1"}, control)
        await post("/resume", None, control)
        async with session.post(app.url + "/v1/completions", data=f"not json {PROMPT}") as answer:
            await answer.read()
        await engines[0].stop()
        await traffic()
        pages = {}
        for path in PAGES:
            async with session.get(app.url + path, headers=control) as answer:
                pages[path] = await answer.text()
        await asyncio.sleep(0.1)
        told = b""
        while True:
            try:
                async with asyncio.timeout(0.3):
                    told += await events.content.readany()
            except TimeoutError:
                break
        events.close()
    assert b"event: control_call" in told
    own = [record for record in caplog.records if record.name.startswith("fleetgate")]
    assert any(record.name == "fleetgate.access" for record in own)
    assert any(record.name == "fleetgate.events" for record in own)
    written = "\n".join(
        formatter.format(record) for record in caplog.records for formatter in (TextFormatter(), JsonFormatter())
    )
    for canary in CANARIES:
        assert canary not in written
        assert canary.encode() not in told
        for path, page in pages.items():
            assert canary not in page, path
