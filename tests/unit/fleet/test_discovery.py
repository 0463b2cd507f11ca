import os

import pytest

from proxy.config import Settings
from proxy.fleet.discovery import EMPTY_LOOKS, Discovery, FileList, Source
from proxy.fleet.dns import AddressList
from proxy.fleet.engine import engine_id
from proxy.fleet.registry import Fleet


class FakeEngine:
    def __init__(self, url):
        self.url = url
        self.id = engine_id(url)
        self.since = 0.0
        self.eligible = False


class FakeMembers:
    def __init__(self, fleet):
        self.fleet = fleet
        self.removed = []

    def add(self, url):
        self.fleet.add(FakeEngine(url))

    async def remove(self, engine, *, drain):
        self.removed.append(engine.url)
        self.fleet.remove(engine)


@pytest.fixture
def rig(tmp_path):
    path = tmp_path / "engines"
    fleet = Fleet(lambda: 0.0)
    members = FakeMembers(fleet)
    discovery = Discovery(Settings(engines_file=path), fleet, members)
    return path, fleet, members, discovery


async def settle():
    import asyncio

    for _ in range(3):
        await asyncio.sleep(0)


async def step(discovery):
    (source,) = discovery._sources
    await discovery._step(source)
    await settle()


async def test_engines_join_and_leave_with_the_file(rig):
    path, fleet, members, discovery = rig
    path.write_text("http://a:1\nhttp://b:2\n")
    await step(discovery)
    assert list(fleet.engines) == ["a:1", "b:2"]
    path.write_text("http://b:2\nhttp://c:3\nhttp://d:4\n")
    await step(discovery)
    assert list(fleet.engines) == ["b:2", "c:3", "d:4"]
    assert members.removed == ["http://a:1"]


async def test_engines_of_others_stay(rig):
    path, fleet, members, discovery = rig
    members.add("http://mine:1")
    path.write_text("http://mine:1\nhttp://a:1\n")
    await step(discovery)
    path.write_text("http://a:1\n")
    await step(discovery)
    assert "a:1" in fleet.engines


@pytest.mark.parametrize("spoil", ["unlink", "garbage"])
async def test_a_source_that_fails_changes_nothing(rig, spoil, caplog):
    path, fleet, _, discovery = rig
    path.write_text("http://a:1\n")
    await step(discovery)
    if spoil == "unlink":
        path.unlink()
    else:
        path.write_text("http://b:2\nnot a url\n")
    await step(discovery)
    await step(discovery)
    assert list(fleet.engines) == ["a:1"]
    assert len([record for record in caplog.records if "stays as it is" in record.message]) == 1


async def test_emptiness_is_believed_only_when_it_lasts(rig):
    _, fleet, members, discovery = rig

    async def nobody():
        return []

    source = Source("dns", nobody, 1.0)
    members.add("http://a:1")
    source.mine = ["http://a:1"]
    for _ in range(EMPTY_LOOKS - 1):
        await discovery._step(source)
        await settle()
        assert "a:1" in fleet.engines
    await discovery._step(source)
    await settle()
    assert "a:1" not in fleet.engines


async def test_a_file_is_read_again_only_when_it_changed(tmp_path):
    path = tmp_path / "list"
    path.write_text("http://a:1\n")
    watched = FileList(path)
    assert await watched.look() == ["http://a:1"]
    assert await watched.look() is None
    path.write_text("http://b:2\n")
    os.utime(path, ns=(1, 1))
    assert await watched.look() == ["http://b:2"]


async def test_dns_names_one_engine_an_address():
    assert "http://127.0.0.1:8000" in await AddressList("localhost", 8000).look()
    assert await AddressList("127.0.0.1", 9).look() == ["http://127.0.0.1:9"]
