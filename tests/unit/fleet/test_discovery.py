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
        self.leaving = False


class FakeMembers:
    def __init__(self, fleet):
        self.fleet = fleet
        self.removed = []
        self.slow = False

    def add(self, url):
        self.fleet.add(FakeEngine(url))

    async def remove(self, engine, *, drain):
        self.removed.append(engine.url)
        if self.slow:
            engine.leaving = True
        else:
            self.fleet.remove(engine)

    def stay(self, engine, why):
        was, engine.leaving = engine.leaving, False
        return was


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
    assert list(fleet.engines) == ["mine:1", "a:1"]
    assert members.removed == []


async def test_engines_of_the_command_line_stay_although_the_file_was_read_first(tmp_path):
    path = tmp_path / "engines"
    fleet = Fleet(lambda: 0.0)
    members = FakeMembers(fleet)
    discovery = Discovery(Settings(engine=["http://mine:1/"], engines_file=path), fleet, members)
    path.write_text("http://mine:1\nhttp://a:1\n")
    await step(discovery)
    assert list(fleet.engines) == ["mine:1", "a:1"]
    path.write_text("http://a:1\n")
    await step(discovery)
    assert members.removed == []


async def test_an_engine_named_again_while_it_drains_stays_and_leaves_when_it_is_dropped_again(rig):
    path, fleet, members, discovery = rig
    members.slow = True
    path.write_text("http://a:1\nhttp://b:2\n")
    await step(discovery)
    path.write_text("http://b:2\n")
    await step(discovery)
    assert fleet.engines["a:1"].leaving
    path.write_text("http://b:2\nhttp://a:1\n")
    await step(discovery)
    assert not fleet.engines["a:1"].leaving
    path.write_text("http://b:2\n")
    await step(discovery)
    assert members.removed == ["http://a:1", "http://a:1"]


async def test_an_engine_that_an_operator_took_out_stays_out_whatever_else_changes_in_the_file(rig):
    path, fleet, members, discovery = rig
    members.add("http://mine:1")
    path.write_text("http://mine:1\nhttp://a:1\n")
    await step(discovery)
    for name in ("mine:1", "a:1"):
        await members.remove(fleet.engines[name], drain=0)
    path.write_text("http://mine:1\nhttp://a:1\nhttp://b:2\n")
    await step(discovery)
    assert list(fleet.engines) == ["b:2"]


async def test_what_two_sources_name_leaves_when_neither_does(rig):
    path, fleet, members, discovery = rig
    named = ["http://a:1"]

    async def names():
        return list(named)

    other = Source("dns", names, 1.0)
    path.write_text("http://a:1\nhttp://b:2\n")
    (source,) = discovery._sources
    discovery._sources.append(other)
    for each in (source, other):
        await discovery._step(each)
    path.write_text("http://b:2\n")
    await discovery._step(source)
    assert members.removed == []
    named[:] = ["http://c:3"]
    await discovery._step(other)
    await settle()
    assert members.removed == ["http://a:1"]
    assert list(fleet.engines) == ["b:2", "c:3"]


@pytest.mark.parametrize("text", ["", "# nobody\n"])
async def test_an_emptied_file_is_believed_when_it_stays_so(rig, text):
    path, fleet, _, discovery = rig
    path.write_text("http://a:1\n")
    await step(discovery)
    path.write_text(text)
    for _ in range(EMPTY_LOOKS - 1):
        await step(discovery)
        assert list(fleet.engines) == ["a:1"]
    await step(discovery)
    assert list(fleet.engines) == []
    path.write_text("http://a:1\n")
    await step(discovery)
    assert list(fleet.engines) == ["a:1"]


async def test_a_file_that_was_empty_only_for_a_moment_loses_nobody(rig):
    path, _, members, discovery = rig
    path.write_text("http://a:1\n")
    await step(discovery)
    path.write_text("")
    await step(discovery)
    path.write_text("http://a:1\n")
    for _ in range(EMPTY_LOOKS + 1):
        await step(discovery)
    assert members.removed == []


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
    source.named, source.mine = ["http://a:1"], {"http://a:1"}
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
