"""Engines by SRV records of a name server on this machine: they join, leave, and stay while nobody answers."""

from __future__ import annotations

import dns.name
import dns.rcode
import pytest

from proxy.fleet import dns as discovery
from proxy.fleet.dns import AddressList, SrvList, dns_source
from tests.tools.dns_server import NameServer, name_server
from tests.tools.fault_engine import FaultEngine, answer_bytes
from tests.tools.fault_scripts import reply
from tests.tools.rig import ask, eventually, post, proxy_for

NAME = "_http._tcp.engines.rl.test"


def port_of(engine: FaultEngine) -> int:
    return int(engine.url.rpartition(":")[2])


async def test_each_record_is_an_engine_by_its_name_whatever_its_priority() -> None:
    async with name_server() as server:
        server.records[NAME] = ["0 50 8000 e-1.engines.rl.test.", "10 0 8001 e-0.engines.rl.test."]
        looked = await SrvList(NAME, server.resolver).look()
    assert looked == ["http://e-0.engines.rl.test:8001", "http://e-1.engines.rl.test:8000"]


async def test_the_service_says_https() -> None:
    async with name_server() as server:
        server.records["_https._tcp.engines.test"] = ["0 0 443 a.test."]
        assert await SrvList("_https._tcp.engines.test", server.resolver).look() == ["https://a.test:443"]


async def test_a_fleet_that_does_not_fit_a_datagram_comes_by_tcp() -> None:
    async with name_server() as server:
        server.records[NAME] = [f"0 0 8000 engine-{n}.engines.rl.test." for n in range(200)]
        assert len(await SrvList(NAME, server.resolver).look()) == 200
        assert [transport for _, transport in server.asked] == ["udp", "tcp"]


@pytest.mark.parametrize("records", [None, [], ["0 0 0 ."]])
async def test_no_name_no_records_and_a_service_that_is_not_there_are_nobody(records: list[str] | None) -> None:
    async with name_server() as server:
        if records is not None:
            server.records[NAME] = records
        assert await SrvList(NAME, server.resolver).look() == []


async def test_a_server_that_fails_is_an_error_and_not_an_empty_fleet() -> None:
    async with name_server() as server:
        server.failure = dns.rcode.SERVFAIL
        with pytest.raises(OSError, match=f"no SRV records of {NAME}"):
            await SrvList(NAME, server.resolver).look()


async def test_the_search_list_is_followed() -> None:
    async with name_server() as server:
        server.records["_http._tcp.engines.rl.test"] = ["0 0 8000 a.test."]

        def resolver() -> object:
            made = server.resolver()
            made.search = [dns.name.from_text("rl.test.")]
            made.ndots = 5
            return made

        assert await SrvList("_http._tcp.engines", resolver).look() == ["http://a.test:8000"]  # type: ignore[arg-type]


def test_a_setting_says_which_records_are_meant() -> None:
    assert isinstance(dns_source("engines.rl.svc:8000"), AddressList)
    assert isinstance(dns_source(NAME), SrvList)
    assert isinstance(dns_source("srv:engines.rl.svc"), SrvList)


async def served(url: str, engines: list[FaultEngine], count: int = 8) -> list[int]:
    before = [len(engine.requests) for engine in engines]
    for _ in range(count):
        assert (await ask(url, post("/v1/completions", b"{}"))).status == 200
    return [len(engine.requests) - was for engine, was in zip(engines, before, strict=True)]


async def test_the_proxy_follows_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        name_server() as server,
        FaultEngine(reply(answer_bytes(200, b"{}"))) as a,
        FaultEngine(reply(answer_bytes(200, b"{}"))) as b,
        FaultEngine(reply(answer_bytes(200, b"{}"))) as c,
    ):
        monkeypatch.setattr(discovery, "system_resolver", server.resolver)
        say(server, a, b)
        async with proxy_for(engines_dns=NAME, engines_dns_interval=0.02, policy="round_robin", ready=0) as app:
            await eventually(lambda: len(app.fleet.eligible) == 2, "two engines")
            assert await served(app.url, [a, b, c]) == [4, 4, 0]
            say(server, b, c)
            await eventually(lambda: list(app.fleet.engines) == [f"localhost:{port_of(each)}" for each in (b, c)])
            await eventually(lambda: len(app.fleet.eligible) == 2, "the newcomer")
            assert await served(app.url, [a, b, c]) == [0, 4, 4]
            server.failure = dns.rcode.SERVFAIL
            asked = len(server.asked)
            await eventually(lambda: len(server.asked) > asked + 4)
            assert await served(app.url, [a, b, c]) == [0, 4, 4]


def say(server: NameServer, *engines: FaultEngine) -> None:
    server.records[NAME] = [f"0 0 {port_of(engine)} localhost." for engine in engines]
