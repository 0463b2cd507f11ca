from __future__ import annotations

import json

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from proxy import app as proxy_app
from proxy.config import Settings

PAGES = ("/metrics", "/fleet", "/fleet/ui", "/fleet/load", "/fleet/syncs", "/health", "/ready")


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_is_there_with_and_without_a_slash(demo, path):
    for spelling in (path, f"{path}/"):
        status, _, headers = await demo.get(spelling)
        assert status == 200
        assert "X-Forwarded-For" not in headers
        assert headers["Server"] == "fleetgate"


async def test_with_a_control_token_and_a_control_port_reading_stays_open_on_both(demo):
    app = await proxy_app.start(
        Settings(engine=[demo.engines[0].url], port=0, control_port=0, control_token="secret", drain_timeout=0.0)
    )
    try:
        async with aiohttp.ClientSession() as session:
            for url in (app.url, app.control_url):
                for path in PAGES:
                    async with session.get(url + path) as answer:
                        assert answer.status == 200, url + path
                        await answer.read()
                async with session.post(f"{url}/fleet/engines/x/fence") as answer:
                    assert answer.status in (401, 403)
    finally:
        await app.stop()


async def test_the_live_page_may_load_nothing_and_be_framed_by_nobody(demo):
    _, text, headers = await demo.get("/fleet/ui")
    policy = headers["Content-Security-Policy"]
    for rule in ("default-src 'none'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"):
        assert rule in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


@pytest.mark.parametrize("last", ["", "-1", "1.5", "x", "9" * 5000, "\u0663"])
async def test_a_number_of_syncs_that_is_none_is_refused_with_an_example(demo, last):
    async with demo.session.get(demo.url + "/fleet/syncs", params={"last": last}) as answer:
        assert answer.status in (400, 414)
        assert answer.status == 414 or "last=8" in await answer.text()


async def test_both_formats_parse_and_say_the_same(demo):
    text_status, text, text_headers = await demo.get("/metrics")
    open_status, other, open_headers = await demo.get("/metrics", Accept="application/openmetrics-text;version=1.0.0")
    assert (text_status, open_status) == (200, 200)
    assert text_headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert open_headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    plain = {sample.name for family in parse_text(text) for sample in family.samples}
    assert {sample.name for family in parse_open(other) for sample in family.samples} == plain
    assert "vllm:num_requests_running" in plain
    assert "fleetgate_paused" in plain


async def test_the_engines_families_carry_their_ids(demo):
    _, text, _ = await demo.get("/metrics")
    engines = {
        sample.labels["engine"]
        for family in parse_text(text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }
    assert engines == set(demo.app.fleet.engines)


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text"])
async def test_the_metrics_page_tells_its_length_and_has_no_body_for_head(demo, accept):
    async with demo.session.get(demo.url + "/metrics", headers={"Accept": accept}) as answer:
        body = await answer.read()
        assert int(answer.headers["Content-Length"]) == len(body) > 10_000
    async with demo.session.head(demo.url + "/metrics", headers={"Accept": accept}) as answer:
        assert answer.status == 200
        assert int(answer.headers["Content-Length"]) > 10_000
        assert await answer.read() == b""
    assert (await demo.get("/health"))[0] == 200


async def test_the_reason_of_a_ready_engine_is_todays(demo):
    async def reasons():
        _, text, _ = await demo.get("/fleet")
        return {(engine["state"], engine["reason"]) for engine in json.loads(text)["engines"]}

    assert await reasons() == {("ready", "no weight update was ever seen")}
    await demo.join()
    await demo.end(await demo.begin(), "step-1")
    assert await reasons() == {("ready", "holds the fleet's weights 'step-1'")}
    engine = next(iter(demo.app.fleet)).id
    for action in ("fence", "admit"):
        assert (await demo.post(f"/fleet/engines/{engine}/{action}"))[0] == 200
    assert ("ready", "admitted by hand") in await reasons()
    await demo.end(await demo.begin(), "step-2")
    assert await reasons() == {("ready", "holds the fleet's weights 'step-2'")}
