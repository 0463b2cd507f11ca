from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import aiohttp
import pytest

from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.server import SimEngine
from engine_launcher.sim.trainer import SimTrainer
from proxy import app as proxy_app
from proxy.config import Settings
from proxy.tasks import spawn
from tests.ui.browser import Browser, find_chromium


class Demo:
    """Simulated engines, a proxy in front of them, rollouts through it, and a trainer."""

    def __init__(self, engines, app, session):
        self.engines = engines
        self.app = app
        self.url = app.url
        self.session = session
        self.trainer = None
        self._rollouts = set()

    async def post(self, path, body=None):
        async with self.session.post(self.url + path, json=body) as answer:
            return answer.status, await answer.text()

    async def get(self, path, **headers):
        async with self.session.get(self.url + path, headers=headers) as answer:
            return answer.status, await answer.text(), answer.headers

    def roll(self, count, max_tokens=100_000):
        for _ in range(count):
            body = {"model": "tiny", "prompt": "once", "max_tokens": max_tokens, "ignore_eos": True}
            task = spawn(self._rollout(body), name="rollout")
            self._rollouts.add(task)
            task.add_done_callback(self._rollouts.discard)

    async def _rollout(self, body):
        with contextlib.suppress(aiohttp.ClientError):
            await self.post("/v1/completions", body)

    async def join(self):
        self.trainer = SimTrainer(len(self.engines) + 1)
        await self.trainer.start()
        status, text = await self.post("/init_weight_transfer_engine", {"init_info": self.trainer.init_info()})
        assert status == 200, text

    async def begin(self):
        """A sync up to the update, which then waits for the trainer."""
        for path in ("/pause?mode=keep", "/start_weight_update"):
            status, text = await self.post(path)
            assert status == 200, text
        return spawn(self.post("/update_weights", {"update_info": {}}), name="update")

    async def end(self, update, version):
        await self.trainer.broadcast(version)
        status, text = await update
        assert status == 200, text
        for path, body in (("/finish_weight_update", {"weight_version": version}), ("/resume", None)):
            status, text = await self.post(path, body)
            assert status == 200, text

    async def stop(self):
        for task in list(self._rollouts):
            task.cancel()
        await asyncio.gather(*self._rollouts, return_exceptions=True)
        if self.trainer is not None:
            await self.trainer.stop()


@pytest.fixture
async def demo():
    engines = [SimEngine(SimConfig(seed=1, tokens_per_second=40.0, max_model_len=1_000_000)) for _ in range(3)]
    for engine in engines:
        await engine.start()
    settings = Settings(
        engine=[engine.url for engine in engines], port=0, drain_timeout=0.0, probe_interval=0.2, probe_fall=1
    )
    app = await proxy_app.start(settings)
    async with aiohttp.ClientSession() as session:
        demo = Demo(engines, app, session)
        yield demo
        await demo.stop()
    await app.stop()
    for engine in engines:
        await engine.stop()


@pytest.fixture
async def page():
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine; apt-get install chromium")
    async with Browser(program) as browser:
        page = await browser.page()
        yield page
        await page.close()


@pytest.fixture
def pictures(tmp_path):
    """Where screenshots go: into the docs when FG_SCREENSHOTS is set."""
    return Path(__file__).parents[2] / "docs" / "img" if os.environ.get("FG_SCREENSHOTS") else tmp_path
