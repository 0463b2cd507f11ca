from __future__ import annotations

import asyncio
import gzip

import pytest

from proxy.core.engine_state import State
from proxy.core.failures import Failure, Kind
from proxy.data.connection import Head
from proxy.data.upstream import Answer, FetchError
from proxy.fleet.engine import Engine
from proxy.fleet.registry import Fleet
from proxy.observe import scrape
from proxy.observe.exposition import Format
from proxy.observe.scrape import Scraper

HEAD = Head(200, b"OK", [], None, chunked=False, keep_alive=True)


class StubUpstream:
    """Answers with its page once it may."""

    def __init__(self):
        self.page = b"# TYPE vllm:x gauge\nvllm:x 1\n"
        self.head = HEAD
        self.free = asyncio.Event()
        self.free.set()
        self.fetches = 0
        self.error = None

    async def fetch(self, method, target, *, headers, timeout, limit):
        assert (method, target) == ("GET", "/metrics")
        assert (b"Accept-Encoding", b"identity") in headers
        self.fetches += 1
        await self.free.wait()
        if self.error is not None:
            raise self.error
        return Answer(self.head, self.page)


def make(*names):
    fleet = Fleet(asyncio.get_running_loop().time)
    for name in names:
        engine = Engine(name, f"http://{name}", StubUpstream())
        engine.state = State.READY
        fleet.add(engine)
    return fleet, Scraper(fleet), [engine.upstream for engine in fleet]


async def body(scraper):
    await scraper.refresh()
    return b"".join(await scraper.merged(Format.TEXT)).decode()


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(scrape, "PATIENCE", 0.01)
    monkeypatch.setattr(scrape, "FRESH", 0.0)


async def test_all_engines_are_on_the_page():
    fleet, scraper, _ = make("a:1", "b:2")
    assert await body(scraper) == (
        '# HELP vllm:x vllm:x\n# TYPE vllm:x gauge\nvllm:x{engine="a:1"} 1\nvllm:x{engine="b:2"} 1\n'
    )
    assert scraper.stale() == {"a:1": False, "b:2": False}
    assert len(fleet) == 2


async def test_within_a_second_and_for_many_at_once_each_engine_is_read_once():
    _, scraper, (upstream,) = make("a:1")
    await asyncio.gather(*(body(scraper) for _ in range(20)))
    await body(scraper)
    assert upstream.fetches == 1


@pytest.mark.usefixtures("_impatient")
async def test_a_slow_engine_is_shown_with_its_last_page_and_not_waited_for_again():
    _, scraper, (quick, slow) = make("a:1", "b:2")
    await body(scraper)
    slow.free.clear()
    quick.page = slow.page = b"# TYPE vllm:x gauge\nvllm:x 2\n"
    text = await body(scraper)
    assert 'vllm:x{engine="a:1"} 2' in text
    assert 'vllm:x{engine="b:2"} 1' in text
    assert scraper.stale() == {"a:1": False, "b:2": True}
    await body(scraper)
    assert slow.fetches == 2, "one read of an engine at a time"
    slow.free.set()
    await asyncio.sleep(0.01)
    assert 'vllm:x{engine="b:2"} 2' in await body(scraper)
    await scraper.stop()


@pytest.mark.usefixtures("_impatient")
async def test_a_page_that_is_too_old_is_not_shown(monkeypatch):
    _, scraper, (upstream,) = make("a:1")
    assert "vllm:x" in await body(scraper)
    upstream.error = FetchError(Failure(Kind.CONNECT, "refused"), sent=False)
    assert "vllm:x" in await body(scraper)
    monkeypatch.setattr(scrape, "KEEP", 0.0)
    assert await body(scraper) == ""
    assert scraper.stale() == {"a:1": True}


@pytest.mark.usefixtures("_impatient")
async def test_an_engine_that_is_down_or_gone_is_not_shown():
    fleet, scraper, _ = make("a:1", "b:2")
    await body(scraper)
    a, b = fleet
    a.state = State.DOWN
    fleet.remove(b)
    assert await body(scraper) == ""
    assert scraper.stale() == {"a:1": True}


@pytest.mark.parametrize(
    ("coding", "page", "shown"),
    [
        (b"gzip", gzip.compress(b"vllm:x 1\n", mtime=0), True),
        (b"gzip", b"not gzip", False),
        (b"gzip", gzip.compress(b"vllm:x 1\n", mtime=0)[:-9], False),
        (b"br", b"anything", False),
        (b"identity", b"vllm:x 1\n", True),
    ],
)
async def test_a_page_that_is_compressed_against_our_wish(coding, page, shown):
    _, scraper, (upstream,) = make("a:1")
    upstream.page = page
    upstream.head = Head(200, b"OK", [(b"Content-Encoding", coding)], None, chunked=False, keep_alive=True)
    assert ("vllm:x" in await body(scraper)) is shown


async def test_an_error_page_is_no_page():
    _, scraper, (upstream,) = make("a:1")
    upstream.head = Head(404, b"Not Found", [], None, chunked=False, keep_alive=True)
    assert await body(scraper) == ""


async def test_a_scraper_that_goes_away_does_not_end_the_read_of_others():
    _, scraper, (upstream,) = make("a:1")
    upstream.free.clear()
    first = asyncio.ensure_future(body(scraper))
    second = asyncio.ensure_future(body(scraper))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    upstream.free.set()
    assert "vllm:x" in await second
    assert first.cancelled()


async def test_token_rates_come_from_two_pages(monkeypatch):
    monkeypatch.setattr(scrape, "FRESH", 0.0)
    monkeypatch.setattr("proxy.observe.load.SMOOTH", 0.0)
    _, scraper, (upstream,) = make("a:1")
    upstream.page = b"vllm:generation_tokens_total 10\nvllm:num_requests_running 3\nvllm:kv_cache_usage_perc 0.5\n"
    await scraper.refresh()
    assert scraper.load()["a:1"].as_json() == {
        "tokens_per_second": None, "running": 3.0, "waiting": None, "kv_cache": 0.5,
    }  # fmt: skip
    upstream.page = b"vllm:generation_tokens_total 60\n"
    await scraper.refresh()
    rate = scraper.load()["a:1"].tokens_per_second
    assert rate is not None
    assert rate > 0
