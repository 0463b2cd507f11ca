"""Engines on a real Ray cluster of several nodes on this machine, one of which is killed. Run by `make ray-test`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_launcher import guard
from tests.scenarios.launcher.restart import Line, Report, done_by, until
from tests.scenarios.launcher.stage import ENGINE_PYTHON, MODEL, Stage, stage

# Before Ray is imported: nodes of a cluster on this machine are to meet at 127.0.0.1, and to report to nobody.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
pytest.importorskip("ray")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

NODES = 3
CPUS = 2
"""Of each node: room for two engines, so that two nodes can hold what three held."""
HERE = {"node_ip_address": "127.0.0.1", "object_store_memory": 100_000_000}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **HERE})
    complete(made)
    yield made
    made.shutdown()


def places(show: Stage) -> dict[str, tuple[str, str]]:
    """Where each engine runs: its last (node, URL) by name."""
    found = {}
    for _, line in show.lines:
        match = re.search(r"engine (\S+) \(\w+, on Ray\) runs on node (\w+) at (\S+)", line)
        if match:
            found[match[1]] = (match[2], match[3])
    return found


def lose(cluster: Any, node: str) -> None:
    """The node dies: its raylet and all that runs on it."""
    (found,) = [each for each in cluster.worker_nodes if each.node_id == node]
    cluster.remove_node(found, allow_graceful=False)


def complete(cluster: Any) -> None:
    """As many nodes as at first, whatever was lost before."""
    while len(cluster.worker_nodes) < NODES:
        cluster.add_node(num_cpus=CPUS, **HERE)


async def heals(
    kind: str, cluster: Any, directory: Path, start: float, load: tuple[int, tuple[int, int]], *, count: int = NODES
) -> Report:
    """Kill a node under load: its engine comes back on another, with the checkpoint, and syncs go on as before."""
    report = Report(f"{count} {kind} engines on {NODES} Ray nodes under load, one node killed")
    arguments = ["--backend", "ray", "--ray-address", cluster.address, "--restart-backoff", "0.5"]
    opened = time.monotonic()
    async with stage(kind, directory, *arguments, count=count, seconds=start) as show:
        report.facts["seconds from the first command to all in rotation"] = round(time.monotonic() - opened, 2)
        before = places(show)
        assert len({node for node, _ in before.values()}) == count
        began = time.monotonic()
        await show.sync("step-1")
        report.facts["seconds of init, sync and checksums"] = round(time.monotonic() - began, 2)
        await show.save("step-1")
        async with show.load(*load):
            await until(lambda: min(len(done_by(show, each)) for each in show.ids()) >= 1, start)
            at = time.monotonic()
            node, url = before["1"]
            victim = url.removeprefix("http://")
            server = process_on(url.rpartition(":")[2])
            orphans = {server, *guard.descendants(server)}
            await asyncio.to_thread(lose, cluster, node)
            report.lines.append(Line(0.0, f"node {node[:8]} with engine 1 ({victim}) is killed"))
            report.lines.append(
                Line(await show.said("ended with exit code 255", 90) - at, "the launcher: engine 1 is lost")
            )
            await until(lambda: places(show)["1"] != before["1"], start)
            node, url = places(show)["1"]
            show.urls[1] = url
            heir = show.ids()[1]
            ready = await show.until(heir, "ready", at, start)
            await until(lambda: any(each.started > ready.when for each in done_by(show, heir)), 60)
            report.lines.append(
                Line(time.monotonic() - at, f"node {node[:8]}: the first whole rollout of its heir {heir}")
            )
            assert "checksums" in ready.reason
            await show.sync("step-2")
            report.lines.append(Line(time.monotonic() - at, f"all {count} took the sync step-2"))
            synced = time.monotonic()
            await until(lambda: any(each.started > synced for each in done_by(show, heir)), 60)
        for move in show.moves:
            if move.when > at and move.engine in (victim, heir):
                report.lines.append(Line(move.when - at, f"the proxy: {move.engine} {move.state} ({move.reason})"))
        assert node != before["1"][0]
        # The machine lives on, and nobody else would end what the node's engine had started.
        await until(lambda: not orphans & set(guard.parents()), 30)
        fleet = await show.control.get("/fleet")
        assert sorted(each["id"] for each in fleet["engines"]) == sorted(show.ids())
        assert fleet["versions"] == dict.fromkeys(show.ids(), "step-2")
        tokens, wrong = await show.mismatches(heir)
        hurt = [each for each in show.done if each.error]
        report.facts |= {
            "rollouts": len(show.done),
            "cut, having begun on the dead node": len(hurt),
            "tokens judged": tokens,
            "tokens of other weights than they name": wrong,
            "versions that made tokens": ", ".join(sorted(show.versions())),
        }
        assert all(each.engine in (victim, "") and each.started < ready.when for each in hurt), hurt
        assert not wrong
        assert show.versions() == {"step-1", "step-2"}
    return report


async def test_an_engine_that_dies_alone_stays_on_its_node_and_port(cluster: Any, tmp_path: Path) -> None:
    arguments = ["--backend", "ray", "--ray-address", cluster.address, "--restart-backoff", "0.1"]
    async with stage("sim", tmp_path, *arguments) as show:
        before = places(show)
        port = show.urls[1].rpartition(":")[2]
        at = time.monotonic()
        os.kill(process_on(port), signal.SIGKILL)
        await show.said("ended with exit code 137", 30)
        await show.until(show.ids()[1], "ready", at, 60)
        assert places(show) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kind", "vllm", "--gpus-per-engine", "4"), "needs 1 CPU and 4 GPU on one node"),
        (("--kind", "sim", "--count", "9", "--ready-wait", "2"), "has no room for 9 engines within 2 s"),
    ],
)
async def test_what_no_node_can_hold_is_said(
    cluster: Any, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    argv = ["--backend", "ray", "--ray-address", cluster.address, "--model", str(tmp_path), "--log-dir", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine_launcher", *argv, *arguments), stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode in (1, 2)
    assert message in err.decode()


async def test_each_engine_sees_its_own_gpus_of_one_node(cluster: Any, tmp_path: Path) -> None:
    """Ray counts GPUs that a node says it has; a simulated engine does not miss them."""
    # Ray sets a signal handler when it makes a node, so this cannot be done in another thread.
    node = cluster.add_node(num_cpus=CPUS, num_gpus=4, **HERE)
    try:
        arguments = ["--backend", "ray", "--ray-address", cluster.address, "--gpus-per-engine", "2"]
        async with stage("sim", tmp_path, *arguments, count=2) as show:
            seen = [variable(url.rpartition(":")[2], "CUDA_VISIBLE_DEVICES").split(",") for url in show.urls]
            assert [len(each) for each in seen] == [2, 2]
            assert sorted(seen[0] + seen[1]) == ["0", "1", "2", "3"]
            assert {place[0] for place in places(show).values()} == {node.node_id}
            await show.sync("step-1")
    finally:
        await asyncio.to_thread(lose, cluster, node.node_id)


async def test_the_fleet_heals_when_a_node_is_killed(cluster: Any, tmp_path: Path) -> None:
    print(await heals("sim", cluster, tmp_path, 60.0, (16, (30, 120))))


@pytest.mark.vllm
@pytest.mark.timeout(1800)
async def test_real_engines_heal_too(cluster: Any, tmp_path: Path) -> None:
    if not ENGINE_PYTHON.exists() or not MODEL.exists():
        pytest.skip("needs `make engine model`")
    complete(cluster)
    # Two of them, and a third node to go to: more would only wait for the processors of this machine.
    print(await heals("vllm", cluster, tmp_path, 900.0, (3, (40, 120)), count=2))


def process_on(port: str) -> int:
    """The engine that was started with this port."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if "--port" in words and words[words.index("--port") + 1] == port and "-I" not in words:
                return int(entry.name)
    raise AssertionError(f"no engine on port {port}")


def variable(port: str, name: str) -> str:
    """A variable in the environment of the engine on this port."""
    items = Path(f"/proc/{process_on(port)}/environ").read_text().split("\0")
    return next(item.partition("=")[2] for item in items if item.startswith(f"{name}="))
