"""How the launcher talks to a proxy, and what it writes down for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from engine_launcher.proxy_link import ApiRoster, FileRoster, LinkError, ProxyLink, name_of

ENGINE = "http://127.0.0.1:9001"
OTHER = "http://127.0.0.1:9002"


class FakeProxy:
    """``/fleet`` of a proxy that asks for a token."""

    def __init__(self) -> None:
        self.engines: dict[str, dict[str, Any]] = {}
        self.drained: list[str] = []
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.guard])
        app.router.add_get("/fleet", self.show)
        app.router.add_post("/fleet/engines", self.add)
        app.router.add_delete("/fleet/engines/{name}", self.remove)
        app.router.add_post("/fleet/engines/{name}/{action}", self.act)
        return app

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({"error": {"message": "no token"}}, status=401)
        return await handler(request)

    async def show(self, request: web.Request) -> web.Response:
        return web.json_response({"engines": list(self.engines.values())})

    async def add(self, request: web.Request) -> web.Response:
        url = (await request.json())["url"]
        if name_of(url) in self.engines:
            return web.json_response({"error": {"message": "it is in the fleet already"}}, status=409)
        self.engines[name_of(url)] = {"id": name_of(url), "state": "ready", "inflight": 0}
        return web.json_response({}, status=201)

    async def remove(self, request: web.Request) -> web.Response:
        if self.engines.pop(request.match_info["name"], None) is None:
            return web.json_response({"error": {"message": "unknown"}}, status=404)
        return web.json_response({})

    async def act(self, request: web.Request) -> web.Response:
        self.drained.append(f"{request.match_info['action']} {request.match_info['name']}")
        return web.json_response({})


@pytest.fixture
async def proxy() -> AsyncIterator[FakeProxy]:
    made = FakeProxy()
    async with TestServer(made.app()) as server:
        made.url = str(server.make_url(""))
        yield made


@pytest.fixture
async def link(proxy: FakeProxy) -> AsyncIterator[ProxyLink]:
    async with ProxyLink(proxy.url, "secret") as made:
        yield made


def test_an_engine_has_the_proxys_name() -> None:
    assert name_of("http://127.0.0.1:9001/") == "127.0.0.1:9001"


async def test_engines_are_added_drained_and_removed(proxy: FakeProxy, link: ProxyLink) -> None:
    await link.add(ENGINE)
    await link.add(ENGINE)
    assert await link.engine(ENGINE) == {"id": "127.0.0.1:9001", "state": "ready", "inflight": 0}
    assert await link.engine(OTHER) is None
    await link.drain(ENGINE)
    await link.admit(ENGINE)
    assert proxy.drained == ["drain 127.0.0.1:9001", "admit 127.0.0.1:9001"]
    await link.remove(ENGINE)
    await link.remove(ENGINE)
    assert proxy.engines == {}


async def test_a_wrong_token_is_said_with_the_flag_that_gives_it(proxy: FakeProxy) -> None:
    async with ProxyLink(proxy.url, "wrong") as link:
        with pytest.raises(LinkError, match="answered 401: no token; give it with --control-token"):
            await link.add(ENGINE)


async def test_a_proxy_that_is_not_there_is_named() -> None:
    async with ProxyLink("http://127.0.0.1:9") as link:
        with pytest.raises(LinkError, match=r"GET http://127\.0\.0\.1:9/fleet"):
            await link.engines()


async def test_idle_is_when_nothing_runs(proxy: FakeProxy, link: ProxyLink) -> None:
    await link.add(ENGINE)
    proxy.engines["127.0.0.1:9001"]["inflight"] = 3
    assert not await link.idle([ENGINE], 0.0)
    waiting = asyncio.ensure_future(link.idle([ENGINE, OTHER], 60.0))
    await asyncio.sleep(0)
    proxy.engines["127.0.0.1:9001"]["inflight"] = 0
    assert await waiting


async def test_a_roster_adds_and_removes_what_changed(proxy: FakeProxy, link: ProxyLink) -> None:
    roster = ApiRoster(link)
    await roster.show([ENGINE, OTHER])
    assert list(proxy.engines) == ["127.0.0.1:9001", "127.0.0.1:9002"]
    await roster.show([OTHER])
    assert list(proxy.engines) == ["127.0.0.1:9002"]
    await roster.show([])
    assert proxy.engines == {}


async def test_a_proxy_that_forgot_all_is_told_again_one_that_lost_some_is_not(
    proxy: FakeProxy, link: ProxyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_launcher.proxy_link.KEEP_INTERVAL", 0.001)
    roster = ApiRoster(link)
    await roster.show([ENGINE, OTHER])
    keeping = asyncio.ensure_future(roster.keep())
    try:
        await link.remove(ENGINE)
        await asyncio.sleep(0.05)
        assert list(proxy.engines) == ["127.0.0.1:9002"]
        proxy.engines.clear()
        while len(proxy.engines) < 2:
            await asyncio.sleep(0.001)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_a_proxy_that_is_not_there_yet_is_no_error_for_a_roster() -> None:
    async with ProxyLink("http://127.0.0.1:9") as link:
        await ApiRoster(link).show([ENGINE])


async def test_a_file_holds_one_url_a_line(tmp_path: Path) -> None:
    roster = FileRoster(tmp_path / "engines")
    await roster.show([ENGINE, OTHER])
    assert (tmp_path / "engines").read_text() == f"{ENGINE}\n{OTHER}\n"
    await roster.show(())
    assert (tmp_path / "engines").read_text() == ""
