"""Rules and dashboard, held to a real Prometheus that scrapes a real proxy."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
from pathlib import Path

import pytest
import yaml

from engine_launcher.sim.faults import Fault
from proxy.tasks import spawn

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "docker" / "prometheus"
RULES = PROMETHEUS / "fleetgate.rules.yml"
DASHBOARD = ROOT / "docker" / "grafana" / "dashboards" / "fleetgate.json"
RECORDED = ROOT / "tests" / "unit" / "observe" / "pages_recorded" / "vllm-0.33.prom"
WAIT_SECONDS = 40.0

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no Prometheus on this machine; apt-get install prometheus",
)


def rule_expressions():
    return {
        rule["alert"]: rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    }


def panel_expressions():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])]
    return [
        (title, expression.replace("$instance", ".*").replace("$__rate_interval", "10s")) for title, expression in found
    ]


def metric_names(expression):
    return set(re.findall(r"\b(?:fleetgate_|vllm:|process_)[a-z0-9_]+", expression))


def names_on(page):
    return {line.partition(" ")[0].partition("{")[0] for line in page.splitlines() if line and not line.startswith("#")}


async def test_every_metric_that_rules_and_dashboard_name_is_on_a_real_page(demo):
    _, page, _ = await demo.get("/metrics")
    declared = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    known = names_on(page) | declared | names_on(RECORDED.read_text())
    used = set().union(*(metric_names(expression) for expression in rule_expressions().values()))
    used |= set().union(*(metric_names(expression) for _, expression in panel_expressions()))
    assert len(used) > 25
    assert used - known == set()


def test_the_dashboard_has_no_two_panels_in_one_place():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    taken = {}
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
                assert x < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["description"] for panel in panels if panel["type"] != "row")


@needs_prometheus
@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "fleetgate.rules.yml"),
        ("test", "rules", "fleetgate.test.yml"),
    ],
)
async def test_promtool_is_content(command):
    process = await asyncio.create_subprocess_exec(
        "promtool", *command, cwd=PROMETHEUS, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()


def test_every_rule_is_tested_to_fire():
    tests = yaml.safe_load((PROMETHEUS / "fleetgate.test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == set(rule_expressions())


@needs_prometheus
async def test_promtool_finds_no_fault_with_the_page(demo):
    _, page, _ = await demo.get("/metrics")
    process = await asyncio.create_subprocess_exec(
        "promtool", "check", "metrics", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    own = re.split(r"^# HELP vllm:", page, maxsplit=1, flags=re.MULTILINE)[0]
    out, _ = await process.communicate(own.encode())
    assert out.decode() == ""
    assert process.returncode == 0


def hasty(rules):
    """The rules with seconds for minutes, so that an incident can be played through."""
    rules = re.sub(r"for: \d+m", "for: 1s", rules)
    rules = re.sub(r"\[\d+m\]", "[6s]", rules)
    return rules.replace("> 300", "> 1")


class Prometheus:
    def __init__(self, session, port):
        self._session = session
        self._url = f"http://127.0.0.1:{port}"

    async def api(self, path, **params):
        async with self._session.get(f"{self._url}/api/v1/{path}", params=params) as answer:
            data = await answer.json()
        assert data["status"] == "success", data
        return data["data"]

    async def query(self, expression):
        return (await self.api("query", query=expression))["result"]

    async def firing(self):
        alerts = (await self.api("alerts"))["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    async def until(self, name, *, fires):
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_SECONDS
        while (name in await self.firing()) is not fires:
            assert loop.time() < deadline, f"{name} {'does not fire' if fires else 'still fires'}"
            await asyncio.sleep(0.2)

    async def ready(self):
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_SECONDS
        while True:
            try:
                if len(await self.query("up == 1")) == 1 and len(await self.query("fleetgate_paused offset 5s")) == 1:
                    return
            except OSError:
                pass
            assert loop.time() < deadline, "Prometheus does not scrape the proxy"
            await asyncio.sleep(0.2)


@pytest.fixture
async def prometheus(demo, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms", "scrape_timeout": "500ms"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [demo.url.removeprefix("http://")]}]
    await asyncio.to_thread((tmp_path / "prometheus.yml").write_text, yaml.safe_dump(config))
    await asyncio.to_thread((tmp_path / RULES.name).write_text, hasty(RULES.read_text()))
    process = await asyncio.create_subprocess_exec(
        "prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    server = Prometheus(demo.session, port)
    try:
        await server.ready()
        yield server
    finally:
        process.terminate()
        await process.wait()


class Incident:
    """What was done, and which alerts fired and cleared upon it."""

    def __init__(self, demo, prometheus):
        self.demo = demo
        self._prometheus = prometheus
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self.lines = []

    def _note(self, what):
        self.lines.append(f"{self._loop.time() - self._began:6.1f} s  {what}")

    async def post(self, path, body=None, *, status=200):
        got, text = await self.demo.post(path, body)
        assert got == status, text
        self._note(f"POST {path}: {got}")

    async def fires(self, *names):
        for name in names:
            await self._prometheus.until(name, fires=True)
            self._note(f"    {name} fires")

    async def clears(self, *names):
        for name in names:
            await self._prometheus.until(name, fires=False)
            self._note(f"    {name} is clear")

    async def sync(self, version):
        """A whole one, its group made anew."""
        await self.demo.trainer.stop()
        await self.demo.join()
        await self.demo.end(await self.demo.begin(), version)
        self._note(f"a weight sync to {version}")

    def did(self, what):
        self._note(what)


def fence(engine):
    return f"/fleet/engines/{engine.url.removeprefix('http://')}/fence"


@needs_prometheus
@pytest.mark.timeout(300)
async def test_alerts_fire_and_clear_in_an_incident(demo, prometheus):
    await demo.join()
    await demo.end(await demo.begin(), "step-1")
    assert not {name for name in await prometheus.firing() if name != "FleetgateControlCallsSlow"}
    incident = Incident(demo, prometheus)
    _, second, third = demo.engines

    await incident.post("/pause?mode=keep")
    await incident.fires("FleetgateGateClosedTooLong")
    await incident.post("/resume")
    await incident.clears("FleetgateGateClosedTooLong")

    await incident.post(fence(second))
    await incident.fires("FleetgateEngineFenced")
    await incident.post(fence(second).replace("/fence", "/admit"))
    await incident.clears("FleetgateEngineFenced")

    second.core.version = "somebody-elses"
    incident.did("somebody labels an engine behind the proxy's back")
    await incident.fires("FleetgateMixedWeightVersions", "FleetgateEngineFenced")
    await incident.sync("step-2")
    await incident.clears("FleetgateMixedWeightVersions", "FleetgateEngineFenced")

    for engine in demo.engines[:2]:
        engine.faults.replace([Fault(path="/v1/completions", action="status", status=503, probability=0.6)])
    incident.did("two engines refuse most requests: overload")
    rolling = spawn(keep_rolling(demo), name="rollouts")
    await incident.fires("FleetgateRetriesRising")
    for engine in demo.engines:
        engine.faults.replace([])
    incident.did("they take requests again")
    await incident.clears("FleetgateRetriesRising")
    rolling.cancel()

    await third.stop()
    incident.did("an engine dies")
    await incident.fires("FleetgateEngineDown")
    await incident.post("/start_weight_update", status=409)
    await third.restart()
    incident.did("it is started again, with the weights of its checkpoint")
    await incident.fires("FleetgateEngineFenced", "FleetgateEngineRestarted")
    await incident.clears("FleetgateEngineDown")
    await incident.sync("step-3")
    await incident.clears("FleetgateEngineFenced", "FleetgateEngineRestarted")

    for engine in demo.engines:
        await incident.post(fence(engine))
    await incident.fires("FleetgateNoEngineServes")
    for engine in demo.engines:
        await incident.post(fence(engine).replace("/fence", "/admit"))
    await incident.clears("FleetgateNoEngineServes", "FleetgateEngineFenced")
    print("\n" + "\n".join(incident.lines))


async def keep_rolling(demo):
    """Short rollouts, some 20 a second."""
    while True:
        demo.roll(2, max_tokens=2)
        await asyncio.sleep(0.1)


@needs_prometheus
async def test_every_panel_and_rule_can_be_asked_and_the_main_ones_answer(demo, prometheus):
    demo.roll(6, max_tokens=20)
    await asyncio.sleep(3)
    answers = {}
    for title, expression in panel_expressions():
        answers.setdefault(title, []).extend(await prometheus.query(expression))
    for expression in rule_expressions().values():
        await prometheus.query(expression)
    only_in_trouble = {"Sent again, by reason", "Failed legs", "Refused control calls", "Restarts noticed"}
    empty = {title for title, found in answers.items() if not found}
    assert empty - only_in_trouble == set()
    (target,) = (await prometheus.api("targets"))["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    engines = {sample["metric"]["engine"] for sample in await prometheus.query("vllm:num_requests_running")}
    assert engines == {engine.url.removeprefix("http://") for engine in demo.engines}
