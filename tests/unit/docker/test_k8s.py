"""The Kubernetes manifests: valid by the schema of several releases, and saying what the launcher would."""

from __future__ import annotations

import ast
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from proxy.config import Settings
from proxy.fleet.engine import engine_id

DIRECTORY = Path(__file__).parents[3] / "docker" / "k8s"
FILES = sorted(DIRECTORY.glob("*.yaml"))
RELEASES = ("1.29", "1.32", "1.36")
"""The oldest with native sidecars, one in the middle, and one of the newest."""


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((DIRECTORY / name).read_text()))


def document(name: str, kind: str) -> dict:
    (found,) = [each for each in documents(name) if each["kind"] == kind]
    return found


def container(name: str, kind: str) -> dict:
    (found,) = document(name, kind)["spec"]["template"]["spec"]["containers"]
    return found


def variables(container: dict) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


def test_there_are_engines_and_two_ways_to_run_the_proxy() -> None:
    assert [each.name for each in FILES] == ["deployment.yaml", "engines.yaml", "sidecar.yaml"]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_document_is_valid_with_no_field_too_many(path: Path, release: str) -> None:
    for each in documents(path.name):
        kubernetes_validate.validate(each, release, strict=True)


def test_the_check_would_find_a_slip() -> None:
    wrong = document("engines.yaml", "StatefulSet")
    wrong["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, RELEASES[-1], strict=True)


def test_the_service_is_headless_and_of_the_stateful_set() -> None:
    service, engines = document("engines.yaml", "Service"), document("engines.yaml", "StatefulSet")
    assert service["spec"]["clusterIP"] == "None"
    assert engines["spec"]["serviceName"] == service["metadata"]["name"]
    labels = engines["spec"]["template"]["metadata"]["labels"]
    for each in documents("engines.yaml"):
        selector = each["spec"].get("selector") or each["spec"]["podSelector"]
        assert selector.get("matchLabels", selector) == labels, each["kind"]


@pytest.mark.parametrize("name", ["deployment.yaml", "sidecar.yaml"])
def test_the_proxy_looks_for_the_engines_where_they_are(name: str) -> None:
    service, engines = document("engines.yaml", "Service"), document("engines.yaml", "StatefulSet")
    where = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    (workload,) = [each for each in documents(name) if each["kind"] in ("Deployment", "Job")]
    pod = workload["spec"]["template"]["spec"]
    (proxy,) = [each for each in [*pod.get("initContainers", []), *pod["containers"]] if each["name"] == "fleetgate"]
    found = variables(proxy)
    assert found["FLEETGATE_ENGINES_DNS"] == where
    assert found["FLEETGATE_MIN_ENGINES"] == str(engines["spec"]["replicas"])
    assert Settings(engines_dns=where).engines_dns == where
    grace = pod["terminationGracePeriodSeconds"]
    assert grace > float(found.get("FLEETGATE_DRAIN_TIMEOUT", Settings().drain_timeout))
    assert pod["enableServiceLinks"] is False


def test_the_service_has_the_srv_records_that_the_how_to_names() -> None:
    service = document("engines.yaml", "Service")
    (port,) = service["spec"]["ports"]
    assert port.get("protocol", "TCP") == "TCP"
    name = f"_{port['name']}._tcp.{service['metadata']['name']}"
    assert f"FLEETGATE_ENGINES_DNS={name}`" in (DIRECTORY.parents[1] / "docs/how-to/kubernetes.md").read_text()
    assert Settings(engines_dns=name).engines_dns == name


def test_the_engines_are_started_as_the_launcher_would() -> None:
    engine = container("engines.yaml", "StatefulSet")
    assert {"--enable-scale-out", "--api-server-count=1", '--weight-transfer-config={"backend":"nccl"}'} <= set(
        engine["args"]
    )
    found = variables(engine)
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert float(found["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > Settings().engine_idle
    assert float(found["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > Settings().probe_interval


def test_an_engine_that_is_stopped_is_drained_under_the_name_that_the_proxy_has_for_it() -> None:
    engine, proxy = container("engines.yaml", "StatefulSet"), document("deployment.yaml", "Service")
    python, flag, script = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert (python, flag) == ("python3", "-c")
    ast.parse(script)
    assert 'os.environ["POD_IP"] + ":8000"' in script
    assert engine_id("http://10.1.2.3:8000") == "10.1.2.3:8000"
    port = proxy["spec"]["ports"][0]["port"]
    assert variables(engine)["PROXY_URL"] == f"http://{proxy['metadata']['name']}:{port}"
    wait = int(script.partition("range(")[2].partition(")")[0])
    pod = document("engines.yaml", "StatefulSet")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > wait


def test_there_is_one_proxy_and_a_pause_does_not_take_it_out_of_service() -> None:
    spec = document("deployment.yaml", "Deployment")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"]["type"] == "Recreate"
    proxy = container("deployment.yaml", "Deployment")
    assert all("tcpSocket" in proxy[probe] for probe in ("readinessProbe", "livenessProbe"))
    (token,) = [each for each in proxy["env"] if each["name"] == "FLEETGATE_CONTROL_TOKEN"]
    assert "secretKeyRef" in token["valueFrom"]


def test_only_the_trainer_the_proxy_and_other_engines_reach_an_engine() -> None:
    policy = document("engines.yaml", "NetworkPolicy")["spec"]
    allowed = {each["podSelector"]["matchLabels"]["app"] for each in policy["ingress"][0]["from"]}
    labels = {
        document("deployment.yaml", "Deployment")["spec"]["template"]["metadata"]["labels"]["app"],
        document("sidecar.yaml", "Job")["spec"]["template"]["metadata"]["labels"]["app"],
        document("engines.yaml", "StatefulSet")["spec"]["template"]["metadata"]["labels"]["app"],
    }
    assert allowed == labels
